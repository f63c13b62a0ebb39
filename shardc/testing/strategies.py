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
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from shardc.mesh import Mesh
from shardc.spec import REDUCTIONS, Dim, Factor, P, ShardSpec
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
    free = [axis for axis in mesh.names if axis not in batch]
    if program is not None and free and draw(st.booleans()):
        ndims = {name: p.dim() for name, p in program.make_state()[0].named_parameters() if p.dim()}
        pins: dict[str, P] = {}
        for name in draw(st.lists(st.sampled_from(sorted(ndims)), min_size=1, max_size=3, unique=True)):
            k = draw(st.integers(0, ndims[name] - 1))
            pins[name] = P(*[None] * k, draw(st.sampled_from(free)))
        out["params"] = pins
    return out


# -- programs ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Model:
    """A model being written: the lines of its `__init__` and `forward`, and the shape of `x` (batch dim left out) so far."""

    shape: tuple[int, ...]
    exact: bool
    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    count: int = 0

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def add(self, name: str, module: str) -> str:
        """Declares a submodule; returns how `forward` refers to it."""
        self.init.append(f"self.{name} = {module}")
        return f"self.{name}"

    @property
    def centred(self) -> bool:
        """Whether batch normalisation might take the mean of what a layer norm made zero: nothing but rounding."""
        return len(self.shape) == 2 and any("self.norm" in line for line in self.forward)

    @property
    def width(self) -> int:
        return self.shape[-1]


SIZES = st.sampled_from([3, 2, 4, 5, 6, 7, 8])
ACTIVATIONS = ("torch.relu", "F.gelu", "torch.tanh", "F.silu", "torch.sigmoid")


def _linear(draw: DrawFn, m: _Model) -> None:
    new = draw(SIZES)
    layer = m.add(m.name("linear"), f"nn.Linear({m.width}, {new}{draw(st.sampled_from(['', ', bias=False']))})")
    m.forward.append(f"x = {layer}(x)")
    m.shape = (*m.shape[:-1], new)


def _activation(draw: DrawFn, m: _Model) -> None:
    m.forward.append(f"x = {'torch.relu' if m.exact else draw(st.sampled_from(ACTIVATIONS))}(x)")


def _residual(draw: DrawFn, m: _Model) -> None:
    inner, n = draw(SIZES), m.name("")
    up, down = m.add(f"up{n}", f"nn.Linear({m.width}, {inner})"), m.add(f"down{n}", f"nn.Linear({inner}, {m.width})")
    m.forward.append(f"x = x + {down}(torch.relu({up}(x)))")


def _tied(draw: DrawFn, m: _Model) -> None:
    n = m.name("")
    one = m.add(f"first{n}", f"nn.Linear({m.width}, {m.width})")
    two = m.add(f"second{n}", f"nn.Linear({m.width}, {m.width}, bias=False)")
    m.init.append(f"{two}.weight = {one}.weight")
    m.forward.append(f"x = {two}(torch.relu({one}(x)))")


def _scale(draw: DrawFn, m: _Model) -> None:
    name = m.name("scale")
    m.init.append(f"self.{name} = nn.Parameter(torch.ones({m.width}))")
    m.forward.append(f"x = x * self.{name}")


def _buffer(draw: DrawFn, m: _Model) -> None:
    name = m.name("mask")
    m.init.append(f'self.register_buffer("{name}", (torch.arange({m.width}) % 2 + 1).float())')
    m.forward.append(f"x = x * self.{name}")


def _statistic(draw: DrawFn, m: _Model) -> None:
    name = m.name("total")
    m.init.append(f'self.register_buffer("{name}", torch.zeros({m.width}))')
    over = tuple(range(len(m.shape)))
    m.forward.append(f"self.{name}.add_(x.detach().sum({over if len(over) > 1 else 0}))")


def _counter(draw: DrawFn, m: _Model) -> None:
    name = m.name("calls")
    m.init.append(f'self.register_buffer("{name}", torch.tensor(0))')
    m.forward.append(f"self.{name} += 1")


def _frozen(draw: DrawFn, m: _Model) -> None:
    name = m.name("frozen")
    layer = m.add(name, f"nn.Linear({m.width}, {m.width})")
    m.init.append(f"{layer}.requires_grad_(False)")
    m.forward.append(f"x = {layer}(x)")


