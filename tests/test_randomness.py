"""Random numbers of compiled steps: from a counter they do not depend on the plan; from torch they are those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import FAMILIES
from torch import Tensor, nn

import shardc
from shardc.errors import AgreementError
from shardc.testing import RankFailure, check, run_ranks
from shardc.testing.compare import Tally
from shardc.testing.oracle import Oracle

Returned = dict[str, Tensor]


class Noisy(nn.Module):
    """Attention with dropout, dropout of elements and of channels, and a noisy residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, 4)
        self.dropout, self.channels = nn.Dropout(0.3), nn.Dropout1d(0.25)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).transpose(1, 2).flatten(2))
        x = self.channels(self.dropout(x))
        return self.head(x + 0.1 * torch.randn_like(x))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Returned:
    """Draws of every kind; those of the batch's size are split with it, the others are whole on each rank."""
    order = torch.randperm(len(x))
    keep = torch.bernoulli(torch.full((len(x), 1, 1), 0.7, dtype=x.dtype))
    shift = torch.rand(len(x), 1, 1, dtype=x.dtype) - 0.5
    scale = torch.empty(6, dtype=x.dtype).normal_(1.0, 0.1)
    picked = torch.randint(0, 4, (len(x), 3))
    drawn = torch.multinomial(y.exp(), 2)
    target = y[order] + 0.1 * (picked + drawn[:, :1]).sum(1, keepdim=True)
    loss = F.mse_loss(model((x[order] * keep + shift) * scale).mean(1), target)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad += 0.01 * torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "order": order, "keep": keep, "shift": shift, "scale": scale, "picked": picked, "drawn": drawn}


def state() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Noisy()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(rows: int = 7, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 5, 6, generator=g), torch.randn(rows, 4, generator=g)) for _ in range(count)]


def run(fn: Any, make: Callable[[], tuple[Any, ...]], data: list[Any], dp: int, zero: int, **options: Any) -> list[Any]:
    """Results and state after each step, from a compiled step with numbers from a counter."""
    step = shardc.compile(fn, mesh=shardc.Mesh(dp=dp, simulated=True), zero=zero, **options)
    return list(Oracle(fn, make, data, torch.float64).run(step).steps)


def alike(got: list[Any], want: list[Any]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        for part in ("results", "state"):
            a, b = getattr(mine, part), getattr(theirs, part)
            assert a.keys() == b.keys()
            for path, value in b.items():
                if not isinstance(value, Tensor):
                    assert a[path] == value, path
                elif path in ("result", "result.loss") or part == "state":  # sums are re-associated
                    torch.testing.assert_close(a[path], value, rtol=1e-10, atol=1e-12, msg=lambda m, p=path: f"{p}: {m}")
                else:
                    assert torch.equal(a[path], value), path


POINTS = [(2, 0), (3, 1), (4, 2), (8, 3)]


def test_counter_gives_the_same_for_every_size_and_stage() -> None:
    alone = run(train, state, batches(), 1, 0, seed=5)
    for dp, zero in POINTS:
        alike(run(train, state, batches(), dp, zero, seed=5), alone)
    first, second = (s.results for s in alone[:2])
    for name in ("order", "keep", "shift", "scale", "picked", "drawn"):
        assert not torch.equal(first[f"result.{name}"], second[f"result.{name}"]), f"{name} is the same in each step"


def test_counter_numbers_are_random() -> None:
    """Not the same for each rank, nor for each draw, and of the shares that were asked for."""

    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(x), torch.rand_like(x), F.dropout(torch.ones_like(x), 0.25)

    step = shardc.compile(draw, mesh=shardc.Mesh(dp=4, simulated=True), seed=3)
    a, b, kept = step(torch.zeros(4, 2500))
    assert len({tuple(row.tolist()) for row in (*a, *b)}) == 8
    assert abs(a.mean() - 0.5) < 0.02 and abs((a * b).mean() - 0.25) < 0.02
    assert abs((kept != 0).double().mean() - 0.75) < 0.02 and torch.all((kept == 0) | ((kept - 4 / 3).abs() < 1e-6))


def compiled_for_each(fn: Any, dp: int, zero: int) -> Any:
    """`fn` compiled anew for each model that it is called with, with numbers from a counter."""
    steps: dict[nn.Module, Any] = {}

    @functools.wraps(fn)
    def call(model: nn.Module, *rest: Any) -> Any:
        if model not in steps:
            steps[model] = shardc.compile(fn, mesh=shardc.Mesh(dp=dp, simulated=True), zero=zero, seed=5)
        return steps[model](model, *rest)

    return call


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.dropout])
def test_counter_on_models(name: str) -> None:
    family = FAMILIES[name]
    alone = Oracle(compiled_for_each(family.step, 1, 0), family.state, family.batches(7), torch.float64)
    for dp in (2, 3, 4, 8):
        for zero in (0, 1, 2, 3):
            got, tally = alone.run(compiled_for_each(family.step, dp, zero)), Tally(alone)
            for index, step in enumerate(got.steps):
                assert not tally.step(index, step)[0], (dp, zero)


