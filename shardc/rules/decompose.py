"""Operators that divide by a count of their own input, written so that the count is the global one.

Programs are traced at global shapes: a decomposed `mean` is a sum, which may stay partial, over the constant number of all
elements. Counts that depend on data (the targets that a loss does not ignore) become sums themselves. Half precision is
accumulated in float32, as torch's own kernels do. Also written out here: operators that look at sizes of one (`squeeze`), which
a part has where the whole has not, and constants that read no more than the shape of an operand.

A decomposition uses aten operators alone and never the one that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.rules import decompose_losses, decompose_norms, decompose_scaler
from shardc.rules.arithmetic import aten, cast, constant, total, view, wide
from shardc.rules.call import overload

Decomposition = Callable[..., Any]


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    named = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % max(x.dim(), 1) for d in named}) if x.dim() else []


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def mean(x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims, out = _dims(x, dim), dtype or x.dtype
    return cast(aten.div.Scalar(total(cast(x, wide(out)), dims, keepdim), _count(x, dims)), out)


def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean(x, dtype=dtype)


def _moments(x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean, in two passes."""
    dims, work = _dims(x, dim), cast(x, wide(x.dtype))
    count = _count(x, dims)
    average = aten.div.Scalar(total(work, dims, True), count)
    centred = aten.sub.Tensor(work, average)
    square = aten.mul.Tensor(centred, aten.conj_physical.default(centred) if x.is_complex() else centred)
    if x.is_complex():
        square = aten.select.int(aten.view_as_real.default(square), -1, 0)
    free = max(count - (1 if correction is None else correction), 0)
    spread = aten.mul.Scalar(total(square, dims, keepdim), 1.0 / free if free else math.inf)
    out = spread.dtype if x.is_complex() else x.dtype
    return cast(spread, out), cast(average if keepdim else aten.view.default(average, list(spread.shape)), x.dtype)


def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0]


def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def var_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _moments(x, dim, correction, keepdim)


def std_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    spread, average = _moments(x, dim, correction, keepdim)
    return aten.sqrt.default(spread), average


def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The order's own reduction (a sum, a maximum), so that a split dim stays split: clipping by a global norm."""
    out = dtype or x.dtype
    out = torch.empty((), dtype=out).real.dtype if out.is_complex else out
    dims, work = _dims(x, dim), cast(x, wide(dtype or x.dtype))
    if ord == 2 and len(dims) == work.dim() > 0 and work.is_contiguous() and not work.is_complex():
        flat = view(work, [work.numel()])  # a product of the value with itself needs no second value of its size
        norm = cast(aten.sqrt.default(aten.dot.default(flat, flat)), out)
        return view(norm, [1] * work.dim()) if keepdim else norm
    if ord == 2 and not work.is_complex():
        return cast(aten.sqrt.default(total(aten.mul.Tensor(work, work), dims, keepdim)), out)
    size = aten.abs.default(work)
    if ord == math.inf:
        return cast(aten.amax.default(size, dims, keepdim), out)
    if ord == -math.inf:
        return cast(aten.amin.default(size, dims, keepdim), out)
    if ord == 0:
        return total(cast(aten.ne.Scalar(size, 0), out), dims, keepdim)
    if ord == 1:
        return cast(total(size, dims, keepdim), out)
    powers = total(aten.pow.Tensor_Scalar(size, ord), dims, keepdim)
    return cast(aten.pow.Tensor_Scalar(powers, 1.0 / ord), out)


def norm_of(x: Tensor, p: float | None, dim: Any, keepdim: bool = False) -> Tensor:
    return vector_norm(x, 2 if p is None else p, dim, keepdim)


def norm_all(x: Tensor, p: float = 2) -> Tensor:
    return vector_norm(x, p)


def logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """A maximum and a sum, both of which may stay split."""
    dims = _dims(x, dim)
    top = aten.amax.default(x, dims, True)
    top = aten.where.self(aten.isinf.default(top), constant(0, x, dtype=x.dtype), top)
    out = aten.log.default(total(aten.exp.default(aten.sub.Tensor(x, top)), dims, True))
    out = aten.add.Tensor(out, top)
    return out if keepdim else view(out, [n for k, n in enumerate(x.shape) if k not in dims])


def squeeze(x: Tensor, dim: Any = None) -> Tensor:
    """A part of a larger dim may have size one, and must keep it: the resulting shape is said outright."""
    dims = range(x.dim()) if dim is None else _dims(x, dim) if dim != [] else []
    return view(x, [n for k, n in enumerate(x.shape) if not (k in dims and n == 1)])


