"""Optimizers that people write themselves give what they give on one device: signs, trust ratios, whole matrices, SAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.testing import check_all

POINTS: list[dict[str, Any]] = [{"mesh": {"dp": 3}, "zero": 3}, {"mesh": {"dp": 2}, "zero": 1}]
ALL: list[dict[str, Any]] = [{"mesh": {"dp": dp}, "zero": zero} for dp in (2, 3, 4) for zero in range(4)]


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(5, 11), nn.LayerNorm(11), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.norm(self.inner(x))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(count: int = 4, rows: int = 7) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, 5, generator=g), torch.randn(rows, 3, generator=g)) for _ in range(count)]


class Each(torch.optim.Optimizer):
    """An optimizer whose update is a function of (parameter, its state, its group)."""

    def __init__(self, params: Any, update: Callable[[Any, dict[str, Any], dict[str, Any]], None], **numbers: Any) -> None:
        super().__init__(params, numbers)
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)


def lion(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["exp_avg"] = torch.zeros_like(p)
    (b1, b2), m = group["betas"], state["exp_avg"]
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_((m * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
    m.lerp_(p.grad, 1 - b2)


def lamb(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    b1, b2 = group["betas"]
    state["step"] += 1
    state["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
    state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
    corrected = state["v"] / (1 - b2 ** state["step"])
    update = state["m"] / (1 - b1 ** state["step"]) / (corrected.sqrt() + 1e-6) + 0.01 * p
    weight, size = p.norm(), update.norm()
    p.sub_(group["lr"] * torch.where((weight > 0) & (size > 0), weight / size, torch.ones_like(size)) * update)


def lars(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The trust ratio by an `if` on values."""
    weight, size = torch.norm(p), torch.norm(p.grad)
    rate = 0.02 * weight / (size + 1e-8) if weight > 0 and size > 0 else 1.0
    momentum = state.setdefault("momentum", torch.zeros_like(p))
    momentum.mul_(group["momentum"]).add_(p.grad * rate * group["lr"])
    p.add_(-momentum)


def shampoo(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Inverse roots of whole matrices, renewed at every second step."""
    if p.dim() != 2:
        p.add_(p.grad, alpha=-group["lr"])
        return
    if not state:
        state["k"] = 0
        for name, n in (("left", p.shape[0]), ("right", p.shape[1])):
            state[name], state[f"{name}_root"] = torch.eye(n, dtype=p.dtype), torch.eye(n, dtype=p.dtype)
    state["left"].mul_(0.9).addmm_(p.grad, p.grad.T)
    state["right"].mul_(0.9).addmm_(p.grad.T, p.grad)
    if state["k"] % 2 == 0:
        for name in ("left", "right"):
            values, vectors = torch.linalg.eigh(state[name])
            state[f"{name}_root"].copy_(vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T)
    state["k"] += 1
    p.add_(state["left_root"] @ p.grad @ state["right_root"], alpha=-group["lr"])


def adan(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Keeps the gradient of the step before."""
    if not state:
        state.update(before=p.grad.clone(), m=torch.zeros_like(p), d=torch.zeros_like(p), n=torch.zeros_like(p))
    b1, b2, b3 = group["betas"]
    change = p.grad - state["before"]
    state["m"].lerp_(p.grad, 1 - b1)
    state["d"].lerp_(change, 1 - b2)
    ahead = p.grad + b2 * change
    state["n"].mul_(b3).addcmul_(ahead, ahead, value=1 - b3)
    p.sub_(group["lr"] * (state["m"] + b2 * state["d"]) / (state["n"].sqrt() + 1e-8))
    state["before"].copy_(p.grad)


def factored(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Second moments by rows and columns, the update clipped to unit size."""
    square = p.grad.square() + 1e-30
    if p.dim() < 2:
        update = p.grad / state.setdefault("v", torch.zeros_like(p)).lerp_(square, 0.1).sqrt()
    else:
        rows = state.setdefault("rows", p.new_zeros(p.shape[0])).lerp_(square.mean(1), 0.1)
        columns = state.setdefault("columns", p.new_zeros(p.shape[1])).lerp_(square.mean(0), 0.1)
        update = p.grad * (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()
    p.sub_(update / update.pow(2).mean().sqrt().clamp(min=1.0), alpha=group["lr"])


class Centralised(torch.optim.SGD):
    """Edits gradients, then does what torch's does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        return super().step(closure)


class Lookahead:
    """No `Optimizer`: holds one, slow weights in lists, and a counter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]

    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
                    for p, q in zip(group["params"], slow, strict=True):
                        q.add_(p - q, alpha=0.5)
                        p.copy_(q)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def each(update: Callable[..., None], **numbers: Any) -> Callable[[Any], Any]:
    return lambda params: Each(params, update, **{"lr": 0.01, **numbers})


CASES: dict[str, Callable[[Any], Any]] = {
    "lion": each(lion, betas=(0.9, 0.99), weight_decay=0.1),
    "lamb": each(lamb, betas=(0.9, 0.99)),
    "lars": each(lars, lr=0.1, momentum=0.9),
    "shampoo": each(shampoo, lr=0.05),
    "adan": each(adan, betas=(0.98, 0.92, 0.99)),
    "factored": each(factored),
    "centralised": lambda params: Centralised(params, lr=0.1, momentum=0.9),
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=0.01)),
}


def made(case: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
    model = Net()
    return model, case(model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(name: str) -> None:
    reports = check_all(train, lambda: made(CASES[name]), batches(), [POINTS[len(name) % 2]])
    assert not reports[0].rounded


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_equal_at_every_stage(name: str) -> None:
    assert not [r for report in check_all(train, lambda: made(CASES[name]), batches(), ALL) for r in report.rounded]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer, with whose groups it works."""

    def __init__(self, params: Any, base: Any, rho: float, **numbers: Any) -> None:
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups, **numbers)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        every = [(p, group["rho"]) for group in self.param_groups for p in group["params"]]
        norm = torch.norm(torch.stack([p.grad.norm() for p, _ in every]))
        for p, rho in every:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (rho / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()


def test_sam_shares_the_groups_of_the_optimizer_inside() -> None:
    def step(model: nn.Module, optimizer: Sam, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.climb()
        F.mse_loss(model(x), y).backward()
        optimizer.descend()
        for group in optimizer.base.param_groups:
            group["lr"] *= 0.9  # of both
        return loss

    def make() -> tuple[nn.Module, Any]:
        return made(lambda params: Sam(params, torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9))

    check_all(step, make, batches(), POINTS)
