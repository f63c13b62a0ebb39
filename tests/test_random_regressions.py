"""What random programs once got wrong, made small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc import P, constrain
from shardc.testing import check

Step = Callable[..., Any]


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


def batches(*shapes: tuple[int, ...], steps: int = 3) -> list[tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(shape, generator=g) for shape in shapes) for _ in range(steps)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def state(model: Callable[[], nn.Module], optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **kw: Any) -> Step:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        m = model()
        return m, optimizer(m.parameters(), **{"lr": 0.01, **kw})

    return make


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_that_are_set_to_zero(foreach: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    make = state(lambda: nn.Linear(5, 3), torch.optim.Adam, foreach=foreach)
    check(step, make, batches((3, 5), (3, 3)), mesh={"dp": 2}, zero=3)


def test_the_fused_path_counts_steps_in_float32_whatever_the_default_dtype() -> None:
    for optimizer in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        check(train, state(lambda: nn.Linear(5, 3), optimizer, fused=True), batches((3, 5), (3, 3)), mesh={"dp": 2}, zero=2)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_two_slots_that_end_in_one_value_lie_in_their_own_ways(zero: int) -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)
            self.register_buffer("average", torch.zeros(3, 5))
            self.register_buffer("before", torch.zeros(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    def step(model: Averaged, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model.before.copy_(model.inner.weight)
        loss = train(model, optimizer, x, y)
        with torch.no_grad():
            model.average.copy_(model.inner.weight)
        return loss

    check(step, state(Averaged, momentum=0.9), batches((3, 5), (3, 3)), mesh={"dp": 2}, zero=zero)
    make = state(lambda: nn.Linear(5, 3), torch.optim.ASGD, t0=1)  # whose average starts as the parameter
    check(train, make, batches((3, 5), (3, 3)), mesh={"dp": 2}, zero=zero)


def test_an_expanded_dim_is_split_by_the_slices_that_its_users_take() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        mask = (y.sum(-1) > 0).to(x.dtype)
        loss = (((model(x) - y) ** 2).mean(-1) * mask).sum() / mask.sum().clamp_min(1)
        loss.backward()
        optimizer.step()
        return loss

    pins = {"weight": P("tp"), "bias": P("tp")}
    check(step, state(lambda: nn.Linear(24, 4)), batches((2, 24), (2, 4)), mesh={"tp": 3, "dp": 4}, zero=3, params=pins)


def test_rows_repeated_by_a_tensor_of_counts() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        rows = x.repeat_interleave(torch.tensor([1, 2, 1]), 0, output_size=4)
        return train(model, optimizer, rows, y)

    check(step, state(lambda: nn.Linear(5, 3)), batches((3, 5), (4, 3)), mesh={"dp": 2}, zero=3)


def squared(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = constrain(x * self.w, P("cp", ("dp", "tp")))
        return y * torch.arange(4).view(2, 2)


def test_views_of_parts_that_are_empty_on_some_ranks() -> None:
    """Two columns over four ranks: what a rank without elements would hold of each dim of a view is open."""
    check(squared, state(Flat), batches((2, 2)), mesh={"dp": 2, "tp": 2, "cp": 2}, inputs={"x": P("dp")})


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, 4, 7))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(torch.tensor([2, 3, 5, 5, 27]), (x * self.w).flatten(0, 1)).tanh()


def test_a_table_whose_parts_are_no_runs_of_rows_is_gathered() -> None:
    check(squared, state(Table), batches((7, 4, 7)), mesh={"dp": 3}, inputs={"x": P(None, "dp", None)})
