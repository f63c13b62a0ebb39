"""Kinds of training steps on small models: optimizers and their paths, clipping, precision, frozen and shared parts, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc import P
from shardc.testing import Report, check_all

Batch = tuple[Tensor, Tensor]
POINTS: list[dict[str, Any]] = [{"mesh": {"dp": 3}, "zero": 3}, {"mesh": {"dp": 2}, "zero": 1}]


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(5, 11), nn.LayerNorm(11), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.norm(self.inner(x))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(count: int = 3, rows: int = 7, shape: tuple[int, ...] = (5,)) -> list[Batch]:
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, *shape, generator=g), torch.randint(3, (rows,), generator=g)) for _ in range(count)]


def equal(
    step: Callable[..., Any], make: Callable[[], tuple[Any, ...]], data: Any = None, points: Any = None, **more: Any
) -> list[Report]:  # fmt: skip
    reports = check_all(step, make, data or batches(), points or POINTS, **more)
    assert all(not r.rounded for r in reports)
    return reports


# -- optimizers --------------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.98)}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "maximize": (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
}
PATHS: dict[str, dict[str, bool]] = {
    "default": {}, "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}
}  # fmt: skip
CASES = [(kind, path) for kind in OPTIMIZERS for path in PATHS if (kind, path) != ("rmsprop", "fused")]  # torch has none


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_optimizers(kind: str, path: str) -> None:
    cls, options = OPTIMIZERS[kind]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, cls(model.parameters(), **options, **PATHS[path])

    equal(train, make, points=[POINTS[len(kind + path) % 2]])


def test_groups_with_numbers_of_their_own() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "betas": (0.5, 0.9)}]
        return model, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

    equal(train, make)


def test_several_optimizers() -> None:
    """A generator and a critic, each with gradients that the other's step leaves behind."""

    def step(maker: nn.Module, critic: nn.Module, optimizers: dict[str, torch.optim.Optimizer], x: Tensor) -> dict[str, Tensor]:
        made = maker(x)
        bad = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(x[:, :3])).mean()
        bad.backward()
        optimizers["critic"].step()
        optimizers["critic"].zero_grad()
        good = F.softplus(-critic(made)).mean()
        good.backward()
        optimizers["maker"].step()
        optimizers["maker"].zero_grad()  # the critic's gradients of this loss stay
        return {"bad": bad, "good": good}

    def make() -> tuple[Any, ...]:
        maker, critic = Net(), nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))
        return maker, critic, {
            "critic": torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5),
            "maker": torch.optim.Adam(maker.parameters(), lr=0.01),
        }  # fmt: skip

    equal(step, make, [(x,) for x, _ in batches()])


# -- gradients ---------------------------------------------------------------------------------------------------------------


def adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "two": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05),
    "one": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, norm_type=1.0),
    "infinite": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, norm_type=float("inf")),
    "loop": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, foreach=False),
    "foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, foreach=True),
    "never": lambda ps: nn.utils.clip_grad_norm_(ps, 1e6),
    "value": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
    "value_loop": lambda ps: nn.utils.clip_grad_value_(ps, 0.01, foreach=False),
}


