"""What `programs` puts a training step together from: layers, losses, optimizers, as lines of source.

A layer is a function that appends lines to a `Model` being written; it keeps `shape` (without the batch dim) right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from shardc.testing.expressions import ACROSS, ROWWISE


@dataclass
class Model:
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
    def attends(self) -> bool:
        """Whether there is attention, whose kernels have no second derivative."""
        return any("scaled_dot_product" in line or "encoder" in line for line in self.forward)

    @property
    def width(self) -> int:
        return self.shape[-1]


Layer = Callable[[DrawFn, Model], None]

SIZES = st.sampled_from([3, 2, 4, 5, 6, 7, 8])
ACTIVATIONS = ("torch.relu", "F.gelu", "torch.tanh", "F.silu", "torch.sigmoid")


def _linear(draw: DrawFn, m: Model) -> None:
    new = draw(SIZES)
    layer = m.add(m.name("linear"), f"nn.Linear({m.width}, {new}{draw(st.sampled_from(['', ', bias=False']))})")
    m.forward.append(f"x = {layer}(x)")
    m.shape = (*m.shape[:-1], new)


def _activation(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {'torch.relu' if m.exact else draw(st.sampled_from(ACTIVATIONS))}(x)")


def _residual(draw: DrawFn, m: Model) -> None:
    inner, n = draw(SIZES), m.name("")
    up, down = m.add(f"up{n}", f"nn.Linear({m.width}, {inner})"), m.add(f"down{n}", f"nn.Linear({inner}, {m.width})")
    m.forward.append(f"x = x + {down}(torch.relu({up}(x)))")


def _tied(draw: DrawFn, m: Model) -> None:
    n = m.name("")
    one = m.add(f"first{n}", f"nn.Linear({m.width}, {m.width})")
    two = m.add(f"second{n}", f"nn.Linear({m.width}, {m.width}, bias=False)")
    m.init.append(f"{two}.weight = {one}.weight")
    m.forward.append(f"x = {two}(torch.relu({one}(x)))")


def _scale(draw: DrawFn, m: Model) -> None:
    name = m.name("scale")
    m.init.append(f"self.{name} = nn.Parameter(torch.ones({m.width}))")
    m.forward.append(f"x = x * self.{name}")


def _buffer(draw: DrawFn, m: Model) -> None:
    name = m.name("mask")
    m.init.append(f'self.register_buffer("{name}", (torch.arange({m.width}) % 2 + 1).float())')
    m.forward.append(f"x = x * self.{name}")


def _statistic(draw: DrawFn, m: Model) -> None:
    name = m.name("total")
    m.init.append(f'self.register_buffer("{name}", torch.zeros({m.width}))')
    over = tuple(range(len(m.shape)))
    m.forward.append(f"self.{name}.add_(x.detach().sum({over if len(over) > 1 else 0}))")


def _counter(draw: DrawFn, m: Model) -> None:
    name = m.name("calls")
    m.init.append(f'self.register_buffer("{name}", torch.tensor(0))')
    m.forward.append(f"self.{name} += 1")


def _frozen(draw: DrawFn, m: Model) -> None:
    name = m.name("frozen")
    layer = m.add(name, f"nn.Linear({m.width}, {m.width})")
    m.init.append(f"{layer}.requires_grad_(False)")
    m.forward.append(f"x = {layer}(x)")


def _unused(draw: DrawFn, m: Model) -> None:
    m.add(m.name("unused"), f"nn.Linear({m.width}, {draw(SIZES)})")


def _layer_norm(draw: DrawFn, m: Model) -> None:
    affine = draw(st.sampled_from(["", ", bias=False", ", elementwise_affine=False"]))
    m.forward.append(f"x = {m.add(m.name('norm'), f'nn.LayerNorm({m.width}{affine})')}(x)")


def _softmax(draw: DrawFn, m: Model) -> None:
    m.forward.append("x = torch.softmax(x, -1)")


def _dropout(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = F.dropout(x, {draw(st.sampled_from([0.25, 0.5]))}, self.training)")


def _batch_norm(draw: DrawFn, m: Model) -> None:
    features = m.width if len(m.shape) == 1 else m.shape[0]
    norm = m.add(m.name("bn"), f"nn.BatchNorm{'2d' if len(m.shape) == 3 else '1d'}({features})")
    m.forward.append(f"x = {norm}(x)")


def _attention(draw: DrawFn, m: Model) -> None:
    t, d = m.shape
    heads = draw(st.sampled_from([h for h in (1, 2, 3, 4) if d % h == 0]))
    n, causal = m.name(""), draw(st.booleans())
    qkv, out = m.add(f"qkv{n}", f"nn.Linear({d}, {3 * d})"), m.add(f"out{n}", f"nn.Linear({d}, {d})")
    m.forward += [
        f"q, k, v = {qkv}(x).view(x.shape[0], {t}, 3, {heads}, {d // heads}).permute(2, 0, 3, 1, 4)",
        f"a = F.scaled_dot_product_attention(q, k, v, is_causal={causal})",
        f"x = x + {out}(a.transpose(1, 2).reshape(x.shape[0], {t}, {d}))",
    ]


def _conv(draw: DrawFn, m: Model) -> None:
    c, h, w = m.shape
    new, k, pad = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 3])), draw(st.integers(0, 1))
    pad = 1 if k > min(h, w) else pad
    m.forward.append(f"x = {m.add(m.name('conv'), f'nn.Conv2d({c}, {new}, {k}, padding={pad})')}(x)")
    m.shape = (new, h + 2 * pad - k + 1, w + 2 * pad - k + 1)


def _rms_norm(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {m.add(m.name('rms'), f'nn.RMSNorm({m.width})')}(x)")


def _gated(draw: DrawFn, m: Model) -> None:
    n, inner = m.name(""), draw(SIZES)
    up, down = m.add(f"gate{n}", f"nn.Linear({m.width}, {2 * inner})"), m.add(f"back{n}", f"nn.Linear({inner}, {m.width})")
    m.forward += [f"a, b = {up}(x).chunk(2, -1)", f"x = {down}(F.silu(a) * b)"]


def _concat(draw: DrawFn, m: Model) -> None:
    layer = m.add(m.name("side"), f"nn.Linear({m.width}, {(new := draw(SIZES))})")
    m.forward.append(f"x = torch.cat([x, {layer}(x)], -1)")
    m.shape = (*m.shape[:-1], m.width + new)


def _maximum(draw: DrawFn, m: Model) -> None:
    m.forward.append("x = x - x.amax(-1, keepdim=True)")


def _roll(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = x + x.roll({draw(st.integers(1, 2))}, -1)")


def _batch_mean(draw: DrawFn, m: Model) -> None:
    m.forward.append("x = x - 0.5 * x.mean(0)  # rows depend on each other")


def _mix(draw: DrawFn, m: Model) -> None:
    layer = m.add(m.name("mix"), f"nn.Linear({m.shape[0]}, {m.shape[0]})")
    m.forward.append(f"x = x + {layer}(x.transpose(1, 2)).transpose(1, 2)")


def _prefix(draw: DrawFn, m: Model) -> None:
    m.forward.append("x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)")


def _last(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {draw(st.sampled_from(['x[:, -1:]', 'x[:, :1]', 'x.mean(1, keepdim=True)']))} + x")


def _positions(draw: DrawFn, m: Model) -> None:
    name = m.name("position")
    m.init.append(f"self.{name} = nn.Embedding({m.shape[0]}, {m.width})")
    m.forward.append(f"x = x + self.{name}(torch.arange({m.shape[0]}))")


def _group_norm(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {m.add(m.name('gn'), f'nn.GroupNorm(1, {m.shape[0]})')}(x)")


def _pool(draw: DrawFn, m: Model) -> None:
    c, h, w = m.shape
    if min(h, w) >= 2:
        m.forward.append(f"x = F.{draw(st.sampled_from(['max_pool2d', 'avg_pool2d']))}(x, 2, 1)")
        m.shape = (c, h - 1, w - 1)


def _rowwise(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {draw(st.sampled_from(ROWWISE))}")


def _across(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {draw(st.sampled_from(ACROSS))}  # rows depend on each other")


def _prelu(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {m.add(m.name('prelu'), 'nn.PReLU()')}(x)")


def _bilinear(draw: DrawFn, m: Model) -> None:
    m.forward.append(f"x = {m.add(m.name('bilinear'), f'nn.Bilinear({m.width}, {m.width}, {m.width})')}(x, x.tanh())")


def _recurrent(draw: DrawFn, m: Model) -> None:
    kind, new = draw(st.sampled_from(["GRU", "LSTM", "RNN"])), draw(SIZES)
    m.forward.append(f"x = {m.add(m.name('cells'), f'nn.{kind}({m.width}, {new}, batch_first=True)')}(x)[0]")
    m.shape = (m.shape[0], new)


def _transformer(draw: DrawFn, m: Model) -> None:
    heads = draw(st.sampled_from([h for h in (1, 2, 3) if m.width % h == 0]))
    first = draw(st.booleans())
    text = f"nn.TransformerEncoderLayer({m.width}, {heads}, {2 * m.width}, 0.0, batch_first=True, norm_first={first})"
    m.forward.append(f"x = {m.add(m.name('encoder'), text)}(x)")


def _convolution(draw: DrawFn, m: Model) -> None:
    """Over the sequence: the whole width, or each channel for itself."""
    groups = draw(st.sampled_from([1, m.width]))
    layer = m.add(m.name("conv"), f"nn.Conv1d({m.width}, {m.width}, 3, padding=1, groups={groups})")
    m.forward.append(f"x = {layer}(x.transpose(1, 2)).transpose(1, 2)")


def _checkpointed(draw: DrawFn, m: Model) -> None:
    n, inner = m.name(""), draw(SIZES)
    layer = m.add(f"block{n}", f"nn.Sequential(nn.Linear({m.width}, {inner}), nn.Tanh(), nn.Linear({inner}, {m.width}))")
    m.forward.append(f"x = torch.utils.checkpoint.checkpoint({layer}, x, use_reentrant=False)")


ANY = (_linear, _activation, _residual, _tied, _scale, _buffer, _statistic, _counter, _frozen, _unused)
"""Layers for inputs with features last, exact on integers."""
INEXACT = (_layer_norm, _softmax, _rms_norm, _gated, _concat, _maximum, _roll, _batch_mean, _rowwise, _rowwise, _rowwise,
           _across, _across, _prelu, _bilinear, _checkpointed)  # fmt: skip
SEQUENCE = (_attention, _mix, _prefix, _last, _positions, _recurrent, _transformer, _convolution)
IMAGES = (_conv, _activation, _counter)
IMAGES_INEXACT = (_group_norm, _pool, _batch_mean, _across)


def layers(kind: str, m: Model, rows: int, dropout: bool) -> list[Layer]:
    """The layers that may follow in a program on inputs of `kind`."""
    out: list[Layer] = list(IMAGES if kind == "images" else ANY)
    if not m.exact:
        out += IMAGES_INEXACT if kind == "images" else INEXACT
        out += SEQUENCE if kind in ("tokens", "sequence") else ()
        out += [_dropout] if dropout else []
        out += [_batch_norm] if rows > 1 and not m.centred else []
    return out


REAL_LOSSES = {
    "smooth": "F.smooth_l1_loss(out, y)",
    "logits": "F.binary_cross_entropy_with_logits(out, (y > 0).to(out.dtype))",
    "divergence": 'F.kl_div(F.log_softmax(out, -1), F.softmax(y, -1), reduction="batchmean")',
    "penalty": "F.l1_loss(out, y) + 0.01 * sum((p ** 2).sum() for p in model.parameters())",
}
LOSSES = ["mean", "sum", "cross_entropy", "ignore", "masked", "contrastive", *REAL_LOSSES]


def loss_lines(draw: DrawFn, m: Model, rows: int, vocab: int, exact: bool) -> tuple[list[str], list[str], int]:
    """Lines that compute the loss from `out` and `y`, lines that make `y`, and the width of the output layer."""
    lead = (rows, *m.shape[:-1])
    width = draw(st.sampled_from([vocab, 2, 4]))
    real = [f"y = numbers(g, {', '.join(map(str, (*lead, width)))})"]
    kind = draw(st.sampled_from(["sum"] if exact else LOSSES))
    if kind == "contrastive" and rows == 1:  # there is no other row, and nothing to learn
        kind = "mean"
    if kind in ("mean", "sum"):
        return [f'loss = F.mse_loss(out, y, reduction="{kind}")'], real, width
    if kind in REAL_LOSSES:
        return [f"loss = {REAL_LOSSES[kind]}"], real, width
    if kind == "contrastive":  # every row against every other
        return ["z = out.flatten(1)", "loss = F.cross_entropy(z @ z.t(), torch.arange(len(z)))"], real, width
    if kind == "masked":
        mean = "loss = (((out - y) ** 2).mean(-1) * mask).sum() / mask.sum().clamp_min(1)"
        return ["mask = (y.sum(-1) > 0).to(out.dtype)", mean], real, width
    target = [f"y = torch.randint({width}, ({', '.join(map(str, lead))},), generator=g)"]
    if kind == "ignore":
        target += ["y[torch.rand(y.shape, generator=g) < 0.4] = -100", "y.view(-1)[0] = 0  # one at least counts"]
    extra = draw(st.sampled_from(["", "", ", label_smoothing=0.1", ', reduction="sum"']))
    shaped = [f"out.view(-1, {width}), y.view(-1)", "out.transpose(1, 2), y"] if len(lead) > 1 else ["out, y"]
    return [f"loss = F.cross_entropy({draw(st.sampled_from(shaped))}{extra})"], target, width


AFTER = (
    'for group in optimizer.param_groups: group["lr"] *= 0.9',
    "with torch.no_grad(): model.head.weight.mul_(0.99)",
    "with torch.no_grad(): list(model.parameters())[0].clamp_(-2, 2)",
)
"""Lines that may follow the optimizer's step."""


