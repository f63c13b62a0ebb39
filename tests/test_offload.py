"""Offload: state and activations on the host or on disk change where and when, never what."""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import OptionError, StateError
from shardc.instructions import Arrive, Compute, Transfer, outs_of
from shardc.runtime.tiers import tier_of
from shardc.testing import check, check_all_processes
from shardc.tiers import DEVICE, DISK, HOST, Offload

WIDTH = 16
EVERYTHING = ("optimizer", "params", "gradients", "activations")
STATE = EVERYTHING[:3]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Sizes above and below a sector of a disk, a tied table, rows that two and three ranks do not divide."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(11, WIDTH), nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Factored(torch.optim.Optimizer):
    """Second moments of matrices as an outer product, as in Adafactor: traced as it is, with small state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, square = self.state[p], p.grad**2 + 1e-30
                if p.dim() == 2:
                    if not state:
                        state |= {"row": p.new_zeros(p.shape[0]), "column": p.new_zeros(p.shape[1])}
                    state["row"].lerp_(square.mean(1), 0.1)
                    state["column"].lerp_(square.mean(0), 0.1)
                    second = state["row"][:, None] * state["column"][None] / state["row"].mean()
                else:
                    if not state:
                        state["all"] = torch.zeros_like(p)
                    second = state["all"].lerp_(square, 0.1)
                p.sub_(group["lr"] * p.grad * (second + 1e-12).rsqrt())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "factored": Factored,
}


def make_state(optimizer: str = "adamw", layers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network(layers)
    return model, OPTIMIZERS[optimizer](model.parameters())


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_keeping(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """The gradients survive."""
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss


def train_growing(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """The gradients survive and are added to; they are clipped, so that no update comes before the last of them."""
    loss = loss_of(model, x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of(model, x)


def batches(count: int = 3, rows: int = 6) -> list[tuple[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randint(11, (rows, 5), generator=g),) for _ in range(count)]


def on(tier: str, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names or EVERYTHING, tier)


def exact(report: Any) -> None:
    """What was measured is what was predicted, to the byte, on each tier."""
    plan = report.plan
    assert report.stats.peak_bytes == plan.memory.peak_bytes
    assert report.stats.tiers == plan.memory.tiers


CASES = [
    ("adamw", train, 1, 0, on(HOST), {}),
    ("adamw", train_keeping, 2, 3, on(DISK), {"microbatches": 2}),
    ("momentum", train_growing, 3, 2, on(DISK, "optimizer", "gradients"), {"recompute": "full"}),
    ("factored", train_growing, 1, 0, on(DISK), {}),
    ("momentum", train, 1, 0, on(DISK), {"microbatches": 3}),
    ("factored", train, 2, 1, on(HOST), {}),
    ("adamw", train, 3, 1, {"optimizer": DISK, "params": HOST, "staging": 0}, {"precision": None}),
    ("adamw", train_keeping, 2, 0, on(DISK, "params", "activations"), {"recompute": "full"}),
]


@pytest.mark.parametrize(
    ("optimizer", "step", "dp", "zero", "offload", "more"),
    [pytest.param(*case, marks=[pytest.mark.long] if k > 3 else []) for k, case in enumerate(CASES)],
)
def test_equal_to_one_device(
    optimizer: str, step: Any, dp: int, zero: int, offload: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    make = functools.partial(make_state, optimizer)
    offload = {**offload, "folder": str(tmp_path)}
    exact(check(step, make, batches(), mesh={"dp": dp}, zero=zero, offload=offload, **more))
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", [train, train_keeping, train_growing])
def test_equal_in_all_combinations(optimizer: str, step: Any) -> None:
    make, draw = functools.partial(make_state, optimizer), random.Random(0)
    ways = [on(tier, *names) for tier in (HOST, DISK) for names in [EVERYTHING, *((n,) for n in EVERYTHING)]]
    for dp, zero, offload in itertools.product((1, 2, 3), (0, 1, 2, 3), ways):
        more = {"microbatches": draw.choice((1, 1, 2, 3)), "recompute": draw.choice((None, None, "full"))}
        exact(check(step, make, batches(), mesh={"dp": dp}, zero=zero, offload=offload, **more))


@pytest.mark.processes
def test_equal_in_processes() -> None:
    options = [
        {"zero": 3, "offload": on(DISK)},
        {"zero": 1, "offload": on(DISK, "optimizer"), "microbatches": 2},
    ]
    check_all_processes(2, train_keeping, make_state, batches(), options)


def test_half_precision_and_guards() -> None:
    """Overflow is decided before anything is written; masters are offloaded, their casts made again."""
    x = batches(2)
    assert _losses(train, x, precision="fp16", offload=on(DISK)) == _losses(train, x, precision="fp16")


def _losses(fn: Any, data: list[tuple[Tensor]], **options: Any) -> list[float]:
    step, state = shardc.compile(fn, mesh=shardc.Mesh(dp=2, simulated=True), zero=3, **options), make_state()
    return [step(*state, *x).item() for x in data]


# -- memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier", "zero"), [(HOST, 0), (DISK, 3)])
def test_only_activations_and_staging_are_resident(tier: str, zero: int) -> None:
    x = batches(rows=4)[0]
    lowered = {}
    for offload in (None, on(tier, *STATE), on(tier)):
        step = shardc.compile(train_keeping, mesh=shardc.Mesh(dp=2, simulated=True), zero=zero, offload=offload)
        state = make_state(layers=3)
        for _ in range(2):
            step(*state, *x)
        assert step.stats.peak_bytes == step.plan.memory.peak_bytes
        assert step.stats.tiers == step.plan.memory.tiers
        lowered["none" if offload is None else str(len(offload))] = step.plan
    inputs = x[0].numel() * 8 // 2
    for plan in (lowered["3"], lowered["4"]):
        assert plan.memory.start_bytes == inputs
        held = {name for moment in plan.memory.timeline for name, n in moment.by_category.items() if n}
        assert not held & {"parameters", "optimizer"}
    moments = {m.name: m.by_category for m in lowered["4"].memory.timeline}
    turn = next(i.name for i in lowered["4"].instructions if i.phase == "backward" and isinstance(i, Compute))
    kept = {m.name: m.by_category for m in lowered["3"].memory.timeline}
    assert moments[turn].get("activations", 0) < 0.5 * kept[turn]["activations"]
    assert lowered["4"].memory.peak_bytes < lowered["3"].memory.peak_bytes < lowered["none"].memory.peak_bytes


def test_one_device_trains_a_model_that_does_not_fit(tmp_path: Path) -> None:
    """Parameters, gradients and moments take twice what the device tier ever holds; the losses are those of one device."""
    make = functools.partial(make_state, layers=6)
    report = check(train_keeping, make, batches(2, rows=2), mesh={"dp": 1}, offload={**on(DISK), "folder": str(tmp_path)})
    state = sum(report.plan.sizes.slot_bytes(slot) for slot in report.plan.slots.values())
    assert report.stats.peak_bytes < state / 2
    exact(report)


# -- the pass --------------------------------------------------------------------------------------------------------------


def lowered(fn: Any = train, optimizer: str = "adamw", mesh: Any = None, **options: Any) -> Any:
    return shardc.compile(fn, mesh=mesh or shardc.Mesh(dp=1), **options).lower(*make_state(optimizer), *batches()[0])


def test_without_the_option_nothing_changes() -> None:
    plan = lowered()
    assert plan.hash == lowered(offload={}).hash == lowered(offload=on(DEVICE)).hash
    assert not plan.memory.tiers and plan.stages["offload"] is plan.stages["schedule"]


def test_prefetch_keeps_to_the_bound() -> None:
    """Loads start ahead of their use, never more of them than the bound allows; stores are waited for alike."""
    ahead = {}
    for bound in (0, 10_000, 40_000):
        plan = lowered(offload={**on(DISK), "staging": bound})
        sizes = {i.out.reg: plan.sizes.nbytes(i.out) for i in plan.instructions if isinstance(i, Transfer) and not i.wait}
        tiers = {i.out.reg: i.out.tier for i in plan.instructions if isinstance(i, Transfer)}
        started: dict[int, int] = {}
        between = 0
        for k, i in enumerate(plan.instructions):
            if isinstance(i, Transfer) and not i.wait:
                started[i.out.reg] = k
            if isinstance(i, Arrive):
                between += k - started.pop(i.moved) - 1
            works = isinstance(i, Compute) and not any(o.reg in plan.aliases.source for o in outs_of(i))
            for tier in (HOST, DISK) if works else ():
                assert sum(sizes[r] for r in started if tiers[r] == tier) <= bound
        assert not started
        ahead[bound] = between
    assert ahead[0] < ahead[10_000] < ahead[40_000]


def test_the_update_runs_where_it_is_faster() -> None:
    """The state of AdamW is four times its gradient, there and back; on a GPU that of momentum, twice, is sooner moved."""
    gpu = shardc.Mesh(dp=1, device="cuda", profile="H100")

    def host(plan: Any) -> int:
        calls = [i for i in plan.instructions if isinstance(i, Compute) and any(o.tier == HOST for o in outs_of(i))]
        return sum(i.op.startswith("shardc.") for i in calls)

    assert host(lowered(offload=on(HOST, "optimizer"))) == len(list(Network().parameters()))
    assert host(lowered(optimizer="momentum", mesh=gpu, offload=on(HOST, "optimizer"))) == 0


def test_plan_says_what_lies_where(tmp_path: Path) -> None:
    plan = lowered(train_keeping, offload={**on(DISK), "optimizer": HOST, "folder": str(tmp_path)})
    text = str(plan)
    assert "on host" in text and "on disk" in text
    for line in (
        r"offload: \d+ tensors of optimizer state on host, .* a rank",
        r"offload: \d+ parameters on disk, .* a rank",
        r"offload: \d+ gradients on disk, .* a rank",
        r"offload: \d+ activations on disk till the backward",
        r"offload: \d+ operators of the update run on the host",
        r"offload: a rank moves per step .* disk to host.*; staging up to .* each way",
        rf"disk: one file for each rank in {re.escape(str(tmp_path))} \(.*\)",
    ):
        assert re.search(line, text), line
    assert "tier     disk" in plan.explain("model.layers.0.up.weight")
    assert "on disk" in plan.diff(lowered(train_keeping))
    again = shardc.Plan.from_json(plan.to_json())
    assert again == plan and again.memory.tiers == plan.memory.tiers


def test_saved_plan_runs(tmp_path: Path) -> None:
    options = {"mesh": shardc.Mesh(dp=2, simulated=True), "zero": 2, "offload": on(DISK)}
    plan = shardc.compile(train, **options).lower(*make_state(), *batches()[0])
    plan.save(tmp_path / "plan.json")
    step, state, other = shardc.compile(train, **options, plan=str(tmp_path / "plan.json")), make_state(), make_state()
    for x in batches():
        same(step(*state, *x), train(*other, *x))
    assert step.plan.hash == plan.hash


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("host", "dict|optimizer"),
        ({"optimiser": "host"}, "optimiser"),
        ({"optimizer": "tape"}, "tape"),
        ({"optimizer": "host", "staging": "much"}, "much"),
        ({"optimizer": "disk", "folder": 3}, "folder"),
    ],
)
def test_wrong_options(value: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        shardc.compile(train, offload=value)


def test_staging_is_read_in_units() -> None:
    assert [Offload.of({"staging": s}).staging for s in ("3 KiB", "1MB", 7, None)] == [3072, 10**6, 7, None]


# -- the user's objects ----------------------------------------------------------------------------------------------------


def running(tier: str, folder: Path, steps: int = 2, fn: Any = train_keeping, **options: Any) -> tuple[Any, Any]:
    offload = {**on(tier), "folder": str(folder)}
    step, state = shardc.compile(fn, **{"mesh": {"dp": 1}, "offload": offload, **options}), make_state()
    for x in batches(steps):
        step(*state, *x)
    return step, state


def plain(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    state = make_state()
    for x in batches(steps):
        train_keeping(*state, *x)
    return state


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_state_dicts_and_evaluation(tier: str, tmp_path: Path) -> None:
    step, (model, optimizer) = running(tier, tmp_path / "files")
    want, other = plain(2)
    assert {tier_of(p) for p in model.parameters()} == ({HOST, DISK} if tier == DISK else {HOST})
    same(dict(model.state_dict()), dict(want.state_dict()))
    same(optimizer.state_dict()["state"], other.state_dict()["state"])
    same(step.full_state_dict()["model"], want.state_dict())
    with shardc.gathered(model), torch.no_grad():
        same(model(batches()[0][0]), want(batches()[0][0]))
    same([p.grad for p in model.parameters()], [p.grad for p in want.parameters()])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    same(torch.load(tmp_path / "model.pt"), dict(want.state_dict()))

    again = shardc.compile(evaluate, mesh={"dp": 1})  # shares the state as it lies
    with torch.no_grad():
        same(again(model, *batches()[0]), evaluate(want, *batches()[0]))
    assert again.plan.memory.start_bytes == batches()[0][0].numel() * 8
    x = batches(3)[2]
    same(step(model, optimizer, *x), train_keeping(want, other, *x))


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_state_that_the_user_changes(tier: str, tmp_path: Path) -> None:
    """In place, by `load_state_dict`, and by loading a checkpoint: the step goes on from the new values."""
    step, (model, optimizer) = running(tier, tmp_path / "files")
    want, other = plain(2)
    with torch.no_grad():
        for m in (model, want):
            m.layers[0].up.weight.mul_(1.5)
    x = batches(3)[2]
    same(step(model, optimizer, *x), train_keeping(want, other, *x))
    shardc.save(tmp_path / "ckpt", step)
    fresh, moments = plain(1)
    model.load_state_dict(fresh.state_dict())
    optimizer.load_state_dict(moments.state_dict())
    same(step(model, optimizer, *x), train_keeping(fresh, moments, *x))
    assert shardc.load(tmp_path / "ckpt", step) == 3
    same(step(model, optimizer, *x), train_keeping(want, other, *x))


def test_moving_back_to_the_device(tmp_path: Path) -> None:
    step, state = running(DISK, tmp_path)
    back = shardc.compile(train_keeping, mesh={"dp": 1}, offload=on(DEVICE))
    want, other = plain(2)
    x = batches(3)[2]
    same(back(*state, *x), train_keeping(want, other, *x))
    assert {tier_of(p) for p in state[0].parameters()} == {DEVICE} and not back.plan.memory.tiers
    same(step(*state, *x), train_keeping(want, other, *x))


def test_checkpoints_to_and_from_any_tier(tmp_path: Path) -> None:
    x = batches(3)
    step, _ = running(DISK, tmp_path / "files", zero=3, mesh=shardc.Mesh(dp=2, simulated=True))
    shardc.save(tmp_path / "ckpt", step, asynchronous=True).result()
    want, other = plain(2)
    expected = train_keeping(want, other, *x[2])
    for offload in (None, on(HOST), on(DISK)):
        again = shardc.compile(train_keeping, mesh={"dp": 1}, offload=offload)
        assert shardc.load(tmp_path / "ckpt", again) == 2
        same(again(*make_state(), *x[2]), expected)


def test_model_made_without_memory(tmp_path: Path) -> None:
    step = shardc.compile(train, mesh={"dp": 1}, offload={**on(DISK), "folder": str(tmp_path)})
    torch.manual_seed(0)
    model = shardc.init(Network, step)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    want = make_state()
    for x in batches():
        same(step(model, optimizer, *x), train(*want, *x))


# -- the disk --------------------------------------------------------------------------------------------------------------


def damage(folder: Path, where: Callable[[int], int]) -> None:
    """Change one byte of the file of a folder."""
    (path,) = folder.iterdir()
    with path.open("r+b") as f:
        at = where(path.stat().st_size)
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 1]))


def weight_of(model: nn.Module) -> tuple[str, int]:
    """A parameter on disk, and where its region begins."""
    region = model.layers[1].up.weight.untyped_storage()._shardc_rest
    return region.name, region.offset


@pytest.mark.parametrize("reader", ["step", "save", "full_state_dict", "gathered"])
def test_damage_is_never_silent(reader: str, tmp_path: Path) -> None:
    step, state = running(DISK, tmp_path / "files")
    shardc.save(tmp_path / "good", step)
    name, offset = weight_of(state[0])
    damage(tmp_path / "files", lambda _: offset + 40)
    with pytest.raises(StateError, match=rf"{re.escape(name)} on disk has checksum") as error:
        if reader == "step":
            step(*state, *batches()[0])
        elif reader == "save":
            shardc.save(tmp_path / "bad", step)
        elif reader == "full_state_dict":
            step.full_state_dict()
        else:
            with shardc.gathered(state[0]):
                pass
    assert str(tmp_path / "files") in str(error.value) and "checkpoint" in str(error.value)
    assert shardc.load(tmp_path / "good", step) == 2  # and all is well again
    want = plain(2)
    x = batches(3)[2]
    same(step(*state, *x), train_keeping(*want, *x))


def test_torn_file(tmp_path: Path) -> None:
    """What the file has lost cannot be read."""
    step, state = running(DISK, tmp_path, fn=train)
    (path,) = tmp_path.iterdir()
    name, offset = weight_of(state[0])
    os.truncate(path, offset)
    with pytest.raises(StateError, match=r"on disk cannot be (read|mapped)"):
        step(*state, *batches()[0])
    with pytest.raises(StateError, match=rf"{re.escape(name)} on disk cannot be read"):
        step.full_state_dict()


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StateError, match=r"no space on disk for model.*No space left"):
        running(DISK, tmp_path)


def test_failed_write_poisons_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = running(DISK, tmp_path / "files", offload={**on(DISK, *STATE), "folder": str(tmp_path / "files")})
    shardc.save(tmp_path / "ckpt", step)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        with pytest.raises(shardc.ShardcError, match="Input/output error"):
            step(*state, *batches()[0])
    with pytest.raises(StateError, match="half a step"):
        step(*state, *batches()[0])
    assert shardc.load(tmp_path / "ckpt", step) == 2
    want, x = plain(2), batches(3)[2]
    same(step(*state, *x), train_keeping(*want, *x))


def test_files_go_with_the_step(tmp_path: Path) -> None:
    step, state = running(DISK, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del step
    gc.collect()
    assert not list(tmp_path.iterdir())
    want = plain(2)
    same(dict(state[0].state_dict()), dict(want[0].state_dict()))  # the state lives on


KILLED = """
import sys
sys.path.insert(0, sys.argv[3])
import torch, shardc
from test_offload import EVERYTHING, batches, make_state, train_keeping
from pathlib import Path
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
step = shardc.compile(train_keeping, mesh=shardc.Mesh(dp=2, simulated=True), zero=3,
                      offload={**dict.fromkeys(EVERYTHING, "disk"), "folder": str(folder / "files")})
