"""Indexing in which some dims are not looked up but run along: ``x[arange(len(x)), index]`` reads row k at ``index[k]``.

With the run made by the operator itself from the rows that a rank holds, such a dim is split like any other. `along` has one
entry for each dim of the indexed tensor: the dim of what is picked that it runs along, or -1 where it has an index (or, with
neither, is kept whole, as in aten.index). What is picked has `rank` dims before the kept dims are put in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.ops.library import operator

Indices = Sequence[Tensor | None]


def _full(indices: Indices, along: Sequence[int], rank: int, shape: Sequence[int], device: torch.device) -> list[Tensor | None]:
    """The indices with the runs written out."""
    out = []
    for k, d in enumerate(along):
        given = indices[k] if k < len(indices) else None
        if d >= 0:
            given = torch.arange(shape[k], device=device).view([-1 if i == d else 1 for i in range(rank)])
        out.append(given)
    return out


def _index_rows(x: Tensor, indices: Indices, along: Sequence[int], rank: int) -> Tensor:
    return torch.ops.aten.index.Tensor(x, _full(indices, along, rank, x.shape, x.device))  # type: ignore[no-any-return]


def _index_sum(values: Tensor, indices: Indices, along: Sequence[int], rank: int, size: Sequence[int]) -> Tensor:
    """Zeros of `size` to which each value is added where its index says."""
    full = _full(indices, along, rank, size, values.device)
    return torch.ops.aten.index_put_.default(values.new_zeros(size), full, values, True)  # type: ignore[no-any-return]


def _index_rows_fake(x: Tensor, indices: Indices, along: Sequence[int], rank: int) -> Tensor:
    return torch.ops.aten.index.Tensor(x, _full(indices, along, rank, x.shape, x.device))  # type: ignore[no-any-return]


def _index_sum_fake(values: Tensor, indices: Indices, along: Sequence[int], rank: int, size: Sequence[int]) -> Tensor:
    return values.new_empty(size)


index_rows = operator(
    "index_rows(Tensor self, Tensor?[] indices, int[] along, int rank) -> Tensor", _index_rows, _index_rows_fake
)
index_sum = operator(
    "index_sum(Tensor values, Tensor?[] indices, int[] along, int rank, SymInt[] size) -> Tensor", _index_sum, _index_sum_fake
)
