"""A training program with dropout, batch statistics, a scheduler and a tensor list, for tests of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


class Net(nn.Module):
    """Odd sizes; a tied pair, a scalar, a fused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9, bias=False)
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = F.dropout(F.gelu(self.norm(self.up(self.embed(x)))), 0.3, self.training)
        return self.head(self.down(h) * self.scale)  # type: ignore[no-any-return]


def train(model: Net, optimizer: Any, schedule: Any, average: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    with torch.no_grad():
        for a, p in zip(average, model.parameters(), strict=True):
            a.lerp_(p, 0.1)
    return loss.detach()


def state(seed: int = 0) -> tuple[Net, torch.optim.Optimizer, Any, list[Tensor]]:
    torch.manual_seed(seed)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
    return model, optimizer, schedule, [p.detach().clone().requires_grad_() for p in model.parameters()]


def batch(i: int, part: bool = False) -> tuple[Tensor, Tensor]:
    """The global batch of step i; with `part` this rank's rows."""
    g = torch.Generator().manual_seed(100 + i)
    x, y = torch.randint(11, (7,), generator=g), torch.randint(11, (7,), generator=g)
    if not part:
        return x, y
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return x.tensor_split(world)[rank], y.tensor_split(world)[rank]


def compiled(n: int, zero: int, rng: str = "counter", processes: bool = False) -> shardc.CompiledStep:
    mesh: Any = {"dp": n} if processes else shardc.Mesh(dp=n, simulated=n > 1)
    return shardc.compile(train, mesh=mesh, zero=zero, rng=rng)  # type: ignore[no-any-return]


def trained(n: int, zero: int, steps: range, folder: Path | None, rng: str = "counter", seed: int = 0,
            processes: bool = False, save: Path | None = None) -> tuple[list[float], dict[str, Any]]:  # fmt: skip
    """Losses of steps, from a fresh state or (`folder`) a checkpoint; and the whole state then, which `save` gets."""
    step, arguments = compiled(n, zero, rng, processes), state(seed)
    if folder is not None:
        assert shardc.load(folder, step) == steps.start
    losses = [step(*arguments, *batch(i, processes)).item() for i in steps]
    if save is not None:
        shardc.save(save, step)
    full = step.full_state_dict()
    full["calls"], full["average"] = arguments[0].calls, [whole(t) for t in arguments[3]]
    return losses, full


def whole(t: Tensor) -> Tensor:
    from shardc.runtime.whole import whole as gathered

    return gathered(t)


def same(a: Any, b: Any, exact: bool, path: str = "") -> None:
    """Equal trees; floating point within 1e-10 unless exact."""
    if isinstance(a, Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, path
        if exact:
            assert torch.equal(a, b), path
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m: f"{path}: {m}")
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for k in a:
            same(a[k], b[k], exact, f"{path}.{k}")
    elif isinstance(a, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, exact, f"{path}[{i}]")
    elif isinstance(a, float) and not exact:
        assert abs(a - b) <= 1e-10 * max(1.0, abs(b)), (path, a, b)
    else:
        assert a == b, (path, a, b)
