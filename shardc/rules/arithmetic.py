"""Small pieces that decompositions are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are accumulated."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def total(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Sum over dims; none at all leaves the value as it is."""
    return x if not dims and x.dim() else aten.sum.dim_IntList(x, list(dims), keepdim)


def constant(value: Any, like: Tensor, size: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """A constant on the device of another tensor."""
    return aten.full.default(list(size), value, dtype=dtype or like.dtype, device=like.device)  # type: ignore[no-any-return]


def view(x: Tensor, size: Sequence[int]) -> Tensor:
    """A reshape."""
    return aten.view.default(x, list(size))  # type: ignore[no-any-return]
