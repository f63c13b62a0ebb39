"""Plans of real steps, from capture to printout: what is predicted is what a run measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardc
from shardc import P
from shardc.plan import Plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(23, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        self.seen += tokens.numel()
        return x @ self.table.weight.t()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(0, 23, (7, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), tokens, tokens.roll(1, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 1}, "zero": 0},
        {"mesh": {"dp": 2}, "zero": 0},
        {"mesh": {"dp": 3}, "zero": 1},
        {"mesh": {"dp": 3}, "zero": 3},
        {"mesh": {"dp": 2, "tp": 2}, "zero": 3, "params": {"*.up.*": P("tp"), "*.down.weight": P(None, "tp")}},
    ],
    ids=str,
)
def test_predicted_is_measured(options: dict[str, Any], tmp_path: Any) -> None:
    mesh = shardc.Mesh(options["mesh"], simulated=True)
    run = shardc.compile(step, **{**options, "mesh": mesh})
    args = make()
    for _ in range(2):
        run(*args)
    plan = run.plan
    assert run.stats.peak_bytes == plan.memory.peak_bytes
    assert run.stats.comm_bytes == plan.communication.bytes_per_rank
    assert run.stats.collectives == plan.communication.collectives
    assert sum(plan.memory.by_category.values()) == plan.memory.peak_bytes
    n, p = options["mesh"]["dp"], sum(t.numel() * 4 for t in args[0].parameters())
    if len(options["mesh"]) == 1:  # the bound on parameter traffic
        factor = 3 if options["zero"] == 3 else 2
        assert plan.communication.bytes_of("parameters", "gradients") <= factor * p * (n - 1) / n * 1.02
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.instructions == plan.instructions and str(again) == str(plan) and again.hash == plan.hash
    for path in plan.slots:
        assert again.explain(path) == plan.explain(path)


def test_every_layer_is_folded_and_named() -> None:
    run = shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True), zero=3)
    plan = run.lower(*make())
    text = str(plan)
    assert "model.blocks.{0..2}.up.weight" in text and "optimizer.state[{0..18}].step" in text
    assert len(text.splitlines()) < 50
    assert max(map(len, text.splitlines())) < 160
    assert plan.memory.peak_at.line.startswith("test_plan_models.py:")
    up = plan.explain("model.blocks.1.up.weight")
    assert up.count("all_gather@dp") == 2 and up.count("reduce_scatter@dp") == 1 and "written in place" in up
