"""`shardc.save_name`: a name that model code gives to an activation, for ``recompute={"save": [...]}``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc._torch import is_traced


def save_name(x: Tensor, name: str) -> Tensor:
    """Name an activation, so that ``recompute={"save": [name]}`` keeps it; the identity elsewhere.

    Example: ``h = shardc.save_name(self.attention(x), "attn_out")``
    """
    if not is_traced(x):
        return x
    return torch.ops.shardc.save_name(x, name)  # type: ignore[no-any-return]


@torch.library.custom_op("shardc::save_name", mutates_args=())
def _save_name(x: Tensor, name: str) -> Tensor:
    return x.clone()


@_save_name.register_fake
def _fake(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


_save_name.register_autograd(_backward)
