"""Python that decides on values of the step: each outcome has a program, and a wrong guess changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError, PlanError
from shardc.instructions import Compute, Guard, Write
from shardc.testing import check, check_processes

State = tuple[Any, ...]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh())


def state(kind: type[Any] = torch.optim.AdamW, **options: Any) -> State:
    torch.manual_seed(0)
    model = Net()
    return model, kind(model.parameters(), **{"lr": 1e-2, **options})


def batches(count: int = 3, rows: int = 5) -> list[tuple[Tensor, Tensor]]:
    out = []
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 5, generator=g)
        out.append((x, x[:, :3]))
    return out


def with_nan(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    out = batches(count)
    out[1][0][-1, 0] = float("nan")
    return out


def simulated(**axes: int) -> shardc.Mesh:
    return shardc.Mesh(axes, simulated=True)


def skip(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def clipped(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    if norm > 1.05:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(1.0 / norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def early_exit(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Solves by as many inner updates as it takes."""
    done = 0
    for _ in range(4):
        loss = F.mse_loss(model(x), y)
        if loss.item() < 0.9:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
    return loss.detach(), done


def drop(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    h = F.dropout(x, 0.2)
    if torch.rand(1) > 0.5:
        h = h * 2
    h = model(F.dropout(h, 0.3))
    loss = F.mse_loss(h, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def scaled(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach()


def scaled_state() -> State:
    return *state(torch.optim.SGD, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


def closure(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return torch.as_tensor(optimizer.step(evaluate)).detach()


def lbfgs() -> State:
    return state(torch.optim.LBFGS, lr=0.5, max_iter=3, history_size=2)


def averaged(model: nn.Module, optimizer: Any, mean: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean.update_parameters(model)
    return loss.detach()


def averaged_state() -> State:
    model, optimizer = state(torch.optim.SGD)
    return model, optimizer, torch.optim.swa_utils.AveragedModel(model)


def plain(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def radam() -> State:
    return state(torch.optim.RAdam)


def sizes(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    count = (y > 0).sum() % 3 + 1
    loss = F.mse_loss(model(x[: count.item()]), y[: int(count)])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def comparisons(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if not torch.equal(x, y) and not torch.allclose(loss, loss + 1) and loss.item():
        optimizer.step()
    optimizer.zero_grad()
    return max(0.5, loss.item()), loss.detach()


class Patience:
    def __init__(self) -> None:
        self.best, self.bad = float("inf"), 0


def patient(model: nn.Module, optimizer: Any, patience: Patience, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    patience.bad = 0 if loss.item() < 1.0 else patience.bad + 1
    if patience.bad < 2:
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


CASES: dict[str, tuple[Any, Any, Any]] = {
    "skip": (skip, state, with_nan()),
    "clipped": (clipped, state, batches(4)),
    "early exit": (early_exit, lambda: state(torch.optim.SGD, lr=0.5), batches(4)),
    "drop": (drop, state, batches(5)),
    "scaler": (scaled, scaled_state, with_nan(5)),
    "lbfgs": (closure, lbfgs, batches(3)),
    "averaged": (averaged, averaged_state, batches(3)),
    "radam": (plain, radam, batches(8)),
    "sizes": (sizes, state, batches(4)),
    "comparisons": (comparisons, state, batches(2)),
    "patience": (patient, lambda: (*state(), Patience()), batches(5)),
    "wolfe": (closure, lambda: state(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"), batches(2)),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, zero: int) -> None:
    fn, make, data = CASES[name]
    check(fn, make, data, mesh={"dp": 2, "tp": 2} if zero else {"dp": 3}, zero=zero)


@pytest.mark.parametrize("rng", ["torch", "counter"])
def test_decisions_on_draws_are_the_same_on_any_mesh(rng: str) -> None:
    losses = []
    for mesh in ({"dp": 1}, {"dp": 3}):
        step = shardc.compile(drop, mesh=simulated(**mesh), rng=rng, seed=3)
        made = state()
        torch.manual_seed(5)
        losses.append([step(*made, *b).item() for b in batches(6)])
        assert len(step.variants) == 3  # the first step, and both courses of the later ones
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_failed_guard_changes_nothing_and_is_told() -> None:
    step = shardc.compile(skip, mesh=simulated(dp=2), zero=1)
    made = state()
    good, bad = batches(2)
    bad[0][0, 0] = float("inf")
    step(*made, *good)
    step(*made, *good)
    before = {k: v.clone() for k, v in made[0].state_dict().items()}
    step(*made, *bad)
    assert all(torch.equal(v, before[k]) for k, v in made[0].state_dict().items())
    assert "guard at test_guards.py" in step.variants[-1].reason and "is now False" in step.variants[-1].reason
    count = len(step.variants)
    for data in (good, bad, good, bad):
        step(*made, *data)
    assert len(step.variants) == count


def test_nothing_of_state_is_written_before_the_last_guard() -> None:
    step = shardc.compile(early_exit, mesh=simulated(dp=2), zero=1)
    made = state(torch.optim.SGD, lr=0.5)
    step(*made, *batches(1)[0])
    code = step.plan.instructions
    last = max(k for k, i in enumerate(code) if isinstance(i, Guard))
    assert step.plan.guards and not any(isinstance(i, Write) for i in code[:last])
    assert "guard at test_guards.py" in str(step.plan)
    doubled = any(isinstance(i, Compute) and i.op.startswith("shardc.sgd") and not i.inplace for i in code[:last])
    assert doubled == ("double-buffered" in str(step.plan))
    assert shardc.Plan.from_json(step.plan.to_json()) == step.plan


def test_float_does_not_ask_for_the_exact_number() -> None:
    step = shardc.compile(clipped, mesh=simulated(dp=2))
    made = state(torch.optim.SGD)
    for b in batches(6):
        step(*made, *b)
    assert len(step.variants) == 2


def test_int_asks_for_the_exact_number_and_variants_are_bounded() -> None:
    def exact(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * int(x.sum() * 1000)

    step = shardc.compile(exact, mesh=simulated(dp=2), max_variants=3)
    made = state()[0]
    with pytest.raises(CaptureError, match=r"test_guards.py:\d+") as caught:
        for b in batches(5):
            step(made, b[0])
    assert "max_variants=3" in str(caught.value) and len(step.variants) == 3


def test_lower_decides_on_real_tensors_only() -> None:
    plan = shardc.compile(skip, mesh=simulated(dp=2)).lower(*state(), *batches(1)[0])
    assert [g.expected for g in plan.guards] == [True]
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="meta device") as caught:
        shardc.compile(skip, mesh=simulated(dp=2)).lower(model, optimizer, *batches(1)[0])
    assert "test_guards.py" in str(caught.value)


def test_a_generator_that_failed_does_not_advance() -> None:
    step = shardc.compile(drop, mesh=simulated(dp=2), rng="torch")
    made, other = state(), state()
    for k, b in enumerate(batches(4)):
        torch.manual_seed(k)
        step(*made, *b)
        mine = torch.get_rng_state()
        torch.manual_seed(k)
        drop(*other, *b)
        assert torch.equal(mine, torch.get_rng_state())


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["drop", "scaler", pytest.param("skip", marks=pytest.mark.long), pytest.param("lbfgs", marks=pytest.mark.long)]
)
def test_on_processes(name: str) -> None:
    fn = {"skip": skip, "drop": drop, "scaler": scaled, "lbfgs": closure}[name]
    make = {"skip": state, "drop": state, "scaler": scaled_state, "lbfgs": lbfgs}[name]
    data = {"skip": with_nan(3), "drop": batches(3), "scaler": with_nan(3), "lbfgs": batches(1)}[name]
    check_processes(2, fn, make, data, zero=3)


def test_a_cache_is_kept_without_its_graph() -> None:
    class Keeps(Net):
        cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.cache = self.inner(x)
            return self.outer(self.cache)

    def make() -> Iterator[Any] | Any:
        torch.manual_seed(0)
        model = Keeps()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    step = shardc.compile(plain, mesh=simulated(dp=2))
    made, other = make(), make()
    for b in batches(2):
        step(*made, *b)
        plain(*other, *b)
        assert torch.allclose(made[0].cache, other[0].cache) and not made[0].cache.requires_grad
    assert "model.cache is kept without its autograd graph" in str(step.plan)
