"""`shardc.testing.check` accepts what is equal and names the first thing that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import MeshError
from shardc.testing import Mismatch, check, check_all, check_processes
from shardc.testing.compare import Tally, distance
from shardc.testing.oracle import Oracle, Step, reverse_rows
from shardc.testing.snapshot import snapshot


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(self.norm(self.inner(x)).relu()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_keeping_grads(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    return loss, out


def make_state() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_random_state() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(dropout=0.5)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def batches(n: int = 3, rows: int = 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, 5, generator=generator), torch.randint(3, (rows,), generator=generator)) for _ in range(n)]


# ---- the oracle and the comparison, without the compiler ---------------------------------------------------------------


def test_snapshot_holds_all_state_under_its_name() -> None:
    model, optimizer = make_state()
    train_keeping_grads(model, optimizer, *batches(1)[0])
    paths = list(snapshot({"model": model, "optimizer": optimizer, "extra": {"n": 3, "ema": [torch.zeros(2)]}}))
    assert paths[0] == "model.inner.weight.grad"
    expected = ["model.norm.running_var", "model.norm.num_batches_tracked", "model.outer.bias", "optimizer.state[5].exp_avg"]
    expected += ["optimizer.state[0].step", "optimizer.param_groups[0].lr", "optimizer.param_groups[0].betas[1]"]
    for path in [*expected, "extra.n", "extra.ema[0]"]:
        assert path in paths


def test_oracle_runs_in_float64_and_restores_the_default() -> None:
    oracle = Oracle(train, make_state, batches(), torch.float64)
    assert oracle.plain.steps[0].results["result"].dtype == torch.float64
    assert oracle.plain.steps[2].state["optimizer.state[0].exp_avg"].dtype == torch.float64
    assert oracle.plain.steps[2].state["model.inner.weight.grad"] is None
    assert torch.get_default_dtype() == torch.float32 and not oracle.plain.random


def test_second_oracle_differs_by_rounding_alone() -> None:
    for state, random in ((make_state, False), (make_random_state, True)):
        oracle = Oracle(train, state, batches(), torch.float64)
        assert oracle.plain.random is random
        plain, second = oracle.plain.steps[2].state["model.inner.weight"], oracle.second.steps[2].state["model.inner.weight"]
        assert 0 < distance(plain, second) < 1e-13


class Narrow(nn.Module):
    """A norm that works in float32 whatever it is given, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(5, 7), nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).float()
        h = self.weight.float() * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        return h[:, :3].to(x.dtype)


def make_narrow() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Narrow()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_parts_in_float32_have_the_rounding_of_float32() -> None:
    oracle = Oracle(train, make_narrow, batches(), torch.float64)
    plain, second = oracle.plain.steps[0].state["model.weight"], oracle.second.steps[0].state["model.weight"]
    assert 1e-12 < distance(plain, second) < 1e-5
    check(train, make_narrow, batches(), mesh={"dp": 3}, zero=3)
    report = check(train, make_narrow, batches(), mesh={"tp": 2}, batch=(), params={"model.inner.weight": shardc.P("tp", None)})
    assert "model.weight" in {r.path for r in report.rounded}


def wrong(step: Step, path: str, change: Any) -> Step:
    return Step(step.results, {**step.state, path: change(step.state[path])})


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("model.inner.weight", lambda t: t * (1 + 1e-8), r"model\.inner\.weight after step 1: differs by .*relative 1\.0e-08"),
        ("model.inner.weight", lambda t: t.float(), r"is a tensor float32\[7, 5\], should be a tensor float64"),
        ("model.inner.weight", lambda t: t.t().contiguous().t(), r"has strides \(1, 7\), should have \(5, 1\)"),
        ("model.inner.weight.grad", lambda t: torch.zeros(7, 5), r"grad after step 1: is a tensor .*should be None"),
        ("model.norm.num_batches_tracked", lambda t: t + 1, r"differs in 1 of 1 entries"),
        ("optimizer.param_groups[0].lr", lambda x: x * 2, r"lr after step 1: is 0\.02, should be 0\.01"),
        ("model.outer.bias", lambda t: t * float("nan"), r"outer\.bias after step 1: differs by inf"),
    ],
)
def test_each_kind_of_difference_is_found_and_named(path: str, change: Any, message: str) -> None:
    oracle = Oracle(train, make_state, batches(), torch.float64)
    bad, _ = Tally(oracle).step(1, oracle.plain.steps[1])
    assert not bad
    bad, _ = Tally(oracle).step(1, wrong(oracle.plain.steps[1], path, change))
    assert len(bad) == 1
    with pytest.raises(Mismatch, match=message):
        raise Mismatch(bad)


