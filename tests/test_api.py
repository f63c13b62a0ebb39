"""The public surface of `shardc.compile`: what the user sees of a compiled step."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(x), y)


def state(**keywords: float) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().double()
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **keywords})


def batch(seed: int = 1, rows: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 6, dtype=torch.float64), torch.randint(3, (rows,))


def simulated(**axes: int) -> shardc.Mesh:
    return shardc.Mesh(axes, simulated=True)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_decorator_with_and_without_options() -> None:
    bare = shardc.compile(train)
    with_options = shardc.compile(mesh=simulated(dp=2), zero=3)(train)
    assert bare.__name__ == with_options.__name__ == "train" and bare.__doc__ == train.__doc__
    want = train(*state(), *batch())
    for step in (bare, with_options):
        loss = step(*state(), *batch())
        assert close(loss, want) and not loss.requires_grad and loss.shape == ()


def test_plan_and_stats_after_a_call() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    model, optimizer = state()
    for _ in range(2):
        step(model, optimizer, *batch())
    text = str(step.plan)
    assert "zero 3" in text and "dp=2" in text and "model.inner.weight" in text
    assert step.stats.comm_bytes == step.plan.communication.bytes_per_rank
    assert step.stats.peak_bytes > 0 and step.stats.collectives > 0
    assert set(step.plan.stages) >= {"normalize", "annotate", "propagate", "partition", "schedule"}


def test_variants_are_listed_with_their_reason_and_found_again() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2))
    model, optimizer = state()
    step(model, optimizer, *batch())
    step(model, optimizer, *batch())  # the optimizer has its state now
    assert len(step.variants) == 2
    for rows in (5, 3, 5, 3):
        step(model, optimizer, *batch(rows=rows))
    assert len(step.variants) == 3
    assert step.variants[2].reason == "x: f64[5, 6] became f64[3, 6]"


def test_learning_rates_change_without_recompiling() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=1)
    (model, optimizer), (reference, other) = state(), state()
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)) for o in (optimizer, other)]
    for i in range(4):
        got, want = step(model, optimizer, *batch(i)), train(reference, other, *batch(i))
        assert close(got, want)
        for schedule in schedules:
            schedule.step()
    assert len(step.variants) == 2


def test_a_second_function_shares_the_state() -> None:
    step, check = (shardc.compile(f, mesh=simulated(dp=2), zero=3) for f in (train, evaluate))
    (model, optimizer), (reference, other) = state(), state()
    step(model, optimizer, *batch())
    train(reference, other, *batch())
    assert close(check(model, *batch(7)), evaluate(reference, *batch(7)))
    with shardc.gathered(model):
        assert close(model(batch(7)[0]), reference(batch(7)[0]))


def test_full_state_dict() -> None:
    step = shardc.compile(train, mesh=simulated(dp=3), zero=3)
    (model, optimizer), (reference, other) = state(), state()
    step(model, optimizer, *batch())
    train(reference, other, *batch())
    whole = step.full_state_dict()
    assert list(whole) == ["model", "optimizer"]
    assert list(whole["model"]) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert type(whole["model"][name]) is Tensor and close(whole["model"][name], value)
    mine, theirs = whole["optimizer"], other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert all(close(mine["state"][i][k], v) for i, entry in theirs["state"].items() for k, v in entry.items())


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    scale: float = 1.0


def train_nested(
    models: list[nn.Module], optimizer: torch.optim.Optimizer, data: Batch, *, more: dict[str, Tensor]
) -> dict[str, object]:
    out = models[1](models[0](data.x + more["shift"]).relu())
    loss = F.cross_entropy(out, data.y) * data.scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "out": [out, None], "n": 3}


def test_nested_arguments_keywords_and_results() -> None:
    def make() -> tuple[list[nn.Module], torch.optim.Optimizer]:
        torch.manual_seed(0)
        models: list[nn.Module] = [nn.Linear(6, 8).double(), nn.Linear(8, 3).double()]
        return models, torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1, momentum=0.9)

    step = shardc.compile(train_nested, mesh=simulated(dp=2), zero=3)
    (models, optimizer), (references, other) = make(), make()
    x, y = batch()
    for scale in (1.0, 2.0):
        got = step(models, optimizer, Batch(x, y, scale), more={"shift": x.flip(0)})
        want = train_nested(references, other, Batch(x, y, scale), more={"shift": x.flip(0)})
        assert list(got) == ["loss", "out", "n"] and got["n"] == 3 and got["out"][1] is None
        assert close(got["loss"], want["loss"]) and close(got["out"][0], want["out"][0])
    assert close(models[0].weight, references[0].weight)


def test_lower_needs_no_devices() -> None:
    with torch.device("meta"):
        model = Net(width=1024)
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = torch.randn(4, 6), torch.empty(4, dtype=torch.int64)
    plan = shardc.compile(train, mesh={"dp": 64}, zero=3).lower(model, optimizer, x, y)
    assert "dp=64" in str(plan) and plan.memory.peak_bytes > 0 and plan.communication.bytes_per_rank > 0
    assert not optimizer.state and model.inner.weight.device.type == "meta"


def test_lower_leaves_everything_alone_and_gives_the_steady_plan() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    model, optimizer = state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = step.lower(model, optimizer, *batch())
    assert not optimizer.state and all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    for _ in range(2):
        step(model, optimizer, *batch())
    assert plan.hash == step.plan.hash


def test_saved_plan_prints_the_same(tmp_path: Path) -> None:
    plan = shardc.compile(train, mesh=simulated(dp=2), zero=3).lower(*state(), *batch())
    plan.save(tmp_path / "plan.json")
    again = shardc.Plan.load(tmp_path / "plan.json")
    assert again.hash == plan.hash and str(again) == str(plan)


def test_plan_explains_and_diffs() -> None:
    plans = [shardc.compile(train, mesh=simulated(dp=2), zero=zero).lower(*state(), *batch()) for zero in (0, 3)]
    assert "model.inner.weight" in plans[1].explain("model.inner.weight")
    assert "inner.weight" in str(plans[0].diff(plans[1])) and plans[0].hash != plans[1].hash


def test_deleting_the_step_releases_it() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    model, optimizer = state()
    step(model, optimizer, *batch())
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


def test_state_on_a_simulated_mesh_stays_whole_and_the_users_own() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    model, optimizer = state()
    weight = model.inner.weight
    step(model, optimizer, *batch())
    assert model.inner.weight is weight and type(weight) is nn.Parameter and weight.shape == (8, 6)
    assert optimizer.state[weight]["exp_avg"].shape == (8, 6) and weight.grad is None


@pytest.mark.parametrize("before", [False, True])
def test_surviving_gradients_are_state(before: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        if before:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = shardc.compile(step, mesh=simulated(dp=2), zero=3)
    (model, optimizer), (reference, other) = state(), state()
    for i in range(3):
        compiled(model, optimizer, *batch(i))
        step(reference, other, *batch(i))
        assert all(close(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
