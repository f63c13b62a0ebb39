"""Between shard specs and DTensor placements, which say for each mesh axis, in the order of the mesh, what it does.

DTensor reads placements from left to right: `Shard(k)` cuts what is left of dim k as `torch.chunk` does, `_StridedShard(k,
split_factor=s)` first cuts it into s pieces, then each piece, and keeps one part of each. The latter writes axes that do
not stand in the order of the mesh (``8@(tp,dp)`` on a mesh dp, tp: FSDP over TP) and factors that are not the first of
their dim (``3·8@tp``: a fused qkv split by heads). What torch lays out otherwise cannot be stored, and is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardc._torch import _StridedShard
from shardc.errors import SpecError
from shardc.mesh import Mesh
from shardc.spec import Dim, Factor, ShardSpec, canonical_dim, dim_axes, dim_size

Cut = tuple[str, int]
"""An axis and its split factor: 1 for `Shard`, more for `_StridedShard`."""
Indices = npt.NDArray[np.int64]

_REDUCE_OPS = {"sum": "sum", "max": "max", "min": "min"}


def to_placements(spec: ShardSpec, mesh: Mesh, where: str = "") -> tuple[Placement, ...]:
    """One placement for each axis of `mesh`, in its order; `where` names the tensor in errors.

    Raises:
        SpecError: a layout that placements cannot express.
        MeshError: an axis that the mesh does not have.
    """
    for axis in (*spec.axes, *spec.partial_axes):
        mesh.index(axis)
    out: dict[str, Placement] = {axis: Partial(op) for axis, op in spec.partial if mesh.axes[axis] > 1}
    for k, dim in enumerate(spec.dims):
        for axis, pieces in _cuts(canonical_dim(dim, mesh), mesh, k, spec, where):
            out[axis] = Shard(k) if pieces == 1 else _StridedShard(k, split_factor=pieces)
    return tuple(out.get(axis, Replicate()) for axis in mesh.names)


def check_storage(spec: ShardSpec, mesh: Mesh, where: str = "") -> None:
    """Whether state can rest in `spec`: whole values (nothing pending), in a layout that DTensor can express.

    Raises:
        SpecError: if not; it names `where`, the spec and a way out.
    """
    if spec.canonical(mesh).partial:
        raise SpecError(f"{spec} cannot be a storage spec: a reduction is pending", where=where, hint="store the reduced value")
    to_placements(spec, mesh, where)


def from_placements(placements: Sequence[Placement], shape: Sequence[int], mesh: Mesh, where: str = "") -> ShardSpec:
    """The spec of a DTensor of global `shape`, canonical on `mesh`.

    Raises:
        SpecError: not one placement for each axis, a dim or reduction that does not exist, or a layout that is no spec.
    """
    if len(placements) != len(mesh.axes):
        raise SpecError(f"{len(placements)} placements for the {len(mesh.axes)} axes of mesh {mesh}", where=where)
    cuts: list[list[Cut]] = [[] for _ in shape]
    partial = []
    for (axis, n), p in zip(mesh.axes.items(), placements, strict=True):
        if isinstance(p, Partial):
            if p.reduce_op not in _REDUCE_OPS:
                raise SpecError(f"{p} over axis {axis!r}: unknown reduction", where=where, hint="one of sum, max, min")
            partial.append((axis, p.reduce_op))
        elif isinstance(p, (Shard, _StridedShard)):
            if not -len(shape) <= p.dim < len(shape):
                raise SpecError(f"{p} over axis {axis!r} on a tensor of shape {list(shape)}", where=where)
            if n > 1:
                cuts[p.dim].append((axis, int(p.split_factor) if isinstance(p, _StridedShard) else 1))
        elif not isinstance(p, Replicate):
            raise SpecError(f"unknown placement {p} over axis {axis!r}", where=where, hint="Shard, Replicate or Partial")
    dims = []
    for k, (size, found) in enumerate(zip(shape, cuts, strict=True)):
        dim = _dim_of(int(size), tuple(found), mesh)
        if dim is None:
            text = ", ".join(f"{axis}: {'Shard' if s == 1 else f'_StridedShard(split_factor={s})'}" for axis, s in found)
            raise SpecError(
                f"dim {k} of {list(shape)} on mesh {mesh} is placed by {text}, which is no product of evenly nested factors",
                where=where, hint="redistribute it to Shard placements first",
            )  # fmt: skip
        dims.append(dim)
    return ShardSpec(tuple(dims), tuple(partial)).canonical(mesh)


# -- one dim -----------------------------------------------------------------------------------------------------------------


def placed(size: int, cuts: Sequence[Cut], mesh: Mesh, index: dict[str, int]) -> Indices:
    """The global indices, in local order, that DTensor gives the rank at `index` (axis -> coordinate) along one dim."""
    held = np.arange(size)
    for axis, pieces in cuts:
        held = np.concatenate([_chunk(piece, mesh.axes[axis], index[axis]) for piece in _chunks(held, pieces)])
    return held


def _chunks(x: Indices, n: int) -> list[Indices]:
    return [_chunk(x, n, i) for i in range(n)]


def _chunk(x: Indices, n: int, i: int) -> Indices:
    """Part i of n, as `torch.chunk` cuts (the last parts may be empty)."""
    step = -(-len(x) // n)
    return x[i * step : (i + 1) * step]


def _held(dim: Dim, mesh: Mesh, index: dict[str, int]) -> Indices:
    coord = tuple(index.get(axis, 0) for axis in mesh.names)
    held = np.zeros(1, dtype=np.int64)
    for f in dim:
        held = (held[:, None] * f.size + np.arange(*f.interval(mesh, coord))).reshape(-1)
    return held


def _agree(dim: Dim, cuts: Sequence[Cut], mesh: Mesh) -> bool:
    """Whether a dim and placements give every rank the same indices in the same order."""
    size, axes = dim_size(dim), [axis for axis, _ in cuts]
    for at in itertools.product(*(range(mesh.axes[axis]) for axis in axes)):
        index = dict(zip(axes, at, strict=True))
        if not np.array_equal(_held(dim, mesh, index), placed(size, cuts, mesh, index)):
            return False
    return True


def _cuts(dim: Dim, mesh: Mesh, k: int, spec: ShardSpec, where: str) -> tuple[Cut, ...]:
    """The placements of a canonical dim, memoised on the mesh."""
    memo = mesh.memo.setdefault("placements", {})
    if dim not in memo:
        memo[dim] = next((cuts for cuts in _candidate_cuts(dim, mesh) if _agree(dim, cuts, mesh)), None)
    found: tuple[Cut, ...] | None = memo[dim]
    if found is None:
        even = Factor(dim_size(dim), tuple(a for a in mesh.names if a in dim_axes(dim)))
        raise SpecError(
            f"dim {k} of {spec} on mesh {mesh} cannot be stored: DTensor has no placement with this layout",
            where=where, hint=f"split it over its axes in the order of the mesh ({even}), or choose sizes that divide evenly",
        )  # fmt: skip
    return found


def _candidate_cuts(dim: Dim, mesh: Mesh) -> Iterator[tuple[Cut, ...]]:
    """First what the factors suggest, then every split factor that is a product of sizes in the dim."""
    axes = sorted(dim_axes(dim), key=mesh.index)
    yield tuple((axis, 1) for axis in axes)
    yield tuple((axis, _pieces(dim, axis, mesh)) for axis in axes)
    sizes = [f.size for f in dim] + [mesh.axes[axis] for axis in axes]
    products = sorted({math.prod(c) for r in range(len(sizes) + 1) for c in itertools.combinations(sizes, r)})
    choices = [products] * len(axes)
    for pieces in itertools.islice(itertools.product(*choices), 2000):
        yield tuple(zip(axes, pieces, strict=True))


def _pieces(dim: Dim, axis: str, mesh: Mesh) -> int:
    """How many pieces `axis` finds: the parts of major factors that earlier axes left, times the later axes before it."""
    out = 1
    for f in dim:
        earlier = [a for a in f.axes if mesh.index(a) < mesh.index(axis)]
        if axis in f.axes:
            before = f.axes[: f.axes.index(axis)]
            return out * math.prod(mesh.axes[a] for a in before if a not in earlier)
        out *= max(1, f.size // math.prod(mesh.axes[a] for a in earlier))
    return out


def _dim_of(size: int, cuts: tuple[Cut, ...], mesh: Mesh) -> Dim | None:
    memo = mesh.memo.setdefault("placed_dim", {})
    if (size, cuts) not in memo:
        found = (dim for dim in _candidate_dims(size, cuts, mesh) if _agree(dim, cuts, mesh))
        dim = next(found, None)
        memo[size, cuts] = None if dim is None else canonical_dim(dim, mesh)
    return memo[size, cuts]  # type: ignore[no-any-return]


def _candidate_dims(size: int, cuts: tuple[Cut, ...], mesh: Mesh) -> Iterator[Dim]:
    """Every order of the axes, over up to four factors, cut where products of split factors and axis sizes allow."""
    axes = tuple(axis for axis, _ in cuts)
    yield (Factor(size, axes),)
    if size == 0 or not axes:
        return
    numbers = [s for _, s in cuts] + [mesh.axes[axis] for axis in axes]
    borders = {math.prod(c) for r in range(len(numbers) + 1) for c in itertools.combinations(numbers, r)}
    majors = sorted(b for b in borders | {size // b for b in borders if size % b == 0} if size % b == 0)
    for count in range(min(2, len(majors)) + 1 if len(axes) < 3 else min(3, len(majors)) + 1):
        for where in itertools.combinations([b for b in majors if b > 1], count):
            edges = [1, *where, size]
            if any(b % a for a, b in itertools.pairwise(edges)):
                continue
            sizes = [b // a for a, b in itertools.pairwise(edges)]
            for order in itertools.permutations(axes):
                for at in itertools.combinations_with_replacement(range(len(sizes)), len(axes)):
                    parts = [tuple(a for a, j in zip(order, at, strict=True) if j == i) for i in range(len(sizes))]
                    yield tuple(map(Factor, sizes, parts))
