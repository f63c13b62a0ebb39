"""A rank's part of a tensor: cut out, put back, gathered whole. Storage specs (nothing pending) of any factor structure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.errors import SpecError
from shardc.mesh import Coord, Mesh
from shardc.runtime.world import Ranks
from shardc.spec import Factor, ShardSpec

Intervals = list[list[tuple[int, int]]]
"""For each dim, for each of its factors: the half-open range of elements held."""


def intervals(spec: ShardSpec, mesh: Mesh, coord: Coord) -> Intervals:
    return [[f.interval(mesh, coord) for f in dim] for dim in spec.dims]


def window(t: Tensor, have: Intervals, want: Intervals) -> Tensor:
    """The view of `t`, which holds `have`, on the elements `want`; a dim for each factor."""
    k = 0
    for outer, inner in zip(have, want, strict=True):
        if len(outer) > 1:
            t = t.view(*t.shape[:k], *(hi - lo for lo, hi in outer), *t.shape[k + 1 :])
        for (lo, hi), (a, b) in zip(outer, inner, strict=True):
            if (a, b) != (lo, hi):
                t = t.narrow(k, a - lo if b > a else 0, b - a)
            k += 1
    return t


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in the order that the strides `like` have."""
    out, step = [0] * len(shape), 1
    for k in sorted(range(len(shape)), key=lambda k: (like[k], -k)):
        out[k] = step
        step *= max(shape[k], 1)
    return tuple(out)


def cut(whole: Tensor, spec: ShardSpec, mesh: Mesh, coord: Coord, device: torch.device | None = None) -> Tensor:
    """The part of `whole` at `coord`: a dense tensor of its own with the dim order of `whole`; `whole` itself where that
    is all of it (and on `device` already).

    Raises:
        SpecError: `spec` is of another shape, or partial.
    """
    _check(whole.shape, spec)
    device = device or whole.device
    if not spec.axes:
        return whole.to(device)
    part = window(whole, _full(spec), intervals(spec, mesh, coord))
    shape = spec.local_shape(mesh, coord)
    out = torch.empty_strided(shape, dense_strides(shape, whole.stride()), dtype=whole.dtype, device=device)
    out.copy_(part.reshape(shape))
    return out


def split(whole: Tensor, spec: ShardSpec, mesh: Mesh) -> list[Tensor]:
    """The parts of all ranks of a simulated mesh, in rank order, each with a storage of its own; on a mesh of one rank
    `whole` itself.

    Raises:
        SpecError: `spec` is of another shape, or partial.
    """
    with torch.no_grad():
        whole = whole.detach()
        if mesh.size == 1:
            _check(whole.shape, spec)
            return [whole]
        parts = [cut(whole, spec, mesh, coord) for coord in mesh.coords()]
        return [p.clone() if p is whole else p for p in parts]


def assemble(parts: Sequence[Tensor], spec: ShardSpec, mesh: Mesh, out: Tensor | None = None) -> Tensor:
    """The whole tensor of the parts of all ranks; replicated elements are those of the lowest rank.

    Args:
        parts: in rank order, as `split` gives them.
        out: written in place if given (its strides stay).

    Raises:
        SpecError: a part of the wrong shape, `spec` partial, `out` of another shape.
    """
    _check(out.shape if out is not None else spec.shape, spec)
    if len(parts) != mesh.size:
        raise SpecError(f"{len(parts)} parts for the {mesh.size} ranks of mesh {mesh}")
    with torch.no_grad():
        if mesh.size == 1 and (out is None or out is parts[0]):
            return parts[0]
        first = parts[0]
        if out is None:
            strides = dense_strides(spec.shape, first.stride())
            out = torch.empty_strided(spec.shape, strides, dtype=first.dtype, device=first.device)
        target, seen = out.detach(), set()
        for coord, part in zip(mesh.coords(), parts, strict=True):
            held = intervals(spec, mesh, coord)
            key = tuple(map(tuple, held))
            if key in seen:
                continue
            seen.add(key)
            if tuple(part.shape) != spec.local_shape(mesh, coord):
                want = list(spec.local_shape(mesh, coord))
                raise SpecError(f"part of shape {list(part.shape)} at {coord} of {spec}, expected {want}")
            view = window(target, _full(spec), held)
            view.copy_(part.reshape(view.shape))
        return out


def gather(local: Tensor, spec: ShardSpec, ranks: Ranks) -> Tensor:
    """The whole tensor on every rank, from each one's part (collective over the axes of `spec`; axis by axis, the innermost
    first). `local` itself where it is whole."""
    mesh, coord, now = ranks.mesh, ranks.coord, local.detach()
    while spec.axes:
        dim, j = next((k, j) for k, d in enumerate(spec.dims) for j, f in enumerate(d) if f.axes)
        factor = spec.dims[dim][j]
        axis = factor.axes[-1]
        wider = spec.with_dim(
            dim, (*spec.dims[dim][:j], Factor(factor.size, factor.axes[:-1]), *spec.dims[dim][j + 1 :])
        )
        if mesh.axes[axis] > 1:
            now = _gather_axis(now, spec, wider, axis, ranks, coord)
        spec = wider
    return now


def _gather_axis(local: Tensor, spec: ShardSpec, wider: ShardSpec, axis: str, ranks: Ranks, coord: Coord) -> Tensor:
    mesh = ranks.mesh
    line = mesh.group(coord, axis)
    counts = [math.prod(spec.local_shape(mesh, c)) * local.dtype.itemsize for c in line]
    shape = wider.local_shape(mesh, coord)
    out = torch.empty_strided(shape, dense_strides(shape, local.stride()), dtype=local.dtype, device=local.device)
    if max(counts) == 0:
        return out
    # bytes, so that every dtype of every backend goes; padded, so that parts may differ in size
    flat = local.contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)
    if len(flat) < max(counts):
        flat = torch.cat([flat, flat.new_zeros(max(counts) - len(flat))])
    got = [torch.empty_like(flat) for _ in line]
    dist.all_gather(got, flat, group=ranks.group(axis))
    have = intervals(wider, mesh, coord)
    for c, raw, n in zip(line, got, counts, strict=True):
        if n:
            view = window(out, have, intervals(spec, mesh, c))
            view.copy_(raw[:n].view(local.dtype).view(view.shape))
    return out


def _full(spec: ShardSpec) -> Intervals:
    return [[(0, f.size) for f in dim] for dim in spec.dims]


def _check(shape: Sequence[int], spec: ShardSpec) -> None:
    if spec.partial:
        raise SpecError(f"a tensor at rest cannot be partial: {spec}")
    if tuple(shape) != spec.shape:
        raise SpecError(f"a tensor of shape {list(shape)} does not fit {spec}")
