"""Indexing whose rows a rank can do by itself: equal to one device, with nothing gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.testing import check

ROWS, LENGTH, WIDTH = 5, 4, 6
Read = Callable[[Tensor, Tensor], Tensor]


def diagonal(x: Tensor, at: Tensor) -> Tensor:
    """Two dims cannot run along one: the second stays an index."""
    rows = torch.arange(len(x))
    return x @ x.flatten(1).sum(0)[:WIDTH] + x[rows, at][rows][:, :LENGTH]


READS: dict[str, Read] = {
    "a position of each row": lambda x, at: x[torch.arange(len(x)), at],
    "some positions of each row": lambda x, at: x[torch.arange(len(x))[:, None], torch.stack([at, 3 - at], 1)],
    "a table that broadcasts": lambda x, at: x[torch.arange(ROWS)[:, None, None], torch.arange(LENGTH)[None, :, None] + 0],
    "counted from the end": lambda x, at: x[torch.arange(len(x)), at - LENGTH],
    "by a view": lambda x, at: x[torch.arange(ROWS).view(-1, 1).expand(ROWS, 2), torch.stack([at, at], 1)],
    "a run that expands the others": lambda x, at: x[torch.arange(ROWS)[:, None].expand(ROWS, 2), at[:, None]],
    "a run along the last dim": lambda x, at: x.transpose(0, 2)[:, at, torch.arange(ROWS)].t(),
    "the derivative of a selection": lambda x, at: x.index_select(1, torch.tensor([2, 0, 2])),
    "a second run along one dim": diagonal,
}
LOCAL = set(READS) - {"a second run along one dim", "a run that expands the others"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, WIDTH)
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.far = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.lin(x).tanh() + self.table[at][:, None] + self.far.index_select(0, at + 4)[:, None]


def state() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, LENGTH, 3, generator=g), torch.randint(LENGTH, (ROWS,), generator=g)) for _ in range(2)]


def trains(read: Read) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, at: Tensor) -> Tensor:
        loss = read(model(x, at), at).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("dp", [2, 4])
def test_equal(name: str, dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")
    plan = check(trains(READS[name]), state, batches(), mesh={"dp": dp}, zero=3).plan
    moved = [row for row in plan.communication if row.group == "activations"]
    assert not moved or name not in LOCAL
    assert not plan.replicated or name not in LOCAL


def test_gradient_of_a_table_is_reduced_into_its_shard() -> None:
    """Summed by each rank over its own rows, not gathered: one reduction of the table's size for each table."""
    step = shardc.compile(trains(lambda x, at: x), mesh=shardc.Mesh(dp=2, simulated=True), zero=3)
    plan = step.lower(*state(), *batches()[0])
    reduced = [row for row in plan.communication if row.kind == "reduce_scatter" and row.group == "gradients"]
    assert sum(row.count for row in reduced) == 4  # weight, bias and the two tables
    assert sum(row.bytes for row in reduced) == (3 * WIDTH + WIDTH + LENGTH * WIDTH + 9 * WIDTH) * 4 // 2


def test_what_is_added_to_something_stays() -> None:
    """Only a sum onto zeros is one of the values alone."""

    def step(table: nn.Linear, x: Tensor, at: Tensor) -> Tensor:
        return table.weight.detach().index_put((at,), x, accumulate=True)

    def one() -> tuple[nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return (nn.Linear(3, 4),)

    data = [(torch.randn(ROWS, 3), torch.tensor([0, 3, 3, 1, 0]))]
    plan = check(step, one, data, mesh={"dp": 2}).plan
    targets = {str(n.target) for n in plan.stages["normalize"].compute_nodes()}
    assert "aten.index_put.default" in targets and "shardc.index_sum.default" not in targets