def _unused(draw: DrawFn, m: _Model) -> None:
    m.add(m.name("unused"), f"nn.Linear({m.width}, {draw(SIZES)})")


def _layer_norm(draw: DrawFn, m: _Model) -> None:
    affine = draw(st.sampled_from(["", ", bias=False", ", elementwise_affine=False"]))
    m.forward.append(f"x = {m.add(m.name('norm'), f'nn.LayerNorm({m.width}{affine})')}(x)")


def _softmax(draw: DrawFn, m: _Model) -> None:
    m.forward.append("x = torch.softmax(x, -1)")


def _dropout(draw: DrawFn, m: _Model) -> None:
    m.forward.append(f"x = F.dropout(x, {draw(st.sampled_from([0.25, 0.5]))}, self.training)")


def _batch_norm(draw: DrawFn, m: _Model) -> None:
    features = m.width if len(m.shape) == 1 else m.shape[0]
    norm = m.add(m.name("bn"), f"nn.BatchNorm{'2d' if len(m.shape) == 3 else '1d'}({features})")
    m.forward.append(f"x = {norm}(x)")


def _attention(draw: DrawFn, m: _Model) -> None:
    t, d = m.shape
    heads = draw(st.sampled_from([h for h in (1, 2, 3, 4) if d % h == 0]))
    n, causal = m.name(""), draw(st.booleans())
    qkv, out = m.add(f"qkv{n}", f"nn.Linear({d}, {3 * d})"), m.add(f"out{n}", f"nn.Linear({d}, {d})")
    m.forward += [
        f"q, k, v = {qkv}(x).view(x.shape[0], {t}, 3, {heads}, {d // heads}).permute(2, 0, 3, 1, 4)",
        f"a = F.scaled_dot_product_attention(q, k, v, is_causal={causal})",
        f"x = x + {out}(a.transpose(1, 2).reshape(x.shape[0], {t}, {d}))",
    ]


def _conv(draw: DrawFn, m: _Model) -> None:
    c, h, w = m.shape
    new, k, pad = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 3])), draw(st.integers(0, 1))
    pad = 1 if k > min(h, w) else pad
    m.forward.append(f"x = {m.add(m.name('conv'), f'nn.Conv2d({c}, {new}, {k}, padding={pad})')}(x)")
    m.shape = (new, h + 2 * pad - k + 1, w + 2 * pad - k + 1)


_ANY = (_linear, _activation, _residual, _tied, _scale, _buffer, _statistic, _counter, _frozen, _unused)
_INEXACT = (_layer_norm, _softmax)
_IMAGES = (_conv, _activation, _counter)


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
    m = _Model(shape, exact)
    first = ", ".join(map(str, shape))
    inputs = f"numbers(g, {rows}, {first})"
    if kind == "tokens":
        m.forward.append(f"x = {m.add('embed', f'nn.Embedding({vocab}, {m.width})')}(x)")
        inputs = f"torch.randint({vocab}, ({rows}, {t}), generator=g)"
    layers = draw(st.integers(0, min(max_layers, 2) if exact else max_layers))
    for _ in range(layers):
        choice = list(_IMAGES if kind == "images" else _ANY)
        if not exact:
            choice += [] if kind == "images" else _INEXACT
            choice += [_dropout] if dropout else []
            choice += [_batch_norm] if rows > 1 and not m.centred else []
            choice += [_attention] if kind in ("tokens", "sequence") else []
        draw(st.sampled_from(choice))(draw, m)
    if kind == "images":
        m.forward.append("x = x.flatten(1)")
        m.shape = (m.shape[0] * m.shape[1] * m.shape[2],)
    loss, target, classes = _loss(draw, m, rows, vocab, exact)
    if kind == "tokens" and m.width == shape[-1] and classes == vocab and draw(st.booleans()):
        m.forward.append(f"return {m.add('head', f'nn.Linear({m.width}, {classes}, bias=False)')}(x)")
        m.init.append("self.head.weight = self.embed.weight")
    else:
        m.forward.append(f"return {m.add('head', f'nn.Linear({m.width}, {classes})')}(x)")
    steps = (1 if layers else 2) if exact else 3  # a second step would need more than the 53 bits of a float64
    body = {
        "init": m.init, "forward": m.forward, "step": _step(draw, loss, exact), "optimizer": [_optimizer(draw, exact)],
        "numbers": ["torch.randint(-2, 3, shape, generator=g).float()" if exact else "torch.randn(shape, generator=g)"],
        "batch": [f"x = {inputs}", *target], "steps": [str(steps)],
        "weights": _INTEGER_WEIGHTS if exact else [],
    }  # fmt: skip
    return TrainingProgram(_fill(body))


