"""microbatches: the gradient of the whole batch, whatever normalises the loss; less memory; reductions where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import shardc
from shardc.errors import OptionError, PlanError
from shardc.testing import check

Loss = Callable[[Tensor, Tensor], Tensor]


def masked_mean(logits: Tensor, y: Tensor) -> Tensor:
    mask = y != 1
    return (F.cross_entropy(logits, y, reduction="none") * mask).sum() / mask.sum()


LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "ignore_index": lambda logits, y: F.cross_entropy(logits, y, ignore_index=1),
    "masked": masked_mean,
    "sum": lambda logits, y: F.cross_entropy(logits, y, reduction="sum"),
    "weights": lambda logits, y: F.cross_entropy(logits, y, weight=torch.tensor([1.0, 2.0, 0.5], dtype=logits.dtype)),
}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))))


def step_of(loss_of: Loss, clip: bool = False) -> Callable[..., Any]:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss, logits

    return train_step


def state(dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(dropout)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(rows: int, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 6, generator=g), torch.randint(3, (rows,), generator=g)) for _ in range(count)]


@pytest.mark.parametrize("microbatches", [2, 3, 4, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_whole_batch(name: str, microbatches: int) -> None:
    for dp, zero in ((1, 0), (2, 3)):
        check(step_of(LOSSES[name]), state, batches(9), mesh={"dp": dp}, zero=zero, microbatches=microbatches)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "rows"), [(3, 7), (4, 16), (4, 3)])
def test_stages_and_uneven_rows(dp: int, rows: int, zero: int) -> None:
    check(step_of(masked_mean, clip=True), state, batches(rows), mesh={"dp": dp}, zero=zero, microbatches=2)


def test_rows_that_always_go_together() -> None:
    """8 rows for two ranks and three microbatches: a part is two rows or none, so that the batch may look like four pairs."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.unsqueeze(1).expand(-1, 4, -1).flatten(0, 1)).unflatten(0, (-1, 4)).mean(1)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Pairs()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    for zero in (0, 3):
        report = check(step_of(F.cross_entropy), make, batches(8), mesh={"dp": 2}, zero=zero, microbatches=3)
        assert report.steps == 2


def test_dropout_is_that_of_one_device() -> None:
    for rng in ("torch", "counter"):
        if rng == "torch":
            check(step_of(F.cross_entropy), lambda: state(0.3), batches(9), mesh={"dp": 2}, zero=3, microbatches=3)
        results = []
        for microbatches in (1, 3):
            mesh = shardc.Mesh(dp=2, simulated=True)
            step = shardc.compile(step_of(F.cross_entropy), mesh=mesh, zero=3, rng=rng, seed=5, microbatches=microbatches)
            torch.manual_seed(7)
            results.append(step(*state(0.3), *batches(8)[0])[1])
        torch.testing.assert_close(results[0], results[1])


def plan(model: nn.Module, inputs: tuple[Tensor, ...], zero: int, microbatches: int, dp: int = 2) -> shardc.Plan:
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = shardc.Mesh(dp=dp, simulated=True)
    step = shardc.compile(step_of(F.cross_entropy), mesh=mesh, zero=zero, microbatches=microbatches)
    found = step.lower(model, optimizer, *inputs)
    assert isinstance(found, shardc.Plan)
    return found


def test_memory_falls_and_reductions_are_where_they_belong() -> None:
    wide = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    inputs = torch.zeros(512, 6), torch.zeros(512, dtype=torch.int64)
    held = [plan(wide, inputs, 0, k).memory.by_category["activations"] for k in (1, 2, 4)]
    assert held[0] > 1.7 * held[1] and held[1] > 1.5 * held[2]  # the returned logits are whole
    one, four = (plan(wide, inputs, 1, k).communication for k in (1, 4))
    assert four.bytes_of("gradients") == one.bytes_of("gradients")  # once a step up to stage 1
    one, four = (plan(wide, inputs, 3, k).communication for k in (1, 4))
    assert four.bytes_of("gradients") == 4 * one.bytes_of("gradients")  # at once in each microbatch from stage 2 on
    assert four.bytes_of("parameters") == 4 * one.bytes_of("parameters")


def test_what_would_save_nothing_is_refused() -> None:
    norm = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(PlanError, match="microbatches=2.*activations"):
        plan(norm, inputs, 0, 2)

    def contrastive(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        loss = F.cross_entropy(z @ z.t(), torch.arange(len(z)))
        loss.backward()
        optimizer.step()
        return loss

    step = shardc.compile(contrastive, mesh=shardc.Mesh(dp=2, simulated=True), microbatches=2)
    with pytest.raises(PlanError, match="microbatches=2"):
        step(*state(), *batches(8)[0])
    with pytest.raises(OptionError, match="microbatches"):
        shardc.compile(contrastive, microbatches=0)


def test_masks_that_two_loops_read_are_no_reason_to_refuse() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        keep = F.dropout(torch.ones_like(x), 0.5)
        loss = (F.cross_entropy(z, y, reduction="none") * keep[:, 0]).sum() / keep.sum() * (keep * x).abs().amax()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    check(train_step, lambda: state(0.3), batches(9), mesh={"dp": 2}, zero=3, microbatches=2)


def test_a_penalty_on_parameters_is_taken_once() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + 0.1 * sum((p**2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for zero in (0, 3):
        check(train_step, state, batches(9), mesh={"dp": 2}, zero=zero, microbatches=2)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_there_are_no_more_microbatches_than_rows(rows: int) -> None:
    step = shardc.compile(step_of(F.cross_entropy), mesh=shardc.Mesh(dp=2, simulated=True), microbatches=4)
    plan = step.lower(*state(), torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long))
    held = -(-rows // 2)
    assert f"microbatches: {held} of 4, no rank has more rows" in plan.notes
    batches = [(torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long)) for _ in range(2)]
    check(step_of(F.cross_entropy), state, batches, mesh={"dp": 2}, zero=3, microbatches=4)
