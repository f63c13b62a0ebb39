"""A long run captures nothing after its second call, whatever schedulers do to numbers of optimizers, and keeps its size."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import shardc
import shardc.api


class EverythingCycle(OneCycleLR):
    """Changes lr and betas, as `OneCycleLR` does, and the weight decay."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * group["lr"]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def scheduled_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: EverythingCycle, x: Tensor, y: Tensor
) -> Tensor:
    loss = plain_step(model, optimizer, x, y)
    schedule.step()
    return loss


def state(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, EverythingCycle]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, EverythingCycle(optimizer, 0.01, total_steps=steps + 1)


def resident() -> int:
    """Bytes of this process that lie in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(steps: int, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("captured or planned again")

    mesh = shardc.Mesh(dp=2, simulated=True)
    step = shardc.compile(scheduled_step if inside else plain_step, mesh=mesh, zero=3)
    arguments, plain = state(steps), state(steps)
    model, optimizer, schedule = arguments
    g = torch.Generator().manual_seed(0)
    numbers, sizes = set(), []
    for i in range(steps):
        x, y = torch.randn(4, 5, dtype=torch.float64, generator=g), torch.randn(4, 3, dtype=torch.float64, generator=g)
        group = optimizer.param_groups[0]
        numbers.add((group["lr"], group["betas"], group["weight_decay"]))
        loss = step(*(arguments if inside else (model, optimizer)), x, y)
        if not inside:
            schedule.step()
        torch.testing.assert_close(loss, scheduled_step(*plain, x, y), rtol=1e-9, atol=1e-12)
        if i == 1:
            monkeypatch.setattr(shardc.api, "capture", refused)
            monkeypatch.setattr(shardc.api, "build", refused)
        if i in (steps // 3, steps - 1):
            sizes.append((resident(), len(gc.get_objects())))
    assert len(numbers) > 0.99 * steps, "each step has numbers of its own"
    assert [v.calls for v in step.variants] == [1, steps - 1]
    (bytes0, objects0), (bytes1, objects1) = sizes
    assert objects1 - objects0 < 0.2 * steps, f"{objects1 - objects0} objects more after {steps - steps // 3} steps"
    if steps >= 1000:  # before, the allocator is still growing its arenas
        assert bytes1 - bytes0 < 1 << 20, f"{bytes1 - bytes0:,} bytes more after {steps - steps // 3} steps"


@pytest.mark.parametrize("inside", [False, True], ids=["schedule outside", "schedule inside"])
def test_a_hundred_steps(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run(100, inside, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True], ids=["schedule outside", "schedule inside"])
def test_a_thousand_steps(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run(1000, inside, monkeypatch)