@pytest.mark.parametrize("kind", CLIPS)
def test_clipping(kind: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = CLIPS[kind](model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    equal(step, adamw)


def test_lists_of_tensors() -> None:
    """Operators on lists, as hand-written optimizers use them."""

    def step(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        params, slow = list(model.parameters()), list(average.parameters())
        grads = [p.grad for p in params if p.grad is not None]
        with torch.no_grad():
            norms = torch._foreach_norm(grads)
            scaled = torch._foreach_div(grads, torch._foreach_add(norms, 1e-6))
            torch._foreach_add_(params, scaled, alpha=-optimizer.param_groups[0]["lr"])
            torch._foreach_addcdiv_(params, grads, torch._foreach_sqrt(torch._foreach_abs(norms)), value=-0.01)
            torch._foreach_lerp_(slow, params, 0.1)
            torch._foreach_mul_(grads, [0.5] * len(grads))
        return loss

    def make() -> tuple[Any, ...]:
        model, optimizer = adamw()
        return model, Net().requires_grad_(False), optimizer

    equal(step, make)


def test_two_backwards_add_up() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = x.new_zeros(())
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):  # 4 and 3 rows, which dp splits once more
            one = F.cross_entropy(model(part), target, reduction="sum") / len(x)
            one.backward()
            loss = loss + one.detach()
        F.mse_loss(model.inner.weight, torch.zeros_like(model.inner.weight)).backward()
        optimizer.step()
        return loss

    equal(step, adamw)


def test_gradients_that_wait_for_the_next_call() -> None:
    """Accumulation over calls: the update comes with every second one."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, last: bool) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    data = [(*b, i % 2 == 1) for i, b in enumerate(batches(5))]
    equal(step, adamw, data)


# -- parts of a model --------------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)  # type: ignore[no-any-return]


def test_frozen_parameters_with_trained_corrections() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.norm.requires_grad_(False)
        model.inner, model.outer = Lora(model.inner), Lora(model.outer)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

    for report in equal(train, make):
        moments = [path for path in report.plan.slots if path.startswith("optimizer.state") and "exp_avg" in path]
        assert len(moments) == 2 * 4, "only the corrections have moments"


class Counting(nn.Module):
    """Buffers that the forward changes: a count, an average over the batch, a codebook; one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("codes", torch.linspace(-1, 1, 15).view(3, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        nearest = F.one_hot(torch.cdist(x, self.codes).argmin(1), 3).to(x.dtype)
        with torch.no_grad():
            self.codes.copy_(0.9 * self.codes + 0.1 * nearest.t() @ x / nearest.sum(0).clamp_min(1)[:, None])
        return self.net(x - self.mean + nearest @ self.codes)  # type: ignore[no-any-return]


def test_buffers() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Counting()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    equal(train, make)


def test_batch_statistics_in_channels_last() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
                  nn.Conv2d(6, 7, 3, stride=2, groups=1), nn.GroupNorm(1, 7), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                  nn.Linear(7, 3)]  # fmt: skip
        model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    data = [(x.to(memory_format=torch.channels_last), y) for x, y in batches(shape=(3, 9, 8))]
    equal(train, make, data)


def test_average_of_weights() -> None:
    """A moving average kept by the step: a second module that no optimizer sees."""

    def step(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        with torch.no_grad():
            for slow, p in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(p, 0.1)
        return loss

    def make() -> tuple[Any, ...]:
        model, optimizer = adamw()
        average = Net().requires_grad_(False)
        average.load_state_dict(model.state_dict())
        return model, average, optimizer

    equal(step, make)


# -- precision ---------------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Every kind of normalisation: under autocast their inputs are bfloat16, their weights and statistics float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.mix, self.layer, self.rms, self.head = nn.Linear(8, 11), nn.LayerNorm(11), nn.RMSNorm(11), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.batch(self.conv(x)).relu()).mean((2, 3))
        return self.head(self.rms(self.layer(self.mix(x))))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch's rms_norm, in eager too
@pytest.mark.parametrize(("model", "shape"), [(Net, (5,)), (Normed, (3, 6, 5))], ids=["plain", "normed"])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_autocast_in_user_code(point: dict[str, Any], model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Products in bfloat16 keep 8 bits, and a rank's part of a sum is rounded by itself: the compiled step is as near to
    float32 as eager with autocast is."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, narrow: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def state_after(run: Callable[..., Any], narrow: bool) -> Tensor:
        torch.manual_seed(0)
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
        for x, y in batches(shape=shape):
            run(made, optimizer, x, y, narrow)
        momenta = [optimizer.state[p]["momentum_buffer"] for p in made.parameters()]
        return torch.cat([t.detach().flatten() for t in (*made.parameters(), *momenta)])

    def compiled() -> Callable[..., Any]:
        return shardc.compile(step, mesh=simulated(**point["mesh"]), zero=point["zero"])  # type: ignore[no-any-return]

    got, eager, exact = state_after(compiled(), True), state_after(step, True), state_after(step, False)
    rounding = (eager - exact).norm()
    assert rounding > 1e-4 and (got - exact).norm() < 1.5 * rounding
    assert (got - eager).norm() < 1.5 * rounding
    assert (state_after(compiled(), False) - exact).norm() < 1e-5


# -- from outside ------------------------------------------------------------------------------------------------------------


def simulated(**axes: int) -> shardc.Mesh:
    return shardc.Mesh(axes, simulated=True)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def double(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_numbers_of_the_optimizer_change_without_recompiling() -> None:
    step = shardc.compile(train, mesh=simulated(dp=2), zero=3)
    (model, optimizer), (reference, other) = double(), double()
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=21) for o in (optimizer, other)]
    seen = set()
    for i, (x, y) in enumerate(batches(20)):
        for o in (optimizer, other):  # OneCycleLR moves lr and betas
            o.param_groups[0]["weight_decay"] = 0.01 * (1 + i)
        seen.add((optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]))
        close(step(model, optimizer, x.double(), y), train(reference, other, x.double(), y))
        for schedule in schedules:
            schedule.step()
    assert len(seen) == 20 and len(step.variants) == 2
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p, q)


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out = model(x)
        return F.cross_entropy(out, y), (out.argmax(-1) == y).sum()


@pytest.mark.parametrize("zero", [0, 3])
def test_evaluation_between_steps_shares_the_state(zero: int) -> None:
    step, show = (shardc.compile(f, mesh=simulated(dp=3), zero=zero) for f in (train, evaluate))
    (model, optimizer), (reference, other) = double(), double()
    held = (torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,)))
    for x, y in batches():
        close(step(model, optimizer, x.double(), y), train(reference, other, x.double(), y))
        model.eval(), reference.eval()
        for got, want in zip(show(model, *held), evaluate(reference, *held), strict=True):
            close(got, want)
        with shardc.gathered(model):
            close(model(held[0]), reference(held[0]))
        model.train(), reference.train()
    assert len(step.variants) == 2 and len(show.variants) == 1