def _filled(value: float) -> Decomposition:
    def like(x: Tensor, **options: Any) -> Tensor:
        return full_like(x, value, **options)

    return like


def full_like(x: Tensor, value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return constant(value, x, list(x.shape), dtype or x.dtype)


def zero(x: Tensor) -> Tensor:
    """What `zero_` leaves behind."""
    return full_like(x, 0)


def foreach_zero(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(zero(x) for x in tensors)


def _new(value: float) -> Decomposition:
    def new(x: Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return constant(value, x, list(size), dtype or x.dtype)

    return new


def new_full(x: Tensor, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return constant(value, x, list(size), dtype or x.dtype)


def new_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return constant(0, x, list(size), dtype or x.dtype)


def _plus(product: Any, bias: Any, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else aten.mul.Scalar(product, alpha)
    out: Tensor = aten.add.Tensor(product, bias if beta == 1 else aten.mul.Scalar(bias, beta))
    return out


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = aten.mm.default(a, b)
    return _plus(product, bias, beta, alpha)


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = aten.bmm.default(a, b)
    return _plus(product, bias, beta, alpha)


def masked_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Writing one value (or one row) wherever a mask says so: a choice, whose size does not depend on the mask."""
    at = next(k for k, i in enumerate(indices) if i is not None)
    mask = indices[at]
    assert mask is not None
    rest = x.dim() - at - mask.dim()
    shape = list(values.shape)
    if len(shape) > rest:  # the dim of what is picked, of size one
        shape[len(shape) - rest - 1 : len(shape) - rest] = [1] * mask.dim()
    elsewhere = constant(0, x) if accumulate else x
    chosen = aten.where.self(view(mask, [*mask.shape, *[1] * rest]), view(values, shape), elsewhere)
    return aten.add.Tensor(x, chosen) if accumulate else chosen  # type: ignore[no-any-return]


def writes_one_value(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> bool:
    """Whether `index_put` is what `masked_put` does: one boolean mask, and a value that does not depend on what it picks.
    Arguments may be types of tensors."""
    masks = [(k, i) for k, i in enumerate(indices) if i is not None]
    if len(masks) != 1 or masks[0][1].dtype != torch.bool:
        return False
    at, mask = masks[0]
    rest = len(x.shape) - at - len(mask.shape)
    return len(values.shape) <= rest or values.shape[len(values.shape) - rest - 1] == 1


ALWAYS: dict[str, Decomposition] = {
    "aten.mean.default": mean_all,
    "aten.mean.dim": mean,
    "aten.var.correction": var,
    "aten.std.correction": std,
    "aten.var_mean.correction": var_mean,
    "aten.std_mean.correction": std_mean,
    "aten.linalg_vector_norm.default": vector_norm,
    "aten.norm.ScalarOpt_dim": norm_of,
    "aten.norm.Scalar": norm_all,
    "aten.logsumexp.default": logsumexp,
    "aten.squeeze.default": squeeze,
    "aten.squeeze.dim": squeeze,
    "aten.squeeze.dims": squeeze,
    "aten.zeros_like.default": _filled(0),
    "aten.ones_like.default": _filled(1),
    "aten.full_like.default": full_like,
    "aten.zero.default": zero,
    "aten._foreach_zero.default": foreach_zero,
    "aten.new_zeros.default": _new(0),
    "aten.new_ones.default": _new(1),
    "aten.new_empty.default": _new(0),
    "aten.new_full.default": new_full,
    "aten.new_empty_strided.default": new_strided,
    **decompose_losses.TABLE,
    **decompose_norms.TABLE,
    **decompose_scaler.TABLE,
}
MASKED: dict[str, Decomposition] = {"aten.index_put.default": masked_put, "aten._unsafe_index_put.default": masked_put}
WHEN_SPLIT: dict[str, Decomposition] = {"aten.addmm.default": addmm, "aten.baddbmm.default": baddbmm}


def decompositions(split_products: bool = False) -> dict[torch._ops.OpOverload, Decomposition]:
    """Operator -> the same in other operators, with the same arguments.

    Args:
        split_products: also products with a fused addition, whose contracted dim could not be split otherwise (it is with
            tensor parallelism: a row-parallel linear layer).
    """
    table = {**ALWAYS, **(WHEN_SPLIT if split_products else {})}
    found = {overload(name): fn for name, fn in table.items()}
    return {op: fn for op, fn in found.items() if op is not None}


def masked_writes() -> dict[torch._ops.OpOverload, Decomposition]:
    """Operators that `writes_one_value` decides about -> `masked_put`."""
    found = {overload(name): fn for name, fn in MASKED.items()}
    return {op: fn for op, fn in found.items() if op is not None}
