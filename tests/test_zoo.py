"""Sixteen families of transformers' models train sharded: equal to one device, nothing replicated, activations where they are.

The quick run takes one layout for each family; `-m long` takes every one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo_models import DECODERS, OTHERS

import shardc
from shardc._torch import FunctionalTensor
from shardc.testing import Report, check_all

ZOO = {**DECODERS, **OTHERS}
ROWS = 7  # neither 2 nor 3 divides it
DATA = [{"dp": 2}, {"dp": 3}]
TENSOR = [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}]
QUICK = {name: DATA[k % 2] for k, name in enumerate(ZOO)}

MOVED = {
    "clip": {"all_gather", "all_to_all", "reduce_scatter"},  # every row's image is compared with every row's text
    "resnet": {"all_gather"},  # statistics of the batch, which its backward reduces for the bias and the rows
}
"""Families whose rows depend on each other, and how activations travel then."""

EVEN_HEADS = ("llama", "gemma2")
"""Families in which 2 divides the heads of keys and values: nothing but the sums of Megatron-LM travels."""


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """What models compute in float32 by themselves (Mamba's scan, with sums over channels) they compute in float64 like the
    rest: over parts of the channels a sum in float32 rounds otherwise, and equality could be shown to 1e-6 only."""
    for kind in (torch.Tensor, FunctionalTensor):
        monkeypatch.setattr(kind, "float", lambda x: x.to(torch.float64))


def equal(name: str, meshes: list[dict[str, int]], steps: int, **options: Any) -> list[Report]:
    family = ZOO[name]
    given = [{"mesh": mesh, "zero": 3, **options} for mesh in meshes]
    reports = check_all(family.step, family.state, family.batches(ROWS, steps), given)
    parameters = sum(1 for _ in family.model().parameters())
    for report in reports:
        assert report.steps == steps
        assert report.compared > steps * 4 * parameters  # value, two moments and a count of steps of each
    return reports


def by_data(name: str, meshes: list[dict[str, int]], steps: int) -> None:
    for report in equal(name, meshes, steps):
        reasons = {r.reason for r in report.plan.replicated}
        assert reasons <= {"never split unless pinned"}  # buffers
        assert {r.kind for r in report.plan.communication if r.group == "activations"} == MOVED.get(name, set())


def by_tensor(name: str, meshes: list[dict[str, int]], steps: int) -> None:
    params = shardc.recipes.megatron(ZOO[name].model())
    for report in equal(name, meshes, steps, params=params):
        slots = report.plan.slots
        assert len(params) > 4 and all("tp" in slots[f"model.{path}"].storage.axes for path in params)
        moved = {r.kind for r in report.plan.communication if r.axis == "tp" and r.group == "activations"}
        assert moved == {"all_reduce"} or name not in EVEN_HEADS or report.plan.mesh.axes["tp"] > 2


@pytest.mark.parametrize("name", ZOO)
def test_by_data(name: str) -> None:
    by_data(name, [QUICK[name]], steps=2)


@pytest.mark.parametrize("name", DECODERS)
def test_by_tensor(name: str) -> None:
    by_tensor(name, TENSOR[:1], steps=2)


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO)
def test_every_size(name: str) -> None:
    by_data(name, DATA, steps=3)


@pytest.mark.long
@pytest.mark.parametrize("name", DECODERS)
def test_every_layout(name: str) -> None:
    by_tensor(name, TENSOR, steps=3)
