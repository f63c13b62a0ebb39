"""How a tensor is laid out on a mesh.

A dim is an ordered product of factors, major first; each factor has a size and the mesh axes it is split over. A factor of
size n over axes (a, b) is cut as `torch.chunk` cuts it: by a into parts of ceil(n / |a|), each of those by b; the part of
a rank is therefore one interval, perhaps empty. `f32[8@dp·12, 64]` is a batch of 8 rows of 12, flattened; `[3·8@tp·64, 512]`
a fused qkv split by heads; `[16, 16] +sum@dp` a value whose true content is the sum over the ranks of dp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardc.errors import SpecError
from shardc.mesh import Coord, Mesh

REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True)
class Factor:
    """`size` elements, split over `axes` (major first)."""

    size: int
    axes: tuple[str, ...] = ()

    def interval(self, mesh: Mesh, coord: Coord) -> tuple[int, int]:
        """The half-open range of elements at `coord`."""
        lo, hi = 0, self.size
        for axis in self.axes:
            chunk = -(-(hi - lo) // mesh.axes[axis])
            begin = min(hi, lo + chunk * coord[mesh.index(axis)])
            lo, hi = begin, min(hi, begin + chunk)
        return lo, hi

    def __str__(self) -> str:
        if not self.axes:
            return str(self.size)
        return f"{self.size}@{self.axes[0]}" if len(self.axes) == 1 else f"{self.size}@({','.join(self.axes)})"


Dim = tuple[Factor, ...]
"""An ordered product of factors, major first; never empty."""


def dim_size(dim: Dim) -> int:
    return math.prod(f.size for f in dim)


def dim_axes(dim: Dim) -> tuple[str, ...]:
    return tuple(axis for f in dim for axis in f.axes)


def dim_local(dim: Dim, mesh: Mesh, coord: Coord) -> int:
    """Number of elements of `dim` at `coord`."""
    out = 1
    for f in dim:
        lo, hi = f.interval(mesh, coord)
        out *= hi - lo
    return out


def dim_indices(dim: Dim, mesh: Mesh, coord: Coord) -> list[int]:
    """The global indices that `coord` holds, ascending."""
    out = [0]
    for f in dim:
        lo, hi = f.interval(mesh, coord)
        out = [i * f.size + j for i in out for j in range(lo, hi)]
    return out


def dim_key(dim: Dim, mesh: Mesh) -> tuple[object, ...]:
    """A value equal for two dims iff every rank of the mesh holds the same indices of both."""
    memo = mesh.memo.setdefault("dim_key", {})
    if dim in memo:
        return memo[dim]  # type: ignore[no-any-return]
    axes = sorted(set(dim_axes(dim)) & {a for a, n in mesh.axes.items() if n > 1})
    ranges = [range(n if a in axes else 1) for a, n in mesh.axes.items()]
    coords: list[Coord] = [()]
    for r in ranges:
        coords = [(*c, i) for c in coords for i in r]
    key = (dim_size(dim), tuple(axes), tuple(_runs(dim, mesh, c) for c in coords))
    memo[dim] = key
    return key


def _runs(dim: Dim, mesh: Mesh, coord: Coord) -> tuple[object, ...]:
    """Normal form of an index set: offset, then (count, stride) of each level, merged where contiguous."""
    stride, offset, levels = 1, 0, []
    for f in reversed(dim):
        lo, hi = f.interval(mesh, coord)
        if hi == lo:
            return ()
        offset += lo * stride
        if hi - lo > 1:
            if levels and levels[-1][0] * levels[-1][1] == stride:
                levels[-1] = ((hi - lo) * levels[-1][0], levels[-1][1])
            else:
                levels.append((hi - lo, stride))
        stride *= f.size
    return (offset, *levels)


def canonical_dim(dim: Dim, mesh: Mesh) -> Dim:
    """The canonical form among all dims with the same index sets on `mesh`: as few factors as possible."""
    memo = mesh.memo.setdefault("canonical_dim", {})
    if dim not in memo:
        memo[dim] = _canonical_dim(dim, mesh)
    return memo[dim]  # type: ignore[no-any-return]


def _canonical_dim(dim: Dim, mesh: Mesh) -> Dim:
    size, first = dim_size(dim), []
    factors: list[Factor] = []
    for f in dim:
        axes = tuple(a for a in f.axes if mesh.axes[a] > 1)
        largest = f.size  # axes that only cut parts of at most one element act as a factor of size one
        for k, axis in enumerate(axes):
            if largest <= 1:
                first.extend(axes[k:])
                axes = axes[:k]
                break
            largest = -(-largest // mesh.axes[axis])
        if f.size != 1 or axes:
            factors.append(Factor(f.size, axes))
    if size == 0:
        return (Factor(0, tuple(sorted(first + [a for f in factors for a in f.axes], key=mesh.index))),)
    if first:
        factors.insert(0, Factor(1, tuple(sorted(first, key=mesh.index))))
    k = 0
    while k + 1 < len(factors):
        a, b = factors[k], factors[k + 1]
        joined = Factor(a.size * b.size, a.axes + b.axes)
        if dim_key((a, b), mesh) == dim_key((joined,), mesh):
            factors[k : k + 2] = [joined]
            k = max(k - 1, 0)
        else:
            k += 1
    return tuple(factors) or (Factor(1),)


def join_dims(dims: Iterable[Dim]) -> Dim:
    """The dim that a reshape makes of several, major first."""
    return tuple(f for dim in dims for f in dim) or (Factor(1),)


def split_dim(dim: Dim, sizes: Sequence[int], mesh: Mesh) -> tuple[Dim, ...] | None:
    """Cut a dim into dims of the given sizes (major first), keeping every rank's index set.

    Returns None where a border between the parts of two ranks falls inside an element of a new dim.
    """
    if math.prod(sizes) != dim_size(dim):
        raise SpecError(f"cannot cut a dim of {dim_size(dim)} into {list(sizes)}")
    todo, out = list(canonical_dim(dim, mesh)), []
    if dim_size(dim) == 0:
        return tuple((Factor(s),) for s in sizes) if not dim_axes(tuple(todo)) else None
    for size in sizes:
        part: list[Factor] = []
        need = size
        while need > 1 or (todo and todo[0].size == 1 and not part):
            f = todo.pop(0)
            if need % f.size == 0:
                part.append(f)
                need //= f.size
                continue
            cut = _cut(f, need, mesh) if f.size % need == 0 else None
            if cut is None:
                return None
            part.append(cut[0])
            todo.insert(0, cut[1])
            need = 1
        out.append(tuple(part) or (Factor(1),))
    if todo:  # factors of size one that are left hang on the last dim
        out[-1] = out[-1] + tuple(todo)
    return tuple(canonical_dim(d, mesh) for d in out)


def _cut(f: Factor, major: int, mesh: Mesh) -> tuple[Factor, Factor] | None:
    for k in range(len(f.axes), -1, -1):
        pair = (Factor(major, f.axes[:k]), Factor(f.size // major, f.axes[k:]))
        if dim_key(pair, mesh) == dim_key((f,), mesh):
            return pair
    return None


@dataclass(frozen=True)
class ShardSpec:
    """Layout of a tensor: its dims, and the axes over which it is still to be reduced.

    Args:
        dims: one `Dim` for each dim of the tensor.
        partial: (axis, reduction) pairs, reduction one of "sum", "max", "min"; sorted by axis.

    Raises:
        SpecError: an axis used twice, an unknown reduction, a negative size.
    """

    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        axes = [a for d in self.dims for a in dim_axes(d)] + [a for a, _ in self.partial]
        twice = sorted({a for a in axes if axes.count(a) > 1})
        if twice:
            raise SpecError(f"mesh axis {twice[0]!r} is used twice in {self}", hint="an axis can split one dim only")
        for _, op in self.partial:
            if op not in REDUCTIONS:
                raise SpecError(f"unknown reduction {op!r}", hint=f"one of {', '.join(REDUCTIONS)}")
        if any(f.size < 0 for d in self.dims for f in d) or not all(self.dims):
            raise SpecError(f"malformed dims in {self.dims}")
        if list(self.partial) != sorted(self.partial):
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))

    @staticmethod
    def replicated(shape: Sequence[int]) -> ShardSpec:
        return ShardSpec(tuple((Factor(int(n)),) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(dim_size(d) for d in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that split a dim."""
        return tuple(a for d in self.dims for a in dim_axes(d))

    @property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(a for a, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        return not self.axes and not self.partial

    def reduction(self, axis: str) -> str | None:
        return dict(self.partial).get(axis)

    def local_shape(self, mesh: Mesh, coord: Coord) -> tuple[int, ...]:
        return tuple(dim_local(d, mesh, coord) for d in self.dims)

    def indices(self, mesh: Mesh, coord: Coord) -> tuple[list[int], ...]:
        """For each dim the ascending global indices held at `coord`."""
        return tuple(dim_indices(d, mesh, coord) for d in self.dims)

    def canonical(self, mesh: Mesh) -> ShardSpec:
        partial = tuple((a, op) for a, op in self.partial if mesh.axes[a] > 1)
        return ShardSpec(tuple(canonical_dim(d, mesh) for d in self.dims), partial)

    def same(self, other: ShardSpec, mesh: Mesh) -> bool:
        """Whether every rank holds the same index set, and the same reductions are pending."""
        return self == other or self.canonical(mesh) == other.canonical(mesh)

    def with_dim(self, k: int, dim: Dim) -> ShardSpec:
        return ShardSpec((*self.dims[:k], dim, *self.dims[k + 1 :]), self.partial)

    def with_partial(self, partial: Iterable[tuple[str, str]]) -> ShardSpec:
        return ShardSpec(self.dims, tuple(sorted(partial)))

    def without(self, axis: str) -> ShardSpec:
        """The spec with `axis` removed everywhere (gathered, reduced)."""
        dims = tuple(tuple(Factor(f.size, tuple(a for a in f.axes if a != axis)) for f in d) for d in self.dims)
        return ShardSpec(dims, tuple((a, op) for a, op in self.partial if a != axis))

    def __str__(self) -> str:
        body = ", ".join("·".join(map(str, d)) for d in self.dims)
        return f"[{body}]" + "".join(f" +{op}@{axis}" for axis, op in self.partial)

    @staticmethod
    def parse(text: str) -> ShardSpec:
        """Inverse of `str`; a leading dtype (``f32[8@dp, 64]``) is accepted and ignored.

        Raises:
            SpecError: text that is not a spec.
        """
        match = re.fullmatch(r"\s*(?:[a-z]+\d*\w*)?\s*\[(.*)\]((?:\s*\+\w+@\w+)*)\s*", text)
        if not match:
            raise SpecError(f"not a shard spec: {text!r}", hint="for example [8@dp·12, 64] +sum@tp")
        body, tail = match.groups()
        dims = []
        for part in re.split(r",(?![^(]*\))", body) if body.strip() else []:
            factors = []
            for word in re.split(r"[·*]", part):
                f = re.fullmatch(r"\s*(\d+)(?:@(?:(\w+)|\(([\w,\s]+)\)))?\s*", word)
                if not f:
                    raise SpecError(f"not a factor: {word!r} in {text!r}", hint="for example 8@dp or 8@(dp,tp)")
                names = (f[2],) if f[2] else tuple(a.strip() for a in f[3].split(",")) if f[3] else ()
                factors.append(Factor(int(f[1]), names))
            dims.append(tuple(factors))
        partial = tuple((axis, op) for op, axis in re.findall(r"\+(\w+)@(\w+)", tail))
        return ShardSpec(tuple(dims), partial)


class P(tuple[object, ...]):
    """Pins mesh axes to dims: ``P("tp", None)``, ``P(("dp", "tp"))``, ``P()`` (replicated).

    One entry for each dim: an axis name, a tuple of names (major first) or None; missing trailing entries are None.
    """

    def __new__(cls, *entries: str | tuple[str, ...] | None) -> P:
        for e in entries:
            names = (e,) if isinstance(e, str) else e
            if e is not None and not (isinstance(names, tuple) and all(isinstance(a, str) for a in names)):
                raise SpecError(f"P takes axis names, tuples of names and None, not {e!r}", hint='P("dp", None)')
        flat = [a for e in entries if e is not None for a in ((e,) if isinstance(e, str) else e)]
        twice = sorted({a for a in flat if flat.count(a) > 1})
        if twice:
            raise SpecError(f"mesh axis {twice[0]!r} stands on two dims of {cls._show(entries)}", hint="use an axis once")
        return super().__new__(cls, entries)

    @staticmethod
    def _show(entries: Sequence[object]) -> str:
        return f"P({', '.join(map(repr, entries))})"

    def __repr__(self) -> str:
        return self._show(self)

    def to_spec(self, shape: Sequence[int], mesh: Mesh, where: str = "") -> ShardSpec:
        """The spec of a tensor of `shape` with these axes pinned.

        Raises:
            SpecError: more entries than dims.
            MeshError: an axis that the mesh does not have.
        """
        if len(self) > len(shape):
            raise SpecError(
                f"{self!r} has {len(self)} entries, the tensor has {len(shape)} dims {list(shape)}",
                where=where, hint="one entry for each dim, None where it is whole",
            )  # fmt: skip
        entries = [*self, *([None] * (len(shape) - len(self)))]
        dims = []
        for n, e in zip(shape, entries, strict=True):
            names: tuple[str, ...] = () if e is None else (e,) if isinstance(e, str) else tuple(e)  # type: ignore[arg-type]
            for a in names:
                mesh.index(a)
            dims.append((Factor(int(n), names),))
        return ShardSpec(tuple(dims)).canonical(mesh)
