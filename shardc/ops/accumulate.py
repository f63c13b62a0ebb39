"""`shardc.accumulate(total, part)`: a running sum, in place where the total dies."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.ops.library import operator
from shardc.ops.optim import INPLACE, InplaceForm


def _sum(total: Tensor, part: Tensor) -> Tensor:
    return total + part


def _fake(total: Tensor, part: Tensor) -> Tensor:
    return torch.empty_like(total)


def _add_(total: Tensor, part: Tensor) -> Tensor:
    return total.add_(part)


operator("accumulate(Tensor total, Tensor part) -> Tensor", _sum, _fake)
INPLACE["shardc.accumulate.default"] = InplaceForm(_add_, ((0, 0),))
