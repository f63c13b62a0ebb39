"""precision="fp16": the loss is scaled inside the step; one that overflows anywhere changes nothing but the scale."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture.loss_scale import INTERVAL
from shardc.testing import run_ranks

MESHES: list[tuple[dict[str, int], int]] = [({"dp": 3}, 3), ({"dp": 2}, 0)]


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(5, 11), nn.BatchNorm1d(11), nn.Linear(11, 3)
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.norm(self.inner(x)))) + self.offset  # type: ignore[no-any-return]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(x), y) * factor
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def compiled(mesh: dict[str, int], zero: int, fn: Any = train, precision: str | None = "fp16") -> Any:
    return shardc.compile(fn, mesh=shardc.Mesh(mesh, simulated=True), zero=zero, precision=precision)


def batch(k: int, broken: bool = False) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    x, y = torch.randn(7, 5, generator=g), torch.randint(3, (7,), generator=g)
    if broken:
        x[6, 2] = 1e30  # infinite in float16: one row, of the last rank
    return x, y


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize(("mesh", "zero"), MESHES, ids=str)
def test_an_overflow_on_one_rank_changes_nothing_but_the_scale(mesh: dict[str, int], zero: int) -> None:
    """Also in the very first step, which would create the optimizer's state. Good steps follow float32."""
    step, (model, optimizer) = compiled(mesh, zero), make()
    reference, wide = make(), compiled(mesh, zero, precision=None)
    expected = 65536.0
    for k in range(7):
        broken = k in (0, 4, 5)
        before = state(model, optimizer)
        loss, norm = step(model, optimizer, *batch(k, broken))
        assert same(before, state(model, optimizer)) == broken
        if broken:
            expected /= 2
            assert not loss.isfinite()
        else:
            exact = wide(*reference, *batch(k))
            assert torch.allclose(torch.stack([loss, norm]), torch.stack(exact), rtol=0.02)
        assert step.loss_scale == expected
    assert len(step.variants) == 4  # with and without overflow, without and with optimizer state
    assert optimizer.state[model.offset]["step"] == 4  # type: ignore[index]


def test_small_gradients_are_not_lost_and_their_norm_is_true() -> None:
    """A loss of 1e-7: its gradients are below the smallest float16, and there are as many as in float32."""
    norms = []
    for precision in ("fp16", None):
        step, (model, optimizer) = compiled({"dp": 2}, 3, precision=precision), make()
        norms.append(step(model, optimizer, *batch(0), 1e-7)[1].item())
        moments = [optimizer.state[p.weight]["exp_avg"] for p in (model.inner, model.outer)]  # type: ignore[index, union-attr]
        assert all((m != 0).float().mean() > 0.9 for m in moments)
    assert 0 < norms[1] < 1e-7 and norms[0] == pytest.approx(norms[1], rel=0.01)


def test_the_scale_grows_after_good_steps_and_is_saved(tmp_path: Path) -> None:
    step, (model, optimizer) = compiled({"dp": 2}, 1), make()
    assert step.loss_scale == 65536.0 and compiled({"dp": 2}, 1, precision="bf16").loss_scale is None
    step(model, optimizer, *batch(0, broken=True))
    step(model, optimizer, *batch(1))
    step.fn.loss_scale.good_steps.fill_(INTERVAL - 1)
    step(model, optimizer, *batch(2))
    assert step.loss_scale == 65536.0 and step.fn.loss_scale.good_steps == 0
    step(model, optimizer, *batch(3, broken=True))
    step(model, optimizer, *batch(4))
    shardc.save(tmp_path / "c", step)
    again, others = compiled({"dp": 3}, 3), make()
    shardc.load(tmp_path / "c", again)
    got, want = again(*others, *batch(5)), step(model, optimizer, *batch(5))
    assert again.loss_scale == 32768.0 and again.fn.loss_scale.good_steps == 2
    assert torch.allclose(torch.stack(got), torch.stack(want), rtol=0.01)


def test_hooks_and_further_gradients_are_true() -> None:
    """What a user's hook, `torch.autograd.grad` and a second backward give does not have the scale in it."""

    def step(model: nn.Module, weight: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        seen: list[Tensor] = []
        handle = weight.weight.register_hook(lambda g: seen.append(g.clone()))  # type: ignore[operator, union-attr]
        h = weight(x)
        loss = model(h).square().mean()
        inner = torch.autograd.grad(loss, [h, model.weight], retain_graph=True)  # type: ignore[list-item]
        loss.backward(torch.tensor(2.0))
        torch.autograd.backward([loss.detach() * model.bias.sum()])  # type: ignore[operator, union-attr]
        handle.remove()
        grads = [p.grad.clone() for m in (model, weight) for p in m.parameters() if p.grad is not None]
        model.zero_grad(), weight.zero_grad()
        return (*inner, seen[0], *grads)

    torch.manual_seed(0)
    modules, x = (nn.Linear(11, 3), nn.Linear(5, 11)), torch.randn(6, 5)
    scaled, plain = (compiled({"dp": 2}, 1, step, p) for p in ("fp16", None))
    scaled.fn.loss_scale.scale.fill_(256.0)
    for got, want in zip(scaled(*modules, x), plain(*modules, x), strict=True):
        assert (got - want).norm() < 0.01 * want.norm()


def test_planned_as_a_step_that_does_not_overflow() -> None:
    with torch.device("meta"):
        step, arguments = compiled({"dp": 4}, 3), make()
    plan = step.lower(*arguments, *batch(0))
    assert plan.slots["shardc.loss_scale.scale"].type.shape == () and any("exp_avg" in path for path in plan.slots)
    assert step.loss_scale == 65536.0


def _rank(unused: int) -> tuple[list[bool], float | None]:
    model, optimizer = make()
    step = shardc.compile(train, mesh={"dp": 2}, zero=3, precision="fp16")
    moved = []
    for k, broken in enumerate((True, False, True, False)):
        x, y = batch(k, broken)
        part = slice(0, 4) if os.environ["RANK"] == "0" else slice(4, 7)
        before = [p.to_local().clone() if hasattr(p, "to_local") else p.detach().clone() for p in model.parameters()]
        step(model, optimizer, x[part], y[part])
        after = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        moved.append(k > 0 and not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return moved, step.loss_scale


@pytest.mark.long
def test_in_processes() -> None:
    for moved, scale in run_ranks(2, _rank, 0):
        assert moved == [False, True, False, True] and scale == 16384.0
