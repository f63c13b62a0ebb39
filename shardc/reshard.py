"""From one spec to another: which collectives, over which axes, moving how many bytes.

A `Step` changes one mesh axis. It carries both specs, so whoever executes it knows from the index sets alone what to move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardc.errors import SpecError
from shardc.mesh import Mesh
from shardc.spec import Dim, Factor, ShardSpec, dim_axes, split_dim

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice")


@dataclass(frozen=True)
class Step:
    """One collective (or a local `slice`) over one axis.

    - all_gather: `axis` splits a dim of `src` and no dim of `dst`;
    - reduce_scatter: `src` is partial over `axis`, which splits a dim of `dst`;
    - all_reduce: `src` is partial over `axis`, `dst` is whole;
    - all_to_all: `axis` splits one dim of `src` and another of `dst`;
    - slice: `src` is whole over `axis`, which splits a dim of `dst`; nothing is sent.
    """

    kind: str
    axis: str
    src: ShardSpec
    dst: ShardSpec
    op: str = "sum"

    def __str__(self) -> str:
        return f"{self.kind}@{self.axis} {self.src} -> {self.dst}"

    def nbytes(self, dtype: torch.dtype, mesh: Mesh) -> int:
        """Bytes each rank sends (the worst one), in the ring convention: S(N-1)/N for all_gather and reduce_scatter,
        2S(N-1)/N for all_reduce, S(N-1)/N of its own part for all_to_all; S is the whole value over this axis."""
        n, first = mesh.axes[self.axis], (0,) * len(mesh.axes)
        whole = self.src.local_shape(mesh, first) if self.kind != "all_gather" else self.dst.local_shape(mesh, first)
        size = math.prod(whole) * dtype.itemsize
        share = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "slice": 0}[self.kind]
        return share * size * (n - 1) // n


def _step_op(kind: str):  # type: ignore[no-untyped-def]
    def op(x: torch.Tensor, step: Step) -> torch.Tensor:
        raise AssertionError("steps are executed by the runtime")  # pragma: no cover

    op.__name__ = op.__qualname__ = kind
    return op


STEP_OPS = {kind: _step_op(kind) for kind in KINDS}
"""The targets of step nodes in a partitioned graph: ``all_gather(x, step)`` and so on."""


def reshard(src: ShardSpec, dst: ShardSpec, mesh: Mesh) -> list[Step]:
    """The steps from `src` to `dst`; empty where every rank already holds its part.

    Partial axes are scattered where `dst` splits a dim over them (before other reductions, so that less is reduced),
    else all-reduced. Moves from one dim to another are all-to-alls where the axis is the innermost on both.

    Raises:
        SpecError: different shapes, or `dst` is partial where `src` is not.
    """
    src, dst = src.canonical(mesh), dst.canonical(mesh)
    if src == dst:
        return []
    if src.shape != dst.shape:
        raise SpecError(f"cannot reshard {src} to {dst}: shapes {list(src.shape)} and {list(dst.shape)} differ")
    extra = set(dst.partial) - set(src.partial)
    if extra:
        raise SpecError(f"cannot reshard {src} to {dst}: a whole value does not become partial")
    steps: list[Step] = []
    pairs = [_align(s, d, mesh) for s, d in zip(src.dims, dst.dims, strict=True)]
    for k, pair in enumerate(pairs):
        if pair is None:  # no common cut: gather this dim alone
            whole = src.with_dim(k, (Factor(src.shape[k]),))
            for axis in reversed(dim_axes(src.dims[k])):
                dim = tuple(Factor(f.size, tuple(a for a in f.axes if a != axis)) for f in src.dims[k])
                steps.append(Step("all_gather", axis, src, src.with_dim(k, dim).canonical(mesh)))
                src = steps[-1].dst
            return steps + reshard(whole.canonical(mesh), dst, mesh)
    now = ShardSpec(tuple(p[0] for p in pairs if p), src.partial)
    goal = ShardSpec(tuple(p[1] for p in pairs if p), dst.partial)

    def go(kind: str, axis: str, new: ShardSpec, op: str = "sum") -> None:
        nonlocal now
        steps.append(Step(kind, axis, now.canonical(mesh), new.canonical(mesh), op))
        now = new

    # 1. what has to be scattered or moved straight into place, as long as it fits
    progress = True
    while progress:
        progress = False
        for k, j, axis in _missing(now, goal):
            op = now.reduction(axis)
            if op is not None and goal.reduction(axis) is None:
                go("reduce_scatter", axis, _push(now.with_partial(p for p in now.partial if p[0] != axis), k, j, axis), op)
                progress = True
                break
            home = _innermost(now, axis)
            if op is None and home is not None and home != (k, j) and not _wanted(now, goal, home, axis):
                go("all_to_all", axis, _push(_pop(now, *home), k, j, axis))
                progress = True
                break
            if op is None and home is None and axis not in now.axes:
                go("slice", axis, _push(now, k, j, axis))
                progress = True
                break
    # 2. pending reductions that stay whole
    for axis, op in [p for p in now.partial if p not in goal.partial]:
        if axis not in goal.axes:
            go("all_reduce", axis, now.with_partial(p for p in now.partial if p[0] != axis), op)
    # 3. gather what is split otherwise than wanted, innermost axis first, and slice into place
    for k, dim in enumerate(now.dims):
        for j in reversed(range(len(dim))):
            keep = _common(now.dims[k][j].axes, goal.dims[k][j].axes)
            while len(now.dims[k][j].axes) > keep:
                go("all_gather", now.dims[k][j].axes[-1], _pop(now, k, j))
    while todo := _missing(now, goal):
        k, j, axis = todo[0]
        op = now.reduction(axis)
        rest = now.with_partial(p for p in now.partial if p[0] != axis)
        go("slice" if op is None else "reduce_scatter", axis, _push(rest, k, j, axis), op or "sum")
    return steps


def _align(dim: Dim, other: Dim, mesh: Mesh) -> tuple[Dim, Dim] | None:
    """Both dims cut at the borders of both, so that their factors have the same sizes; None where parts do not allow it."""
    if [f.size for f in dim] == [f.size for f in other]:
        return dim, other
    borders = sorted({b for d in (dim, other) for b in _borders(d)}, reverse=True)
    outer = [math.prod(f.size for f in dim), *borders]
    if any(b == 0 or a % b for a, b in zip(outer, [*borders, 1], strict=True)):
        return None
    sizes = [a // b for a, b in zip(outer, [*borders, 1], strict=True)]
    cuts = [split_dim(d, sizes, mesh) for d in (dim, other)]
    if any(cut is None or any(len(part) > 1 for part in cut) for cut in cuts):
        return None
    first, second = (tuple(part[0] for part in cut) for cut in cuts if cut is not None)
    return first, second


def _borders(dim: Dim) -> list[int]:
    out, inner = [], 1
    for f in reversed(dim[1:]):
        inner *= f.size
        out.append(inner)
    return out


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _missing(now: ShardSpec, goal: ShardSpec) -> list[tuple[int, int, str]]:
    """(dim, factor, axis): the next axis that each factor lacks, where what it has is a prefix of what is wanted."""
    out = []
    for k, (d, g) in enumerate(zip(now.dims, goal.dims, strict=True)):
        for j, (f, want) in enumerate(zip(d, g, strict=True)):
            n = len(f.axes)
            if want.axes[:n] == f.axes and len(want.axes) > n:
                out.append((k, j, want.axes[n]))
    return out


def _innermost(spec: ShardSpec, axis: str) -> tuple[int, int] | None:
    for k, d in enumerate(spec.dims):
        for j, f in enumerate(d):
            if f.axes and f.axes[-1] == axis:
                return k, j
    return None


def _wanted(now: ShardSpec, goal: ShardSpec, home: tuple[int, int], axis: str) -> bool:
    k, j = home
    return axis in goal.dims[k][j].axes and _common(now.dims[k][j].axes, goal.dims[k][j].axes) == len(now.dims[k][j].axes)


def _edit(spec: ShardSpec, k: int, j: int, axes: tuple[str, ...]) -> ShardSpec:
    dim = spec.dims[k]
    return spec.with_dim(k, (*dim[:j], Factor(dim[j].size, axes), *dim[j + 1 :]))


def _pop(spec: ShardSpec, k: int, j: int) -> ShardSpec:
    return _edit(spec, k, j, spec.dims[k][j].axes[:-1])


def _push(spec: ShardSpec, k: int, j: int, axis: str) -> ShardSpec:
    return _edit(spec, k, j, (*spec.dims[k][j].axes, axis))
