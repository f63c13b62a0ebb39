"""Every error of the product's list: its class, what it names, the numbers, and a way out. One test for each."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc import P
from shardc.errors import (
    AgreementError,
    CaptureError,
    InputError,
    MeshError,
    OptionError,
    PlanError,
    RuleError,
    RuntimeFailure,
    ShardcError,
    SpecError,
    StateError,
)
from shardc.testing.processes import run_outcomes, run_ranks


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


def state(width: int = 8) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(rows: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6), torch.randint(3, (rows,))


def simulated(**axes: int) -> shardc.Mesh:
    return shardc.Mesh(axes, simulated=True)


@contextmanager
def refused(kind: type[ShardcError] | tuple[type[ShardcError], ...], *words: str) -> Iterator[None]:
    """The body raises `kind`; its text holds every word (a regular expression), and it says what to do next."""
    with pytest.raises(kind) as caught:
        yield
    check_message(caught.value, *words)


def check_message(error: BaseException | None, *words: str) -> None:
    assert isinstance(error, ShardcError), repr(error)
    for word in words:
        assert re.search(word, str(error)), f"{word!r} is not in: {error}"
    assert error.hint, f"no way out in: {error}"


# ---- (1) to (6), (21), (22): options ------------------------------------------------------------------------------------


def test_01_unknown_axis() -> None:
    with refused(MeshError, "'data'", "dp"):
        shardc.compile(train, mesh=simulated(dp=2), batch="data")
    with refused(MeshError, "'tp'", "dp"):
        shardc.compile(train, mesh=simulated(dp=2), params={"*.weight": P("tp", None)})


def test_02_mesh_that_does_not_fit_the_world() -> None:
    with refused(MeshError, "dp=4", "4", "1", "torchrun"):
        shardc.compile(train, mesh={"dp": 4})(*state(), *batch())


def test_03_pattern_that_matches_nothing() -> None:
    with refused((OptionError, SpecError), r"\*\.qkv\.weight", r"inner\.weight"):
        shardc.compile(train, mesh=simulated(dp=2), params={"*.qkv.weight": P("dp", None)})(*state(), *batch())
    with refused((OptionError, SpecError), "tokens"):
        shardc.compile(train, mesh=simulated(dp=2), inputs={"tokens": P("dp", None)})(*state(), *batch())


def test_04_spec_of_wrong_rank() -> None:
    with refused(SpecError, r"model\.inner\.weight", "3", "2"):
        shardc.compile(train, mesh=simulated(dp=2), params={"*.inner.weight": P("dp", None, None)})(*state(), *batch())


def test_05_one_axis_on_two_dims() -> None:
    with refused(SpecError, "dp", "two|twice|more than one|2 dims"):
        shardc.compile(train, mesh=simulated(dp=2), params={"*.inner.weight": P("dp", "dp")})(*state(), *batch())


def test_06_contradicting_pins() -> None:
    params = {"*.inner.weight": P("tp", None), "model.*.weight": P(None, "tp")}
    with refused((SpecError, OptionError), r"model\.inner\.weight", r"model\.\*\.weight", r"\*\.inner\.weight"):
        shardc.compile(train, mesh=simulated(dp=2, tp=2), params=params)(*state(), *batch())


def test_21_option_of_wrong_type_or_unknown_name() -> None:
    with refused(OptionError, "zero='3'", "str"):
        shardc.compile(train, mesh=simulated(dp=2), zero="3")
    with refused(OptionError, "'zer'", "zero"):
        shardc.compile(train, mesh=simulated(dp=2), zer=3)
    with refused(OptionError, "mesh"):
        shardc.compile(train, mesh=2)


def test_22_saved_plan_for_another_model_or_mesh(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    shardc.compile(train, mesh=simulated(dp=2), zero=3).lower(*state(), *batch()).save(path)
    with refused(PlanError, r"inner\.(weight|bias)", "8", "9"):
        shardc.compile(train, mesh=simulated(dp=2), plan=path)(*state(width=9), *batch())
    with refused(PlanError, "dp=2", "dp=3"):
        shardc.compile(train, mesh=simulated(dp=3), plan=path)(*state(), *batch())
    same = shardc.compile(train, mesh=simulated(dp=2), zero=3, plan=path)
    mine, other = state(), state()
    got = [same(*mine, *batch()) for _ in range(2)][-1]
    want = [train(*other, *batch()) for _ in range(2)][-1]
    assert torch.allclose(got, want, rtol=1e-5)


# ---- (7) to (11), (17), (19), (20): what a step may not do ---------------------------------------------------------------

HIDDEN: dict[str, Any] = {}
HISTORY: list[float] = []


def test_07_model_through_a_global_that_cannot_be_lifted() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        teacher = globals()["HID" + "DEN"]["teacher"]
        loss = F.cross_entropy(model(x) + teacher(x), y)
        loss.backward()
        optimizer.step()
        return loss

    HIDDEN["teacher"] = Net()
    with refused(CaptureError, r"test_errors\.py:\d+", "argument"):
        shardc.compile(step, mesh=simulated(dp=2))(*state(), *batch())


def test_08_random_of_python_or_numpy() -> None:
    def with_python(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, optimizer, x * random.random(), y)

    def with_numpy(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, optimizer, x * float(np.random.rand()), y)

    for step, word in ((with_python, "random"), (with_numpy, "numpy")):
        with refused(CaptureError, word, "torch"):
            shardc.compile(step, mesh=simulated(dp=2))(*state(), *batch())


def test_09_value_appended_to_a_list() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        HISTORY.append(loss.item())
        return loss

    with refused(CaptureError, r"HISTORY|test_errors\.py:\d+"):
        shardc.compile(step, mesh=simulated(dp=2))(*state(), *batch())


@torch.library.custom_op("shardc_test_errors::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x.flip(0).cumsum(0)


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_10_operator_without_a_rule() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, optimizer, mystery(x), y)

    with refused(RuleError, r"shardc_test_errors\.mystery", r"test_errors\.py:\d+", "register"):
        shardc.compile(step, mesh=simulated(dp=2))(*state(), *batch())


def test_11_input_changed_in_place() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return train(model, optimizer, x, y)

    x, y = batch()
    before = x.clone()
    with refused(CaptureError, r"\bx\b", "in place"):
        shardc.compile(step, mesh=simulated(dp=2))(*state(), x, y)
    assert torch.equal(x, before)


def test_17_step_that_returns_a_parameter() -> None:
    def step(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return train(model, optimizer, x, y), model.inner.weight

    with refused(CaptureError, r"model\.inner\.weight", "clone"):
        shardc.compile(step, mesh=simulated(dp=2))(*state(), *batch())


def test_19_mixed_devices() -> None:
    x, y = batch()
    with refused((CaptureError, InputError), "meta", "cpu", r"\b[xy]\b|model"):
        shardc.compile(train, mesh=simulated(dp=2))(*state(), x.to("meta"), y)


def test_20_second_optimizer_for_the_same_parameter() -> None:
    def step(model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        first.step()
        second.step()
        return loss

    model, optimizer = state()
    other = torch.optim.SGD(model.outer.parameters(), lr=0.1)
    with refused((CaptureError, StateError), r"model\.outer\.weight", "first", "second"):
        shardc.compile(step, mesh=simulated(dp=2))(model, optimizer, other, *batch())


# ---- (15), (16), (18): between calls ------------------------------------------------------------------------------------


def test_15_parameter_replaced_or_retyped() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    model, optimizer = state()
    step(model, optimizer, *batch())
    model.inner.weight = nn.Parameter(torch.zeros(8, 6))
    with refused(StateError, r"model\.inner\.weight", "replaced|another|new"):
        step(model, optimizer, *batch())

    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    model, optimizer = state()
    step(model, optimizer, *batch())
    model.outer.bfloat16()
    with refused(StateError, r"model\.outer\.(weight|bias)", "(?i)bf16|bfloat16", "f(loat)?32"):
        step(model, optimizer, *batch())


def test_16_loaded_state_of_wrong_shapes_is_refused_and_of_right_ones_taken_up() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    model, optimizer = state()
    for _ in range(2):
        step(model, optimizer, *batch())
    reference = state()
    for _ in range(2):
        train(*reference, *batch())
    saved = reference[1].state_dict()
    model.load_state_dict(reference[0].state_dict())
    optimizer.load_state_dict(saved)
    assert torch.allclose(step(model, optimizer, *batch()), train(*reference, *batch()), rtol=1e-5)

    saved["state"][0]["exp_avg"] = torch.zeros(4, 4)
    optimizer.load_state_dict(saved)
    with refused(StateError, r"optimizer\.state\[0\]\.exp_avg", "4, 4", "8, 6"):
        step(model, optimizer, *batch())


def test_18_batch_without_rows() -> None:
    with refused(InputError, r"\bx\b", "0"):
        shardc.compile(train, mesh=simulated(dp=2))(*state(), *batch(rows=0))


# ---- (12) to (14), (18): several processes ------------------------------------------------------------------------------


def rank() -> int:
    return int(os.environ["RANK"])


def refusal(step: Any, *args: Any) -> tuple[BaseException | None, float]:
    """What a call raises, and after how many seconds."""
    begin = time.monotonic()
    try:
        step(*args)
    except ShardcError as error:
        return error, time.monotonic() - begin
    return None, 0.0


def other_code(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return train(model, optimizer, x, y) * 2


def run_different_code() -> tuple[BaseException | None, float]:
    step = shardc.compile(train if rank() == 0 else other_code, mesh={"dp": -1}, zero=3)
    return refusal(step, *state(), *batch())


def run_different_shapes() -> tuple[BaseException | None, float]:
    step = shardc.compile(train, mesh={"dp": -1}, zero=3)
    model, optimizer = state()
    x, y = batch()
    return refusal(step, model, optimizer, x if rank() == 0 else torch.cat([x, x], dim=1), y)


def run_death() -> tuple[BaseException | None, float]:
    step = shardc.compile(train, mesh={"dp": -1}, zero=3)
    model, optimizer = state()
    step(model, optimizer, *batch())
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return refusal(step, model, optimizer, *batch())


def run_empty_part() -> float:
    step = shardc.compile(train, mesh={"dp": -1}, zero=3)
    model, optimizer = state()
    x, y = batch()
    part = slice(0, 5) if rank() == 0 else slice(5, 5)
    losses = [step(model, optimizer, x[part], y[part]).item() for _ in range(2)]
    return losses[-1]


@pytest.mark.processes
def test_12_different_code_on_different_ranks() -> None:
    for error, seconds in run_ranks(2, run_different_code):
        check_message(error, "rank 1", "rank 0")
        assert isinstance(error, AgreementError) and seconds < 30


@pytest.mark.processes
def test_13_different_shapes_where_they_must_agree() -> None:
    for error, seconds in run_ranks(2, run_different_shapes):
        check_message(error, "rank 1", r"\bx\b", "6", "12")
        assert isinstance(error, (AgreementError, InputError)) and seconds < 30


@pytest.mark.processes
def test_14_a_rank_that_dies() -> None:
    first, second = run_outcomes(2, run_death, timeout=300)
    assert second.exit_code == -signal.SIGKILL
    error, seconds = first.value
    check_message(error, "rank")
    assert isinstance(error, (RuntimeFailure, AgreementError)) and seconds < 30


@pytest.mark.processes
def test_18_an_empty_part_on_one_rank_is_fine() -> None:
    model, optimizer = state()
    want = [train(model, optimizer, *batch()).item() for _ in range(2)][-1]
    assert run_ranks(2, run_empty_part) == pytest.approx([want, want], rel=1e-5)
