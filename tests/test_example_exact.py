"""The example's own step, in float64, equal to one device for every stage, mesh and batch; also on three real ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from shardc.testing import check_all, check_processes


def load_example() -> ModuleType:
    """`examples/train_gpt.py` as a module; found again by name, so that its functions can be sent to other processes."""
    name = "train_gpt"
    if name not in sys.modules:
        folder = Path(__file__).parent.parent / "examples"
        spec = importlib.util.spec_from_file_location(name, folder / "train_gpt.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, clip: float) -> Tensor:
    return load_example().train(model, optimizer, tokens, targets, clip)  # type: ignore[no-any-return]


def make_state() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    example = load_example()
    args = example.parse(["--width", "12", "--layers", "2", "--heads", "3", "--context", "9", "--lr", "1e-3"])
    model, optimizer, _ = example.make_state(args)
    return model, optimizer


def batches(rows: int, clip: float) -> list[tuple[Tensor, Tensor, float]]:
    generator = torch.Generator().manual_seed(5)
    draw = [torch.randint(256, (2, rows, 9), generator=generator) for _ in range(3)]
    return [(t[0], t[1], clip) for t in draw]


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_every_stage_and_mesh(clip: float) -> None:
    options = [
        {"mesh": {"dp": n}, "zero": zero} for n, zero in ((1, 3), (2, 0), (3, 1), (3, 2), (4, 3), (8, 3))
    ]
    for report in check_all(train, make_state, batches(5, clip), options):
        assert report.steps == 3


@pytest.mark.processes
def test_three_ranks() -> None:
    report = check_processes(3, train, make_state, batches(7, 0.5), zero=3)
    assert report.steps == 3 and report.compared > 300
