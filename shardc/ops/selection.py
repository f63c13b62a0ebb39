"""Selections of rows by position, in a tensor of which a rank holds the part that begins at `start` in each dim.

Positions are those in the whole tensor; all that a rank is given lie in its part. With the whole tensor and ``start=[0, ...]``
each is the aten operator of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.ops.library import operator

Indices = Sequence[Tensor | None]


def _here(indices: Indices, start: Sequence[int]) -> list[Tensor | None]:
    return [i if i is None or not s else i - s for i, s in zip(indices, start, strict=False)]


def _nonzero(x: Tensor, start: Sequence[int]) -> Tensor:
    rows = x.nonzero()
    return rows.add_(torch.tensor(start, dtype=rows.dtype, device=rows.device)) if any(start) else rows


def _nonzero_fake(x: Tensor, start: Sequence[int]) -> Tensor:
    """As many rows as there can be: what is planned for."""
    return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


def _index(x: Tensor, indices: Indices, start: Sequence[int]) -> Tensor:
    return torch.ops.aten.index.Tensor(x, _here(indices, start))  # type: ignore[no-any-return]


def _index_fake(x: Tensor, indices: Indices, start: Sequence[int]) -> Tensor:
    return torch.ops.aten.index.Tensor(x, list(indices))  # type: ignore[no-any-return]


def _index_put(x: Tensor, indices: Indices, values: Tensor, accumulate: bool, start: Sequence[int]) -> Tensor:
    return torch.ops.aten.index_put.default(x, _here(indices, start), values, accumulate)  # type: ignore[no-any-return]


def _index_put_fake(x: Tensor, indices: Indices, values: Tensor, accumulate: bool, start: Sequence[int]) -> Tensor:
    return torch.empty_like(x)


nonzero = operator("nonzero_part(Tensor self, SymInt[] start) -> Tensor", _nonzero, _nonzero_fake)
index = operator("index_part(Tensor self, Tensor?[] indices, SymInt[] start) -> Tensor", _index, _index_fake)
index_put = operator(
    "index_put_part(Tensor self, Tensor?[] indices, Tensor values, bool accumulate, SymInt[] start) -> Tensor",
    _index_put,
    _index_put_fake,
)