def test_a_tensor_within_its_own_rounding_passes_and_is_listed() -> None:
    # BatchNorm cancels the bias before it: its gradient is zero but for rounding, and Adam makes a full step of that.
    oracle = Oracle(train, make_state, batches(), torch.float64)
    second = oracle.second.steps[2]
    bad, rounded = Tally(oracle).step(2, Step(oracle.plain.steps[2].results, second.state))
    assert not bad and "model.inner.bias" in {r.path for r in rounded}


def test_a_tolerance_of_zero_asks_for_every_bit() -> None:
    oracle = Oracle(train, make_state, batches(), torch.float64)
    moved = wrong(oracle.plain.steps[1], "model.inner.weight", lambda t: torch.nextafter(t, t * 2))
    assert not Tally(oracle).step(1, moved)[0]
    assert [d.path for d in Tally(oracle, 0.0).step(1, moved)[0]] == ["model.inner.weight"]
    assert not Tally(oracle, 0.0).step(1, oracle.plain.steps[1])[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).sum(-1, keepdim=True).expand(-1, 3)


def test_a_sum_of_two_rows_rounds_alike_in_either_order() -> None:
    """So runs from nudged parameters and inputs, and with rows in random order, are asked as well."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Scaled()
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    oracle = Oracle(train, make, batches(1, rows=2), torch.float64)
    gaps = [distance(r.steps[0].state["model.scale"], oracle.plain.steps[0].state["model.scale"]) for r in oracle.others()]
    assert len(gaps) == 13 and gaps[0] == 0 and 0 < max(gaps) < 1e-14


def test_reverse_rows_leaves_other_tensors_alone() -> None:
    x, y, other = reverse_rows((torch.arange(4), torch.arange(8).view(4, 2), torch.arange(3)))
    assert x.tolist() == [3, 2, 1, 0] and y[0].tolist() == [6, 7] and other.tolist() == [0, 1, 2]


# ---- with the compiler ---------------------------------------------------------------------------------------------------


def test_check_passes_for_every_stage_and_a_batch_that_dp_does_not_divide() -> None:
    options = [{"mesh": {"dp": n}, "zero": zero} for n, zero in ((1, 0), (2, 0), (2, 1), (3, 2), (3, 3), (8, 3))]
    for report in check_all(train, make_state, batches(), options):
        assert report.steps == 3 and report.worst <= 1e-10 and report.plan is not None
        assert str(report).startswith("equal: mesh=")


def test_check_compares_surviving_gradients_and_results_with_a_batch_dim() -> None:
    report = check(train_keeping_grads, make_state, batches(), mesh={"dp": 2}, zero=3)
    assert report.compared > 3 * 20


def test_check_holds_for_dropout() -> None:
    check(train, make_random_state, batches(), mesh={"dp": 2}, zero=1)


def broken(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Another function under the compiler than plainly."""
    loss = train(model, optimizer, x, y)
    return loss * 1.001 if torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor) else loss


def test_a_wrong_result_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match=r"result after step 0: differs by"):
        check(broken, make_state, batches(), mesh={"dp": 2})


def test_a_mesh_without_sizes_is_refused() -> None:
    with pytest.raises(MeshError, match="no fixed size"):
        check(train, make_state, batches(), mesh={"dp": -1})


@pytest.mark.processes
def test_check_processes() -> None:
    report = check_processes(2, train, make_state, batches(), zero=3)
    assert report.steps == 3 and report.worst <= 1e-10
