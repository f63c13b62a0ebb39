"""Checkpoints: any mesh and stage to any other, other formats, interrupted saves, damage, what does not fit."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import batch, compiled, same, state, train, trained
from torch import Tensor, nn

import shardc
from shardc.checkpoint.directory import begin, manifest_of, newest
from shardc.checkpoint.pieces import pieces
from shardc.errors import StateError
from shardc.mesh import Mesh
from shardc.spec import ShardSpec
from shardc.testing.processes import run_ranks

HERE = Path(__file__).parent


def resume(tmp_path: Path, n: int, a: int, m: int, b: int, rng: str) -> None:
    before, _ = trained(n, a, range(0, 2), None, rng, save=tmp_path / "ckpt")
    on, want = trained(n, a, range(0, 4), None, rng)
    assert on[:2] == before
    losses, got = trained(m, b, range(2, 4), tmp_path / "ckpt", rng, seed=5)
    exact = (n, a) == (m, b)
    same(losses, on[2:], exact)
    same(got, want, exact)
    assert got["calls"] == 4 and got["schedule"]["last_epoch"] == 4


FAST = [(2, 3, 2, 3, "counter"), (2, 3, 3, 0, "torch"), (1, 0, 4, 3, "counter"), (3, 1, 1, 2, "torch"), (2, 0, 2, 0, "torch")]


@pytest.mark.parametrize(("n", "a", "m", "b", "rng"), FAST)
def test_resume_goes_on_as_if_uninterrupted(tmp_path: Path, n: int, a: int, m: int, b: int, rng: str) -> None:
    resume(tmp_path, n, a, m, b, rng)


@pytest.mark.long
@pytest.mark.parametrize("stages", list(itertools.product(range(4), range(4))))
@pytest.mark.parametrize("ranks", list(itertools.product(range(1, 5), range(1, 5))))
def test_resume_everywhere(tmp_path: Path, ranks: tuple[int, int], stages: tuple[int, int]) -> None:
    resume(tmp_path, ranks[0], stages[0], ranks[1], stages[1], "counter" if sum(ranks) % 2 else "torch")


def _rank(n: int, zero: int, steps: range, folder: str | None, save: str, rng: str) -> tuple[list[float], dict[str, Any]]:
    out = trained(n, zero, steps, None if folder is None else Path(folder), rng, seed=3 if folder else 0, processes=True,
                  save=Path(save))  # fmt: skip
    return out


@pytest.mark.processes
def test_processes_save_and_resume(tmp_path: Path) -> None:
    on, want = trained(1, 0, range(0, 6), None)
    first, _ = run_ranks(2, _rank, 2, 3, range(0, 2), None, str(tmp_path / "a"), "counter")
    assert sorted(p.name for p in (tmp_path / "a").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    second = run_ranks(3, _rank, 3, 1, range(2, 4), str(tmp_path / "a"), str(tmp_path / "b"), "counter")[2]
    third, got = trained(2, 3, range(4, 6), tmp_path / "b", seed=8)
    same([*first[0], *second[0], *third], on, exact=False)
    same(got, want, exact=False)


def test_pieces_hold_each_element_once() -> None:
    mesh = Mesh(dp=2, tp=3)
    for text in ("[3·8@tp·2, 5@dp]", "[7@(tp,dp), 2]", "[]", "[5·2@dp]", "[1@dp, 4]", "[0@dp, 3]", "[12@dp·2@tp, 5]"):
        spec = ShardSpec.parse(text)
        seen = torch.zeros(spec.shape, dtype=torch.int64)
        value = torch.arange(seen.numel()).view(spec.shape)
        unused = [a for a in mesh.axes if a not in spec.axes]
        for coord in mesh.coords():
            if any(coord[mesh.index(a)] for a in unused):
                continue
            local = value
            for k, index in enumerate(spec.indices(mesh, coord)):
                local = local.index_select(k, torch.tensor(index, dtype=torch.int64))
            for piece in pieces(spec, mesh, coord):
                window, count = value, seen
                for k, (at, size) in enumerate(zip(piece.offset, piece.size, strict=True)):
                    window, count = window.narrow(k, at, size), count.narrow(k, at, size)
                assert torch.equal(piece.of(local), window), text
                count += 1
        assert bool((seen == 1).all()), text


def test_asynchronous_save_has_the_values_of_its_moment(tmp_path: Path) -> None:
    step, arguments = compiled(2, 3), state()
    for i in range(2):
        step(*arguments, *batch(i))
    saving = shardc.save(tmp_path / "ckpt", step, asynchronous=True)
    on = [step(*arguments, *batch(i)).item() for i in range(2, 4)]
    assert saving is not None
    saving.result()
    losses, _ = trained(2, 3, range(2, 4), tmp_path / "ckpt", seed=4)
    assert losses == on
    shardc.load(tmp_path / "ckpt", step)  # after calls: at once, in place
    assert step.step == 2 and arguments[0].calls == 2
    assert [step(*arguments, *batch(i)).item() for i in range(2, 4)] == on
    assert len(step.variants) == 2, "nothing was captured again"


def test_a_failed_asynchronous_save_is_not_silent(tmp_path: Path) -> None:
    step, arguments = compiled(1, 0), state()
    step(*arguments, *batch(0))
    (tmp_path / "file").write_text("no directory")
    shardc.save(tmp_path / "file", step, asynchronous=True)
    with pytest.raises(StateError, match="is not a checkpoint: it would be overwritten"):
        shardc.save(tmp_path / "other", step)
    shardc.save(tmp_path / "other", step)
    assert manifest_of(tmp_path / "other") is not None


# -- other formats -----------------------------------------------------------------------------------------------------


def test_plain_files(tmp_path: Path) -> None:
    step, arguments = compiled(2, 3), state()
    losses = [step(*arguments, *batch(i)).item() for i in range(2)]
    assert len(losses) == 2
    torch.save(step.full_state_dict(), tmp_path / "whole.pt")
    other, fresh = compiled(3, 1), state(6)
    assert shardc.load(tmp_path / "whole.pt", other) == 0
    other.step, other._seed = step.step, step._seed
    fresh[3][:] = [t.detach().clone().requires_grad_() for t in arguments[3]]
    same(other(*fresh, *batch(2)).item(), step(*arguments, *batch(2)).item(), exact=False)
    same(other.full_state_dict(), step.full_state_dict(), exact=False)


def test_torch_reads_what_shardc_writes_and_the_other_way_round(tmp_path: Path) -> None:
    step, arguments = compiled(2, 3), state()
    for i in range(2):
        step(*arguments, *batch(i))
    shardc.save(tmp_path / "ckpt", step)
    model, optimizer, _, _ = state(7)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    target = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=tmp_path / "ckpt")
    full = step.full_state_dict()
    same(target["model"], full["model"], exact=True)
    same(target["optimizer"]["state"], full["optimizer"]["state"], exact=True)

    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"app": {"model": model.state_dict()}}, checkpoint_id=tmp_path / "dcp")
    fresh = state(8)[0]
    shardc.load(tmp_path / "dcp", fresh)
    same(dict(fresh.state_dict()), dict(full["model"]), exact=True)


def test_safetensors(tmp_path: Path) -> None:
    model = state()[0]
    shardc.save(tmp_path / "model.safetensors", model)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(model.state_dict()) - {"head.weight"}
    same({k: model.state_dict()[k] for k in loaded}, loaded, exact=True)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    shardc.save(tmp_path / "model.safetensors", model)
    fresh = state(3)[0].float()
    shardc.load(tmp_path / "model.safetensors", fresh)
    same(dict(fresh.state_dict()), dict(model.float().state_dict()), exact=True)
    with pytest.raises(StateError, match=r"missing: weight, bias"):
        shardc.load(tmp_path / "model.safetensors", nn.Linear(2, 3))
    with pytest.raises(StateError, match="saved as safetensors"):
        shardc.save(tmp_path / "model.bin", fresh)


# -- interruptions and damage ------------------------------------------------------------------------------------------

KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
import shardc
from checkpoint_cases import batch, compiled, state
step, arguments = compiled(1, 0), state()
i = 0
while True:
    step(*arguments, *batch(i % 5))
    i += 1
    print("saving", i, flush=True)
    shardc.save(sys.argv[1], step, asynchronous=i % 2 == 0)
    print("saved", i if i % 2 else i - 1, flush=True)
"""


