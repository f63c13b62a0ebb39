"""Static values count by their value, whatever their class: another one is another program."""

from __future__ import annotations

import collections
import enum
import fractions
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_user_optimizers import Net, batches, train
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError
from shardc.testing import check


class Mode(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


class Config:
    def __init__(self, mode: Mode) -> None:
        self.mode = mode


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, how: Any) -> Tensor:
    out: Tensor = model(x)
    if isinstance(how, Config):
        how = how.mode
    if isinstance(how, Mode):
        out = out * 2 if how is Mode.DOUBLE else out * 3
    elif isinstance(how, np.ndarray):
        out = out * torch.from_numpy(how)
    elif isinstance(how, range):
        out = out * len(how)
    elif isinstance(how, slice):
        out = out[:, how]
    elif isinstance(how, fractions.Fraction):
        out = out * float(how)
    elif isinstance(how, collections.deque):
        out = out * sum(how)
    else:
        out = how()(out) if isinstance(how, type) else how(out)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


PAIRS: dict[str, tuple[Any, Any]] = {
    "enum": (Mode.DOUBLE, Mode.TRIPLE),
    "attribute": (Config(Mode.DOUBLE), Config(Mode.TRIPLE)),
    "array": (np.ones(3, np.float32), np.full(3, 2, np.float32)),
    "range": (range(2), range(3)),
    "slice": (slice(0, 1), slice(0, 2)),
    "fraction": (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "deque": (collections.deque([1, 2.0]), collections.deque([1, 3.0])),
    "class": (nn.ReLU, nn.Tanh),
    "builtin": (torch.relu, torch.tanh),
    "operator": (torch.ops.aten.relu, torch.ops.aten.tanh),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_another_value_is_another_variant(kind: str) -> None:
    one, two = PAIRS[kind]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))
    x = batches(1)[0][0]
    for how in (one, two, one):
        torch.testing.assert_close(compiled(model, optimizer, x, how), step(model, optimizer, x, how))
    assert len(compiled.variants) == 2


def test_members_of_an_enum_are_compared_by_identity() -> None:
    """As the parametrization of orthogonal matrices does, to choose how it makes them."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    check(train, make, batches(3), mesh={"dp": 2}, zero=3)


def collecting(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Installs its hooks once, as transformers does to collect the outputs of layers."""
    if not hasattr(model, "hooked"):
        for module in (model.inner, model.outer):
            module.register_forward_hook(collector(0.5))  # type: ignore[operator, union-attr]
        model.hooked = True  # type: ignore[assignment]
    return train(model, optimizer, x, y)


def collector(scale: float) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + scale

    return hook


def adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_hooks_that_a_step_leaves() -> None:
    check(collecting, adam, batches(3), mesh={"dp": 2}, zero=3)
    model, optimizer = adam()
    compiled = shardc.compile(collecting, mesh=shardc.Mesh(dp=2, simulated=True))
    for x, y in batches(3):
        compiled(model, optimizer, x, y)
    assert len(model.inner._forward_hooks) == len(model.outer._forward_hooks) == 1  # type: ignore[arg-type, union-attr]
    assert len(compiled.variants) == 2


def test_a_hook_that_holds_objects_of_the_step_is_refused() -> None:
    def leaving(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        model.inner.register_forward_hook(lambda module, args, output: output + x.mean())  # type: ignore[operator, union-attr]
        return train(model, optimizer, x, y)

    with pytest.raises(CaptureError, match=r"leaves a hook in model\.inner\._forward_hooks that holds objects of the step"):
        shardc.compile(leaving, mesh=shardc.Mesh(dp=2, simulated=True))(*adam(), *batches(1)[0])


def test_tensors_in_defaults_of_a_hook() -> None:
    def make() -> tuple[Any, ...]:
        model, optimizer = adam()
        sums = nn.ParameterList(nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in model.parameters())
        for p, total in zip(model.parameters(), sums, strict=True):

            def hook(p: Any, total: Any = total, *, rate: float = 0.5) -> None:
                with torch.no_grad():
                    total.lerp_(p.grad, rate)
                    p.grad.add_(total, alpha=0.1)

            p.register_post_accumulate_grad_hook(hook)
        return model, sums, optimizer

    def twice(model: nn.Module, sums: nn.ParameterList, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        model(x).abs().mean().backward()
        return train(model, optimizer, x, y)

    check(twice, make, batches(3), mesh={"dp": 3}, zero=3)


def test_a_model_copied_inside_the_step() -> None:
    """Reptile: inner steps on a copy, with an optimizer made for it."""
    import copy

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        inner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            loss = train(inner, optimizer, x, y)
        with torch.no_grad():
            for p, q in zip(model.parameters(), inner.parameters(), strict=True):
                p.lerp_(q, 0.5)
        return loss

    check(step, lambda: (Net(),), batches(3), mesh={"dp": 2}, zero=3)


class Sorted(nn.Module):
    """Experts take their tokens from a sorted batch, cut by the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=3).tolist()
        out = torch.cat([expert(rows) for expert, rows in zip(self.experts, x[order].split(counts), strict=True)])
        back = torch.empty_like(out)
        back[order] = out
        return F.tanh(back * weight[:, None])


def test_bincount_of_known_size() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Sorted()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    check(train, make, batches(3), mesh={"dp": 2}, zero=3)
    compiled = shardc.compile(counting, mesh=shardc.Mesh(dp=2, simulated=True))
    numbers, model = torch.tensor([0, 2, 2, 1]), nn.Linear(1, 1)
    for given in (numbers, numbers + 2, numbers):
        assert compiled(model, given).tolist() == torch.bincount(given, minlength=3).tolist()


def counting(model: nn.Module, numbers: Tensor) -> Tensor:
    return torch.bincount(numbers, minlength=3)
