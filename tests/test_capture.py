"""Captured programs, replayed node by node, are what eager computes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from capture_replay import check, replay
from torch import Tensor, nn
from torch.nn import functional as F

from shardc import ops
from shardc.capture import capture, observe, why
from shardc.errors import CaptureError
from shardc.program import Phase, SlotKind


class MLP(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(
        self, vocab: int = 11, width: int = 8, layers: int = 2, heads: int = 2, length: int = 6, tied: bool = False
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-1)


def batches(n: int = 3) -> list[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(7)
    return [(torch.randn(4, 5, generator=g), torch.randn(4, 3, generator=g)) for _ in range(n)]


def tokens(n: int = 3) -> list[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(7)
    return [(torch.randint(0, 11, (3, 6), generator=g), torch.randint(-1, 11, (3, 6), generator=g)) for _ in range(n)]


def mlp_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def zero_first(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss


def lm_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def with_optimizer(make_model: Any, cls: Any, **options: Any) -> Any:
    def make() -> tuple[Any, ...]:
        model = make_model()
        return model, cls(model.parameters(), **options)

    return make


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Rprop, {"lr": 0.01}),
]


@pytest.fixture
def plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture without shardc's own operators: what is left must be eager's arithmetic bit for bit."""
    monkeypatch.setattr(ops, "sdpa_mode", contextlib.nullcontext)
    monkeypatch.setattr(ops, "optimizer_kernels", contextlib.nullcontext)


@pytest.mark.parametrize(("cls", "options"), [*OPTIMIZERS, (torch.optim.RAdam, {"lr": 0.01})],
                         ids=lambda v: getattr(v, "__name__", None) or "-".join(v))  # fmt: skip
def test_optimizers_bitwise(cls: Any, options: Any, plain_ops: None) -> None:
    if cls is torch.optim.RAdam:
        with pytest.raises(CaptureError, match="Python needs the value"):
            check(mlp_step, with_optimizer(MLP, cls, **options), batches(4))
        return
    exact = not options.get("fused")
    check(mlp_step, with_optimizer(MLP, cls, **options), batches(4), exact=exact, captures=2)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", None) or "-".join(v))
@pytest.mark.parametrize("step", [mlp_step, zero_first])
def test_optimizers(cls: Any, options: Any, step: Any) -> None:
    def schedule(model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7

    check(step, with_optimizer(MLP, cls, **options), batches(4), exact=False, between=schedule, captures=2)


def test_gpt_is_bitwise_up_to_the_update() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        return loss

    check(step, lambda: (GPT().double(),), tokens(), exact=False, captures=2)


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_adamw(tied: bool) -> None:
    found = check(
        lm_step,
        with_optimizer(lambda: GPT(tied=tied).double(), torch.optim.AdamW, lr=1e-3, eps=1e-5),
        tokens(),
        exact=False,
        captures=2,
    )
    program = found[-1].program
    n = len([s for s in program.slots.values() if s.kind is SlotKind.PARAMETER])
    assert sum("shardc.adam" in str(node.target) for node in program.compute_nodes()) == n
    assert any("shardc.sdpa" in str(node.target) for node in program.compute_nodes())
    if tied:
        assert program.slots["model.wte.weight"].aliases == ("model.head.weight",)


def test_gpt_bitwise(plain_ops: None) -> None:
    check(lm_step, with_optimizer(lambda: GPT(tied=True), torch.optim.AdamW, lr=1e-3, foreach=False), tokens(), captures=2)


def test_batchnorm_unused_and_frozen_parameters(plain_ops: None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.bn, self.unused, self.frozen = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.frozen(self.bn(self.c(x)).relu().mean((2, 3))).square().mean()

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss

    def make() -> tuple[Any, ...]:
        model = Net()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    g = torch.Generator().manual_seed(1)
    found = check(step, make, [(torch.randn(2, 3, 5, 5, generator=g),) for _ in range(3)], captures=2)
    assert "model.c.weight.grad" in found[0].program.slots and "model.unused.weight.grad" not in found[0].program.slots


def test_several_modules_and_optimizers(plain_ops: None) -> None:
    def gan(
        g: nn.Module, d: nn.Module, optimizers: dict[str, Any], noise: Tensor, real: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        fake = g(noise)
        optimizers["d"].zero_grad()
        loss_d = F.softplus(d(fake.detach())).mean() + F.softplus(-d(real)).mean()
        loss_d.backward()
        optimizers["d"].step()
        optimizers["g"].zero_grad()
        for p in d.parameters():
            p.requires_grad_(False)
        loss_g = F.softplus(-d(fake)).mean()
        loss_g.backward()
        for p in d.parameters():
            p.requires_grad_(True)
        optimizers["g"].step()
        return loss_g, {"d": loss_d}

    def make() -> tuple[Any, ...]:
        g, d = (
            nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 5)),
            nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)),
        )
        return (
            g,
            d,
            {"g": torch.optim.AdamW(g.parameters(), lr=0.01, foreach=False), "d": torch.optim.SGD(d.parameters(), lr=0.1)},
        )

    gen = torch.Generator().manual_seed(1)
    found = check(
        gan, make, [(torch.randn(3, 2, generator=gen), torch.randn(3, 5, generator=gen)) for _ in range(3)], captures=2
    )
    phases = [found[0].program.info[n].phase for n in found[0].program.compute_nodes()]
    runs = [p for i, p in enumerate(phases) if i == 0 or phases[i - 1] is not p]
    assert runs.count(Phase.UPDATE) >= 2 and runs[-1] is Phase.UPDATE


