"""Fused or split: how operators that are fused while a dim is whole are written where the plan splits it.

What a row is reduced over stays split: maxima and sums of the parts are reduced over the ranks, in one number for each row.
Lookups in a split table read what the rank holds, and zero elsewhere: their results are partial sums. A decomposition has the
arguments of the operator it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.ops import lookup
from shardc.rules.arithmetic import aten, cast, constant, total, wide
from shardc.rules.call import overload
from shardc.rules.decompose import vector_norm


def _shifted(x: Tensor, dim: int, half_to_float: bool) -> tuple[Tensor, torch.dtype]:
    """The value below its maximum, in the dtype of sums, and the dtype of the result."""
    out = torch.float32 if half_to_float else x.dtype
    work = cast(x, wide(x.dtype))
    return aten.sub.Tensor(work, aten.amax.default(work, [dim], True)), out


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    below, out = _shifted(x, dim, half_to_float)
    return cast(aten.sub.Tensor(below, aten.log.default(total(aten.exp.default(below), [dim], True))), out)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    below, out = _shifted(x, dim, half_to_float)
    raised = aten.exp.default(below)
    return cast(aten.div.Tensor(raised, total(raised, [dim], True)), out)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    acc = wide(grad.dtype)
    grad, output = cast(grad, acc), cast(output, acc)
    return cast(aten.sub.Tensor(grad, aten.mul.Tensor(aten.exp.default(output), total(grad, [dim], True))), input_dtype)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    acc = wide(grad.dtype)
    grad, output = cast(grad, acc), cast(output, acc)
    scaled = aten.mul.Tensor(grad, output)
    return cast(aten.sub.Tensor(scaled, aten.mul.Tensor(output, total(scaled, [dim], True))), input_dtype)


def _row(x: Tensor, normalized: Sequence[int]) -> tuple[list[int], int]:
    """The normalised dims, and how many elements they have."""
    dims = list(range(x.dim() - len(normalized), x.dim()))
    count = 1
    for k in dims:
        count *= int(x.shape[k])
    return dims, count


def layer_norm(
    x: Tensor, normalized: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and reciprocal deviation, in two passes."""
    dims, count = _row(x, normalized)
    work = cast(x, wide(x.dtype))
    mean = aten.div.Scalar(total(work, dims, True), count)
    centred = aten.sub.Tensor(work, mean)
    variance = aten.div.Scalar(total(aten.mul.Tensor(centred, centred), dims, True), count)
    rstd = aten.rsqrt.default(aten.add.Scalar(variance, eps))
    out = aten.mul.Tensor(centred, rstd)
    out = out if weight is None else aten.mul.Tensor(out, cast(weight, out.dtype))
    out = out if bias is None else aten.add.Tensor(out, cast(bias, out.dtype))
    return cast(out, x.dtype), mean, rstd


def layer_norm_backward(
    grad: Tensor, x: Tensor, normalized: Sequence[int], mean: Tensor, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    dims, count = _row(x, normalized)
    acc = wide(x.dtype)
    g, work = cast(grad, acc), cast(x, acc)
    normal = aten.mul.Tensor(aten.sub.Tensor(work, cast(mean, acc)), cast(rstd, acc))
    inner = g if weight is None else aten.mul.Tensor(g, cast(weight, acc))
    first = aten.div.Scalar(total(inner, dims, True), count)
    second = aten.mul.Tensor(normal, aten.div.Scalar(total(aten.mul.Tensor(inner, normal), dims, True), count))
    dx = aten.mul.Tensor(aten.sub.Tensor(aten.sub.Tensor(inner, first), second), cast(rstd, acc))
    batch = list(range(x.dim() - len(normalized)))

    def over_batch(value: Tensor, like: Tensor | None) -> Tensor:
        return cast(total(value, batch), x.dtype if like is None else like.dtype)

    return (
        cast(dx, x.dtype) if output_mask[0] else None,
        over_batch(aten.mul.Tensor(g, normal), weight) if output_mask[1] else None,
        over_batch(g, bias) if output_mask[2] else None,
    )


def rms_norm(x: Tensor, normalized: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Output and reciprocal root mean square."""
    dims, count = _row(x, normalized)
    work = cast(x, wide(x.dtype))
    square = aten.div.Scalar(total(aten.mul.Tensor(work, work), dims, True), count)
    rstd = aten.rsqrt.default(aten.add.Scalar(square, torch.finfo(x.dtype).eps if eps is None else eps))
    out = aten.mul.Tensor(work, rstd)
    return cast(out if weight is None else aten.mul.Tensor(out, cast(weight, out.dtype)), x.dtype), rstd


def embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    """What the further arguments say concerns the backward."""
    return lookup.embedding(weight, indices, 0)  # type: ignore[no-any-return]


def embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, by_frequency: bool) -> Tensor:
    return lookup.embedding_backward(grad, indices, num_weights, padding_idx, 0)  # type: ignore[no-any-return]


def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    return lookup.gather(x, dim % max(x.dim(), 1), index, 0)  # type: ignore[no-any-return]


def scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return lookup.scatter(x, dim % max(x.dim(), 1), index, src, 0)  # type: ignore[no-any-return]


def scatter_value(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    return scatter(x, dim, index, constant(value, x, list(index.shape)))


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return lookup.scatter_add(x, dim % max(x.dim(), 1), index, src, 0)  # type: ignore[no-any-return]


SPLIT: dict[str, Callable[..., Any]] = {
    "aten.linalg_vector_norm.default": vector_norm,  # normalize leaves it as it is in half precision only
    "aten._log_softmax.default": log_softmax,
    "aten._softmax.default": softmax,
    "aten._log_softmax_backward_data.default": log_softmax_backward,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm.default": rms_norm,
    "aten.embedding.default": embedding,
    "aten.gather.default": gather,
    "aten.scatter.src": scatter,
    "aten.scatter.value": scatter_value,
    "aten.scatter_add.default": scatter_add,
}
"""Operators of which a plan splits a dim that their rule calls whole -> the same in operators that can be split there."""

SPLIT_RESULT: dict[str, Callable[..., Any]] = {
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten.scatter.src": scatter,
    "aten.scatter.value": scatter_value,
    "aten.scatter_add.default": scatter_add,
}
"""The same for operators of whose result a plan needs a part only."""


def split_forms(of_result: bool = False) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Operator -> how it is written where it is split."""
    found = {overload(name): fn for name, fn in (SPLIT_RESULT if of_result else SPLIT).items()}
    return {op: fn for op, fn in found.items() if op is not None}
