"""Predicted memory of a plan: storage-level liveness over its instructions, at the coordinate that holds the largest parts.

What is counted is requested bytes of distinct storages: state and inputs when the step starts, then every allocation and every
free in order. Chunks are cut so that coordinate (0, ..., 0) holds the largest part of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardc.instructions import Compute, Input, Instruction, Out, Read, Reg, Return, Write
from shardc.mesh import Coord, Mesh
from shardc.plan.alias import Aliases, outs
from shardc.plan.roles import CATEGORIES, SLOT_CATEGORY, Roles
from shardc.program import Slot
from shardc.spec import ShardSpec


@dataclass(frozen=True)
class Moment:
    """Bytes alive on the worst rank while an instruction runs (its results and its operands included)."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PeakAt:
    """The instruction at which memory is highest, and where it comes from."""

    name: str
    op: str
    module: str
    line: str

    def __str__(self) -> str:
        where = ", ".join(x for x in (self.module, self.line) if x)
        return f"{self.op}{f' ({where})' if where else ''}"


@dataclass(frozen=True)
class Memory:
    """Memory of the worst rank, in bytes.

    Args:
        peak_bytes: the most that is alive at any moment; state, inputs and everything shardc holds included.
        by_category: what the peak is made of; sums to `peak_bytes`.
        peak_at: the instruction of the peak.
        timeline: one moment for each instruction, in order.
        start_bytes: alive when the step starts.
    """

    peak_bytes: int
    by_category: Mapping[str, int]
    peak_at: PeakAt
    timeline: tuple[Moment, ...]
    start_bytes: int


class Sizes:
    """Local shapes and bytes at one coordinate, each spec evaluated once."""

    def __init__(self, mesh: Mesh, coord: Coord | None = None) -> None:
        self.mesh = mesh
        self.coord = (0,) * len(mesh.axes) if coord is None else coord
        self._shapes: dict[ShardSpec, tuple[int, ...]] = {}

    def shape(self, spec: ShardSpec) -> tuple[int, ...]:
        out = self._shapes.get(spec)
        if out is None:
            out = self._shapes[spec] = spec.local_shape(self.mesh, self.coord)
        return out

    def numel(self, spec: ShardSpec) -> int:
        return math.prod(self.shape(spec))

    def nbytes(self, out: Out) -> int:
        return 0 if out.spec is None or out.dtype is None else self.numel(out.spec) * out.dtype.itemsize

    def slot_bytes(self, slot: Slot) -> int:
        spec = slot.storage or ShardSpec.replicated(slot.type.shape)
        return self.numel(spec) * slot.type.dtype.itemsize


def profile(
    instructions: Sequence[Instruction],
    slots: Mapping[str, Slot],
    entry: Sequence[str],
    sizes: Sizes,
    aliases: Aliases,
    roles: Roles,
) -> Memory:
    """Memory over the instructions.

    Args:
        slots: all slots of the plan.
        entry: paths of those that exist when the step starts.
    """
    live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    slot_storage: dict[str, int] = {}
    for path in entry:
        live[SLOT_CATEGORY[slots[path].kind]] += sizes.slot_bytes(slots[path])
        slot_storage[path] = -1
    for i in instructions:
        if isinstance(i, Input):
            live["other"] += sizes.nbytes(i.out)
    start = total = sum(live.values())
    holders: dict[Reg, int] = {}
    peak, at, best = start, instructions[0] if instructions else Instruction(name="start"), dict(live)
    kept: set[Reg] = {aliases.root[r] for i in instructions if isinstance(i, Return) for r in i.results}
    timeline = []
    for i in instructions:
        fresh = not isinstance(i, (Read, Input))
        for o in outs(i):
            root = aliases.root[o.reg]
            holders[root] = holders.get(root, 0) + 1
            if root == o.reg and fresh:
                n = sizes.nbytes(o)
                live[roles.category(root)] += n
                total += n
        timeline.append(Moment(i.name, total))
        if total > peak:
            peak, at, best = total, i, dict(live)
        if isinstance(i, Write) and i.slot not in slot_storage:  # the slot takes the tensor: it stays, as state
            root = aliases.root[i.src]
            slot_storage[i.slot] = root
            kept.add(root)
        for reg in i.frees:
            root = aliases.root[reg]
            holders[root] -= 1
            if holders[root] == 0 and root not in kept and root not in aliases.slot and root not in aliases.input:
                n = sizes.nbytes(aliases.out[root])
                live[roles.category(root)] -= n
                total -= n
    op = at.op if isinstance(at, Compute) else type(at).__name__.lower() if instructions else "start"
    where = PeakAt(at.name, op.removesuffix(".default"), at.module, at.line)
    return Memory(peak, best, where, tuple(timeline), start)