@dataclasses.dataclass
class Batch:
    x: Tensor
    extra: dict[str, Any]


def test_dataclasses_dicts_and_lists(plain_ops: None) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Batch, scale: float, *more: Tensor, flag: bool = True) -> Batch:
        loss = (model(batch.x) * batch.extra["weights"][0]).square().mean() * scale + more[0].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Batch(loss, {"n": 3, "list": [loss * 2, None], "flag": flag})

    def items() -> list[tuple[Any, ...]]:
        return [(Batch(torch.randn(4, 5), {"weights": [torch.rand(4, 3)], "tag": "a"}), 0.5, torch.ones(2)) for _ in range(2)]

    found = check(step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), items(), captures=1)
    assert list(found[0].program.inputs) == ["batch.x", "batch.extra.weights[0]", "more[0]"]


def test_mappings_that_are_not_dicts(plain_ops: None) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        return mlp_step(model, optimizer, batch["x"], batch["y"])

    items = [(collections.UserDict({"x": x, "y": y}),) for x, y in batches(2)]
    found = check(step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), items, captures=1)
    assert list(found[0].program.inputs) == ["batch.x", "batch.y"]


def test_accumulation_gradients_survive_and_versions() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        for a, b in zip(x.split(2), y.split(2), strict=True):
            F.mse_loss(model(a), b).backward()
        optimizer.step()

    found = check(step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), batches(), exact=False, captures=2)
    program = found[0].program
    assert [s for s in program.slots if s.endswith(".grad")] == [f"model.{n}.grad" for n, _ in MLP().named_parameters()]
    versions = [n for n, path in program.versions.items() if path == "model.up.weight.grad"]
    assert len(versions) == 2 and all(program.info[n].phase is Phase.BACKWARD for n in versions)
    dropped = check(mlp_step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), batches(1))[0].program
    assert "model.up.weight.grad" in dropped.versions.values() and "model.up.weight.grad" not in dropped.slots


def test_numbers_are_inputs() -> None:
    model = MLP()
    optimizer = torch.optim.AdamW([{"params": model.up.parameters(), "lr": 0.5}, {"params": model.down.parameters()}], lr=0.1)
    world = observe(mlp_step, (model, optimizer, *batches(1)[0]), {})
    assert world.numbers["optimizer.param_groups[0].lr"] == 0.5 and world.numbers["optimizer.param_groups[1].betas[1]"] == 0.999
    found = capture(mlp_step, (model, optimizer, *batches(1)[0]), {}, world)
    assert found.program.numbers["optimizer.param_groups[1].lr"].users
    assert found.admits({**world.numbers, "optimizer.param_groups[1].lr": 0.0})