def kill_during_saves(folder: Path, count: int, seed: int) -> list[int]:
    """Start a program that saves without end, kill it at a random moment, and load: `count` times. The steps loaded."""
    draw, steps = random.Random(seed), []
    for _ in range(count):
        command = [sys.executable, "-c", KILLED, str(folder), str(HERE)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "saved 1\n":
                    break
            time.sleep(draw.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines()
        least = max([1, *(int(line.split()[1]) for line in rest if line.startswith("saved "))])
        step, arguments = compiled(2, 3), state(9)
        at = shardc.load(folder, step)
        assert at >= least, (at, least)
        step(*arguments, *batch(0))
        assert step.step == at + 1
        steps.append(at)
    return steps


def test_killed_while_saving(tmp_path: Path) -> None:
    assert len(kill_during_saves(tmp_path / "ckpt", 5, 0)) == 5


def test_every_moment_of_the_exchange_leaves_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    step, arguments = compiled(1, 0), state()
    step(*arguments, *batch(0))
    shardc.save(path, step)
    step(*arguments, *batch(1))
    shardc.save(tmp_path / "two", step)
    new, old = tmp_path / "ckpt.new", tmp_path / "ckpt.old"

    def count() -> int:
        found = newest(path)
        assert found is not None
        manifest = manifest_of(found)
        assert manifest is not None
        return manifest.step

    new.mkdir()
    (new / "__0_0.distcp").write_bytes(b"half")
    assert count() == 1
    begin(path)
    assert count() == 1 and not list(new.iterdir())
    new.rmdir()
    (tmp_path / "two").rename(new)
    assert count() == 2
    path.rename(old)
    assert count() == 2
    begin(path)
    assert count() == 2 and newest(path) == path and not old.exists()
    path.rename(old)
    assert count() == 2 and newest(path) == old
    assert shardc.load(path, compiled(1, 0)) == 2


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "shardc.json"])
def test_damage_is_seen(tmp_path: Path, name: str) -> None:
    step, arguments = compiled(1, 0), state()
    step(*arguments, *batch(0))
    shardc.save(tmp_path / "ckpt", step)
    raw = bytearray((tmp_path / "ckpt" / name).read_bytes())
    at = raw.index(b'"step": 1') + 8 if name == "shardc.json" else len(raw) // 2
    raw[at] ^= 3
    (tmp_path / "ckpt" / name).write_bytes(raw)
    before = step.full_state_dict()
    with pytest.raises(StateError, match="damaged: its checksum" if name == "shardc.json" else f"{name} is damaged: checksum"):
        shardc.load(tmp_path / "ckpt", step)
    same(step.full_state_dict(), before, exact=True)
    (tmp_path / "ckpt" / "__0_0.distcp").unlink()
    if name == "__0_0.distcp":
        with pytest.raises(StateError, match="cannot be read"):
            shardc.load(tmp_path / "ckpt", step)


