"""User state: cut and put back on simulated meshes; DTensors, tied weights, loading, checkpoints on real processes."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.capture import World, observe
from shardc.errors import AgreementError, ShardcError, SpecError, StateError
from shardc.mesh import Mesh
from shardc.program import SlotKind, TensorType
from shardc.runtime.agree import agree_values
from shardc.runtime.fingerprint import fingerprint
from shardc.runtime.layout import assemble, cut, split
from shardc.runtime.owners import places, strangers
from shardc.runtime.state import Watch, shard_module_state, take_up, to_local
from shardc.runtime.whole import full_state_dict, gathered, whole
from shardc.runtime.world import Ranks, setup
from shardc.spec import ShardSpec
from shardc.testing.processes import run_ranks

SPECS = [
    "[7@dp, 5]", "[7, 5@(tp,dp)]", "[3·4@tp·2, 5@dp]", "[12@dp·2@tp, 5]", "[2@dp, 3@tp]", "[0@dp, 3]", "[5, 1@tp]", "[]",
    "[1@dp]",
]  # fmt: skip


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}, {"dp": 1, "tp": 4}])
def test_split_and_assemble_by_index_sets(text: str, axes: dict[str, int]) -> None:
    mesh, spec = Mesh(axes, simulated=True), ShardSpec.parse(text)
    value = torch.arange(torch.Size(spec.shape).numel(), dtype=torch.float64).view(spec.shape)
    parts = split(value, spec, mesh)
    for coord, part in zip(mesh.coords(), parts, strict=True):
        want = value
        for k, index in enumerate(spec.indices(mesh, coord)):
            want = want.index_select(k, torch.tensor(index, dtype=torch.int64))
        assert torch.equal(part, want)
    assert len({p.untyped_storage()._cdata for p in parts}) == mesh.size, "each rank writes to a storage of its own"
    assert torch.equal(assemble(parts, spec, mesh), value)
    target = torch.full_like(value, -1.0)
    assert assemble(parts, spec, mesh, out=target) is target and torch.equal(target, value)


def test_one_rank_moves_nothing_and_dim_order_is_kept() -> None:
    t = torch.randn(4, 6)
    spec = ShardSpec.parse("[4@dp, 6]")
    assert split(t, spec, Mesh(dp=1))[0].data_ptr() == t.data_ptr()
    transposed = torch.randn(6, 4).t()
    assert cut(transposed, spec, Mesh(dp=2), (1,)).stride() == (1, 2)
    images = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    part = cut(images, ShardSpec.parse("[4@dp, 3, 5, 5]"), Mesh(dp=2), (0,))
    assert part.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(SpecError, match="cannot be partial"):
        split(t, ShardSpec.parse("[4, 6] +sum@dp"), Mesh(dp=2))
    with pytest.raises(SpecError, match=r"\[4, 6\] does not fit"):
        split(t, ShardSpec.parse("[6, 4]"), Mesh(dp=2))


def test_fingerprint_sees_values_places_and_nans() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64):
        t = (torch.arange(5003) % 7 == 0).to(dtype)
        other = t.clone()
        other[[0, 1]] = other[[1, 0]]
        assert fingerprint(t) == fingerprint(t.clone()) != fingerprint(other), dtype
    assert fingerprint(torch.tensor([float("nan")])) == fingerprint(torch.tensor([float("nan")]))
    assert fingerprint(torch.empty(0)) == 0 and fingerprint(torch.tensor(1)) != fingerprint(torch.tensor(2))


# -- who holds a tensor ------------------------------------------------------------------------------------------------------


def test_places_reach_every_holder() -> None:
    class Owner:
        __slots__ = ("held",)

    p = nn.Parameter(torch.zeros(2))
    owner = Owner()
    owner.held = ({"k": p}, p)

    def closure() -> Tensor:
        return p

    table = OrderedDict(a=1)
    table[p] = {"exp_avg": 1}  # type: ignore[index]
    table["z"] = 3
    found = places([{"o": owner, "f": closure, "t": table, "s": {p}, "l": [p]}], [p])
    new = nn.Parameter(torch.ones(2))
    for put in found.put[id(p)]:
        put(new)
    assert owner.held[0]["k"] is new and owner.held[1] is new and closure() is new
    assert list(table) == ["a", new, "z"] or [k is new for k in table] == [False, True, False]


def test_strangers_are_named() -> None:
    model = nn.Linear(3, 2)
    named = {"model.weight": model.weight}
    known = places([model], named.values()).known | {id(named)}
    assert strangers(named, known) == {}
    for name, p in model.named_parameters():
        assert p.shape[0] == 2, name
    assert p is model.bias and strangers({"model.bias": model.bias}, known) == {}, "no one means what a loop leaves behind"
    q = model.weight
    assert "'q' (local variable of" in strangers(named, known)["model.weight"]
    del q
    mine = [model.weight]
    words = strangers(named, known)["model.weight"]
    assert words.startswith("'mine', a list, (local variable of test_strangers_are_named(), test_state.py:")
    del mine
    other = nn.Linear(3, 2)
    other.weight = model.weight
    keep = {"deep": other}
    assert "a Linear that is not among the arguments" in strangers(named, known)["model.weight"]
    del other, keep
    optimizer = {"o": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert "a SGD that is not" in strangers(named, known)["model.weight"]
    del optimizer
    assert strangers(named, known) == {}


# -- between steps -----------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    optimizer.step()
    return model, optimizer


def _replace(m: nn.Module, o: torch.optim.Optimizer) -> None:
    m.weight = nn.Parameter(m.weight.detach().clone())


def _wrong_shapes(m: nn.Module, o: torch.optim.Optimizer) -> None:
    o.load_state_dict(trained(nn.Linear(5, 2))[1].state_dict())


def _remove(m: nn.Module, o: torch.optim.Optimizer) -> None:
    o.param_groups[0]["params"].pop()
    o.state.pop(m.bias)
    m.bias = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace, "model.weight was replaced by another Parameter"),
        (lambda m, o: m.double(), r"model.weight was retyped from torch.float32 to torch.float64"),
        (lambda m, o: setattr(m.bias, "data", torch.zeros(7)), r"model.bias has shape \[7\].*left it with \[2\]"),
        (_wrong_shapes, r"optimizer.state\[0\].exp_avg has shape \[2, 5\].*left it with \[2, 3\]"),
        (_remove, "model.bias is gone"),
    ],
)
def test_state_changed_behind_the_steps_back_is_refused_by_name(change: Callable[..., object], message: str) -> None:
    model, optimizer = trained(nn.Linear(3, 2))
    watch = Watch()
    watch.remember(observe(step, (model, optimizer), {}).slots.values())
    change(model, optimizer)
    with pytest.raises(StateError, match=message):
        watch.check(observe(step, (model, optimizer), {}).slots.values())


def test_new_values_are_fine() -> None:
    model, optimizer = trained(nn.Linear(3, 2))
    watch = Watch()
    watch.remember(observe(step, (model, optimizer), {}).slots.values())
    other, other_optimizer = trained(nn.Linear(3, 2))
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(other_optimizer.state_dict())
    watch.check(observe(step, (model, optimizer), {}).slots.values())


# -- whole tensors in one process --------------------------------------------------------------------------------------------


def test_gathered_is_for_reading() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weight = model[0].weight
    with gathered(model):
        assert model[0].weight is weight
        model.eval()(torch.randn(4, 3))
    with pytest.raises(StateError, match="1.running_mean was changed inside gathered"), gathered(model):
        model.train()(torch.randn(4, 3))
    with pytest.raises(StateError, match="takes modules, not list"), gathered([model]):  # type: ignore[arg-type]
        pass
    with pytest.raises(KeyError), gathered(model):
        raise KeyError("the user's own error comes through")


def test_full_state_dict_nests_and_copies() -> None:
    model, optimizer = trained(nn.Linear(3, 2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    arguments = {"batch": torch.zeros(2), "nets": {"a": model, "n": 3}, "optimizer": optimizer, "many": [scheduler, 1], "n": 3}
    out = full_state_dict(arguments)
    assert list(out) == ["nets", "optimizer", "many"] and list(out["nets"]["a"]) == ["weight", "bias"]
    assert out["many"][0]["step_size"] == 3
    weight = out["nets"]["a"]["weight"]
    assert type(weight) is Tensor and not weight.requires_grad and weight.data_ptr() != model.weight.data_ptr()
    fresh, fresh_optimizer = trained(nn.Linear(3, 2))
    fresh.load_state_dict(out["nets"]["a"])
    fresh_optimizer.load_state_dict(out["optimizer"])
    assert out["nets"]["a"]._metadata == model.state_dict()._metadata
    assert torch.equal(fresh_optimizer.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


# -- real processes ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Odd sizes, a tied embedding, a frozen weight, a buffer, an LSTM's list of weights, an attribute on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.BatchNorm1d(5)
        self.rnn = nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(1, 5), requires_grad=False)
        self.embed.weight.note = "mine"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x).flatten(0, 1)).view(*x.shape, 5)
        return self.head(self.rnn(h)[0] * self.scale + self.frozen)


def make(seed: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    rest = [p for p in model.parameters() if p is not model.scale]
    optimizer = torch.optim.AdamW([{"params": [model.scale]}, {"params": rest}])
    del rest
    model(torch.arange(12).view(4, 3) % 11).square().mean().backward()
    optimizer.step()
    return model, optimizer


def storage(world: World, axis: str = "dp") -> tuple[dict[str, ShardSpec], dict[str, TensorType]]:
    """ZeRO-3: every tensor of at least one dim split over `axis` on its largest dim; buffers whole."""
    specs, types = {}, {}
    for path, ref in world.slots.items():
        t = ref.get()
        types[path] = TensorType.of(t)
        spec = ShardSpec.replicated(t.shape)
        if t.dim() and ref.kind is not SlotKind.BUFFER:
            k = max(range(t.dim()), key=lambda k: t.shape[k])
            spec = ShardSpec.parse("[" + ", ".join(f"{n}@{axis}" if j == k else str(n) for j, n in enumerate(t.shape)) + "]")
        specs[path] = spec
    return specs, types


def sharded(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, axis: str = "dp") -> tuple[World, Any, Any]:
    world = observe(step, (model, optimizer), {})
    specs, types = storage(world, axis)
    shard_module_state(world.slots.values(), specs, ranks, [model, optimizer])
    return observe(step, (model, optimizer), {}), specs, types


def same(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, Tensor):
        assert type(a) is type(b) is Tensor and a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, Mapping):
        assert list(a) == list(b), path
        for k in a:
            same(a[k], b[k], f"{path}.{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{i}]")
    else:
        assert a == b, (path, a, b)


def _life_of_a_sharded_model(mesh: dict[str, int], axis: str, folder: str) -> int:
    ranks = setup(Mesh(mesh))
    plain, plain_optimizer = make()
    model, optimizer = make()
    fired: list[int] = []
    handle = model.frozen.register_hook(lambda g: fired.append(1)) if model.frozen.requires_grad else None
    hook = model.scale.register_post_accumulate_grad_hook(lambda p: fired.append(2))
    gone = weakref.ref(model.embed.weight)
    world, specs, types = sharded(ranks, model, optimizer, axis)
    assert handle is None and gone() is None, "the whole tensor is freed"
    if "tp" in mesh:
        _nested_gather(ranks)

    # parameters: one DTensor each, everywhere
    assert isinstance(model.embed.weight, nn.Parameter) and isinstance(model.embed.weight, DTensor)
    assert model.head.weight is model.embed.weight and model.embed.weight.note == "mine"
    assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
    assert not model.frozen.requires_grad and model.scale.requires_grad
    assert model.scale._post_accumulate_grad_hooks and (hook.remove() or not model.scale._post_accumulate_grad_hooks)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert optimizer.param_groups[0]["params"][0] is model.scale
    assert set(optimizer.state) <= set(model.parameters()) and len(optimizer.state) == len(plain_optimizer.state)
    state = optimizer.state[model.embed.weight]
    assert isinstance(state["exp_avg"], DTensor) and not isinstance(state["step"], DTensor)
    assert isinstance(model.embed.weight.grad, DTensor) and not isinstance(model.norm.running_mean, DTensor)
    want = specs["model.embed.weight"].local_shape(ranks.mesh, ranks.coord)
    assert tuple(to_local(model.embed.weight).shape) == want and model.embed.weight.shape == (11, 5)
    assert "Embedding(11, 5)" in repr(model) and "DTensor" in repr(model.scale)

    # back to whole
    reference = {"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}
    full = full_state_dict({"model": model, "optimizer": optimizer, "lr": 3})
    same(full, reference)
    assert full["model"]["head.weight"] is full["model"]["embed.weight"]
    x = torch.arange(6).view(2, 3)
    with gathered(model):
        assert type(model.embed.weight) is nn.Parameter and model.head.weight is model.embed.weight
        model.eval(), plain.eval()
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    assert isinstance(model.head.weight, DTensor) and model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
    for change, message in (
        (lambda: model.scale.data.add_(1), "scale was changed inside gathered"),
        (lambda: model.train()(x), "norm.running_mean was changed"),
        (lambda: model.eval()(x).sum().backward(), "gradient of"),
        (lambda: setattr(model, "scale", nn.Parameter(torch.zeros(()))), "scale was replaced inside"),
    ):
        try:
            with gathered(model):
                change()
        except StateError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")
    same(full_state_dict({"model": model, "optimizer": optimizer}), reference)

    # between steps: nothing moves
    watch = Watch()
    watch.remember(world.slots.values())
    locals_ = take_up(world.slots.values(), specs, types, ranks)
    assert locals_["model.embed.weight"].data_ptr() == to_local(model.embed.weight).data_ptr()
    for path, t in locals_.items():
        assert type(t) is Tensor and tuple(t.shape) == specs[path].local_shape(ranks.mesh, ranks.coord), path

    # whole state dicts load, DTensor ones load, wrong ones do not
    other, other_optimizer = make(seed=4)
    parameters = list(model.parameters())
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(other_optimizer.state_dict())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    world = observe(step, (model, optimizer), {})
    watch.check(world.slots.values())
    assert not isinstance(optimizer.state[model.embed.weight]["exp_avg"], DTensor)
    take_up(world.slots.values(), specs, types, ranks)
    assert isinstance(optimizer.state[model.embed.weight]["exp_avg"], DTensor)
    same(full_state_dict({"model": model, "optimizer": optimizer})["optimizer"]["state"], other_optimizer.state_dict()["state"])
    same(full_state_dict({"model": model})["model"], other.state_dict())
    optimizer.load_state_dict(copy.copy(optimizer.state_dict()))
    take_up(observe(step, (model, optimizer), {}).slots.values(), specs, types, ranks)
    try:
        model.load_state_dict({**other.state_dict(), "scale": torch.zeros(2)})
    except RuntimeError as error:
        assert "size mismatch for scale" in str(error)
    else:
        raise AssertionError("a wrong shape was loaded")

    # distributed checkpoints
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    target = {"model": model.state_dict()}
    dcp.load(target, checkpoint_id=folder)
    same(full_state_dict({"model": model})["model"], other.state_dict())
    fresh = {"model": make(seed=9)[0].state_dict()}
    dcp.load(fresh, checkpoint_id=folder)  # into plain, whole tensors
    same({k: v.clone() for k, v in fresh["model"].items()}, other.state_dict())

    # a parameter that is plain again
    old = model.scale
    model.scale = nn.Parameter(torch.tensor(2.0))
    world = observe(alone, (model,), {})
    try:
        take_up(world.slots.values(), specs, types, ranks)
    except StateError as error:
        assert "model.scale is a plain tensor" in str(error)
    else:
        raise AssertionError("a plain parameter was taken")
    model.scale = old
    return sum(to_local(p).numel() for p in model.parameters())


@pytest.mark.processes
@pytest.mark.parametrize(("mesh", "axis"), [({"dp": 2}, "dp"), ({"dp": 3}, "dp"), ({"dp": 2, "tp": 2}, "(tp,dp)")])
def test_the_life_of_a_sharded_model(mesh: dict[str, int], axis: str, tmp_path: Path) -> None:
    n = Mesh(mesh).size
    held = run_ranks(n, _life_of_a_sharded_model, mesh, axis, str(tmp_path / "ckpt"))
    assert sum(held) - (n - 1) * 1 == sum(p.numel() for p in make()[0].parameters())  # the scalar is on every rank


def _refusals() -> list[str]:
    ranks = setup(Mesh(dp=2))
    out = []

    def attempt(f: Callable[[], object]) -> None:
        try:
            f()
        except ShardcError as error:
            out.append(f"{type(error).__name__}: {error}")
        else:
            out.append("no error")

    model, optimizer = make(seed=ranks.rank)
    attempt(lambda: sharded(ranks, model, optimizer))
    model, optimizer = make()
    kept = model.head.weight
    attempt(lambda: sharded(ranks, model, optimizer))
    assert not isinstance(model.scale, DTensor), "nothing was changed"
    del kept
    with torch.device("meta"):
        empty = Net()
    attempt(lambda: sharded(ranks, empty, torch.optim.SGD(empty.parameters(), lr=0.1)))
    on_meta(ranks)
    net = nn.Linear(4, 3)
    torch.nn.init.ones_(net.weight), torch.nn.init.ones_(net.bias)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    sharded(ranks, net, sgd)
    world = observe(step, (net, sgd), {})
    other = {path: ShardSpec.replicated(ref.get().shape) for path, ref in world.slots.items()}
    attempt(lambda: shard_module_state(world.slots.values(), other, ranks, [net, sgd]))
    return out


class Mixed(nn.Module):
    """A bias of its own, a weight tied to an embedding that is drawn elsewhere."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.bias = embed.weight, nn.Parameter(torch.empty(9))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.bias)