state = make_state()
start = shardc.load(folder / "ckpt", step, missing_ok=True)
print("start", start, flush=True)
for k, x in list(enumerate(batches(steps)))[start:]:
    print("loss", k, step(*state, *x).item().hex(), flush=True)
    if k % 3 == 2:
        shardc.save(folder / "ckpt", step)
        print("saved", k + 1, flush=True)
"""


def offloading(folder: Path, steps: int, kill_after: float | None = None) -> dict[str, Any]:
    """Run the program above, or kill it so many seconds after its second step; what it said."""
    command = [sys.executable, "-c", KILLED, str(folder), str(steps), str(Path(__file__).parent)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.split())
            if kill_after is not None and len(lines) > 2:  # the first two steps are compiled
                time.sleep(kill_after)
                process.send_signal(signal.SIGKILL)
                kill_after = None
                lines += [text.split() for text in process.stdout.read().splitlines()]
    losses = {int(words[1]): float.fromhex(words[2]) for words in lines if words[0] == "loss" and len(words) == 3}
    start = next(int(words[1]) for words in lines if words[0] == "start")
    return {"start": start, "losses": losses, "saved": [int(w[1]) for w in lines if w[0] == "saved" and len(w) == 2]}


@functools.lru_cache
def uninterrupted(steps: int) -> list[float]:
    return _losses(train_keeping, batches(steps), offload=on(HOST))


def kill_during_offload(folder: Path, seed: int, steps: int = 20) -> int:
    """Kill a run with its state on disk at a random moment, then resume: the losses are bit for bit those of a run that was
    not killed, and the files of the dead are gone. The step from which it went on."""
    folder.mkdir()
    want = uninterrupted(steps)
    killed = offloading(folder, steps, random.Random(seed).uniform(0, 2.5))
    left = len(list((folder / "files").iterdir()))
    resumed = offloading(folder, steps)
    assert resumed["start"] >= max(killed["saved"], default=0)
    assert sorted({**killed["losses"], **resumed["losses"]}) == list(range(steps))
    for losses in (killed["losses"], resumed["losses"]):
        assert all(value == want[k] for k, value in losses.items())
    assert not list((folder / "files").iterdir())
    assert left == 2 or len(killed["losses"]) == steps  # the files of the dead, one for each rank
    return int(resumed["start"])


@pytest.mark.long
def test_killed_while_offloading(tmp_path: Path) -> None:
    kill_during_offload(tmp_path / "run", 0)
