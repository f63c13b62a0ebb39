"""memory_budget and recompute="auto": plans between fast and small, the budget held, the same result."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_recompute import state, tokens, train
from torch import Tensor

import shardc
from shardc.errors import OptionError, PlanError
from shardc.options import bytes_of
from shardc.passes.ladder import Ladder
from shardc.testing import check


def lower(rows: int = 32, mesh: shardc.Mesh | None = None, **options: Any) -> shardc.Plan:
    model, optimizer = state(width=32, layers=3, dropout=0.1)
    step = shardc.compile(train, mesh=mesh or shardc.Mesh(dp=2, simulated=True), **options)
    plan = step.lower(model, optimizer, tokens(rows, 32))
    assert isinstance(plan, shardc.Plan)
    return plan


@functools.lru_cache
def ladder() -> Ladder:
    program = lower(zero=3).stages["accumulate"]
    assert not isinstance(program, str)
    return Ladder.of(program, True)


def test_rungs_are_what_the_whole_plans_are() -> None:
    rungs = ladder().rungs
    assert len(rungs) > 5 and rungs[-1].point.peak < 0.5 * rungs[0].point.peak
    for rung in rungs[::4]:
        assert rung.peak == rung.point.peak
        assert rung.plan.time.predicted_s == pytest.approx(rung.seconds, rel=1e-12)
    for a, b in zip(rungs, rungs[1:], strict=False):
        assert a.seconds < b.seconds and a.point.peak > b.point.peak


def test_a_budget_is_held_and_a_larger_one_is_never_slower() -> None:
    first, last = ladder().rungs[0], ladder().rungs[-1]
    before = 0.0
    for share in (1.0, 0.7, 0.4, 0.0):
        budget = int(last.point.peak + share * (first.point.peak - last.point.peak))
        rung = ladder().fit(budget)
        assert rung is not None and rung.peak <= budget and rung.seconds >= before
        before = rung.seconds
    plan = lower(zero=3, memory_budget=budget)
    assert plan.memory.peak_bytes == rung.peak <= budget
    assert "headroom 0" in str(plan) and f"of {len(ladder().rungs)}, down to" in str(plan)
    assert lower(zero=3, memory_budget="1TiB").memory.peak_bytes == first.peak


@pytest.mark.parametrize(("dp", "zero", "microbatches"), [(1, 0, 1), (3, 1, 1), (2, 3, 2)])
def test_the_result_is_the_same(dp: int, zero: int, microbatches: int) -> None:
    check(train, state, [(tokens(),)] * 2, mesh={"dp": dp}, zero=zero, microbatches=microbatches, recompute="auto")


class Convolutions(nn.Module):
    """Batch statistics, a skip over several layers, no waist narrower than two values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.first(x)
        for layer in self.layers:
            x, skip = layer(x) + 0.5 * skip, x
        return self.head((x + skip).mean((2, 3)))


def convolutions() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Convolutions()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def images(rows: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 12, 12, generator=g), torch.randint(0, 5, (rows,), generator=g)


@pytest.mark.parametrize("zero", [0, 3])
def test_any_network(zero: int) -> None:
    mesh = shardc.Mesh(dp=2, simulated=True)
    plans = [
        shardc.compile(classify, mesh=mesh, zero=zero, recompute=policy).lower(*convolutions(), *images())
        for policy in (None, "auto")
    ]
    assert plans[1].memory.peak_bytes < 0.8 * plans[0].memory.peak_bytes
    check(classify, convolutions, [images()] * 2, mesh={"dp": 2}, zero=zero, recompute="auto")


def test_what_does_not_fit_is_explained_and_every_suggestion_is_true() -> None:
    with pytest.raises(PlanError) as caught:
        lower(rows=64, zero=3, memory_budget="2MB")
    error = caught.value
    assert "no plan fits memory_budget=2,000,000" in error.what and "the lowest peak of" in error.what
    assert "model.blocks.2" in error.what and "test_recompute.py" in error.what
    hints = [h.strip() for h in error.hint.split("\n       or ")]
    assert any(h.startswith("microbatches=2 (peak ") for h in hints) and any(h.startswith("mesh dp=4") for h in hints)
    assert lower(64, zero=3, memory_budget="2MB", microbatches=2).memory.peak_bytes <= 2_000_000
    larger = shardc.Mesh(dp=4, simulated=True)
    assert lower(64, larger, zero=3, memory_budget="2MB").memory.peak_bytes <= 2_000_000
    floor = int(hints[-1].removeprefix("memory_budget="))
    assert lower(64, zero=3, memory_budget=floor).memory.peak_bytes == floor


def test_a_fixed_choice_stays_fixed() -> None:
    peak = lower(zero=3).memory.peak_bytes
    with pytest.raises(PlanError, match='try: recompute="auto"'):
        lower(zero=3, recompute=None, memory_budget=peak - 1)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("16GiB", 16 * 2**30), ("800MB", 800_000_000), ("1.5 kB", 1500), ("7", 7), ("2tib", 2**41), (5, 5), ("12B", 12)],
)
def test_sizes_are_read(given: object, wanted: int) -> None:
    assert bytes_of(given, "memory_budget") == wanted


@pytest.mark.parametrize("given", ["16 giga", "", "-1GB", 0, -4, 1.5, True, "1e9", "MB"])
def test_other_sizes_are_refused(given: object) -> None:
    with pytest.raises(OptionError, match="memory_budget"):
        shardc.compile(train, memory_budget=given)
