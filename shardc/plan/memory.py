"""Predicted memory of a plan: a dry run of the executor on meta tensors, at the coordinate that holds the largest parts.

What is counted is requested bytes of distinct storages: state and inputs when the step starts, then every allocation and every
free in order; and temporaries inside CPU kernels, as `shardc.runtime.workspace` knows them. Chunks are cut so that coordinate
(0, ..., 0) holds the largest part of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardc.instructions import Collective, Compute, Input, Instruction, Out, Transfer, outs_of
from shardc.mesh import Coord, Mesh
from shardc.plan.alias import Aliases
from shardc.plan.roles import CATEGORIES, SLOT_CATEGORY, Roles
from shardc.program import Slot
from shardc.runtime import dry_run
from shardc.spec import ShardSpec


@dataclass(frozen=True)
class Moment:
    """Bytes alive on the worst rank while an instruction runs: its operands, its results, and what its kernel holds inside."""

    name: str
    bytes: int
    by_category: Mapping[str, int]


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
        tiers: the most bytes alive on each other tier ("host", "disk"); none of them count in the rest.
    """

    peak_bytes: int
    by_category: Mapping[str, int]
    peak_at: PeakAt
    timeline: tuple[Moment, ...]
    start_bytes: int
    tiers: Mapping[str, int] = field(default_factory=dict)


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


def predict_memory(
    instructions: Sequence[Instruction],
    slots: Mapping[str, Slot],
    entry: Sequence[str],
    mesh: Mesh,
    aliases: Aliases,
    roles: Roles,
) -> Memory:
    """Memory over the instructions, from a run of the runtime's own executor on meta tensors.

    Args:
        slots: all slots of the plan.
        entry: paths of those that exist when the step starts.

    Raises:
        RuntimeFailure: an instruction whose results are not what the plan says.
    """
    categories = {path: SLOT_CATEGORY[slot.kind] for path, slot in slots.items()}
    for i in instructions:
        made = outs_of(i)
        if made:
            categories[i.path if isinstance(i, Input) else i.name] = roles.category(aliases.root[made[0].reg])
    held = [slots[path] for path in entry]
    state = {s.path: (s.storage or ShardSpec.replicated(s.type.shape), s.type.dtype) for s in held}
    run = dry_run(instructions, mesh, slots=state, categories=categories)
    at = next((i for i in instructions if i.name == run.peak_at), None)
    where = PeakAt(run.peak_at or "start", _op(at), at.module if at else "", at.line if at else "")
    named = [name for name in CATEGORIES if name != "staging" or name in run.by_category]
    by_category = {name: run.by_category.get(name, 0) for name in named}
    timeline = tuple(Moment(n, b, at) for (n, b), at in zip(run.timeline, run.categories, strict=True))
    return Memory(run.peak_bytes, by_category, where, timeline, run.base, run.tiers)


def _op(i: Instruction | None) -> str:
    if i is None:
        return "the start of the step"
    if isinstance(i, Compute):
        return i.op.removesuffix(".default")
    if isinstance(i, Transfer):
        return f"move to {i.out.tier}"
    return f"{i.step.kind}@{i.step.axis}" if isinstance(i, Collective) else type(i).__name__.lower()
