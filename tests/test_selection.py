"""Rows that data selects: equal to one device, and they stay on the rank that has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc import P
from shardc.errors import CaptureError, PlanError
from shardc.testing import check, check_all_processes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as tf

Loss = Callable[["Net", Tensor, Tensor], Tensor]
TP = {"model.a.weight": P("tp", None), "model.a.bias": P("tp"), "model.b.weight": P(None, "tp")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(5, 6), nn.Linear(6, 4), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(torch.relu(self.a(x))))


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step_of(loss_of: Loss) -> Callable[..., Tensor]:
    def train_step(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def batches(rows: int = 7, count: int = 2, classes: Callable[[Tensor], Tensor] = lambda y: y) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 5, generator=g), classes(torch.randint(0, 4, (rows,), generator=g))) for _ in range(count)]


def counted(model: Net, x: Tensor, y: Tensor) -> Tensor:
    """Divided by the number of rows, which is that of all ranks."""
    rows = (y > 0).nonzero().squeeze(1)
    return model.b(model.norm(torch.relu(model.a(x))[rows])).pow(2).sum() / rows.shape[0]


def decided(model: Net, x: Tensor, y: Tensor) -> Tensor:
    """Python decides on the number of rows."""
    rows = (y > 1).nonzero().squeeze(1)
    if rows.numel() == 0:
        return model(x).sum()
    return model(x)[rows].sum() / max(rows.shape[0], 3)


def dispatched(model: Net, x: Tensor, y: Tensor) -> Tensor:
    """Each class of rows through its own layers, put back in place."""
    out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
    for k in range(4):
        rows = (y == k).nonzero().squeeze(1)
        out = out.index_add(0, rows, (k + 1) * model.b(torch.relu(model.a(x[rows]))))
    return out.pow(2).sum()


def put(model: Net, x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
    return out.index_put(((y > 0).nonzero().squeeze(1),), model(x[y > 0])).pow(2).sum()


LOSSES: dict[str, Loss] = {
    "mean": lambda model, x, y: model(x)[y > 0].mean(),
    "cross entropy": lambda model, x, y: F.cross_entropy(model(x)[y > 0], y[y > 0]),
    "smoothed": lambda model, x, y: F.cross_entropy(model(x)[y > 0], y[y > 0], label_smoothing=0.1),
    "mse": lambda model, x, y: F.mse_loss(model(x)[y > 0], x[y > 0][:, :4]),
    "bce": lambda model, x, y: F.binary_cross_entropy_with_logits(model(x)[y > 0], torch.ones_like(model(x)[y > 0])),
    "counted": counted,
    "decided": decided,
    "dispatched": dispatched,
    "put": put,
    "masked_select": lambda model, x, y: model(x).masked_select((y > 0)[:, None]).pow(2).sum(),
    "std": lambda model, x, y: model(x)[y > 0].std(0).sum(),
    "batch norm": lambda model, x, y: F.batch_norm(model(x)[y > 0], None, None, training=True).pow(3).sum(),
    "rows of softmax": lambda model, x, y: model(x)[y > 0].logsumexp(1).mean() + model(x)[y > 0].softmax(1).pow(2).mean(),
    "elements": lambda model, x, y: model(x)[model(x).detach() > 0].pow(2).mean(),
    "views": lambda model, x, y: model(x)[y > 0].view(-1, 2, 2).transpose(1, 2).reshape(-1).pow(3).sum(),
    "largest": lambda model, x, y: model(x)[y > 0].amax(0).sum(),
    "smallest": lambda model, x, y: model(x)[y > 0].amin(0).pow(2).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_equal_to_one_device(name: str) -> None:
    check(step_of(LOSSES[name]), make, batches(), mesh={"dp": 2}, zero=3)


@pytest.mark.long
@pytest.mark.parametrize("dp", [1, 3, 4, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_equal_on_all_meshes(name: str, dp: int) -> None:
    for zero in (0, 1, 2, 3):
        check(step_of(LOSSES[name]), make, batches(), mesh={"dp": dp}, zero=zero)


@pytest.mark.parametrize("name", ["cross entropy", "dispatched", "batch norm"])
def test_with_tensor_parallel_and_two_batch_axes(name: str) -> None:
    step = step_of(LOSSES[name])
    check(step, make, batches(), mesh={"dp": 2, "tp": 2}, zero=3, params=TP)
    check(step, make, batches(), mesh={"a": 2, "b": 2}, batch=("a", "b"), zero=3)
    check(step, make, batches(), mesh={"dp": 2}, zero=3, recompute="full")


@pytest.mark.parametrize("name", ["largest", "smallest"])
def test_a_rank_without_rows_holds_no_extreme(name: str) -> None:
    check(step_of(LOSSES[name]), make, batches(classes=lambda y: torch.arange(len(y)) // 4), mesh={"dp": 2}, zero=3)


@pytest.mark.parametrize("name", ["decided", "dispatched", "put"])
def test_no_rows_at_all_and_none_on_one_rank(name: str) -> None:
    step = step_of(LOSSES[name])
    check(step, make, batches(classes=torch.zeros_like), mesh={"dp": 2}, zero=3)
    check(step, make, batches(classes=lambda y: torch.arange(len(y)) // 4), mesh={"dp": 2}, zero=3)
    check(step, make, batches(rows=3), mesh={"dp": 4}, zero=3)


def test_nothing_moves_but_parameters_and_sums() -> None:
    step = shardc.compile(step_of(dispatched), mesh=shardc.Mesh(dp=2, simulated=True), zero=3)
    plan = step.lower(*make(), *batches()[0])
    gathered = {row.group for row in plan.communication if row.kind in ("all_gather", "all_to_all")}
    assert gathered == {"parameters"}
    assert any(note.startswith("by data: ") for note in plan.notes)


def test_a_decision_on_the_number_is_a_guard() -> None:
    step = shardc.compile(step_of(decided), mesh=shardc.Mesh(dp=2, simulated=True))
    model, optimizer = make()
    for x, y in [*batches(), *batches(classes=torch.zeros_like)]:
        step(model, optimizer, x, y)
    guards = [g for v in step.variants for g in v.captured.program.guards if "numel" in g.text]
    assert {g.expected for g in guards} == {True, False}


def flipped(model: Net, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[(y > 0).nonzero().squeeze(1).flip(0)].cumsum(0).sum()


REFUSED: dict[str, tuple[Loss, type[Exception], str]] = {
    "order": (flipped, PlanError, "needs rows that data selects together"),
    "dropout": (lambda model, x, y: F.dropout(model(x)[y > 0]).sum(), PlanError, "draws random numbers"),
    "equal size": (lambda model, x, y: model(x)[y > 0].sum() * torch.ones(1013).sum(), CaptureError, "a size of 1013"),
    "range": (lambda model, x, y: torch.arange((y > 0).nonzero().shape[0]).sum() * model(x).sum(), CaptureError, "arange over"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_rows_of_all_ranks_is_refused(name: str) -> None:
    loss, error, text = REFUSED[name]
    step = shardc.compile(step_of(loss), mesh=shardc.Mesh(dp=2, simulated=True))
    with pytest.raises(error, match=text) as info:
        step.lower(*make(), *batches()[0])
    assert "test_selection.py" in str(info.value)


def test_microbatches_are_refused() -> None:
    step = shardc.compile(step_of(LOSSES["mean"]), mesh=shardc.Mesh(dp=2, simulated=True), microbatches=2)
    with pytest.raises(PlanError, match="microbatches=2"):
        step.lower(*make(), *batches()[0])


# -- experts -----------------------------------------------------------------------------------------------------------------


def mixtral() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = tf.MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = tf.MixtralForCausalLM(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss


def tokens(count: int) -> list[tuple[Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(31, (6, 7), generator=g),) for _ in range(count)]


@pytest.mark.parametrize("dp", [2, pytest.param(3, marks=pytest.mark.long)])
def test_mixtral(dp: int) -> None:
    check(train, mixtral, tokens(2), mesh={"dp": dp}, zero=3)


@pytest.mark.parametrize(
    ("mesh", "zero"), [({"dp": 2, "tp": 2}, 3), pytest.param({"dp": 1, "tp": 4}, 0, marks=pytest.mark.long)]
)
def test_mixtral_with_tensor_parallel(mesh: dict[str, int], zero: int) -> None:
    params = shardc.recipes.megatron(mixtral()[0])
    report = check(train, mixtral, tokens(2), mesh=mesh, zero=zero, params=params)
    assert report.rounded  # its router and its loss work in float32


def test_mixtral_gathers_no_tokens() -> None:
    step = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True), zero=3)
    plan = step.lower(*mixtral(), *tokens(1)[0])
    assert {row.group for row in plan.communication if row.kind in ("all_gather", "all_to_all")} == {"parameters"}
    assert all(r.name.endswith("inv_freq") for r in plan.replicated)  # buffers
    gathered = sum(r.bytes for r in plan.communication if r.group == "parameters" and r.phase == "forward")
    reduced = [(r.kind, r.bytes) for r in plan.communication if r.group == "gradients"]
    assert reduced == [("reduce_scatter", gathered)]  # once each


def train_dispatched(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return step_of(dispatched)(model, optimizer, x, y)


@pytest.mark.processes
def test_on_processes() -> None:
    report = check_all_processes(2, train_dispatched, make, batches(), [{"zero": 3}], timeout=300.0)[0]
    assert report.steps == 2