# -- tensor parallel ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a gated MLP, as projections that can be split by heads and by hidden units."""

    def __init__(self, heads: int = 4, width: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 22), nn.Linear(width, 22), nn.Linear(22, width)
        self.first, self.second, self.head = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.second(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


COLUMNS, ROWS = P("tp", None), P(None, "tp")
MEGATRON = {
    "*.q.weight": COLUMNS, "*.k.weight": COLUMNS, "*.v.weight": COLUMNS, "*.o.weight": ROWS,
    "*.gate.*": P("tp"), "*.up.weight": COLUMNS, "*.up.bias": P("tp"), "*.down.weight": ROWS,
}  # fmt: skip


TENSOR = [({"dp": 2, "tp": 2}, 0), ({"dp": 2, "tp": 2}, 3), ({"dp": 3, "tp": 3}, 3), ({"tp": 4}, 0)]


@pytest.mark.parametrize(("mesh", "zero"), TENSOR, ids=str)
def test_tensor_parallel(mesh: dict[str, int], zero: int) -> None:
    """Heads and hidden units over tp, rows over dp; 3 does not divide 4 heads, 4 not 22 hidden units."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Block()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    (report,) = equal(train, make, batches(shape=(5, 12)), [{"mesh": mesh, "zero": zero, "params": MEGATRON}])
    slots = report.plan.slots
    assert "tp" in str(slots["model.q.weight"].storage) and "tp" in str(slots["model.down.weight"].storage)
    if mesh == {"dp": 2, "tp": 2} and zero == 0:
        # Two sums in the forward and two in the backward over tp, of activations; nothing of a weight moves over tp.
        moved = [c for c in report.plan.communication if c.axis == "tp" and c.kind != "all_reduce"]
        assert not moved, moved