def test_owner_phase_and_line_also_in_the_backward() -> None:
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = (model, optimizer, *tokens(1)[0])
    program = capture(lm_step, args, {}, observe(lm_step, args, {})).program
    for node in program.compute_nodes():
        info = program.info[node]
        assert info.line.startswith("test_capture.py:"), program.line_of(node)
        if "mm" in str(node.target):
            assert info.module.startswith("model."), program.line_of(node)
    owners = {(program.info[n].phase, program.info[n].module) for n in program.compute_nodes() if "mm" in str(n.target)}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert (phase, "model.h.1.qkv") in owners and (phase, "model.head") in owners


def test_why() -> None:
    make = with_optimizer(MLP, torch.optim.SGD, lr=0.1)
    model, optimizer = make()
    x, y = batches(1)[0]
    one = observe(mlp_step, (model, optimizer, x, y), {})
    assert why(one, observe(mlp_step, (model, optimizer, x, y), {})) == ""
    assert why(one, observe(mlp_step, (model, optimizer, x[:2], y), {})) == "x: shape (4, 5) became (2, 5)"
    assert why(one, observe(mlp_step, (model, optimizer, x, y.double()), {})) == "y: dtype float32 became float64"
    model.eval()
    assert why(one, observe(mlp_step, (model, optimizer, x, y), {})).startswith("model: ")
    model.train()
    optimizer.param_groups[0]["lr"] = 0.7
    assert observe(mlp_step, (model, optimizer, x, y), {}).key == one.key


def test_dropout_is_a_draw() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check(mlp_step, lambda: (model, optimizer), [])
    args = (model, optimizer, *batches(1)[0])
    state = torch.get_rng_state()
    found = capture(mlp_step, args, {}, observe(mlp_step, args, {}))
    assert torch.equal(state, torch.get_rng_state())
    assert [d.index for d in found.program.draws.values()] == [0]


def test_kept_tensors_and_flags(plain_ops: None) -> None:
    class Holder:
        def __init__(self, model: nn.Module) -> None:
            self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}
            self.updates = 0

        def update(self, model: nn.Module) -> None:
            self.updates += 1
            with torch.no_grad():
                for k, v in model.state_dict().items():
                    self.shadow[k].mul_(0.9).add_(v, alpha=0.1)

    def step(model: Any, ema: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = mlp_step(model, optimizer, x, y)
        ema.update(model)
        model.last = loss.detach()
        return loss

    def make() -> tuple[Any, ...]:
        model = MLP()
        return model, Holder(model), torch.optim.SGD(model.parameters(), lr=0.1)

    found = check(step, make, batches())
    assert found[0].program.slots["ema.shadow['up.weight']"].kind is SlotKind.TENSOR
    assert found[0].program.slots["model.last"].kind is SlotKind.TENSOR


def test_recurrent_network() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.rnn(x.unsqueeze(1).expand(-1, 3, -1))[0]
            return self.head(out[:, -1])

    found = check(mlp_step, with_optimizer(Net, torch.optim.SGD, lr=0.1), batches(2), exact=False, captures=1)
    assert not any("mkldnn" in str(n.target) for n in found[0].program.compute_nodes())


def test_meta_tensors_allocate_nothing() -> None:
    with torch.device("meta"):
        model = GPT(vocab=1000, width=4096, layers=1, heads=8)
        x, y = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    args = (model, optimizer, x, y)
    program = capture(lm_step, args, {}, observe(lm_step, args, {})).program
    assert program.slots["optimizer.state[0].exp_avg"].type.shape == (1000, 4096)


def test_closure_and_global_state(plain_ops: None) -> None:
    def make() -> tuple[Any, ...]:
        return ()

    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return mlp_step(model, optimizer, x, y)

    args = batches(1)[0]
    world = observe(step, args, {})
    found = capture(step, args, {}, world)
    assert list(found.program.entry) == [f"model.{n}" for n, _ in model.named_parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    replay(found, world)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_pretended_steady_state_leaves_no_trace() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters())
    args = (model, optimizer, *batches(1)[0])
    world = observe(step, args, {})
    first = capture(step, args, {}, world)
    with first.effects.pretended(world, first.program.slots):
        steady = observe(step, args, {})
        program = capture(step, args, {}, steady).program
    assert set(program.entry) == set(program.exit) == set(first.program.exit)
    assert observe(step, args, {}).key == world.key and not optimizer.state
