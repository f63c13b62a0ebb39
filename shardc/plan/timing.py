"""Predicted time of a plan: the sum over its instructions, which the runtime executes one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardc.cost import PROFILES, collective_seconds, compute_seconds, flops, profile_of
from shardc.instructions import Arrive, Collective, Compute, Instruction, Transfer, outs_of, uses_of
from shardc.mesh import Mesh
from shardc.plan.alias import Aliases
from shardc.plan.memory import Sizes
from shardc.tiers import DEVICE, DISK


@dataclass(frozen=True)
class Time:
    """Predicted seconds per step of the worst rank.

    Args:
        predicted_s: the whole step.
        by_category: compute (matrix products and other kernels), communication, host (operators on numbers); offload, where
            the step waits for moves between tiers.
        by_phase: forward, backward, update.
        flops: floating-point operations of the worst rank.
        device: the hardware profile.
    """

    predicted_s: float
    by_category: Mapping[str, float]
    by_phase: Mapping[str, float]
    flops: int
    device: str


def predict(instructions: Sequence[Instruction], mesh: Mesh, sizes: Sizes, aliases: Aliases) -> tuple[Time, dict[str, float]]:
    """Time of a step, and of each instruction by name (instructions that take none are left out).

    Collectives block: nothing overlaps with them in this runtime, and so in this prediction. Moves from and to disk run beside
    the computation, one after another each way.
    """
    device = profile_of(mesh)
    host = replace(PROFILES["cpu"], memory_bandwidth=device.host_bandwidth)
    lines: dict[tuple[str, str], float] = {}  # way from tier to tier -> when its last move is done
    due: dict[int, float] = {}
    kinds = {"compute": 0.0, "communication": 0.0, "host": 0.0}
    phases: dict[str, float] = {}
    each: dict[str, float] = {}
    work = 0
    for i in instructions:
        seconds, kind = 0.0, "compute"
        if isinstance(i, Collective):
            assert i.out.dtype is not None
            kind = "communication"
            seconds = collective_seconds(device, i.step, i.step.nbytes(i.out.dtype, mesh), mesh)
        elif isinstance(i, Transfer):
            kind, way = "offload", (aliases.out[i.src].tier, i.out.tier)
            takes = sizes.nbytes(i.out) / (device.disk if DISK in way else device.host_link)
            now = sum(kinds.values())
            due[i.out.reg] = lines[way] = max(now, lines.get(way, 0.0)) + takes
            seconds = lines[way] - now if i.wait else 0.0
        elif isinstance(i, Arrive):
            kind, seconds = "offload", max(0.0, due[i.moved] - sum(kinds.values()))
        elif isinstance(i, Compute):
            made = [o for o in outs_of(i) if o.spec is not None and o.dtype is not None]
            if not made:
                kind, seconds = "host", device.launch
            elif any(o.reg in aliases.source and o.reg not in aliases.updated for o in made):
                kind, seconds = "host", device.launch / 4  # a view: nothing is moved
            else:
                read = [aliases.out[r] for r in uses_of(i)]
                read = [o for o in read if o.spec is not None]
                n, matmul = flops(
                    i.op, [sizes.shape(o.spec) for o in read if o.spec], [sizes.shape(o.spec) for o in made if o.spec], i.args
                )
                nbytes = sum(map(sizes.nbytes, (*read, *made)))
                where = device if made[0].tier == DEVICE else host
                seconds = compute_seconds(where, n, nbytes, made[0].dtype or torch.float32, matmul)
                work += n
        if seconds:
            kinds[kind] = kinds.get(kind, 0.0) + seconds
            phases[i.phase] = phases.get(i.phase, 0.0) + seconds
            each[i.name] = seconds
    return Time(sum(kinds.values()), kinds, phases, work, device.name), each
