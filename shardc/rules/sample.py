"""A concrete call of an operator, and the data that samples are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Op = torch._ops.OpOverload


@dataclass(frozen=True)
class Sample:
    """A call on real data.

    Args:
        op: the operator.
        args, kwargs: its arguments.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        def show(a: Any) -> str:
            if isinstance(a, Tensor):
                return str(list(a.shape))
            return "(" + " ".join(map(show, a)) + ")" if isinstance(a, (list, tuple)) else str(a)

        return f"{self.op}({', '.join(map(show, (*self.args, *self.kwargs.values())))})"


def ints(*shape: int, lo: int = -5, hi: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers in [lo, hi), different for each shape."""
    generator = torch.Generator().manual_seed(sum((k + 2) * n for k, n in enumerate(shape)) + len(shape))
    return torch.randint(lo, hi, shape, generator=generator).to(dtype)


def index(*shape: int, below: int) -> Tensor:
    return ints(*shape, lo=0, hi=below, dtype=torch.int64)
