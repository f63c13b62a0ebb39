"""recompute: the same result, with less memory for activations; random numbers and buffers as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import shardc
from shardc.errors import OptionError
from shardc.testing import check


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = shardc.save_name(x + self.dropout(self.out(a)), "attn_out")
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(31, width), nn.Linear(width, 31)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state(**sizes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(**sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def tokens(rows: int = 5, length: int = 6) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(1))


POLICIES = ["full", {"save": ["attn_out"]}]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("dp", "zero", "microbatches"), [(1, 0, 1), (2, 3, 1), (3, 1, 1), (2, 3, 2)])
def test_the_result_is_the_same(policy: Any, dp: int, zero: int, microbatches: int) -> None:
    options = {"mesh": {"dp": dp}, "zero": zero, "microbatches": microbatches, "recompute": policy}
    check(train, state, [(tokens(),)] * 2, **options)


def test_batch_statistics_are_updated_once() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batch = torch.randn(5, 6), torch.randint(3, (5,))
    check(step, make, [batch] * 2, mesh={"dp": 2}, zero=3, recompute="full")


def plan(recompute: Any, layers: int, zero: int = 3) -> shardc.Plan:
    model, optimizer = state(width=32, layers=layers, dropout=0.0)
    step = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True), zero=zero, recompute=recompute)
    found = step.lower(model, optimizer, tokens(32, 32))
    assert isinstance(found, shardc.Plan)
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_layer_costs_its_waists_only(policy: Any) -> None:
    def layer(recompute: Any) -> int:
        return plan(recompute, 6).memory.peak_bytes - plan(recompute, 3).memory.peak_bytes

    assert layer(policy) < 0.35 * layer(None)


def test_gathers_and_reductions_stay_what_they_are() -> None:
    without, with_ = plan(None, 3).communication, plan("full", 3).communication
    assert with_.bytes_of("gradients") == without.bytes_of("gradients")
    more = with_.bytes_of("parameters") - without.bytes_of("parameters")
    assert 0 <= more <= 0.05 * without.bytes_of("parameters")  # the biases, which the backward reads only to recompute


def test_names_and_values_that_do_not_exist() -> None:
    with pytest.raises(OptionError, match="no value has that name"):
        plan({"save": ["attention"]}, 1)
    with pytest.raises(OptionError, match="auto"):
        shardc.compile(train, recompute="some")
