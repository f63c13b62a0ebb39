"""Hypothesis strategies for meshes, shard specs, compile options and whole training steps.

    from hypothesis import given, strategies as st
    from shardc.testing import check, strategies as sh

    @given(st.data(), sh.programs(), sh.meshes())
    def test_equal(data, program, mesh):
        check(program.train_step, program.make_state, program.batches, **data.draw(sh.options(mesh, program)))

Sizes are small and mostly odd or prime: uneven parts, empty parts and dims of size 1 are the rule, not the exception. What
is drawn shrinks to few axes, few layers and small sizes, and prints as text that can be pasted.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from shardc.mesh import Mesh
from shardc.spec import REDUCTIONS, Dim, Factor, P, ShardSpec
from shardc.testing.ingredients import SIZES, Model, layers, loss_lines, optimizer_text, step_lines
from shardc.testing.training_program import TrainingProgram

AXES = ("dp", "tp", "cp", "ep")
"""Names of the axes that are drawn; the first one is always there."""


@st.composite
def meshes(draw: DrawFn, max_axes: int = 3, max_size: int = 4, simulated: bool = True, max_ranks: int = 16) -> Mesh:
    """Meshes of 1 to `max_axes` axes in any order, one of them "dp", of sizes 1 to `max_size`; at most `max_ranks` ranks."""
    names = draw(st.permutations(AXES[: draw(st.integers(1, max_axes))]))
    axes, ranks = {}, 1
    for name in names:
        axes[name] = draw(st.integers(1, max(1, min(max_size, max_ranks // ranks))))
        ranks *= axes[name]
    return Mesh(axes, simulated=simulated)


def shapes(max_dims: int = 3, max_size: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dims of sizes 0 to `max_size`."""
    return st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple)


