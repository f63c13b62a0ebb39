"""From one spec to another: which collectives, over which axes, moving how many bytes.

A `Step` changes one mesh axis. It carries both specs, so whoever executes it knows from the index sets alone what to move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardc.errors import SpecError
from shardc.mesh import Mesh
from shardc.spec import Dim, Factor, ShardSpec, dim_axes, dim_indices, dim_size, finest_dim

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice")


@dataclass(frozen=True)
class Step:
    """One collective (or a local `slice`) over one axis.

    - all_gather: `axis` splits a dim of `src` and no dim of `dst`;
    - reduce_scatter: `src` is partial over `axis`, which splits a dim of `dst`;
    - all_reduce: `src` is partial over `axis`, `dst` is whole;
    - all_to_all: `axis` splits one factor of `src` and another of `dst` (as a rule of two dims), or one dim at other borders;
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
        2S(N-1)/N for all_reduce, S(N-1)/N of its own part for all_to_all; S is the whole value over this axis. Where borders
        inside a dim are moved, what lies between them is sent."""
        n, first = mesh.axes[self.axis], (0,) * len(mesh.axes)
        if self.kind == "all_to_all" and (moved := self._between_borders(mesh)) is not None:
            return moved * dtype.itemsize
        whole = self.src.local_shape(mesh, first) if self.kind != "all_gather" else self.dst.local_shape(mesh, first)
        size = math.prod(whole) * dtype.itemsize
        share = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "slice": 0}[self.kind]
        return share * size * (n - 1) // n

    def _between_borders(self, mesh: Mesh) -> int | None:
        """Elements that the worst rank does not keep where `axis` splits the same dim before and after; else None."""
        here = [k for k, dim in enumerate(self.src.dims) if self.axis in dim_axes(dim)]
        if here != [k for k, dim in enumerate(self.dst.dims) if self.axis in dim_axes(dim)]:
            return None
        (k,), first = here, (0,) * len(mesh.axes)
        src, dst = self.src.dims[k], self.dst.dims[k]
        memo = mesh.memo.setdefault("borders", {})
        if (src, dst) not in memo:
            line = mesh.group(first, self.axis)
            memo[src, dst] = max(len({*dim_indices(src, mesh, c)} - {*dim_indices(dst, mesh, c)}) for c in line)
        rest = math.prod(n for j, n in enumerate(self.src.local_shape(mesh, first)) if j != k)
        return rest * int(memo[src, dst])


def _step_op(kind: str):  # type: ignore[no-untyped-def]
    def op(x: torch.Tensor, step: Step) -> torch.Tensor:
        raise AssertionError("steps are executed by the runtime")  # pragma: no cover

    op.__name__ = op.__qualname__ = kind
    return op


STEP_OPS = {kind: _step_op(kind) for kind in KINDS}
"""The targets of step nodes in a partitioned graph: ``all_gather(x, step)`` and so on."""


def reshard(src: ShardSpec, dst: ShardSpec, mesh: Mesh) -> list[Step]:
    """The steps from `src` to `dst`; empty where every rank already holds its part.

    In this order, whatever applies first: slices (free, and all that follows works on less), scattering a partial value
    into place, moving borders or an axis into place by an all-to-all, reducing what stays whole, gathering one axis. An axis
    is cut into the innermost place of a factor and taken from there, so that the parts stay those of a spec.

    Raises:
        SpecError: different shapes, or `dst` is partial where `src` is not.
    """
    src, dst = src.canonical(mesh), dst.canonical(mesh)
    if src == dst:
        return []
    if src.shape != dst.shape:
        raise SpecError(f"cannot reshard {src} to {dst}: shapes {list(src.shape)} and {list(dst.shape)} differ")
    extra = [f"{op}@{axis}" for axis, op in dst.partial if (axis, op) not in src.partial]
    if extra:
        raise SpecError(
            f"cannot reshard {src} to {dst}: the source has no pending {', '.join(extra)}",
            hint="a whole value does not become partial, and one reduction not another",
        )
    memo = mesh.memo.setdefault("reshard", {})
    if (src, dst) not in memo:
        memo[src, dst] = min(_candidates(src, dst, mesh), key=lambda steps: sum(s.nbytes(torch.float32, mesh) for s in steps))
    return list(memo[src, dst])


def _candidates(src: ShardSpec, dst: ShardSpec, mesh: Mesh) -> Iterator[list[Step]]:
    """Ways from `src` to `dst`, the one to prefer first: straight; with reductions made before anything is moved; by way of
    the whole value."""
    yield _Resharding(src, dst, mesh).steps
    reduced = src.with_partial(dst.partial)
    whole = ShardSpec.replicated(src.shape).with_partial(dst.partial)
    for via in dict.fromkeys((reduced, whole)):
        if via not in (src, dst) and not set(via.axes) & set(via.partial_axes):
            yield _Resharding(src, via, mesh).steps + _Resharding(via, dst, mesh).steps


class _Resharding:
    """Works through the moves from `now` to `goal`, whose dims have factors of the same sizes.

    Dims that cannot be cut alike go through `stay`: the stretches in question whole, all else as wanted already; but where one
    axis splits them on both sides, ranks exchange what lies between the borders.
    """

    def __init__(self, src: ShardSpec, dst: ShardSpec, mesh: Mesh) -> None:
        self.mesh, self.steps = mesh, list[Step]()
        pairs = [_align(s, d, mesh) for s, d in zip(src.dims, dst.dims, strict=True)]
        self.now = ShardSpec(tuple(p.now for p in pairs), src.partial)
        late = {axis for p in pairs for axis in p.late}
        self.shifts = [(k, j, n, dim) for k, p in enumerate(pairs) for j, n, dim in p.shifts]
        keep = [p for p in src.partial if p in dst.partial or p[0] in late]
        self.goal = ShardSpec(tuple(p.goal for p in pairs), tuple(keep))
        while self._slice() or self._scatter() or self._shift() or self._move() or self._reduce() or self._gather():
            pass
        if late or self.now.canonical(mesh) != dst:
            stay = self.now.canonical(mesh)
            assert stay != src, f"reshard {src} -> {dst} makes no progress"
            self.steps += reshard(stay, dst, mesh)

    def _go(self, kind: str, axis: str, new: ShardSpec, op: str = "sum") -> bool:
        src, dst = self.now.canonical(self.mesh), new.canonical(self.mesh)
        if src != dst:
            self.steps.append(Step(kind, axis, src, dst, op))
        self.now = new
        return True

    def _slice(self) -> bool:
        for k, j, axis in self._missing():
            if axis not in self.now.axes and axis not in self.now.partial_axes:
                return self._go("slice", axis, _push(self.now, k, j, axis))
        return False

    def _scatter(self) -> bool:
        for k, j, axis in self._missing():
            op = self.now.reduction(axis)
            if op is not None:
                return self._go("reduce_scatter", axis, _push(_reduced(self.now, axis), k, j, axis), op)
        return False

    def _shift(self) -> bool:
        if not self.shifts:
            return False
        k, j, n, dim = self.shifts.pop()  # from the right, so that the positions of the others stay

        def shifted(spec: ShardSpec) -> ShardSpec:
            return spec.with_dim(k, (*spec.dims[k][:j], *dim, *spec.dims[k][j + n :]))

        self.goal = shifted(self.goal)
        (axis,) = dim_axes(dim)
        return self._go("all_to_all", axis, shifted(self.now))

    def _move(self) -> bool:
        for k, j, axis in self._missing():
            home = _innermost(self.now, axis)
            if home is not None:
                return self._go("all_to_all", axis, _push(_pop(self.now, *home), k, j, axis))
        return False

    def _reduce(self) -> bool:
        for axis, op in self.now.partial:
            if axis not in self.goal.partial_axes and (axis not in self.goal.axes or self._blocked(axis) > 2):
                return self._go("all_reduce", axis, _reduced(self.now, axis), op)
        return False

    def _blocked(self, axis: str) -> int:
        """How much larger the value gets before it can be scattered over `axis`, as other axes are gathered to make room.

        Reducing it whole before that sends twice its present bytes, scattering it after that its bytes then.
        """
        for _, _, f, g in self._factors():
            if axis in g.axes:
                return math.prod(self.mesh.axes[a] for a in f.axes[_common(f.axes, g.axes) :])
        return 1

    def _gather(self) -> bool:
        """Gather an innermost axis that is not where it should be; those first that split nothing in the end."""
        found: list[tuple[bool, int, int, int]] = []
        for k, j, f, g in self._factors():
            if len(f.axes) > _common(f.axes, g.axes):
                found.append((f.axes[-1] in self.goal.axes, self.mesh.axes[f.axes[-1]], k, j))
        if not found:
            return False
        *_, k, j = min(found)
        return self._go("all_gather", self.now.dims[k][j].axes[-1], _pop(self.now, k, j))

    def _factors(self) -> Iterator[tuple[int, int, Factor, Factor]]:
        for k, (dim, want) in enumerate(zip(self.now.dims, self.goal.dims, strict=True)):
            for j, (f, g) in enumerate(zip(dim, want, strict=True)):
                yield k, j, f, g

    def _missing(self) -> Iterator[tuple[int, int, str]]:
        """(dim, factor, axis): the next axis that each factor lacks, where what it has is a prefix of what is wanted."""
        for k, j, f, g in self._factors():
            if len(g.axes) > len(f.axes) == _common(f.axes, g.axes):
                yield k, j, g.axes[len(f.axes)]


@dataclass(frozen=True)
class _Aligned:
    """Two dims as factors of the same sizes; `late` are axes that the second dim has where no common cut exists.

    `shifts`: (position, count, what is wanted) of factors that one axis splits on both sides, at other borders.
    """

    now: Dim
    goal: Dim
    late: tuple[str, ...] = ()
    shifts: tuple[tuple[int, int, Dim], ...] = ()


def _align(dim: Dim, other: Dim, mesh: Mesh) -> _Aligned:
    """Both dims cut at the common borders of their finest factors.

    A stretch between two common borders that is one factor in both is a pair; so is one that can be written as one factor
    (``6@x`` and ``6@(x,y)``, whose finest forms cross). Where one axis splits both, it is a shift. In any other the axes of
    the first dim are to be gathered, and those of the second come later, from whole elements: its goal is the first dim
    without axes.
    """
    now: list[Factor] = []
    goal: list[Factor] = []
    late: list[str] = []
    shifts: list[tuple[int, int, Dim]] = []
    for a, b in _stretches(list(finest_dim(dim, mesh)), list(finest_dim(other, mesh))):
        one, two = _joined(a, mesh), _joined(b, mesh)
        if one is not None and two is not None:
            now.append(one)
            goal.append(two)
        elif len(dim_axes(a)) == 1 and dim_axes(a) == dim_axes(b):
            shifts.append((len(now), len(a), tuple(b)))
            now += a
            goal += a
        else:
            now += a
            goal += [Factor(f.size) for f in a]
            late += dim_axes(b)
    return _Aligned(tuple(now), tuple(goal), tuple(late), tuple(shifts))


def _stretches(a: list[Factor], b: list[Factor]) -> Iterator[tuple[Dim, Dim]]:
    """Cut two lists of factors of the same product at their common borders; whole factors are cut where that makes one."""
    while a or b:
        for mine, others in ((a, b), (b, a)):
            if mine and mine[0].size == 1 and not (others and others[0].size == 1):
                others.insert(0, Factor(1))
        if a[0].size == 0 or b[0].size == 0:
            yield tuple(a), tuple(b)
            return
        parts: tuple[list[Factor], list[Factor]] = ([a.pop(0)], [b.pop(0)])
        sizes = [parts[0][0].size, parts[1][0].size]
        while sizes[0] != sizes[1]:
            k = 0 if sizes[0] < sizes[1] else 1  # the shorter one takes its next factor, unless the longer can be cut
            last = parts[1 - k][-1]
            inner = sizes[1 - k] // sizes[k]
            if not last.axes and sizes[1 - k] % sizes[k] == 0 and last.size % inner == 0 and last.size > inner:
                parts[1 - k][-1] = Factor(last.size // inner)
                (b if k == 0 else a).insert(0, Factor(inner))
                sizes[1 - k] = sizes[k]
                continue
            f = (a, b)[k].pop(0)
            parts[k].append(f)
            sizes[k] *= f.size
        yield tuple(parts[0]), tuple(parts[1])


def _joined(dim: Dim, mesh: Mesh) -> Factor | None:
    """The single factor with the index sets of `dim`, if there is one."""
    if len(dim) == 1:
        return dim[0]
    one = Factor(dim_size(dim), dim_axes(dim))
    return one if finest_dim((one,), mesh) == finest_dim(dim, mesh) else None


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _innermost(spec: ShardSpec, axis: str) -> tuple[int, int] | None:
    for k, d in enumerate(spec.dims):
        for j, f in enumerate(d):
            if f.axes and f.axes[-1] == axis:
                return k, j
    return None


def _reduced(spec: ShardSpec, axis: str) -> ShardSpec:
    return spec.with_partial(p for p in spec.partial if p[0] != axis)


def _edit(spec: ShardSpec, k: int, j: int, axes: tuple[str, ...]) -> ShardSpec:
    dim = spec.dims[k]
    return spec.with_dim(k, (*dim[:j], Factor(dim[j].size, axes), *dim[j + 1 :]))


def _pop(spec: ShardSpec, k: int, j: int) -> ShardSpec:
    return _edit(spec, k, j, spec.dims[k][j].axes[:-1])


def _push(spec: ShardSpec, k: int, j: int, axis: str) -> ShardSpec:
    return _edit(spec, k, j, (*spec.dims[k][j].axes, axis))