def on_meta(ranks: Ranks) -> None:
    with torch.device("meta"):
        embed = nn.Embedding(9, 4)
        model = nn.Sequential(embed, nn.BatchNorm1d(4), nn.Linear(4, 4), Mixed(embed))
    del embed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    world = observe(step, (model, optimizer), {})
    specs, _ = storage(world)
    assert shard_module_state(world.slots.values(), specs, ranks, [model, optimizer])
    assert torch.equal(before, torch.get_rng_state())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    full = full_state_dict({"model": model})["model"]
    assert not any(t.is_meta for t in full.values()) and full["3.weight"] is full["0.weight"]
    assert full["0.weight"].abs().min() > 0 and 0.5 < full["0.weight"].std() < 2, "drawn by the embedding, not by Mixed"
    assert torch.equal(full["3.bias"], torch.ones(9)) and torch.equal(full["1.running_var"], torch.ones(4))
    values = [fingerprint(t) for t in full.values()]
    agree_values(ranks, list(full), values, "values drawn")


def test_meta_modules_get_values_in_one_process() -> None:
    on_meta(setup(Mesh(dp=1)))
    on_meta(setup(Mesh(dp=4, simulated=True)))


@pytest.mark.processes
def test_what_cannot_be_sharded_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, _refusals)
    assert len(first) == len(second) == 4
    assert first[0].startswith(AgreementError.__name__) and "model.frozen f32[1, 5] has other values on rank 1" in first[0]
    assert "model.embed.weight is also held by 'kept' (local variable of _refusals(), test_state.py" in first[1]
    assert "model.scale is on meta" in first[2] and "Net has no reset_parameters()" in first[2] and "to_empty" in first[2]
    assert "the step keeps it as [3, 4]" in first[3] or "is a DTensor of shape [3, 4]" in first[3]


def _nested_gather(ranks: Ranks) -> None:
    """Where torch's own `full_tensor` is wrong: unevenly nested shards."""
    for shape in ((5, 3), (6, 3), (1, 7), (0, 3)):
        for text in (f"[{shape[0]}@(dp,tp), {shape[1]}]", f"[{shape[0]}@tp, {shape[1]}@dp]"):
            for dtype in (torch.float32, torch.bool, torch.bfloat16):
                value = (torch.arange(shape[0] * shape[1]).view(shape) % 5).to(dtype)
                net = nn.Module()
                net.register_buffer("b", value.clone())
                world = observe(_takes, (net,), {})
                shard_module_state(world.slots.values(), {"net.b": ShardSpec.parse(text)}, ranks, [net])
                assert isinstance(net.b, DTensor) and torch.equal(whole(net.b), value)


def _takes(net: nn.Module) -> None: ...


def alone(model: nn.Module) -> None: ...