@st.composite
def dims(draw: DrawFn, size: int, axes: Sequence[str] = (), max_factors: int = 3) -> Dim:
    """Dims of `size` elements, as a product of up to `max_factors` factors, split over all of `axes` in any order."""
    sizes, rest = [], size
    for _ in range(draw(st.integers(0, max_factors - 1)) if size > 1 else 0):
        sizes.append(draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= sizes[-1]
    sizes.append(rest)
    parts: list[list[str]] = [[] for _ in sizes]
    for axis in draw(st.permutations(list(axes))):
        parts[draw(st.integers(0, len(sizes) - 1))].append(axis)
    return tuple(Factor(n, tuple(part)) for n, part in zip(sizes, parts, strict=True))


@st.composite
def specs(draw: DrawFn, shape: Sequence[int], mesh: Mesh, partial: bool = True, products: bool = True) -> ShardSpec:
    """Shard specs of a tensor of `shape`.

    Args:
        partial: also with pending reductions (one kind in a spec, as reductions of different kinds do not commute).
        products: also with dims of several factors; otherwise only what `P` can pin.
    """
    places: dict[str, int] = {}  # -1: partial, len(shape): unused
    for axis in mesh.names:
        places[axis] = draw(st.integers(-1 if partial else 0, len(shape)))
    body = tuple(
        draw(dims(n, [a for a, at in places.items() if at == k], 3 if products else 1)) for k, n in enumerate(shape)
    )  # fmt: skip
    op = draw(st.sampled_from(REDUCTIONS)) if -1 in places.values() else "sum"
    return ShardSpec(body, tuple((axis, op) for axis, at in places.items() if at == -1))


@st.composite
def options(draw: DrawFn, mesh: Mesh, program: TrainingProgram | None = None) -> dict[str, Any]:
    """Keyword options of `shardc.compile` for a mesh, as a dict; those at their default are left out.

    With a program, parameters are also pinned to axes that the batch is not split over.
    """
    out: dict[str, Any] = {"mesh": mesh}
    batch: tuple[str, ...] = ("dp",)
    others = [axis for axis in mesh.names if axis != "dp"]
    if draw(st.booleans()) and others:
        batch = ("dp", draw(st.sampled_from(others)))
        out["batch"] = batch
    zero: int = draw(st.integers(0, 3))
    if zero:
        out["zero"] = zero
    if draw(st.integers(0, 3)) == 0:
        out["recompute"] = "full"
    if draw(st.integers(0, 3)) == 0:
        out["microbatches"] = draw(st.integers(2, 3))
    free = [axis for axis in mesh.names if axis not in batch]
    if program is not None and free and draw(st.booleans()):
        ndims = {name: p.dim() for name, p in program.make_state()[0].named_parameters() if p.dim()}
        pins: dict[str, P] = {}
        for name in draw(st.lists(st.sampled_from(sorted(ndims)), min_size=1, max_size=3, unique=True)):
            k = draw(st.integers(0, ndims[name] - 1))
            pins[name] = P(*[None] * k, draw(st.sampled_from(free)))
        out["params"] = pins
    if draw(st.integers(0, 3)) == 0:
        out["offload"] = draw(offloads())
    return out


@st.composite
def offloads(draw: DrawFn) -> dict[str, Any]:
    """Values of the option `offload`: any of its parts on the host or on disk, with and without a bound on staging."""
    parts = draw(st.lists(st.sampled_from(("optimizer", "params", "gradients", "activations")), min_size=1, unique=True))
    out: dict[str, Any] = {part: draw(st.sampled_from(("host", "disk"))) for part in parts}
    if draw(st.booleans()):
        out["staging"] = draw(st.sampled_from((0, 1000, 10**6)))
    return out


# -- programs ----------------------------------------------------------------------------------------------------------------


@st.composite
def programs(
    draw: DrawFn, max_layers: int = 4, max_rows: int = 7, exact: bool = False, dropout: bool = False
) -> TrainingProgram:
    """Small training steps.

    Stacks of Linear, Embedding, LayerNorm, BatchNorm, Conv2d, attention, residual blocks, tied weights, buffers (fixed,
    counted, summed over the batch), frozen and unused parameters; cross entropy with ignored targets, squared errors (mean
    and sum), a mean over a data-dependent mask; SGD, Adam, AdamW, RMSprop, Adagrad through their loop, foreach and fused
    paths; gradient clipping; `zero_grad` at either end of the step.

    Args:
        max_layers: most layers between input and output layer.
        max_rows: most rows of a batch. All batches of a program have the same number.
        exact: only operations on integers and powers of two (weights, inputs and learning rate included), so that in
            float64 every result is exact and does not depend on the order of summation.
        dropout: also dropout, whose numbers come from torch's global generator.
    """
    kind = draw(st.sampled_from(["features", "tokens", "sequence", "images"]))
    rows = draw(st.integers(1, max_rows))
    t, vocab = draw(st.sampled_from([3, 1, 2, 5])), draw(st.sampled_from([5, 3, 7, 11]))
    shape: tuple[int, ...] = {"features": (draw(SIZES),), "images": (draw(st.integers(1, 3)), 4, 3)}.get(kind, (t, draw(SIZES)))
    m = Model(shape, exact)
    first = ", ".join(map(str, shape))
    inputs = f"numbers(g, {rows}, {first})"
    if kind == "tokens":
        m.forward.append(f"x = {m.add('embed', f'nn.Embedding({vocab}, {m.width})')}(x)")
        inputs = f"torch.randint({vocab}, ({rows}, {t}), generator=g)"
    depth = draw(st.integers(0, min(max_layers, 2) if exact else max_layers))
    for _ in range(depth):
        draw(st.sampled_from(layers(kind, m, rows, dropout)))(draw, m)
    if kind == "images":
        m.forward.append("x = x.flatten(1)")
        m.shape = (m.shape[0] * m.shape[1] * m.shape[2],)
    loss, target, classes = loss_lines(draw, m, rows, vocab, exact)
    if kind == "tokens" and m.width == shape[-1] and classes == vocab and draw(st.booleans()):
        m.forward.append(f"return {m.add('head', f'nn.Linear({m.width}, {classes}, bias=False)')}(x)")
        m.init.append("self.head.weight = self.embed.weight")
    else:
        m.forward.append(f"return {m.add('head', f'nn.Linear({m.width}, {classes})')}(x)")
    steps = (1 if depth else 2) if exact else 3  # a second step would need more than the 53 bits of a float64
    body = {
        "init": m.init, "forward": m.forward, "step": step_lines(draw, m, loss), "optimizer": [optimizer_text(draw, exact)],
        "numbers": ["torch.randint(-2, 3, shape, generator=g).float()" if exact else "torch.randn(shape, generator=g)"],
        "batch": [f"x = {inputs}", *target], "steps": [str(steps)],
        "weights": _INTEGER_WEIGHTS if exact else [],
    }  # fmt: skip
    return TrainingProgram(_fill(body))


_INTEGER_WEIGHTS = [
    "g = torch.Generator().manual_seed(2)",
    "with torch.no_grad():",
    "    for p in model.parameters():",
    "        p.copy_(torch.randint(-2, 3, p.shape, generator=g))",
]

_TEMPLATE = '''\
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}


def make_state():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model()
    {weights}
    return model, {optimizer}


def groups(model):
    """Weights, and all else at another learning rate."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    rest = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": rest}, {"params": flat, "lr": 0.02}]


def train_step(model, optimizer, x, y):
    {step}


def numbers(g, *shape):
    return {numbers}


def make_batches():
    g, out = torch.Generator().manual_seed(3), []
    for _ in range({steps}):
        {batch}
        out.append((x, y))
    return out
'''


def _fill(body: dict[str, list[str]]) -> str:
    """The template with each ``{name}`` replaced by lines of its indentation."""
    out = []
    for line in _TEMPLATE.splitlines():
        stem = line.strip().strip("{}")
        if line.strip() == f"{{{stem}}}" and stem in body:
            out += textwrap.indent("\n".join(body[stem]), line[: len(line) - len(line.lstrip())]).splitlines()
            continue
        for name in ("optimizer", "numbers", "steps"):
            line = line.replace(f"{{{name}}}", body[name][0])
        out.append(line)
    return "\n".join(out) + "\n"
