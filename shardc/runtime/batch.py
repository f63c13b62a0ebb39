"""Rows of a batch that ranks pass in parts of any size, dealt anew to the layout that the program computes in, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.errors import InputError
from shardc.runtime.world import Ranks
from shardc.spec import Factor

Interval = tuple[int, int]


def global_rows(ranks: Ranks, sizes: Sequence[int], axes: Sequence[str], where: str = "") -> int:
    """Rows of the global batch: the parts of the ranks along `axes`, added up.

    Args:
        sizes: dim 0 of the input on each rank, in rank order.
        axes: the batch axes, major first. Ranks that differ in other axes hold the same part.

    Raises:
        InputError: such ranks hold parts of different size; no rows at all.
    """
    if not ranks.distributed:
        return sizes[0]
    kept = [ranks.mesh.index(a) for a in axes]
    seen: dict[tuple[int, ...], int] = {}
    for rank, coord in enumerate(ranks.mesh.coords()):
        first = seen.setdefault(tuple(coord[k] for k in kept), rank)
        if sizes[first] != sizes[rank]:
            raise InputError(
                f"ranks {first} and {rank} hold the same part of the batch (axes {', '.join(axes)}) but pass "
                f"{sizes[first]} and {sizes[rank]} rows",
                where=where, hint="ranks that differ in other axes alone must pass the same tensor",
            )  # fmt: skip
    total = sum(sizes[rank] for rank in seen.values())
    if total == 0:
        raise InputError(f"the global batch has no rows: all {len(sizes)} ranks pass an empty part", where=where,
                         hint="skip the step on all ranks when no data is left")  # fmt: skip
    return total


def chunk_rows(ranks: Ranks, local: Tensor, sizes: Sequence[int], axes: Sequence[str], inner: int = 1) -> Tensor:
    """This rank's rows in the layout of `torch.chunk`, of a batch that is the concatenation of all parts in rank order.

    Args:
        local: [sizes[rank] * inner, ...], any dtype.
        sizes: rows on each rank, in rank order (from `exchange`).
        axes: batch axes, major first.
        inner: elements of dim 0 for each row (rows that were flattened with what follows them).

    Returns:
        [part * inner, ...] with part as ``Factor(sum, axes)`` gives this coordinate; `local` itself where nothing moves.
    """
    return _deal(ranks, local, _parts(ranks, sizes, axes), _chunks(ranks, sizes, axes), axes, inner)


def unchunk_rows(ranks: Ranks, local: Tensor, sizes: Sequence[int], axes: Sequence[str], inner: int = 1) -> Tensor:
    """The inverse of `chunk_rows`: from the layout of `torch.chunk` back to parts of `sizes` rows."""
    return _deal(ranks, local, _chunks(ranks, sizes, axes), _parts(ranks, sizes, axes), axes, inner)


def _parts(ranks: Ranks, sizes: Sequence[int], axes: Sequence[str]) -> dict[int, Interval]:
    out, lo = {}, 0
    for rank in ranks.members(axes):
        out[rank] = (lo, lo + sizes[rank])
        lo += sizes[rank]
    return out


def _chunks(ranks: Ranks, sizes: Sequence[int], axes: Sequence[str]) -> dict[int, Interval]:
    members = ranks.members(axes)
    factor = Factor(sum(sizes[r] for r in members), tuple(axes))
    return {r: factor.interval(ranks.mesh, ranks.mesh.coord(r)) for r in members}


def _deal(
    ranks: Ranks, local: Tensor, have: dict[int, Interval], want: dict[int, Interval], axes: Sequence[str], inner: int
) -> Tensor:
    if not ranks.distributed or have == want:
        return local
    me, tail = ranks.rank, tuple(local.shape[1:])
    assert local.shape[0] == (have[me][1] - have[me][0]) * inner, f"{tuple(local.shape)} for rows {have[me]} x {inner}"
    row = inner * local.dtype.itemsize * math.prod(tail)
    rows = (want[me][1] - want[me][0]) * inner
    if row == 0:
        return local.new_empty((rows, *tail))
    group = ranks.joint(axes)
    order = dist.get_process_group_ranks(group)  # sorted; `have` is in the order of the axes
    flat = local.detach().contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)
    send = [_overlap(have[me], want[r]) for r in order]
    receive = [_overlap(have[r], want[me]) for r in order]
    base = have[me][0]
    pieces = [flat[(lo - base) * row : (hi - base) * row] for lo, hi in send]
    packed = flat if order == list(have) else torch.cat(pieces)
    got = flat.new_empty(sum(hi - lo for lo, hi in receive) * row)
    dist.all_to_all_single(
        got, packed, [(hi - lo) * row for lo, hi in receive], [(hi - lo) * row for lo, hi in send], group=group
    )
    if order != list(have):  # put the pieces in the order of the rows
        cut = dict(zip(order, torch.split(got, [(hi - lo) * row for lo, hi in receive]), strict=True))
        got = torch.cat([cut[r] for r in have])
    out = got.view(local.dtype).view(rows, *tail)
    return out.contiguous(memory_format=torch.channels_last) if _channels_last(local) else out


def _overlap(a: Interval, b: Interval) -> Interval:
    lo, hi = max(a[0], b[0]), min(a[1], b[1])
    return (lo, max(lo, hi))


def _channels_last(t: Tensor) -> bool:
    return t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
