"""Schedulers of torch inside the step: they run on the host after the program, with values that the step computes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_user_optimizers import Net, batches, train, verified
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

import shardc
from shardc.errors import CaptureError
from shardc.testing import check

__all__ = ["verified"]

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "onecycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=12),
    "warm_restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.3, 2), lrs.CosineAnnealingLR(o, 5)], [2]),
    "lambda": lambda o: lrs.LambdaLR(o, lambda k: 0.9**k),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.3, 2), lrs.ExponentialLR(o, 0.8)]),
    "multistep": lambda o: lrs.MultiStepLR(o, [1, 3], 0.5),
    "polynomial": lambda o: lrs.PolynomialLR(o, 6, 2.0),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda k: 0.95),
}


def make(schedule: Callable[[torch.optim.Optimizer], Any], lr: float = 0.02) -> tuple[Any, ...]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, schedule(optimizer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_to_one_device(name: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        schedule.step()
        return loss

    check(step, lambda: make(SCHEDULES[name]), batches(6), mesh={"dp": 2}, zero=3)


@pytest.mark.parametrize("given", ["tensor", "item", "keyword"])
def test_a_plateau_is_seen_on_the_global_loss(given: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        if given == "tensor":
            schedule.step(loss.detach())
        elif given == "item":
            schedule.step(loss.item() * 2)
        else:
            schedule.step(metrics=loss.detach())
        return loss

    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    check(step, lambda: make(plateau), batches(6), mesh={"dp": 3}, zero=1)
    model, optimizer, schedule = make(plateau)
    compiled = shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))
    for x, y in batches(6):
        compiled(model, optimizer, schedule, x, y)
    assert optimizer.param_groups[0]["lr"] < 0.02 and len(compiled.variants) == 2


class Everything(lrs.LRScheduler):
    """A scheduler of the user's own that sets more than the learning rate."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
            group["betas"] = (0.9 - 0.1 * self.last_epoch / 10, 0.99)
        return [0.02 / (1 + self.last_epoch) for _ in self.optimizer.param_groups]


def test_a_users_scheduler_may_change_any_number() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        schedule.step()
        return loss

    check(step, lambda: make(Everything), batches(5), mesh={"dp": 2}, zero=3)

    def late(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
        schedule.step()
        return train(model, optimizer, x, y) * optimizer.param_groups[0]["weight_decay"]

    with pytest.raises(CaptureError, match=r"after scheduler\.step"):
        shardc.compile(late, mesh=shardc.Mesh(dp=2, simulated=True))(*make(Everything), *batches(1)[0])


def test_what_is_no_number_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
        schedule.step(F.mse_loss(model(x), y, reduction="none"))
        return train(model, optimizer, x, y)

    arguments = make(lambda o: lrs.ReduceLROnPlateau(o))
    with pytest.raises(CaptureError, match=r"a scheduler is given a tensor of shape \(7, 3\)"):
        shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))(*arguments, *batches(1)[0])