# -- what does not fit -------------------------------------------------------------------------------------------------


def narrow(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def small(width: int, bias: bool = True, groups: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2, bias=bias))
    parameters = list(model.parameters())
    return model, torch.optim.SGD([{"params": parameters[g::groups]} for g in range(groups)], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (small(5), r"model.0.weight is \[5, 3\] here, \[4, 3\] in the checkpoint"),
        (small(4, bias=False), r"unexpected: model.1.bias.*params has 3 parameters here, 4"),
        (small(4, groups=2), r"optimizer has 2 param_groups here, 1 in the checkpoint"),
        ((small(4)[0].double(), small(4)[1]), r"model.0.weight is torch.float64 here, torch.float32"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, other: Any, message: str) -> None:
    make = lambda: shardc.compile(narrow, mesh=Mesh(dp=2, simulated=True), zero=2)  # noqa: E731
    step, x = make(), torch.ones(4, 3)
    step(*small(4), x)
    shardc.save(tmp_path / "ckpt", step)
    loader = make()
    shardc.load(tmp_path / "ckpt", loader)
    with pytest.raises(StateError, match=message):
        loader(*other, x.to(other[0][0].weight.dtype))
    loader(*small(4), x)  # and with what fits it goes on
    assert loader.step == 2


def test_refusals(tmp_path: Path) -> None:
    step = compiled(1, 0)
    with pytest.raises(StateError, match="has not run yet"):
        shardc.save(tmp_path / "ckpt", step)
    with pytest.raises(StateError, match="there is no checkpoint at"):
        shardc.load(tmp_path / "ckpt", step)
    assert shardc.load(tmp_path / "ckpt", step, missing_ok=True) == 0
    step(*state(), *batch(0))
    shardc.save(tmp_path / "ckpt", step)
    with pytest.raises(StateError, match="rng='counter', the step has rng='torch'"):
        shardc.load(tmp_path / "ckpt", compiled(1, 0, rng="torch"))
    with pytest.raises(StateError, match="the step has seed=5"):
        shardc.load(tmp_path / "ckpt", shardc.compile(train, mesh={"dp": 1}, seed=5))
    step._poisoned = "it failed"
    with pytest.raises(StateError, match="half a step"):
        shardc.save(tmp_path / "ckpt", step)
    shardc.load(tmp_path / "ckpt", step)
    assert step._poisoned is None


# -- kinds of state ----------------------------------------------------------------------------------------------------


def keeping(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Gradients survive and add up."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("NAdam", {}), ("Adagrad", {}), ("RMSprop", {"centered": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_state_of_optimizers_and_surviving_gradients(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)

    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    step, arguments = shardc.compile(keeping, mesh=Mesh(dp=2, simulated=True), zero=3), make(0)
    for _ in range(3):
        step(*arguments, x)
    shardc.save(tmp_path / "ckpt", step)
    other, fresh = shardc.compile(keeping, mesh=Mesh(dp=3, simulated=True), zero=1), make(1)
    shardc.load(tmp_path / "ckpt", other)
    for _ in range(2):
        same(other(*fresh, x).item(), step(*arguments, x).item(), exact=False)
    same(other.full_state_dict(), step.full_state_dict(), exact=False)
    grads = [[p.grad for p in pair[0].parameters()] for pair in (fresh, arguments)]
    same(grads[0], grads[1], exact=False)


def test_a_model_on_meta_gets_its_values_from_the_checkpoint(tmp_path: Path) -> None:
    step, arguments = shardc.compile(narrow, mesh=Mesh(dp=2, simulated=True), zero=3), small(4)
    step(*arguments, torch.ones(4, 3))
    shardc.save(tmp_path / "ckpt", step)
    with torch.device("meta"):
        fresh = small(4)
    other = shardc.compile(narrow, mesh=Mesh(dp=2, simulated=True), zero=3)
    shardc.load(tmp_path / "ckpt", other)
    assert other(*fresh, torch.ones(4, 3)).item() == step(*arguments, torch.ones(4, 3)).item()
    same(other.full_state_dict(), step.full_state_dict(), exact=True)
