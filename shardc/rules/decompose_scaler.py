"""What `torch.amp.GradScaler` calls, in operators that may be split: overflow anywhere is found by every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def unscale(grads: Sequence[Tensor], found: Tensor, inverse: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients times the inverse scale (in float32 or wider), and whether one of them is not finite.

    The elements that are not finite are counted, so that one sum over the ranks serves all gradients.
    """
    bad: Tensor | None = None
    out = []
    for grad in grads:
        count = torch.sum((torch.abs(grad) == float("inf")) | (grad != grad))
        bad = count if bad is None else bad + count
        narrow = grad.dtype in (torch.float16, torch.bfloat16)
        wide = grad.to(torch.float32) if narrow else grad
        product = wide * inverse.to(wide.dtype)
        out.append(product.to(grad.dtype) if narrow else product)
    return tuple(out), found if bad is None else torch.where(bad > 0, torch.ones_like(found), found)


TABLE: dict[str, Callable[..., Any]] = {"aten._amp_foreach_non_finite_check_and_unscale.default": unscale}
