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


def dim_start(dim: Dim, mesh: Mesh, coord: Coord) -> int:
    """Where a rank's part of a dim begins, in elements of the dim.

    Raises:
        SpecError: a part that is not one run of elements (a split inside a dim).
    """
    lo, hi = dim[0].interval(mesh, coord)
    if any(f.axes for f in dim[1:]):
        raise SpecError(f"a part of {'·'.join(map(str, dim))} is not one run of elements", hint="split its major part")
    return min(lo, hi) * math.prod(f.size for f in dim[1:])


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


def dim_key(dim: Dim, mesh: Mesh) -> Dim:
    """A value equal for two dims iff every rank of the mesh holds the same indices of both: the canonical form itself."""
    return canonical_dim(dim, mesh)


def _lengths(f: Factor, mesh: Mesh) -> list[set[int]]:
    """The lengths, without 0, that the parts of a factor of size > 0 have before its first axis and after each of them."""
    out = [{f.size}]
    for axis in f.axes:
        n, new = mesh.axes[axis], set()
        for length in out[-1]:
            chunk = -(-length // n)
            new.add(chunk)
            if length % chunk:
                new.add(length % chunk)
        out.append(new)
    return out


def _refine(f: Factor, mesh: Mesh) -> tuple[list[Factor], list[str]]:
    """The finest product of factors with the index sets of `f`, and the axes that only cut parts of one element.

    Where all parts are of one length L after axes[:k], the factor is (n/L)@axes[:k] · L@axes[k:]; where all borders are
    multiples of r, it is (n/r)@axes · r. Both follow from ceil(ceil(m/r) / a) = ceil(m/a) / r when r divides the latter.
    An axis that cuts parts of at most one element keeps them at its coordinate 0, wherever in the dim it stands.
    """
    axes = tuple(a for a in f.axes if mesh.axes[a] > 1)
    lengths = _lengths(Factor(f.size, axes), mesh)
    out: list[Factor] = []
    size, start = f.size, 0
    for k in range(1, len(axes) + 1):
        if size > 1 and len(lengths[k]) == 1:
            (length,) = lengths[k]
            out.append(Factor(size // length, axes[start:k]))
            size, start = length, k
    if size == 1:
        return out, list(axes[start:])
    if start < len(axes):
        rest = math.gcd(size, *(n for level in lengths[start + 1 :] for n in level))
        out.append(Factor(size // rest, axes[start:]))
        size = rest
    return ([*out, Factor(size)] if size > 1 else out), []


def finest_dim(dim: Dim, mesh: Mesh) -> Dim:
    """The finest product of factors with the same index sets: it is the same for all dims that have them.

    Axes of size 1 are dropped, adjacent whole factors joined; a dim of size 0 has no axes, one of size 1 a single factor.
    """
    memo = mesh.memo.setdefault("finest_dim", {})
    if dim not in memo:
        memo[dim] = _finest_dim(dim, mesh)
    return memo[dim]  # type: ignore[no-any-return]


def _finest_dim(dim: Dim, mesh: Mesh) -> Dim:
    if dim_size(dim) == 0:
        return (Factor(0),)
    factors: list[Factor] = []
    first: list[str] = []
    for f in dim:
        fine, ones = _refine(f, mesh)
        first += ones
        for g in fine:
            if factors and not factors[-1].axes and not g.axes:
                factors[-1] = Factor(factors[-1].size * g.size)
            else:
                factors.append(g)
    if first:  # they stand where they read best: behind the first factor that is cut into single elements, else in front
        tail = tuple(sorted(first, key=mesh.index))
        k = next((k for k, f in enumerate(factors) if f.axes and _lengths(f, mesh)[-1] == {1}), None)
        if k is None:
            factors.insert(0, Factor(1, tail))
        else:
            factors[k] = Factor(factors[k].size, factors[k].axes + tail)
    return tuple(factors) or (Factor(1),)


def canonical_dim(dim: Dim, mesh: Mesh) -> Dim:
    """The canonical form among all dims with the same index sets on `mesh`: the finest one, joined again from the left.

    ``8@dp·12`` is ``96@dp`` on two ranks and itself on three.
    """
    memo = mesh.memo.setdefault("canonical_dim", {})
    if dim not in memo:
        memo[dim] = _canonical_dim(dim, mesh)
    return memo[dim]  # type: ignore[no-any-return]


def _canonical_dim(dim: Dim, mesh: Mesh) -> Dim:
    todo, out = finest_dim(dim, mesh), []
    while todo:
        for k in range(len(todo), 0, -1):
            joined = Factor(dim_size(todo[:k]), dim_axes(todo[:k]))
            if k == 1 or finest_dim((joined,), mesh) == todo[:k]:
                out.append(joined)
                todo = todo[k:]
                break
    return tuple(out)


def join_dims(dims: Iterable[Dim]) -> Dim:
    """The dim that a reshape makes of several, major first."""
    return tuple(f for dim in dims for f in dim) or (Factor(1),)


def split_dim(dim: Dim, sizes: Sequence[int], mesh: Mesh) -> tuple[Dim, ...] | None:
    """Cut a dim into dims of the given sizes (major first), keeping every rank's elements.

    Returns None where a border between the parts of two ranks falls inside an element of a new dim.

    Raises:
        SpecError: the sizes do not multiply to that of the dim.
    """
    if math.prod(sizes) != dim_size(dim):
        raise SpecError(f"cannot cut a dim of {dim_size(dim)} into {list(sizes)}", hint="sizes that multiply to it")
    if dim_size(dim) == 0:
        return tuple((Factor(n),) for n in sizes)
    todo, out = list(finest_dim(dim, mesh)), []
    for size in sizes:
        part: list[Factor] = []
        need = size
        while todo and (need > 1 or todo[0].size == 1):
            f = todo.pop(0)
            if need % f.size == 0:
                part.append(f)
                need //= f.size
            elif f.size % need == 0 and not f.axes:  # factors with axes are already as fine as they can be
                part.append(Factor(need))
                todo.insert(0, Factor(f.size // need))
                need = 1
            else:
                return None
        out.append(tuple(part) or (Factor(1),))
    if not out:  # the single element of a 0-d tensor: nowhere to keep an axis
        return None if dim_axes(tuple(todo)) else ()
    return tuple(canonical_dim(d, mesh) for d in out)


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
        """The one spec that stands for all those with these index sets and pending reductions on `mesh`."""
        memo: dict[ShardSpec, ShardSpec] = mesh.memo.setdefault("canonical", {})
        found = memo.get(self)
        if found is None:
            partial = tuple((a, op) for a, op in self.partial if mesh.axes[a] > 1)
            found = memo[self] = ShardSpec(tuple(canonical_dim(d, mesh) for d in self.dims), partial)
        return found

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
            names: tuple[str, ...] = () if e is None else (e,) if isinstance(e, str) else tuple(e)
            for a in names:
                mesh.index(a)
            dims.append((Factor(int(n), names),))
        return ShardSpec(tuple(dims)).canonical(mesh)
