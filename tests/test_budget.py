"""memory_budget and recompute="auto": plans between fast and small, the budget held, the same result."""

from __future__ import annotations

import functools
import itertools
import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_recompute import state, tokens, train
from torch import Tensor

import shardc
from shardc.errors import OptionError, PlanError
from shardc.options import bytes_of
from shardc.passes.frontier import frontier
from shardc.passes.ladder import Ladder
from shardc.passes.tradeoff import Problem, Step
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


def test_a_saved_plan_keeps_the_budget_or_is_refused(tmp_path: Path) -> None:
    model, optimizer = state(width=8, layers=1)
    step = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True), zero=3)
    step(model, optimizer, tokens(4, 8))
    plan = step.lower(model, optimizer, tokens(4, 8))
    plan.save(tmp_path / "plan.json")
    for over in (0, 1):
        fresh = shardc.compile(
            train, mesh=shardc.Mesh(dp=2, simulated=True), zero=3, plan=tmp_path / "plan.json",
            memory_budget=plan.memory.peak_bytes - over,
        )  # fmt: skip
        if not over:
            fresh(model, optimizer, tokens(4, 8))
            continue
        with pytest.raises(PlanError, match=f"needs {plan.memory.peak_bytes:,} bytes, memory_budget is"):
            fresh(model, optimizer, tokens(4, 8))


def test_rungs_are_what_the_whole_plans_are() -> None:
    rungs = ladder().rungs
    assert len(rungs) > 5 and rungs[-1].point.peak < 0.5 * rungs[0].point.peak
    for rung in rungs[::4]:
        assert rung.peak == rung.point.peak
        assert rung.plan.time.predicted_s == pytest.approx(rung.seconds, rel=1e-12)
    for a, b in zip(rungs, rungs[1:], strict=False):
        assert a.seconds < b.seconds and a.point.peak > b.point.peak


class Scores(nn.Module):
    """Its backward reads transposed views of values of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for a, b in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + (a(x).tanh() @ b(x).tanh().mT).softmax(-1) @ x
        return x


def test_a_repeated_value_is_not_kept_for_views_that_the_backward_makes() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    model = Scores()
    lowered = shardc.compile(step, mesh=shardc.Mesh(dp=1, simulated=True)).lower(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 64, 16)
    )
    program = lowered.stages["accumulate"]
    assert not isinstance(program, str)
    rungs = Ladder.of(program, True).rungs
    assert rungs[-1].point.peak < 0.6 * rungs[0].point.peak
    assert all(rung.peak == rung.point.peak for rung in rungs[::4])


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
        convolutions = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
        self.layers = nn.ModuleList(nn.Sequential(c, nn.BatchNorm2d(8), nn.ReLU()) for c in convolutions)
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
    peaks = [
        shardc.compile(classify, mesh=mesh, zero=zero, recompute=policy).lower(*convolutions(), *images()).memory.peak_bytes
        for policy in (None, "auto")
    ]
    assert peaks[1] < 0.82 * peaks[0]
    check(classify, convolutions, [images()] * 2, mesh={"dp": 2}, zero=zero, recompute="auto")


@pytest.mark.long
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


@pytest.mark.long
def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    plan = lower(zero=3)
    rows = plan.largest_batch("3MB")
    assert lower(rows, zero=3).memory.peak_bytes <= 3_000_000 < lower(rows + 2, zero=3).memory.peak_bytes
    with pytest.raises(PlanError, match="step.lower"):
        shardc.Plan.from_json(plan.to_json()).largest_batch("3MB")


@pytest.mark.parametrize("sizes", [("batch",), pytest.param(("batch", "length", "dp"), marks=pytest.mark.long)])
def test_closed_forms_are_exact(sizes: tuple[str, ...]) -> None:
    plan = lower(zero=3)
    expression = plan.peak_formula(*sizes)
    assert {s.name for s in expression.free_symbols} == set(sizes)
    for rows in (32, 96):
        here = {"batch": rows, "length": 32, "dp": 2}
        value = expression.subs({s: here[s.name] for s in expression.free_symbols})
        assert value == lower(rows, zero=3).memory.peak_bytes
    with pytest.raises(PlanError, match="batch, length or a mesh axis: dp"):
        plan.peak_formula("width")


def test_what_is_alive_at_the_peak_and_a_picture(tmp_path: Path) -> None:
    memory = lower(zero=3).memory
    assert sum(a.bytes for a in memory.live) == memory.peak_bytes == sum(memory.by_module().values())
    for name, n in memory.by_category.items():
        assert sum(a.bytes for a in memory.live if a.category == name) == n
    largest = memory.live[0]
    assert largest.module.startswith("model.blocks.") and largest.line.startswith("test_recompute.py:")
    memory.plot(tmp_path / "memory.svg")
    picture = ElementTree.parse(tmp_path / "memory.svg").getroot()
    drawn = [e[0].text for e in picture if e.tag.endswith("polygon")]
    assert {"parameters", "optimizer", "activations"} <= set(drawn)
    with pytest.raises(PlanError, match="svg"):
        memory.plot(tmp_path / "memory.png")


def small(seed: int, n: int = 11) -> Problem:
    """A forward of `n` values, some read further on, and its backward."""
    draw = random.Random(seed)
    steps, nbytes, reads = [Step((), (0,), 0.0)], {0: 0}, {}
    for k in range(1, n + 1):
        reads[k] = sorted({k - 1} | ({draw.randrange(max(0, k - 4), k)} if draw.random() < 0.3 else set()))
        steps.append(Step(tuple(reads[k]), (k,), draw.choice([1.0, 1.0, 2.0, 3.0, 10.0, 20.0]), movable=True))
        nbytes[k] = draw.choice([1, 1, 2, 4, 4]) * 100
    last: tuple[int, ...] = ()
    for g, k in enumerate(range(n, 0, -1), n + 1):
        wanted = [r for r in (k, *reads[k]) if r and draw.random() < 0.7]
        steps.append(Step((*wanted, *last), (g,), 2 * steps[k].seconds, forward=False, late=True))
        nbytes[g], last = 100, (g,)
    return Problem([*steps, Step(last, (), 0.0, forward=False)], {}, nbytes)


@pytest.mark.parametrize("seed", range(6))
def test_small_frontiers_are_within_two_percent_of_all_choices(seed: int) -> None:
    problem = small(seed)
    movable = [k for k, s in enumerate(problem.steps) if s.movable]
    every = [
        problem.judge(frozenset((k, 0) for k in c)) for n in range(len(movable) + 1) for c in itertools.combinations(movable, n)
    ]
    for point in frontier(problem):
        best = min((p.seconds for p in every if p.peak <= point.peak), default=math.inf)  # what is dropped late is in none
        assert point.seconds <= 1.02 * best


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
