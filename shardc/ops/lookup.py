"""Lookups in a table of which a rank holds the rows (or classes) from `start` on: what the others hold counts as zero.

With all of the table and ``start=0`` each is the aten operator of the same name. `start` is given by the part that a rank
holds (`rules.rule.Start`), so that a program at global shapes always says 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.ops.library import operator


def _inside(index: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """The index into this part (0 where it is outside), and whether it is inside."""
    local = index - start
    inside = (local >= 0) & (local < count)
    return torch.where(inside, local, 0), inside


def _embedding(weight: Tensor, indices: Tensor, start: int) -> Tensor:
    if not weight.shape[0]:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    local, inside = _inside(indices, start, weight.shape[0])
    return torch.embedding(weight, local).masked_fill_(~inside.unsqueeze(-1), 0)


def _embedding_fake(weight: Tensor, indices: Tensor, start: int) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, start: int) -> Tensor:
    local, inside = _inside(indices, start, num_weights)
    if padding_idx >= 0:
        inside = inside & (indices != padding_idx)
    out = grad.new_zeros((num_weights + 1, grad.shape[-1]))  # rows of others go to one more, which is cut off
    rows = torch.where(inside, local, num_weights)
    return out.index_add_(0, rows.reshape(-1), grad.reshape(-1, grad.shape[-1]))[:num_weights].clone()


def _embedding_backward_fake(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, start: int) -> Tensor:
    return grad.new_empty((num_weights, grad.shape[-1]))


def _gather(x: Tensor, dim: int, index: Tensor, start: int) -> Tensor:
    if not x.shape[dim]:
        return x.new_zeros(index.shape)
    local, inside = _inside(index, start, x.shape[dim])
    return x.gather(dim, local).masked_fill_(~inside, 0)


def _gather_fake(x: Tensor, dim: int, index: Tensor, start: int) -> Tensor:
    return x.new_empty(index.shape)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor, start: int) -> Tensor:
    """Entries of others go to one more place, which is cut off."""
    return _written(x, dim, index, src, start, adding=False)


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor, start: int) -> Tensor:
    return _written(x, dim, index, src, start, adding=True)


def _written(x: Tensor, dim: int, index: Tensor, src: Tensor, start: int, adding: bool) -> Tensor:
    count = x.shape[dim]
    local, inside = _inside(index, start, count)
    rest = torch.where(inside, local, count)
    wide = torch.cat([x, x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))], dim)
    wide = wide.scatter_add_(dim, rest, src) if adding else wide.scatter_(dim, rest, src)
    return wide.narrow(dim, 0, count).clone(memory_format=torch.contiguous_format)


def _written_fake(x: Tensor, dim: int, index: Tensor, src: Tensor, start: int) -> Tensor:
    return x.new_empty(x.shape)


embedding = operator("embedding_part(Tensor weight, Tensor indices, SymInt start) -> Tensor", _embedding, _embedding_fake)
embedding_backward = operator(
    "embedding_backward_part(Tensor grad, Tensor indices, SymInt num_weights, int padding_idx, SymInt start) -> Tensor",
    _embedding_backward,
    _embedding_backward_fake,
)
gather = operator("gather_part(Tensor self, int dim, Tensor index, SymInt start) -> Tensor", _gather, _gather_fake)
scatter = operator(
    "scatter_part(Tensor self, int dim, Tensor index, Tensor src, SymInt start) -> Tensor", _scatter, _written_fake
)
scatter_add = operator(
    "scatter_add_part(Tensor self, int dim, Tensor index, Tensor src, SymInt start) -> Tensor", _scatter_add, _written_fake
)
