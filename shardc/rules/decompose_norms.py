"""Batch normalisation as sums over the global batch (see `decompose`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.rules.arithmetic import aten, cast, constant, total, wide

Optional = Tensor | None


def _channels(x: Tensor) -> list[int]:
    """The dims over which statistics are taken."""
    return [k for k in range(x.dim()) if k != 1]


def _spread(stat: Tensor, x: Tensor) -> Tensor:
    """``[C]`` in the shape that broadcasts against ``[N, C, ...]``."""
    return aten.view.default(stat, [1, int(x.shape[1]), *[1] * (x.dim() - 2)])  # type: ignore[no-any-return]


def _affine(x: Tensor, mean: Tensor, rstd: Tensor, weight: Optional, bias: Optional, dtype: torch.dtype) -> Tensor:
    acc = x.dtype
    out = aten.mul.Tensor(aten.sub.Tensor(x, _spread(cast(mean, acc), x)), _spread(cast(rstd, acc), x))
    if weight is not None:
        out = aten.mul.Tensor(out, _spread(cast(weight, acc), x))
    if bias is not None:
        out = aten.add.Tensor(out, _spread(cast(bias, acc), x))
    return cast(out, dtype)


def _rstd(variance: Tensor, eps: float) -> Tensor:
    return aten.rsqrt.default(aten.add.Scalar(variance, eps))  # type: ignore[no-any-return]


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, in two passes."""
    dims, count = _channels(x), x.numel() // max(int(x.shape[1]), 1)
    mean = aten.div.Scalar(total(x, dims), count)
    centred = aten.sub.Tensor(x, _spread(mean, x))
    return mean, aten.div.Scalar(total(aten.mul.Tensor(centred, centred), dims), count)


def _running(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    return aten.add.Tensor(aten.mul.Scalar(old, 1 - momentum), aten.mul.Scalar(cast(new, old.dtype), momentum))  # type: ignore[no-any-return]


def batch_norm(
    x: Tensor, weight: Optional, bias: Optional, mean: Optional, variance: Optional, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Optional, Optional]:
    """Output, saved mean and reciprocal deviation, new running mean and (unbiased) variance."""
    work = cast(x, wide(x.dtype))
    if not training:
        assert mean is not None and variance is not None
        none = constant(0, work, [0], work.dtype)
        return _affine(work, mean, _rstd(cast(variance, work.dtype), eps), weight, bias, x.dtype), none, none, mean, variance
    now, spread = _statistics(work)
    rstd = _rstd(spread, eps)
    out = _affine(work, now, rstd, weight, bias, x.dtype)
    if mean is None or variance is None:
        return out, now, rstd, None, None
    count = x.numel() // max(int(x.shape[1]), 1)
    unbiased = aten.mul.Scalar(spread, count / (count - 1) if count > 1 else float("nan"))
    return out, now, rstd, _running(mean, now, momentum), _running(variance, unbiased, momentum)


def without_running(
    x: Tensor, weight: Optional, bias: Optional, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


def with_update(
    x: Tensor, weight: Optional, bias: Optional, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Optional, Optional]:
    out, now, rstd, new_mean, new_variance = batch_norm(x, weight, bias, mean, variance, True, momentum, eps)
    return out, now, rstd, constant(0, x, [0], torch.uint8), new_mean, new_variance


def no_update(
    x: Tensor, weight: Optional, bias: Optional, mean: Optional, variance: Optional, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, now, rstd, _, _ = batch_norm(x, weight, bias, mean, variance, False, momentum, eps)
    return out, now, rstd, constant(0, x, [0], torch.uint8)


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Optional, mean: Optional, variance: Optional, saved: Optional, saved_rstd: Optional,
    train: bool, eps: float, output_mask: list[bool],
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """Gradients of input, weight and bias; both sums are those of the global batch."""
    acc = wide(x.dtype)
    g, work, dims = cast(grad, acc), cast(x, acc), _channels(x)
    if train:
        assert saved is not None and saved_rstd is not None
        centre, rstd = cast(saved, acc), cast(saved_rstd, acc)
    else:
        assert mean is not None and variance is not None
        centre, rstd = cast(mean, acc), _rstd(cast(variance, acc), eps)
    normal = aten.mul.Tensor(aten.sub.Tensor(work, _spread(centre, x)), _spread(rstd, x))
    db, dw = total(g, dims), total(aten.mul.Tensor(g, normal), dims)
    inner = g
    if train:
        count = x.numel() // max(int(x.shape[1]), 1)
        inner = aten.sub.Tensor(inner, _spread(aten.div.Scalar(db, count), x))
        inner = aten.sub.Tensor(inner, aten.mul.Tensor(normal, _spread(aten.div.Scalar(dw, count), x)))
    scale = rstd if weight is None else aten.mul.Tensor(rstd, cast(weight, acc))
    kind = x.dtype if weight is None else weight.dtype
    return (
        cast(aten.mul.Tensor(inner, _spread(scale, x)), x.dtype) if output_mask[0] else None,
        cast(dw, kind) if output_mask[1] else None,
        cast(db, kind) if output_mask[2] else None,
    )


def backward_with_reserve(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Optional, variance: Optional, saved: Optional, saved_rstd: Optional,
    update: bool, eps: float, output_mask: list[bool], reserve: Tensor,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    return batch_norm_backward(grad, x, weight, mean, variance, saved, saved_rstd, update, eps, output_mask)


def _three(*args: Any) -> tuple[Any, ...]:
    return batch_norm(*args)[:3]


TABLE: dict[str, Callable[..., Any]] = {
    "aten._native_batch_norm_legit_functional.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": without_running,
    "aten._native_batch_norm_legit_no_training.default": lambda x, w, b, m, v, momentum, eps: _three(
        x, w, b, m, v, False, momentum, eps
    ),
    "aten._batch_norm_with_update_functional.default": with_update,
    "aten._batch_norm_no_update.default": no_update,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
    "aten.batch_norm_backward.default": backward_with_reserve,
}
