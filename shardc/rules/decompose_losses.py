"""Losses as elementwise operators, sums and global counts (see `decompose`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.rules.arithmetic import aten, cast, constant, total, wide

NONE, MEAN, TOTAL = 0, 1, 2
"""torch's numbers for the reductions of a loss."""
SMALLEST = 9.999999960041972e-13
"""The bound of torch's binary cross entropy: 1e-12 in float32, in all dtypes."""


def _reduced(values: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return values
    out = total(cast(values, wide(values.dtype)), list(range(values.dim())))
    if reduction == MEAN:
        out = aten.div.Scalar(out, values.numel())
    return cast(out, values.dtype)


def _scaled(grad: Tensor, elements: int, reduction: int) -> Tensor:
    """The gradient of each element of the loss."""
    return aten.div.Scalar(grad, elements) if reduction == MEAN else grad


def mse(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    d = aten.sub.Tensor(x, y)
    return _reduced(aten.mul.Tensor(d, d), reduction)


def mse_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    g = aten.mul.Scalar(_scaled(grad, x.numel(), reduction), 2.0)
    return aten.mul.Tensor(aten.sub.Tensor(x, y), g)  # type: ignore[no-any-return]


def smooth_l1(x: Tensor, y: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    d = aten.abs.default(aten.sub.Tensor(x, y))
    if beta == 0:
        return _reduced(d, reduction)
    square = aten.mul.Scalar(aten.mul.Tensor(d, d), 0.5 / beta)
    return _reduced(aten.where.self(aten.lt.Scalar(d, beta), square, aten.sub.Scalar(d, 0.5 * beta)), reduction)


def smooth_l1_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    d = aten.sub.Tensor(x, y)
    slope = aten.sgn.default(d) if beta == 0 else aten.clamp.default(aten.div.Scalar(d, beta), -1, 1)
    return aten.mul.Tensor(slope, _scaled(grad, x.numel(), reduction))  # type: ignore[no-any-return]


def huber(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    d = aten.abs.default(aten.sub.Tensor(x, y))
    square = aten.mul.Scalar(aten.mul.Tensor(d, d), 0.5)
    line = aten.mul.Scalar(aten.sub.Scalar(d, 0.5 * delta), delta)
    return _reduced(aten.where.self(aten.le.Scalar(d, delta), square, line), reduction)


def huber_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor:
    slope = aten.clamp.default(aten.sub.Tensor(x, y), -delta, delta)
    return aten.mul.Tensor(slope, _scaled(grad, x.numel(), reduction))  # type: ignore[no-any-return]


def bce(x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    """torch bounds both logarithms at -100."""
    log = aten.clamp_min.default(aten.log.default(x), -100)
    other = aten.clamp_min.default(aten.log1p.default(aten.neg.default(x)), -100)
    values = aten.sub.Tensor(aten.mul.Tensor(aten.sub.Scalar(y, 1), other), aten.mul.Tensor(y, log))
    return _reduced(values if weight is None else aten.mul.Tensor(values, weight), reduction)


def bce_backward(grad: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    below = aten.clamp_min.default(aten.mul.Tensor(aten.rsub.Scalar(x, 1), x), SMALLEST)
    slope = aten.div.Tensor(aten.sub.Tensor(x, y), below)
    slope = slope if weight is None else aten.mul.Tensor(slope, weight)
    return aten.mul.Tensor(slope, _scaled(grad, x.numel(), reduction))  # type: ignore[no-any-return]


def bce_logits(
    x: Tensor, y: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """``(1 - y) x + (1 + (pos - 1) y) log(1 + exp(-x))``."""
    soft = aten.softplus.default(aten.neg.default(x))
    if pos_weight is not None:
        soft = aten.mul.Tensor(soft, aten.add.Scalar(aten.mul.Tensor(aten.sub.Scalar(pos_weight, 1), y), 1))
    values = aten.add.Tensor(aten.mul.Tensor(aten.rsub.Scalar(y, 1), x), soft)
    return _reduced(values if weight is None else aten.mul.Tensor(values, weight), reduction)


def soft_margin(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    return _reduced(aten.softplus.default(aten.neg.default(aten.mul.Tensor(x, y))), reduction)


def soft_margin_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    slope = aten.neg.default(aten.mul.Tensor(y, aten.sigmoid.default(aten.neg.default(aten.mul.Tensor(x, y)))))
    return aten.mul.Tensor(slope, _scaled(grad, x.numel(), reduction))  # type: ignore[no-any-return]


# -- nll: the count depends on the targets ---------------------------------------------------------------------------------


def _targets(target: Tensor, weight: Tensor | None, ignore: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Targets with the ignored ones at class 0, which ones count, and the weight of each (0 where ignored)."""
    target = cast(target, torch.int64)
    valid = aten.ne.Scalar(target, ignore)
    safe = aten.where.self(valid, target, constant(0, target, dtype=torch.int64))
    if weight is None:
        return safe, valid, cast(valid, dtype)
    each = aten.index.Tensor(cast(weight, dtype), [safe])
    return safe, valid, aten.where.self(valid, each, constant(0, each, dtype=dtype))


def nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss and the total weight, which reads the targets alone and is in float32 or wider."""
    k = 1 if x.dim() > 1 else 0
    acc = wide(x.dtype)
    safe, valid, each = _targets(target, weight, ignore_index, acc)
    picked = aten.select.int(aten.gather.default(x, k, aten.unsqueeze.default(safe, k)), k, 0)
    zero = constant(0, x, dtype=acc)
    values = aten.neg.default(cast(picked, acc))
    values = aten.where.self(valid, values if weight is None else aten.mul.Tensor(values, each), zero)
    if reduction == NONE:
        return cast(values, x.dtype), constant(0, x, dtype=x.dtype)
    whole = list(range(values.dim()))
    out, count = total(values, whole), total(each, whole)
    return cast(aten.div.Tensor(out, count) if reduction == MEAN else out, x.dtype), count


def nll_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total_weight: Tensor
) -> Tensor:
    """``-weight * grad / total`` at each target, zero elsewhere; linear in the gradient."""
    k = 1 if x.dim() > 1 else 0
    acc = wide(x.dtype)
    safe, _, each = _targets(target, weight, ignore_index, acc)
    grad = cast(grad, acc)
    scale = aten.div.Tensor(grad, cast(total_weight, acc)) if reduction == MEAN else grad
    value = cast(aten.neg.default(aten.mul.Tensor(each, scale)), x.dtype)
    zeros = constant(0, x, list(x.shape), x.dtype)
    return aten.scatter.src(zeros, k, aten.unsqueeze.default(safe, k), aten.unsqueeze.default(value, k))  # type: ignore[no-any-return]


TABLE: dict[str, Callable[..., Any]] = {
    "aten.mse_loss.default": mse,
    "aten.mse_loss_backward.default": mse_backward,
    "aten.smooth_l1_loss.default": smooth_l1,
    "aten.smooth_l1_loss_backward.default": smooth_l1_backward,
    "aten.huber_loss.default": huber,
    "aten.huber_loss_backward.default": huber_backward,
    "aten.binary_cross_entropy.default": bce,
    "aten.binary_cross_entropy_backward.default": bce_backward,
    "aten.binary_cross_entropy_with_logits.default": bce_logits,
    "aten.soft_margin_loss.default": soft_margin,
    "aten.soft_margin_loss_backward.default": soft_margin_backward,
    "aten.nll_loss_forward.default": nll,
    "aten.nll_loss_backward.default": nll_backward,
    "aten.nll_loss2d_forward.default": nll,
    "aten.nll_loss2d_backward.default": nll_backward,
}
