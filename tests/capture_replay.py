"""The oracle of the capture tests: replay a program node by node on real tensors and compare with eager, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture import Captured, World, capture, observe
from shardc.capture.world import SlotRef


def replay(captured: Captured, world: World) -> Any:
    """Run the program on the world's tensors, write everything back, give the step's result."""
    program, env = captured.program, dict[fx.Node, Any]()
    for path, node in program.entry.items():
        env[node] = world.slots[path].get().detach()
    for path, node in program.inputs.items():
        env[node] = captured.constants[path] if path in captured.constants else world.inputs[path]
    for path, node in program.numbers.items():
        env[node] = world.numbers[path]
    with torch.no_grad():
        for node in program.compute_nodes():
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
            kind = program.info[node].type
            if hasattr(kind, "shape"):
                assert tuple(env[node].shape) == kind.shape and env[node].dtype == kind.dtype, program.line_of(node)
    finals = {path: env[node].clone() for path, node in program.exit.items()}
    results = [env[n].clone() if isinstance(env[n], Tensor) else env[n] for n in program.results]
    numbers = {path: env[n] for path, n in program.number_exit.items()}
    with torch.no_grad():
        for path in program.entry:
            if path in finals:
                world.slots[path].get().copy_(finals[path])
    captured.effects.commit(world, finals, None, numbers)
    return captured.rebuild(results)


def snapshot(world: World) -> dict[str, Any]:
    """Every slot, number and static value by path."""

    def describe(slot: SlotRef) -> tuple[Any, ...]:
        t = slot.get()
        return t.detach().clone(), t.dtype, t.stride() if slot.kind != "gradient" else None

    out: dict[str, Any] = {path: describe(slot) for path, slot in world.slots.items()}
    out.update(world.numbers)
    out.update(
        {
            f"signature {k}": v
            for k, v in world.signature.items()
            if not (isinstance(v, tuple) and v[0] in ("hooks", "function"))
        }
    )
    return out


def same(a: Any, b: Any, where: str, exact: bool = True) -> None:
    """Assert equality of nested results."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, where
        if exact:
            assert torch.equal(torch.nan_to_num(a.detach()), torch.nan_to_num(b.detach())), f"{where}: {(a - b).abs().max()}"
        else:
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-7, msg=lambda m: f"{where}: {m}")
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{where}: {set(a) ^ set(b) or 'order'}"
        for k in a:
            same(a[k], b[k], f"{where}.{k}", exact)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]", exact)
    elif hasattr(a, "__dataclass_fields__"):
        same(vars(a), vars(b), where, exact)
    elif isinstance(a, float) and not exact:
        assert abs(a - b) <= 1e-6 * abs(b) + 1e-12, f"{where}: {a} and {b}"
    else:
        assert a == b, f"{where}: {a} and {b}"


def check(
    step: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    batches: list[tuple[Any, ...]],
    exact: bool = True,
    between: Callable[..., None] | None = None,
    captures: int | None = None,
) -> list[Captured]:
    """Run eager and captured side by side, with one capture per new key; gives the captures.

    Args:
        make: the leading arguments (same values at each call).
        batches: the rest, one tuple for each step.
        exact: bitwise; otherwise to 1e-5 (optimizers whose operator uses torch's fused arithmetic).
        between: called with the leading arguments after each step, on both sides (a scheduler).
        captures: largest number of captures allowed.
    """  # fmt: skip
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    ours = make()
    variants: dict[Any, list[Captured]] = {}
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        expected = step(*plain, *copy.deepcopy(batch))
        args = (*ours, *batch)
        world = observe(step, args, {})
        before = snapshot(world)
        for c in (c for cs in variants.values() for c in cs):
            world.carry(c.carried)
        known = [c for c in variants.get(world.key, []) if c.admits(world.numbers)]
        if not known:
            known = [capture(step, args, {}, world)]
            variants.setdefault(world.key, []).append(known[0])
            same(snapshot(observe(step, args, {})), before, f"step {i}: capture touched")
        torch.manual_seed(i)
        got = replay(known[0], world)
        same(_detached(got), _detached(expected), f"step {i}: result", exact)
        theirs, mine = observe(step, (*plain, *batch), {}), observe(step, (*ours, *batch), {})
        same(snapshot(mine), snapshot(theirs), f"step {i}: state", exact)
        if between:
            between(*plain)
            between(*ours)
    out = [c for cs in variants.values() for c in cs]
    assert captures is None or len(out) <= captures, f"{len(out)} captures"
    return out


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
