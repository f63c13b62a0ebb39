"""State through compiled steps on two real ranks: shared by an evaluation step, loaded, saved, changed, refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import ShardcError
from shardc.runtime.whole import whole
from shardc.testing.processes import run_ranks


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.up = nn.Linear(6, 9, bias=False)  # a bias before batch statistics has gradient zero: Adam would step on noise
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 6)
        self.head = nn.Linear(6, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(F.gelu(self.norm(self.up(self.embed(x))))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_keeping_grads(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def make(seed: int = 0) -> tuple[Tiny, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tiny().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 + i)
    return torch.randint(17, (7,), generator=g), torch.randint(17, (7,), generator=g)


def mine(t: Tensor) -> Tensor:
    """This rank's rows: 5 and 2 of 7, not as torch.chunk would cut them."""
    return t[:5] if os.environ["RANK"] == "0" else t[5:]


def close(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, Tensor):
        assert type(a) is type(b) is Tensor, path
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m: f"{path}: {m}")
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for k in a:
            close(a[k], b[k], f"{path}.{k}")
    elif isinstance(a, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, f"{path}[{i}]")
    else:
        assert a == b, (path, a, b)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _a_run(zero: int, folder: str) -> None:
    model, optimizer = make()
    plain, plain_optimizer = make()
    step = shardc.compile(train, mesh={"dp": -1}, zero=zero)
    show = shardc.compile(evaluate, mesh={"dp": -1}, zero=zero)

    def both(i: int) -> None:
        x, y = batch(i)
        close(step(model, optimizer, mine(x), mine(y)), train(plain, plain_optimizer, x, y), f"loss {i}")

    both(0), both(1)
    close(step.full_state_dict(), _states(plain, plain_optimizer))
    assert isinstance(model.up.weight, DTensor) and model.head.weight is model.embed.weight
    assert all(p.grad is None for p in model.parameters())
    if zero == 3:
        held = sum(p.to_local().numel() for p in model.parameters())
        total = sum(p.numel() for p in plain.parameters())
        assert held <= total // 2 + 30, (held, total)

    # a second function shares the state as it lies; results come back as this rank's rows
    model.eval(), plain.eval()
    x, _ = batch(9)
    close(show(model, mine(x)), mine(evaluate(plain, x)))
    with shardc.gathered(model):
        close(model(x).detach(), plain(x).detach())
    model.train(), plain.train()
    both(2)

    # save, go on, load: whole state dicts and distributed checkpoints
    full = copy.deepcopy(step.full_state_dict())
    dcp.save(_states(model, optimizer), checkpoint_id=folder)
    expected = copy.deepcopy(_states(plain, plain_optimizer))
    both(3)
    model.load_state_dict(full["model"])
    optimizer.load_state_dict(copy.deepcopy(full["optimizer"]))
    plain.load_state_dict(expected["model"])
    plain_optimizer.load_state_dict(copy.deepcopy(expected["optimizer"]))
    both(4)
    target = _states(model, optimizer)
    dcp.load(target, checkpoint_id=folder)
    optimizer.load_state_dict(target["optimizer"])
    plain.load_state_dict(expected["model"])
    plain_optimizer.load_state_dict(copy.deepcopy(expected["optimizer"]))
    model.norm.load_state_dict({k.removeprefix("norm."): v for k, v in full["model"].items() if k.startswith("norm.")})
    both(5)
    close(step.full_state_dict(), _states(plain, plain_optimizer))
    with torch.no_grad():  # a change in place is the user's right
        model.down.bias.zero_(), plain.down.bias.zero_()
    optimizer.param_groups[0]["lr"] = plain_optimizer.param_groups[0]["lr"] = 0.5
    both(6)
    close(step.full_state_dict(), _states(plain, plain_optimizer))
    assert len(step.variants) == 2, [v.reason for v in step.variants]

    # gradients that survive are sharded state
    keeping = shardc.compile(train_keeping_grads, mesh={"dp": -1}, zero=zero)
    for i in (7, 8):
        x, y = batch(i)
        close(keeping(model, optimizer, mine(x), mine(y)), train_keeping_grads(plain, plain_optimizer, x, y))
    assert isinstance(model.up.weight.grad, DTensor) and model.up.weight.grad.placements == model.up.weight.placements
    close(whole(model.up.weight.grad), plain.up.weight.grad)


@pytest.mark.processes
@pytest.mark.parametrize("zero", [0, 3])
def test_state_lives_through_steps_evaluation_and_loading(zero: int, tmp_path: Path) -> None:
    run_ranks(2, _a_run, zero, str(tmp_path / "ckpt"), timeout=300)


@dataclasses.dataclass
class Change:
    """What the user does between two steps, and the message that follows."""

    do: Callable[[Tiny, torch.optim.Optimizer], object]
    message: str


def _replaced(model: Tiny, optimizer: torch.optim.Optimizer) -> None:
    model.up.weight = nn.Parameter(torch.zeros(9, 6, dtype=torch.float64))


def _wrong_state(model: Tiny, optimizer: torch.optim.Optimizer) -> None:
    other = copy.deepcopy(optimizer.state_dict())
    other["state"][0]["exp_avg"] = torch.zeros(3, 3, dtype=torch.float64)
    optimizer.load_state_dict(other)


CHANGES = [
    Change(_replaced, "model.up.weight was replaced"),
    Change(lambda m, o: m.float(), "was retyped from torch.float64 to torch.float32"),
    Change(_wrong_state, "optimizer.state[0].exp_avg has shape [3, 3]"),
]


def _different(kind: str, rank: int) -> None:
    model, optimizer = make()
    function = train_keeping_grads if kind == "code" and rank == 1 else train
    step = shardc.compile(function, mesh={"dp": -1}, zero=rank if kind == "options" else 1)
    x, y = batch(0)
    step(model, optimizer, mine(x.int() if kind == "dtypes" and rank == 1 else x), mine(y))


def _refusals() -> list[str]:
    out = []

    def attempt(f: Callable[[], object]) -> None:
        try:
            f()
        except ShardcError as error:
            out.append(f"{type(error).__name__}: {error}")
        else:
            out.append("no error")

    for change in CHANGES:
        model, optimizer = make()
        step = shardc.compile(train, mesh={"dp": -1}, zero=3)
        x, y = map(mine, batch(0))
        step(model, optimizer, x, y)
        change.do(model, optimizer)
        attempt(functools.partial(step, model, optimizer, x, y))
    for kind in ("code", "dtypes", "options"):  # all ranks stop before the first collective, and can go on with other work
        attempt(functools.partial(_different, kind, int(os.environ["RANK"])))
    return out


@pytest.mark.processes
def test_changed_state_and_ranks_that_differ_are_refused_on_all_ranks() -> None:
    for messages in run_ranks(2, _refusals, timeout=200):
        assert len(messages) == len(CHANGES) + 3
        for change, message in zip(CHANGES, messages, strict=False):
            assert message.startswith("StateError") and change.message in message
        for message in messages[len(CHANGES) :]:
            assert message.startswith("AgreementError") and "rank 1" in message and "rank 0" in message
