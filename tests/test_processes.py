"""GPT and ResNet on real gloo processes, each rank with rows of its own: equal to eager on one device."""

from __future__ import annotations

import functools

import pytest
import torch
from model_zoo import FAMILIES
from torch import nn

from shardc.testing import check_all_processes

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")  # the ranks inherit it


def state(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    return FAMILIES[name].state()


def equal(name: str, ranks: int, stages: tuple[int, ...], rows: int = 7) -> None:
    family = FAMILIES[name]
    make = functools.partial(state, name)
    options = [{"zero": zero} for zero in stages]
    reports = check_all_processes(ranks, family.step, make, family.batches(rows), options, timeout=600.0)
    assert [r.options["zero"] for r in reports] == list(stages)
    for report in reports:
        assert report.steps == 3 and report.compared > 3 * 5 * len(list(family.model().parameters()))
        assert not report.rounded


@pytest.mark.parametrize(("name", "zero"), [("gpt", 3), ("resnet", 1)])
def test_two_processes(name: str, zero: int) -> None:
    equal(name, 2, (zero,))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])  # parts of 7 rows: 4 and 3; 3, 2, 2; 2, 2, 2, 1
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_every_stage(name: str, ranks: int) -> None:
    equal(name, ranks, (0, 1, 2, 3))


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_more_processes_than_rows(name: str) -> None:
    equal(name, 4, (3,), rows=3)
