"""Collectives by bytes and counts: parameters are gathered once for each phase that reads them, gradients reduced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import shardc

DP = (2, 4, 8)
STAGES = (0, 1, 2, 3)


class Model(nn.Module):
    """An embedding, two blocks with norms and biases, and a head that may be tied or frozen."""

    def __init__(self, tied: bool = False, lora: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        if lora:
            self.requires_grad_(False)
            self.a, self.b = nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False)
        self.lora = lora

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        h = self.down(F.gelu(self.up(self.norm(x))))
        if self.lora:
            h = h + self.b(self.a(x))
        return self.head(x + h)


def step(clip: bool) -> Callable[..., Any]:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def plan_of(model: nn.Module, dp: int, zero: int, clip: bool = False) -> shardc.Plan:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    compiled = shardc.compile(step(clip), mesh=shardc.Mesh(dp=dp, simulated=True), zero=zero)
    plan = compiled.lower(model, optimizer, torch.zeros(16, 8, dtype=torch.int64))
    assert isinstance(plan, shardc.Plan)
    return plan


def parameters(model: nn.Module) -> Iterator[tuple[str, int, bool, bool]]:
    """(name, bytes, read in the backward, trained) of each distinct parameter."""
    unread = {"wte.weight", "up.bias", "down.bias", "norm.bias"}  # the derivative of a sum or a lookup needs no operand
    for name, p in model.named_parameters():
        tied = name == "wte.weight" and getattr(model.head, "weight", None) is p
        yield name, p.numel() * p.element_size(), name not in unread or tied, p.requires_grad


def ideal(model: nn.Module, dp: int, zero: int) -> float:
    """The least there is: per slot a gather for each phase that reads it, and one reduction; ring convention."""
    share, total = (dp - 1) / dp, 0.0
    for _, nbytes, backward, trained in parameters(model):
        gathers = 1 + backward if zero == 3 else 0
        reductions = (2 if zero == 0 else 1) if trained else 0
        updates = 1 if zero in (1, 2) and trained else 0
        total += (gathers + reductions + updates) * nbytes * share
    return total


def traffic(plan: shardc.Plan) -> int:
    return sum(row.bytes for row in plan.communication if row.group in ("parameters", "gradients"))


@pytest.mark.parametrize("kind", ["plain", "clip", "tied"])
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("dp", DP)
def test_parameter_traffic_is_the_sum_over_phases(dp: int, zero: int, kind: str) -> None:
    model = Model(tied=kind == "tied")
    plan = plan_of(model, dp, zero, clip=kind == "clip")
    assert traffic(plan) == pytest.approx(ideal(model, dp, zero), rel=0.02)


@pytest.mark.parametrize("zero", STAGES)
def test_each_gradient_is_reduced_once(zero: int) -> None:
    model = Model(tied=True)
    plan = plan_of(model, 4, zero)
    reductions = sum(row.count for row in plan.communication if row.group == "gradients")
    assert reductions == len(list(model.parameters()))


@pytest.mark.parametrize("dp", DP)
def test_frozen_parameters_are_gathered_and_never_reduced(dp: int) -> None:
    model = Model(lora=True)
    plan = plan_of(model, dp, 3)
    reduced = sum(row.bytes for row in plan.communication if row.group == "gradients")
    trained = sum(p.numel() * 4 for p in (model.a.weight, model.b.weight))
    assert reduced == trained * (dp - 1) // dp
    assert not any(path.startswith("model.up.weight.grad") or "optimizer.state[2]" in path for path in plan.slots)
    gathered = sum(row.bytes for row in plan.communication if row.group == "parameters" and row.phase == "forward")
    assert gathered == sum(p.numel() * 4 for p in model.parameters()) * (dp - 1) // dp
    again = sum(row.bytes for row in plan.communication if row.group == "parameters" and row.phase == "backward")
    assert again == sum(p.numel() * 4 for p in (model.head.weight, model.b.weight)) * (dp - 1) // dp


@pytest.mark.parametrize("zero", STAGES)
def test_clipping_by_the_global_norm_reduces_one_number(zero: int) -> None:
    plain, clipped = (plan_of(Model(), 4, zero, clip) for clip in (False, True))
    extra = clipped.communication.collectives - plain.communication.collectives
    assert extra == (0 if zero == 0 else 1)  # at stage 0 all ranks hold whole gradients
    assert clipped.communication.bytes_per_rank - plain.communication.bytes_per_rank == (6 if zero else 0)


def test_gradients_of_activations_are_not_gradients_of_parameters() -> None:
    """Over tp alone every value of the backward is whole once it is reduced; it is still an activation's."""
    params = {"*up.weight": shardc.P("tp", None), "*up.bias": shardc.P("tp"), "*down.weight": shardc.P(None, "tp")}
    model = Model()
    compiled = shardc.compile(step(False), mesh=shardc.Mesh(dp=1, tp=4, simulated=True), params=params)
    plan = compiled.lower(model, torch.optim.AdamW(model.parameters()), torch.zeros(16, 8, dtype=torch.int64))
    assert [(row.group, row.phase, row.count) for row in plan.communication] == [
        ("activations", "forward", 1), ("activations", "backward", 1),
    ]  # fmt: skip


class Sliced(nn.Module):
    """An embedding and one weight of 64 rows, used in two slices."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.wte, self.rows = nn.Embedding(64, 32), rows
        self.weight = nn.Parameter(torch.randn(64, 32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        up, down = self.weight[: self.rows], self.weight[self.rows : 2 * self.rows]
        return torch.cat([F.linear(x, up).tanh(), F.linear(x, down)], -1)


@pytest.mark.parametrize(
    ("zero", "rows", "kinds"),
    [
        (3, 32, ["reduce_scatter"] * 2),  # of the embedding and of the weight
        (3, 16, ["reduce_scatter"] * 2),  # half of the rows: scattering all sends as much as reducing these for every rank
        (3, 4, ["all_reduce"] * 2 + ["reduce_scatter"]),
        (0, 32, ["all_reduce"] * 2),
        (0, 16, ["all_reduce"] * 3),
    ],
)
def test_parts_of_a_gradient_are_reduced_together_where_that_sends_no_more(zero: int, rows: int, kinds: list[str]) -> None:
    plan = plan_of(Sliced(rows), 2, zero)
    found = [r.kind for r in plan.communication if r.group == "gradients" for _ in range(r.count)]
    assert sorted(found) == kinds