def step_lines(draw: DrawFn, m: Model, loss: list[str]) -> list[str]:
    """The lines of the training step."""
    exact = m.exact
    before = draw(st.booleans())
    clips = ("clip_grad_norm_(model.parameters(), 0.5)", "clip_grad_value_(model.parameters(), 0.05)",
             'clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))')  # fmt: skip
    clip = [] if exact or not draw(st.booleans()) else [f"torch.nn.utils.{draw(st.sampled_from((clips[0], *clips)))}"]
    zero = [f"optimizer.zero_grad({draw(st.sampled_from(['', 'set_to_none=False']))})"]
    back = ["loss.backward()"]
    if not exact:
        back = draw(st.sampled_from([back, back, _TWICE, back if m.attends else _PENALTY]))
    after = [] if exact else draw(st.sampled_from([[], [], *([line] for line in AFTER)]))
    body = ["out = model(x)", *loss, *back, *clip, "optimizer.step()", *after]
    result = draw(st.sampled_from(["loss", "loss", "loss, out", '{"loss": loss.detach(), "sum": out.sum(0)}']))
    return [*(zero if before else []), *body, *([] if before else zero), f"return {result}"]


_TWICE = ["(0.3 * loss).backward(retain_graph=True)", "(0.7 * loss).backward()"]
_PENALTY = [
    "(slope,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)",
    "(loss + 0.1 * slope.pow(2).sum()).backward()",
]


