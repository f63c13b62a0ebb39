"""nn.Embedding(sparse=True): rows that the global batch hits are updated, with their moments, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError
from shardc.testing import Report, check_all, check_processes

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad, in eager
POINTS: list[dict[str, Any]] = [{"mesh": {"dp": 3}, "zero": 3}, {"mesh": {"dp": 2}, "zero": 0}]
Make = Callable[[], tuple[Any, ...]]


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


class Net(nn.Module):
    """Two tables of 23 and 7 rows, the first with a padding row and looked up twice; rows may be weighted by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(23, 5, padding_idx=2, sparse=True)
        self.kinds = nn.Embedding(7, 5, sparse=True)
        self.out = nn.Linear(5, 2)

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        x = (self.words(ids) * weight[..., None]).mean(1) + self.words(ids[:, 0] // 2) + self.kinds(ids[:, 1] % 7)
        return self.out(x)  # type: ignore[no-any-return]


def tables(model: nn.Module) -> list[nn.Parameter]:
    return [model.words.weight, model.kinds.weight]  # type: ignore[union-attr, list-item]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], ids: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(ids, weight), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def making(cls: Any, **options: Any) -> Make:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = Net()
        return model, [cls(tables(model), **options), torch.optim.AdamW(model.out.parameters(), lr=0.01)]

    return make


def batches(count: int = 5, rows: int = 7) -> list[tuple[Tensor, ...]]:
    """Each batch reads other rows; one id is in every row of the batch, one word has no weight at all."""
    g = torch.Generator().manual_seed(3)
    out = []
    for k in range(count):
        ids = torch.randint(1, 8 + 3 * (k % 3), (rows, 4), generator=g)
        ids[:, 0] = 6
        out.append((ids, (ids != 5).float(), torch.randn(rows, 2, generator=g)))
    return out


def equal(make: Make, points: Any = None, step: Callable[..., Any] = train, data: Any = None) -> list[Report]:
    reports = check_all(step, make, data or batches(), points or POINTS)
    assert not [r for report in reports for r in report.rounded]
    return reports


def sparse_adam() -> tuple[Any, ...]:
    return making(torch.optim.SparseAdam, lr=0.05)()


OPTIMIZERS: dict[str, Make] = {
    "sparse_adam": sparse_adam,
    "sparse_adam_maximize": making(torch.optim.SparseAdam, lr=0.05, betas=(0.5, 0.9), maximize=True),
    "sgd": making(torch.optim.SGD, lr=0.1),
    "adagrad": making(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "adagrad_without_eps": making(torch.optim.Adagrad, lr=0.1, eps=0.0, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equal_to_one_device(kind: str) -> None:
    equal(OPTIMIZERS[kind])


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equal_at_every_stage(kind: str) -> None:
    microbatched = [{"mesh": {"dp": 2}, "zero": z, "microbatches": 2} for z in (0, 3)]
    equal(OPTIMIZERS[kind], [{"mesh": {"dp": n}, "zero": z} for n in (2, 3, 4) for z in range(4)] + microbatched)


def test_only_rows_of_the_global_batch_change() -> None:
    """A row that is hit with a gradient of zero has its moments decayed, and moves; a row that no rank reads does not."""
    step = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True), zero=3)
    model, optimizers = OPTIMIZERS["sparse_adam"]()
    start = model.words.weight.detach().clone()
    first = (torch.tensor([[6, 1], [6, 9]]), torch.ones(2, 2), torch.randn(2, 2))
    step(model, optimizers, *first)
    middle = model.words.weight.detach().clone()
    step(model, optimizers, torch.tensor([[6, 9], [6, 6]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.randn(2, 2))
    moved = [(a != b).any(1).nonzero().flatten().tolist() for a, b in ((start, middle), (middle, model.words.weight.detach()))]
    assert moved == [[1, 3, 6, 9], [3, 6, 9]]  # 3 = 6 // 2; row 9 has a gradient of zero the second time
    assert any("words.weight.grad is sparse in torch" in note for note in step.plan.notes)


def test_gradients_that_survive_are_kept_dense() -> None:
    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], *batch: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids, weight, y = batch
        loss = F.mse_loss(model(ids, weight), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    equal(OPTIMIZERS["sparse_adam"], step=step)


def test_two_backwards_and_microbatches() -> None:
    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], ids: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        first = F.mse_loss(model(ids, weight), y)
        first.backward()
        second = F.l1_loss(model(ids + 1, weight), y)
        (second / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return first + second.detach()

    equal(OPTIMIZERS["sparse_adam"], step=step)
    equal(OPTIMIZERS["sparse_adam"], [{"mesh": {"dp": 2}, "zero": z, "microbatches": 2} for z in (0, 3)])


def test_a_table_that_is_also_read_densely_has_a_dense_gradient() -> None:
    def step(table: nn.Embedding, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
        loss = F.cross_entropy(table(ids) @ table.weight.T, ids)
        loss.backward()
        assert table.weight.grad is not None and not table.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def make() -> tuple[Any, ...]:
        table = nn.Embedding(11, 5, sparse=True)
        return table, torch.optim.AdamW(table.parameters())

    equal(make, step=step, data=[((ids[:, 0] + ids[:, 1]) % 11,) for ids, *_ in batches(2)])


@pytest.mark.long
def test_in_processes() -> None:
    report = check_processes(2, train, sparse_adam, batches(3), zero=3)
    assert not report.rounded


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "norm": (lambda p: nn.utils.clip_grad_norm_([p], 1.0), "sparse gradient"),
    "values": (lambda p: p.grad.coalesce()._values().sum(), "_values of a sparse gradient"),
    "clone": (lambda p: p.grad.clone(), "clone of a sparse gradient"),
    "momentum": (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9).step(), "sparse gradient"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_mask_cannot_answer_is_refused(what: str) -> None:
    act, message = REFUSED[what]

    def step(table: nn.Embedding, ids: Tensor) -> Tensor:
        loss = table(ids).square().mean()
        loss.backward()
        act(table.weight)
        return loss

    compiled = shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))
    with pytest.raises(CaptureError, match=message):
        compiled(nn.Embedding(11, 5, sparse=True), torch.arange(4))


def test_bags_are_refused() -> None:
    def step(bag: nn.EmbeddingBag, ids: Tensor) -> Tensor:
        loss = bag(ids).square().mean()
        loss.backward()
        return loss

    compiled = shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))
    with pytest.raises(CaptureError, match="embedding_bag"):
        compiled(nn.EmbeddingBag(11, 5, sparse=True), torch.arange(8).view(4, 2))
