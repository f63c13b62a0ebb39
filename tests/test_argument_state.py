"""State beside modules and optimizers: lists and dicts of tensors, attributes that hooks compute, buffers made late."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_user_optimizers import Net, batches, train, verified
from torch import Tensor, nn
from torch.nn.utils import prune

import shardc
from shardc.errors import CaptureError
from shardc.testing import check, check_all, run_ranks

__all__ = ["verified"]

POINTS: list[dict[str, Any]] = [{"mesh": {"dp": 2}, "zero": 3}, {"mesh": {"dp": 3}, "zero": 0}]


def adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def averaging(model: nn.Module, optimizer: torch.optim.Optimizer, average: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    loss = train(model, optimizer, x, y)
    with torch.no_grad():
        for slow, p in zip(average, model.parameters(), strict=True):
            slow.mul_(0.9).add_(p, alpha=0.1)
    return loss


def with_average(parameters: bool = False) -> tuple[Any, ...]:
    model, optimizer = adamw()
    copies = [p.detach().clone() for p in model.parameters()]
    return model, optimizer, [nn.Parameter(t, requires_grad=False) for t in copies] if parameters else copies


@pytest.mark.parametrize("parameters", [False, True], ids=["tensors", "parameters"])
def test_a_list_of_averages(parameters: bool) -> None:
    check_all(averaging, lambda: with_average(parameters), batches(), POINTS)


def test_a_dict_that_is_read_and_changed() -> None:
    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor], seen: Any, x: Tensor, y: Tensor
    ) -> Tensor:
        target = torch.func.functional_call(model, average, (x,))
        loss = F.mse_loss(model(x), y) + 0.1 * F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.1)
            seen["rows"] += len(x)
            seen["bias"][0].copy_(model.outer.bias)  # type: ignore[union-attr, arg-type]
        return loss

    def make() -> tuple[Any, ...]:
        model, optimizer = adamw()
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
        return model, optimizer, average, {"rows": torch.zeros(()), "bias": [torch.zeros(3)]}

    check_all(step, make, batches(), POINTS)


def double(state: tuple[Any, ...]) -> tuple[Any, ...]:
    model, optimizer, average = state
    model.double()
    return model, optimizer, [t.double() for t in average]


def test_averages_are_in_checkpoints(tmp_path: Path) -> None:
    data = [(x.double(), y.double()) for x, y in batches(6)]

    def run(dp: int, zero: int, start: int, stop: int) -> tuple[Any, list[Tensor]]:
        step = shardc.compile(averaging, mesh=shardc.Mesh(dp=dp, simulated=True), zero=zero)
        if start:
            assert shardc.load(tmp_path / "ckpt", step) == start
        torch.manual_seed(start)  # other values where they are loaded
        state = double(with_average())
        for x, y in data[start:stop]:
            step(*state, x, y)
        return step, state[2]

    shardc.save(tmp_path / "ckpt", run(2, 3, 0, 3)[0])
    step, resumed = run(3, 1, 3, 6)
    for a, b in zip(resumed, run(1, 0, 0, 6)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    shardc.load(tmp_path / "ckpt", step)
    for a, b in zip(resumed, run(1, 0, 0, 3)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def in_process(count: int) -> list[Tensor]:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    state = double(with_average())
    step = shardc.compile(averaging, mesh={"dp": world}, zero=3) if world > 1 else averaging
    for x, y in batches(count):  # averages are of other shapes than a part of the batch
        step(*state, *(t.double().tensor_split(world)[rank] for t in (x, y)))
    return state[2]


@pytest.mark.processes
def test_in_processes() -> None:
    want = in_process(3)
    for found in run_ranks(2, in_process, 3):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_tensor_of_the_batch_that_changes_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return train(model, optimizer, x, y)

    with pytest.raises(CaptureError, match="changes the input x in place"):
        shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))(*adamw(), *batches(1)[0])


class Late(nn.Module):
    """Registers a buffer in its first forward."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.net, self.persistent = Net(), persistent

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        if not hasattr(self, "centre"):
            self.register_buffer("centre", out.detach().mean(0), persistent=self.persistent)
        else:
            self.centre.lerp_(out.detach().mean(0), 0.1)  # type: ignore[operator, union-attr]
        return out - self.centre  # type: ignore[operator]


@pytest.mark.parametrize("persistent", [False, True])
def test_buffers_made_by_the_first_forward(persistent: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Late(persistent)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    check(train, make, batches(), mesh={"dp": 2}, zero=3)
    model, optimizer = make()
    step = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True))
    step(model, optimizer, *batches(1)[0])
    assert ("centre" in model.state_dict()) == persistent and "centre" in dict(model.named_buffers())


class Computed(nn.Module):
    """Weights that hooks compute before each forward: torch's pruning, and its old norms of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        prune.l1_unstructured(self.a, "weight", 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.b)
            nn.utils.spectral_norm(self.c)
        self.double()
        for module in (self.a, self.b, self.c):
            for hook in module._forward_pre_hooks.values():
                hook(module, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


def test_weights_that_hooks_compute() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Computed()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    check_all(train, make, [(x.double(), y.double()) for x, y in batches()], POINTS)


def test_an_attribute_whose_graph_is_read_is_refused() -> None:
    model, optimizer = adamw()
    model.extra = model.inner.weight.sum()  # type: ignore[assignment, operator, union-attr]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) + model.extra  # type: ignore[operator]
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CaptureError, match=r"model\.extra carries an autograd graph from outside"):
        shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))(model, optimizer, *batches(1)[0])