def test_counter_on_gpt() -> None:
    family = FAMILIES["gpt"]
    runs = [run(family.step, family.state, family.batches(7, 2), dp, zero, seed=5) for dp, zero in [(1, 0), (3, 3)]]
    alike(runs[1], runs[0])
    other = run(family.step, family.state, family.batches(7, 1), 1, 0, seed=6)
    assert not torch.allclose(other[0].results["result"], runs[0][0].results["result"], rtol=1e-6), "dropout is not drawn"


def test_seed_is_an_option_and_torchs_own_by_default() -> None:
    def losses(manual: int, **options: Any) -> list[float]:
        step = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True), **options)
        model, optimizer = state()
        torch.manual_seed(manual)
        return [step(model, optimizer, *b)["loss"].item() for b in batches(count=2)]

    assert losses(1, seed=5) == losses(2, seed=5) != losses(1, seed=6)
    assert losses(1) == losses(1) != losses(2)
    assert losses(5) == losses(2, seed=5)


def test_counter_leaves_torchs_generator_alone() -> None:
    step = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True), seed=5)
    before = torch.get_rng_state()
    step(*state(), *batches()[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("dp", "zero"), POINTS)
def test_torch_gives_the_numbers_of_one_device(dp: int, zero: int) -> None:
    check(train, state, batches(), mesh={"dp": dp}, zero=zero)


def test_torch_leaves_the_generator_as_eager_does() -> None:
    step = shardc.compile(train, mesh=shardc.Mesh(dp=3, simulated=True), zero=3, rng="torch")
    ends = []
    for fn in (train, step):
        model, optimizer = state()
        torch.manual_seed(11)
        for b in batches():
            fn(model, optimizer, *b)
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends)


def _moved(model: nn.Module, x: Tensor) -> Returned:
    """Draws whose value is moved at once: returned whole, the value of a buffer, in layouts of their own."""
    last = torch.randn_like(x.transpose(0, 2))
    model.noise.copy_(torch.rand(x.shape[1:], dtype=x.dtype))
    images = torch.relu(x[:, :, :, None].expand(-1, -1, -1, 2).to(memory_format=torch.channels_last))
    return {
        "last": last,
        "noisy": last + model.noise.sum(),
        "dropped": F.dropout(images, 0.4),
        "even": torch.rand_like(images),
        "straight": torch.rand_like(images, memory_format=torch.contiguous_format),
        "chosen": torch.bernoulli(images.clamp(0, 1)),
        "half": torch.bernoulli(images, 0.5),
        "filled": torch.empty_like(images).bernoulli_(0.5),
    }


@pytest.mark.parametrize("rng", ["counter", "torch"])
@pytest.mark.parametrize("dp", [2, 3, 8])  # of 3 rows
def test_draws_that_are_moved_at_once(rng: str, dp: int) -> None:
    def outcome(ranks: int | None) -> tuple[Returned, Tensor, Tensor]:
        model = nn.Module()
        model.noise = nn.Buffer(torch.zeros(5, 6))
        step = _moved
        if ranks:
            step = shardc.compile(_moved, mesh=shardc.Mesh(dp=ranks, simulated=True), seed=1, rng=rng, zero=3)
        torch.manual_seed(2)
        return step(model, torch.linspace(-1, 1, 90).view(3, 5, 6)), model.noise, torch.get_rng_state()

    got, want = outcome(dp), outcome(None if rng == "torch" else 1)
    for name, value in want[0].items():
        torch.testing.assert_close(got[0][name], value, rtol=1e-6, atol=1e-6, msg=lambda m, p=name: f"{p}: {m}")
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


# -- real processes ----------------------------------------------------------------------------------------------------------


def _losses(seeds: tuple[int, ...], options: dict[str, Any]) -> list[float]:
    import os

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    step = shardc.compile(train, mesh={"dp": world}, **options)
    model, optimizer = state()
    torch.manual_seed(seeds[rank])
    return [step(model, optimizer, *(t.tensor_split(world)[rank] for t in b))["loss"].item() for b in batches()]


@pytest.mark.processes
def test_processes_draw_the_numbers_of_the_simulated_mesh() -> None:
    step = shardc.compile(train, mesh=shardc.Mesh(dp=1, simulated=True), seed=5)
    model, optimizer = state()
    want = [step(model, optimizer, *b)["loss"].item() for b in batches()]
    for got in run_ranks(2, _losses, (1, 2), {"seed": 5, "zero": 3}):  # torch's own generators may differ
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.processes
def test_processes_with_different_generators_are_refused() -> None:
    with pytest.raises(RankFailure, match="random generator") as caught:
        run_ranks(2, _losses, (1, 2), {"rng": "torch"})
    assert all(isinstance(o.error, AgreementError) for o in caught.value.outcomes)
