"""Models that are sharded from the start have the very values of one device, whatever their initialisation does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import AgreementError, StateError
from shardc.runtime.deferred import Recorder
from shardc.runtime.whole import full_state_dict
from shardc.testing.processes import RankFailure, run_ranks


class Odd(nn.Module):
    """Every way of initialising that people write."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, padding_idx=2)
        self.rnn = nn.LSTM(6, 5)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.BatchNorm1d(6)
        self.mix = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 3)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.register_buffer("angles", torch.arange(6) / 6.0)
        self.register_buffer("tied", self.mix.weight.detach()[:2])
        nn.init.orthogonal_(self.mix.weight, gain=0.7)
        nn.init.trunc_normal_(self.frozen.weight, std=0.5)
        nn.init.sparse_(self.rnn.weight_hh_l0, 0.3)
        with torch.no_grad():
            self.frozen.bias.copy_(self.mix.weight.sum(1)[:3] * 2)  # derived from another parameter
            self.mix.bias[1::2] = 3.0
            draw = torch.randn(7)
            while bool((draw.abs() > 1).any()):  # a sampler that rejects
                draw = torch.where(draw.abs() > 1, torch.randn(7), draw)
            self.mix.bias += draw
            self.rnn.bias_ih_l0[5:10].fill_(math.sqrt(2))
            self.attention.out_proj.weight.mul_(torch.linalg.vector_norm(self.attention.out_proj.weight).item())
            self.scale.data = torch.bernoulli(torch.tensor(0.5)) + torch.rand(())
            keep = torch.randperm(13, generator=torch.Generator().manual_seed(4))[:5]
            self.embed.weight[keep] = torch.poisson(self.embed.weight[keep].abs() * 5)
        for p in self.frozen.parameters():
            p.requires_grad_(False)
        self.teacher = copy.deepcopy(self.mix)
        self.mix.weight.note = "mine"  # type: ignore[attr-defined]
        self.apply(self.again)

    @staticmethod
    def again(module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            nn.init.xavier_normal_(module.in_proj_weight)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def plain(make: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(3)
    model = make()
    return {k: v.detach() for k, v in model.state_dict().items()}, torch.get_rng_state()


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, t in want.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), name


@pytest.mark.parametrize("make", [Odd, mlp])
def test_one_process(make: Callable[[], nn.Module]) -> None:
    want, after = plain(make)
    torch.manual_seed(3)
    model = shardc.init(make, mesh=shardc.Mesh(dp=3, simulated=True), zero=3)
    compare({k: v.detach() for k, v in model.state_dict().items()}, want)
    assert torch.equal(after, torch.get_rng_state())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    if isinstance(model, Odd):
        assert model.head.weight is model.embed.weight and model.mix.weight.note == "mine"
        assert not model.frozen.weight.requires_grad and model.mix.weight.requires_grad
        assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0


def test_values_are_made_from_few_operators() -> None:
    with Recorder() as recorder:
        first, second = nn.Linear(50, 40), nn.Linear(40, 30)
        nn.init.normal_(second.weight)
    assert len(recorder._slice(recorder_storage(second.weight))) <= 3, "the uniform draw that normal_ replaced is left out"
    del first


def recorder_storage(t: Tensor) -> int:
    from shardc import _torch

    return _torch.storage_id(t)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _rank(zero: int) -> tuple[dict[str, Tensor], float, float, int, bool]:
    step = shardc.compile(train, mesh={"dp": -1}, zero=zero)
    torch.manual_seed(3)
    odd = shardc.init(Odd, step)
    full = {k: v.clone() for k, v in full_state_dict({"m": odd})["m"].items()}
    torch.manual_seed(3)
    model = shardc.init(mlp, step)
    loss = step(model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.ones(3, 5, dtype=torch.float64))
    torch.manual_seed(3)
    other = mlp()
    twin = shardc.compile(train, mesh={"dp": -1}, zero=zero)
    same = twin(other, torch.optim.AdamW(other.parameters(), lr=0.1), torch.ones(3, 5, dtype=torch.float64))
    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    return full, loss.item(), same.item(), held, isinstance(odd.mix.weight, DTensor)


@pytest.mark.processes
def test_two_ranks() -> None:
    want, _ = plain(Odd)
    ranks = run_ranks(2, _rank, 3)
    for full, loss, same, _, sharded in ranks:
        compare(full, want)
        assert loss == same and sharded
    assert ranks[0][3] + ranks[1][3] == sum(p.numel() for p in mlp().parameters())


def _other_seeds() -> None:
    import os

    torch.manual_seed(int(os.environ["RANK"]))
    shardc.init(mlp, mesh={"dp": 2})


@pytest.mark.processes
def test_ranks_of_other_seeds_are_refused() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, _other_seeds)
    assert all(isinstance(o.error, AgreementError) for o in caught.value.outcomes)


def test_refusals() -> None:
    with pytest.raises(StateError, match="not a module"):
        shardc.init(lambda: 3)  # type: ignore[type-var, return-value, arg-type]
    step = shardc.compile(train)
    with pytest.raises(StateError, match="not both"):
        shardc.init(mlp, step, zero=3)
    assert F is not None
