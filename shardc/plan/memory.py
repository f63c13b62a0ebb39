"""Predicted memory of a plan: a dry run of the executor on meta tensors, at the coordinate that holds the largest parts.

What is counted is requested bytes of distinct storages: state and inputs when the step starts, then every allocation and every
free in order; and temporaries inside CPU kernels, as `shardc.runtime.workspace` knows them. Chunks are cut so that coordinate
(0, ..., 0) holds the largest part of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardc.dtypes import short
from shardc.instructions import Collective, Compute, Input, Instruction, Out, Read, Reg, Transfer, Write, outs_of, uses_of
from shardc.mesh import Coord, Mesh
from shardc.plan.alias import Aliases
from shardc.plan.draw import draw
from shardc.plan.roles import CATEGORIES, SLOT_CATEGORY, Roles
from shardc.program import Slot
from shardc.runtime import dry_run
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE


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
class Alive:
    """A storage that is alive at the peak.

    Args:
        name: the instruction that made it, or the path of state or an input.
        type: shape on the rank and dtype; "" for what a kernel or a collective holds inside.
        bytes: of the storage.
        category: as in `Memory.by_category`.
        module, line: of what made it.
    """

    name: str
    type: str
    bytes: int
    category: str
    module: str
    line: str


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
        live: what is alive at the peak, largest first; sums to `peak_bytes`.
    """

    peak_bytes: int
    by_category: Mapping[str, int]
    peak_at: PeakAt
    timeline: tuple[Moment, ...]
    start_bytes: int
    tiers: Mapping[str, int] = field(default_factory=dict)
    live: tuple[Alive, ...] = ()

    def by_module(self) -> dict[str, int]:
        """Bytes alive at the peak by the module that made them ("" for none), largest first."""
        return _summed((a.module, a.bytes) for a in self.live)

    def by_line(self) -> dict[str, int]:
        """Bytes alive at the peak by the user's source line ("" for state and inputs), largest first."""
        return _summed((a.line, a.bytes) for a in self.live)

    def plot(self, path: str | Path) -> None:
        """Draw the bytes alive over the step, stacked by category, as an SVG file.

        Raises:
            PlanError: a name that does not end in ``.svg``.
        """
        draw(self, path)


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
    alive = _alive(instructions, slots, entry, mesh, aliases, roles, run.peak_at)
    rest = run.peak_bytes - sum(a.bytes for a in alive)
    if rest:
        alive.append(Alive(f"inside {where.op}", "", rest, "other", where.module, where.line))
    alive.sort(key=lambda a: (-a.bytes, a.name))
    return Memory(run.peak_bytes, by_category, where, timeline, run.base, run.tiers, tuple(alive))


def _alive(
    instructions: Sequence[Instruction],
    slots: Mapping[str, Slot],
    entry: Sequence[str],
    mesh: Mesh,
    aliases: Aliases,
    roles: Roles,
    peak_at: str,
) -> list[Alive]:
    """The storages of state, inputs and registers that are alive while the instruction `peak_at` runs."""
    sizes = Sizes(mesh)
    peak = next((k for k, i in enumerate(instructions) if i.name == peak_at), -1)
    out: dict[str, Alive] = {}
    for path in entry:
        slot = slots[path]
        if slot.tier != DEVICE:
            continue
        shape = sizes.shape(slot.storage or ShardSpec.replicated(slot.type.shape))
        out[path] = Alive(path, _text(slot.type.dtype, shape), sizes.slot_bytes(slot), SLOT_CATEGORY[slot.kind], "", "")
    last: dict[Reg, int] = {}
    written: dict[Reg, int] = {}  # what a slot takes lives to the end
    for k, i in enumerate(instructions):
        for reg in uses_of(i):
            last[aliases.root[reg]] = k
        if isinstance(i, Write) and i.slot not in entry:
            written[aliases.root[i.src]] = k
    for k, i in enumerate(instructions):
        if isinstance(i, Input) and i.out.spec is not None and i.out.dtype is not None:
            out[i.path] = Alive(i.path, _text(i.out.dtype, sizes.shape(i.out.spec)), sizes.nbytes(i.out), "other", "", "")
        if k > peak or isinstance(i, (Read, Input)):
            continue
        for o in outs_of(i):
            root = aliases.root[o.reg]
            lives = max(last.get(root, k), k) >= peak or written.get(root, peak) < peak
            if root != o.reg or o.tier != DEVICE or o.spec is None or o.dtype is None or not lives or not sizes.nbytes(o):
                continue
            name = i.name if len(outs_of(i)) == 1 else f"{i.name}[{outs_of(i).index(o)}]"
            kind = _text(o.dtype, sizes.shape(o.spec))
            out[f"%{name}"] = Alive(name, kind, sizes.nbytes(o), roles.category(root), i.module, i.line)
    return [a for a in out.values() if a.bytes]


def _text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{short(dtype)}[{', '.join(map(str, shape))}]"


def _summed(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for key, n in rows:
        out[key] = out.get(key, 0) + n
    return dict(sorted(out.items(), key=lambda item: (-item[1], item[0])))


def _op(i: Instruction | None) -> str:
    if i is None:
        return "the start of the step"
    if isinstance(i, Compute):
        return i.op.removesuffix(".default")
    if isinstance(i, Transfer):
        return f"move to {i.out.tier}"
    return f"{i.step.kind}@{i.step.axis}" if isinstance(i, Collective) else type(i).__name__.lower()