def optimizer_text(draw: DrawFn, exact: bool) -> str:
    """``torch.optim.X(model.parameters(), ...)``."""
    if exact:
        return f"torch.optim.SGD(model.parameters(), lr=2.0**-6{draw(st.sampled_from(['', ', momentum=0.5']))})"
    sgd = ["momentum=0.9", "momentum=0.9, nesterov=True", "weight_decay=0.1", "momentum=0.5, dampening=0.1", "maximize=True"]
    name, extras = draw(
        st.sampled_from([
            ("SGD", ["", *sgd]),
            ("AdamW", ["", "weight_decay=0.1", "amsgrad=True", "betas=(0.8, 0.99)"]),
            ("Adam", ["", "weight_decay=0.1", "amsgrad=True"]),
            ("RMSprop", ["", "momentum=0.9", "centered=True"]),
            ("NAdam", ["", "weight_decay=0.1"]),
            ("Adamax", ["", "weight_decay=0.1"]),
            ("Adadelta", ["", "weight_decay=0.1"]),
            ("Adagrad", ["", "lr_decay=0.1", "initial_accumulator_value=0.1"]),
            ("RAdam", ["", "weight_decay=0.1, decoupled_weight_decay=True", "betas=(0.5, 0.9)"]),
            ("ASGD", ["", "weight_decay=0.1"]),
        ])
    )  # fmt: skip
    extra = draw(st.sampled_from(extras))
    paths = ["", "foreach=False", *(["fused=True"] if name in ("SGD", "Adam", "AdamW", "Adagrad") else [])]
    if "nesterov" not in extra:  # whose foreach path adds the momentum to .grad itself, which no other path does
        paths.append("foreach=True")
    params = draw(st.sampled_from(["model.parameters()", "groups(model)"]))
    given = ["lr=0.05" if name == "SGD" else "lr=0.01", extra, draw(st.sampled_from(paths))]
    return f"torch.optim.{name}({params}, {', '.join(g for g in given if g)})"
