"""The loss scale of a step in float16, which is state beside its arguments. See `shardc.capture.scaling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

INITIAL, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
NAME = "shardc.loss_scale"
"""Path of its state: no variable of the user's has a dot in its name."""
OVERFLOW = "loss scale"
"""Stands for the line of the decision."""


class LossScale(nn.Module):
    """The scale, and the number of good steps since it last changed."""

    scale: Tensor
    good_steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(INITIAL, device="cpu"))  # whatever the default device
        self.register_buffer("good_steps", torch.tensor(0, dtype=torch.int32, device="cpu"))


class Scaled:
    """A step with a loss scale; called like the step."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.__wrapped__ = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.loss_scale = LossScale()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)
