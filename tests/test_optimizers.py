"""Every optimizer of torch.optim gives what it gives on one device, on shapes that no mesh divides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.testing import check, check_all

Batch = tuple[Tensor, Tensor]
QUICK: list[dict[str, Any]] = [{"mesh": {"dp": 3}, "zero": 3}, {"mesh": {"dp": 2}, "zero": 1}]
ALL: list[dict[str, Any]] = [{"mesh": {"dp": dp}, "zero": zero} for dp in (2, 3) for zero in range(4)]


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


class Net(nn.Module):
    """Matrices and vectors of odd sizes, a number, a vector of one element and a tensor with dims of size one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 11), nn.Linear(11, 3)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.1]))
        self.tiny = nn.Parameter(torch.tensor([[[0.3]], [[-0.2]]]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale * self.outer(torch.tanh(self.inner(x))) + self.shift
        return y + (self.tiny * x[:, :3]).prod(0)


class Matrices(nn.Module):
    """Taller and wider than square, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 11, bias=False), nn.Linear(11, 7, bias=False)
        self.c, self.d = nn.Linear(7, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)  # type: ignore[arg-type]


def batches(count: int = 5, rows: int = 7) -> list[Batch]:
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, 5, generator=g), torch.randn(rows, 3, generator=g)) for _ in range(count)]


optim = torch.optim
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd_decay": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "maximize": True}),
    "sgd_nesterov": (optim.SGD, {"lr": 0.07, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adam_amsgrad": (optim.Adam, {"amsgrad": True}),
    "adamw": (optim.AdamW, {}),
    "adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "nadam": (optim.NAdam, {}),
    "nadam_decoupled": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {}),
    "rmsprop_centered": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {"weight_decay": 0.1, "t0": 2}),
    "adafactor": (optim.Adafactor, {}),
    "muon": (optim.Muon, {"lr": 0.05}),
    "muon_plain": (optim.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    "lbfgs": (optim.LBFGS, {"lr": 0.1, "max_iter": 3, "history_size": 3}),
    "lbfgs_wolfe": (optim.LBFGS, {"max_iter": 2, "line_search_fn": "strong_wolfe"}),
}


def test_the_table_has_all_of_them() -> None:
    there = {c for c in vars(optim).values() if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    assert there - {optim.Optimizer, optim.SparseAdam} == {cls for cls, _ in CASES.values()}


def equal(kind: str, points: list[dict[str, Any]]) -> None:
    cls, options = CASES[kind]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Matrices() if cls is optim.Muon else Net()
        return model, cls(model.parameters(), **options)

    reports = check_all(train_with_closure if cls is optim.LBFGS else train, make, batches(), points)
    assert not [r for report in reports for r in report.rounded]


@pytest.mark.parametrize("kind", CASES)
def test_equal_to_one_device(kind: str) -> None:
    equal(kind, [QUICK[len(kind) % 2]])


@pytest.mark.long
@pytest.mark.parametrize("kind", CASES)
def test_equal_at_every_stage(kind: str) -> None:
    equal(kind, ALL)


def test_products_in_half_precision_take_one_gather_for_each_matrix() -> None:
    """Muon's iteration is computed whole: its parts would be rounded each by itself, and need a reduction each."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Matrices()
        return model, optim.Muon(model.parameters())

    plan = check(train, make, batches(2), mesh={"dp": 2}, zero=1).plan
    moved = [(row.kind, row.count) for row in plan.communication if row.phase == "update"]
    assert moved == [("all_gather", 4)]  # and the updated parameters are whole already


def test_iterations_of_products_do_not_depend_on_the_mesh() -> None:
    """The same of a hand-written update on stacked matrices, of which a rank has some."""

    def step(model: nn.ParameterList, momentum: nn.Module, x: Tensor) -> Tensor:
        loss = (x @ model[0] @ model[1]).square().mean()
        loss.backward()
        with torch.no_grad():
            grad = model[0].grad
            assert grad is not None
            y = grad.bfloat16()
            y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                gram = y @ y.mT
                y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
            model[0].add_(y.to(x.dtype), alpha=-0.1)
            model.zero_grad()
        return loss

    def make() -> tuple[nn.Module, nn.Module]:
        return nn.ParameterList([torch.randn(3, 5, 7), torch.randn(3, 7, 2)]), nn.Linear(1, 1)

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, 6, 5, generator=g),) for _ in range(4)]
    check_all(step, make, data, [*QUICK, {"mesh": {"dp": 2, "tp": 2}, "zero": 0, "params": {"0": shardc.P(None, "tp", None)}}])