def _loss(draw: DrawFn, m: _Model, rows: int, vocab: int, exact: bool) -> tuple[list[str], list[str], int]:
    """Lines that compute the loss from `out` and `y`, lines that make `y`, and the width of the output layer."""
    lead = (rows, *m.shape[:-1])
    width = draw(st.sampled_from([vocab, 2, 4]))
    real = [f"y = numbers(g, {', '.join(map(str, (*lead, width)))})"]
    kind = draw(st.sampled_from(["sum"] if exact else ["mean", "sum", "cross_entropy", "ignore", "masked", "smooth"]))
    if kind in ("mean", "sum"):
        return [f'loss = F.mse_loss(out, y, reduction="{kind}")'], real, width
    if kind == "smooth":
        return ["loss = F.smooth_l1_loss(out, y)"], real, width
    if kind == "masked":
        mean = "loss = (((out - y) ** 2).mean(-1) * mask).sum() / mask.sum().clamp_min(1)"
        return ["mask = (y.sum(-1) > 0).to(out.dtype)", mean], real, width
    target = [f"y = torch.randint({width}, ({', '.join(map(str, lead))},), generator=g)"]
    if kind == "ignore":
        target += ["y[torch.rand(y.shape, generator=g) < 0.4] = -100", "y.view(-1)[0] = 0  # one at least counts"]
    flat = f"out.view(-1, {width}), y.view(-1)" if len(lead) > 1 and draw(st.booleans()) else None
    return [f"loss = F.cross_entropy({flat or ('out.transpose(1, 2), y' if len(lead) > 1 else 'out, y')})"], target, width


def _step(draw: DrawFn, loss: list[str], exact: bool) -> list[str]:
    """The lines of the training step."""
    before = draw(st.booleans())
    clip = [] if exact or not draw(st.booleans()) else ["torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"]
    zero = [f"optimizer.zero_grad({draw(st.sampled_from(['', 'set_to_none=False']))})"]
    body = ["out = model(x)", *loss, "loss.backward()", *clip, "optimizer.step()"]
    return [*(zero if before else []), *body, *([] if before else zero), "return loss"]


def _optimizer(draw: DrawFn, exact: bool) -> str:
    """``torch.optim.X(model.parameters(), ...)``."""
    if exact:
        return f"torch.optim.SGD(model.parameters(), lr=2.0**-6{draw(st.sampled_from(['', ', momentum=0.5']))})"
    name, extras = draw(
        st.sampled_from([
            ("SGD", ["", "momentum=0.9", "momentum=0.9, nesterov=True", "weight_decay=0.1"]),
            ("AdamW", ["", "weight_decay=0.1", "amsgrad=True", "betas=(0.8, 0.99)"]),
            ("Adam", ["", "weight_decay=0.1", "amsgrad=True"]),
            ("RMSprop", ["", "momentum=0.9", "centered=True"]),
            ("Adagrad", ["", "lr_decay=0.1", "initial_accumulator_value=0.1"]),
        ])
    )  # fmt: skip
    paths = ["", "foreach=False", "foreach=True"] + ([] if name == "RMSprop" else ["fused=True"])
    given = ["lr=0.05" if name == "SGD" else "lr=0.01", draw(st.sampled_from(extras)), draw(st.sampled_from(paths))]
    return f"torch.optim.{name}(model.parameters(), {', '.join(g for g in given if g)})"


_INTEGER_WEIGHTS = [
    "g = torch.Generator().manual_seed(2)",
    "with torch.no_grad():",
    "    for p in model.parameters():",
    "        p.copy_(torch.randint(-2, 3, p.shape, generator=g))",
]

_TEMPLATE = '''\
import torch
import torch.nn.functional as F
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
