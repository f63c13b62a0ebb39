"""Results of which torch's fake kernels (2.13) give another dtype than its real ones: normalisation of narrow inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_WEIGHT = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}
"""Operator -> position of its weight."""
_NARROW = (torch.bfloat16, torch.float16)


def corrected(op: Any, args: Sequence[Any], out: Any, device: str) -> Any:
    """`out`, the fake result of ``op(*args)``, in the dtypes that a device of kind `device` gives.

    Mean and inverse deviation of a narrow input are float32: on CUDA always, on the CPU where the weight is float32. Gradients
    have the dtypes of what they are gradients of.
    """
    if op in _WEIGHT and args[0].dtype in _NARROW:
        weight = args[_WEIGHT[op]]
        if device != "cpu" or (isinstance(weight, Tensor) and weight.dtype == torch.float32):
            return (out[0], *(_like(t, torch.float32) for t in out[1:]))
    if op is aten.native_group_norm_backward.default:
        x, weight = args[1], args[4]
        kinds = (x.dtype, *[x.dtype if weight is None else weight.dtype] * 2)
        return tuple(t if t is None else _like(t, kind) for t, kind in zip(out, kinds, strict=True))
    return out


def _like(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else torch.empty_like(t, dtype=dtype)
