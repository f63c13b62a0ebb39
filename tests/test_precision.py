"""precision="bf16": parameters are cast before they are gathered, masters stay float32, gradients are reduced in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.errors import OptionError


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.emb, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.emb.weight
        self.seen: list[torch.dtype] = []

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        y = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        assert isinstance(y, Tensor)
        return self.head(x + y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run(precision: str | None, dp: int, zero: int, recompute: bool = False, steps: int = 30) -> tuple[list[float], Net, Any]:
    torch.manual_seed(0)
    model = Net(recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shardc.compile(train, mesh=shardc.Mesh(dp=dp, simulated=True), zero=zero, precision=precision)
    tokens = torch.randint(64, (8, 16))
    return [step(model, optimizer, tokens).item() for _ in range(steps)], model, step


def test_parameters_cost_half_the_bytes_and_masters_stay() -> None:
    wide, narrow = (run(precision, 4, 3, steps=2)[2].plan.communication for precision in (None, "bf16"))
    assert narrow.bytes_of("parameters") * 2 == wide.bytes_of("parameters")
    assert narrow.bytes_of("gradients") == wide.bytes_of("gradients")  # reduced in float32
    model = run("bf16", 2, 3, steps=1)[1]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_each_parameter_is_updated_as_soon_as_its_gradient_is_final() -> None:
    program = run("bf16", 2, 3, steps=2)[2].plan.stages["schedule"]
    lines = [line for line in str(program).splitlines() if " = shardc.adam(" in line or " = reduce_" in line]
    order = [line.split(" = ")[1].split("(")[0] for line in lines]
    assert order[:4] == ["reduce_scatter", "shardc.adam"] * 2


@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_follows_float32_and_no_plan_changes_it(recompute: bool) -> None:
    reference = run(None, 1, 0)[0]
    for dp, zero in ((1, 0), (2, 3), (3, 1)):
        losses = run("bf16", dp, zero, recompute)[0]
        assert losses[0] == pytest.approx(reference[0], rel=2e-3)
        assert losses[-1] == pytest.approx(reference[-1], rel=0.05)


def test_batch_normalisation_and_recurrent_modules() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)
            self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.norm(self.conv(x)).transpose(1, 2))[0][:, -1])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True), zero=3, precision="bf16")
    losses = [compiled(model, optimizer, torch.ones(4, 4, 9), torch.arange(4) % 3).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert model.norm.running_mean is not None and model.norm.running_mean.dtype == torch.float32


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match="fp8"):
        shardc.compile(train, precision="fp8")
