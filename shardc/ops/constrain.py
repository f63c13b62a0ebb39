"""`shardc.constrain`: a spec pinned by model code, as an operator that capture records."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from shardc._torch import is_traced
from shardc.spec import P


def constrain(x: Tensor, p: P) -> Tensor:
    """Pin the layout of `x` (and of its gradient) where a compiled step computes it; the identity elsewhere.

    Args:
        x: any tensor.
        p: one entry for each dim: an axis name, a tuple of names, or None.

    Example: ``h = shardc.constrain(h, P("dp", "sp", None))``
    """
    if not is_traced(x):
        return x
    return torch.ops.shardc.constrain(x, json.dumps(list(p)))  # type: ignore[no-any-return]


def pinned(text: str) -> P:
    """The `P` of a constrain node's second argument."""
    return P(*(tuple(e) if isinstance(e, list) else e for e in json.loads(text)))


@torch.library.custom_op("shardc::constrain", mutates_args=())
def _constrain(x: Tensor, p: str) -> Tensor:
    return x.clone()


@_constrain.register_fake
def _fake(x: Tensor, p: str) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.p = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.shardc.constrain(grad, ctx.p), None


_constrain.register_autograd(_backward, setup_context=_setup)
