"""The operators that `shardc.testing.pinned` writes programs of: each is a function that asks a `Writer` for operands and
returns an expression, or None where nothing fits.

`BOTH` are exact on whole numbers. `WHOLE_NUMBERS` are, but tie or jump on real numbers that should be equal and differ by
rounding. `REAL_NUMBERS` divide, or have roots or exponentials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardc.testing.operators_shapes import SHAPES, dim, numel

if TYPE_CHECKING:
    from shardc.testing.pinned import Writer

Operator = Callable[["Writer"], str | None]


def unary(*texts: str, kind: str = "float") -> Operator:
    """One of these expressions of ``{x}``."""

    def write(w: Writer) -> str | None:
        x = w.pick(kind=kind)
        return w.choose(*texts).format(x=x) if x else None

    return write


def reducing(*texts: str, kind: str = "float", least: int = 1) -> Operator:
    """Expressions of `x` and a dim `d` of at least so many elements; `k` is whether the dim is kept."""

    def write(w: Writer) -> str | None:
        x = w.pick(lambda t: any(n >= least for n in t.shape), kind)
        if x is None:
            return None
        d = w.choose(*(k for k, n in enumerate(w[x].shape) if n >= least))
        d = w.choose(d, d - w[x].dim())
        text: str = w.choose(*texts)
        return text.format(x=x, d=d, k=w.choose(True, False), n=w.number(1, w[x].shape[d]))

    return write


def binary(*texts: str) -> Operator:
    """Expressions of `x` and of `y`, which broadcasts to it."""

    def write(w: Writer) -> str | None:
        x = w.pick()
        return w.choose(*texts).format(x=x, y=w.partner(tuple(w[x].shape))) if x else None

    return write


def sum_over(w: Writer) -> str | None:
    x = w.pick()
    if x is None:
        return None
    dims = [k for k in range(w[x].dim()) if w.number(0, 1)]
    return f"{x}.sum({f'{dims}, keepdim={w.choose(True, False)}' if dims else ''})"


def where(w: Writer) -> str | None:
    x = w.pick()
    if x is None:
        return None
    shape = tuple(w[x].shape)
    if w.choose(True, False):
        return f"{x}.masked_fill({w.mask(shape)}, {w.number(0, 2)})"
    return f"torch.where({w.mask(shape)}, {x}, {w.partner(shape)})"


# -- products ----------------------------------------------------------------------------------------------------------------


def matmul(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    *lead, n = w[x].shape
    if len(lead) >= 2 and w.choose(True, False):
        batch = [m if w.number(0, 2) else 1 for m in lead[w.number(0, len(lead) - 1) : -1]]
        return f"{x} @ {w.like(*batch, n, w.size())}"
    return f"{x} @ {w.like(n, w.size()) if w.number(0, 3) else w.like(n)}"


def einsum(w: Writer) -> str | None:
    x = w.pick(lambda t: 0 < t.dim() <= 3)
    if x is None:
        return None
    left = "abc"[: w[x].dim()]
    sizes = {**dict(zip(left, w[x].shape, strict=True)), "d": w.size()}
    right = "".join(w.draw_order([c for c in left if w.number(0, 2)] + (["d"] if w.number(0, 1) else [])))
    kept = [c for c in dict.fromkeys(left + right) if w.number(0, 2)]
    y = w.like(*(sizes[c] for c in right))
    return f'torch.einsum("{left},{right}->{"".join(w.draw_order(kept))}", {x}, {y})'


def linear(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    n, m = w[x].shape[-1], w.size()
    return f"F.linear({x}, {w.like(m, n)}, {w.choose('None', w.fresh(m))})"


def fused_sum(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() in (2, 3))
    if x is None:
        return None
    *b, n, k = w[x].shape
    m = w.size()
    name, added = ("baddbmm", (*b, n, m)) if b else ("addmm", (n, m))
    return f"torch.{name}({w.partner(added)}, {x}, {w.like(*b, k, m)}, beta={w.number(0, 2)}, alpha={w.number(1, 2)})"


def outer(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() == 1)
    return f"torch.outer({x}, {w.like(w.size())})" if x else None


# -- by index -----------------------------------------------------------------------------------------------------------------


def select(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    n = w[x].shape[d]
    how = w.number(0, 3)
    if how == 0:
        return f"{x}.index_select({d}, {w.index(n, w.size())})"
    if how == 1:
        return f"{x}[{':, ' * d}{w.index(n, w.size(), *([w.size()] if w.number(0, 1) else []))}]"
    if how == 2 and w[x].dim() >= 2:
        size = w.size()
        return f"{x}[{w.index(w[x].shape[0], size)}, {w.index(w[x].shape[1], size)}]"
    return f"{x}.flatten().take({w.index(numel(w, x), w.size())})"


def gather(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    shape = [m if w.number(0, 2) else w.number(1, m) for m in w[x].shape]
    shape[d] = w.size()
    index = w.index(w[x].shape[d], *shape)
    return f"{w.choose('torch.gather')}({x}, {d}, {index})"


def scatter(w: Writer) -> str | None:
    """Places are different wherever one would overwrite another."""
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    shape = [m if w.number(0, 2) else w.number(1, m) for m in w[x].shape]
    if w.choose(True, False):
        shape[d] = w.size()
        return f"{x}.scatter_add({d}, {w.index(w[x].shape[d], *shape)}, {w.like(*shape)})"
    order = w.order(w[x].shape[d])
    shape[d] = w.length(order)
    one = ", ".join("-1" if k == d else "1" for k in range(len(shape)))
    index = f"{order}.view({one}).expand({', '.join(map(str, shape))})"
    return f"{x}.scatter({d}, {index}, {w.choose(w.like(*shape), '2.0')})"


def index_into(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    n = w[x].shape[d]
    shape = list(w[x].shape)
    how = w.choose("index_add", "index_copy", "index_fill", "index_put", "index_put+")
    if how == "index_add":
        shape[d] = w.size()
        return f"{x}.index_add({d}, {w.index(n, shape[d])}, {w.like(*shape)})"
    if how == "index_put+":
        shape[0] = w.size()
        return f"{x}.index_put(({w.index(w[x].shape[0], shape[0])},), {w.partner(tuple(shape))}, accumulate=True)"
    if how == "index_put":
        order = w.order(w[x].shape[0])
        shape[0] = w.length(order)
        return f"{x}.index_put(({order},), {w.partner(tuple(shape))})"
    order = w.order(n)
    shape[d] = w.length(order)
    return f"{x}.index_fill({d}, {order}, 2.0)" if how == "index_fill" else f"{x}.index_copy({d}, {order}, {w.like(*shape)})"


def embedding(w: Writer) -> str | None:
    table = w.pick(lambda t: t.dim() == 2) or w.fresh(w.size(), w.size())
    rows = w[table].shape[0]
    shape = [w.size() for _ in range(w.number(1, 2))]
    padding = w.choose("", f", padding_idx={w.number(0, rows - 1)}")
    return f"F.embedding({w.index(rows, *shape)}, {table}{padding})"


def one_hot(w: Writer) -> str | None:
    return f"F.one_hot({w.index(5, *[w.size() for _ in range(w.number(1, 2))])}, 5){w.choose('', '.to(torch.float64)')}"


# -- networks ----------------------------------------------------------------------------------------------------------------


def conv(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() in (3, 4))
    if x is None:
        return None
    _, c, *space = w[x].shape
    groups = w.choose(1, c)
    kernel = [w.number(1, min(3, n)) for n in space]
    back = w.number(0, 3) == 3
    out = groups * w.number(1, 3)
    weight = w.like(*((c, out // groups) if back else (out, c // groups)), *kernel)
    bias = w.choose("None", w.fresh(out))
    name = f"conv{'_transpose' if back else ''}{len(space)}d"
    how = f"stride={w.number(1, 2)}, padding={w.number(0, min(kernel) // 2)}, groups={groups}"
    return f"F.{name}({x}, {weight}, {bias}, {how})"


def pool(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() in (3, 4) and min(t.shape[2:]) >= 2)
    if x is None:
        return None
    return f"F.{w.choose('avg', 'max') if w.exact else 'avg'}_pool{w[x].dim() - 2}d({x}, 2, {w.number(1, 2)})"


def resize(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() == 4)
    if x is None:
        return None
    wide = w.number(1, min(2, w[x].shape[3]))
    return str(w.choose(f'F.interpolate({x}, scale_factor=2, mode="nearest")', f"F.unfold({x}, (1, {wide}))",
                        f"F.pad({x}, (1, 0, 0, 1), mode='replicate')"))  # fmt: skip


def softmax(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    return f"F.{w.choose('softmax', 'log_softmax', 'softmin')}({x}, {dim(w, x)})" if x else None


def norm(w: Writer) -> str | None:
    """Of more than one element: of one, nothing is left but rounding."""
    x = w.pick(lambda t: t.dim() > 1 and t.shape[-1] > 2)
    if x is None:
        return None
    shape = w[x].shape
    n, c = shape[-1], shape[1]
    texts = [f"F.layer_norm({x}, ({n},), {w.fresh(n)}, {w.fresh(n)}, 0.1)", f"F.rms_norm({x}, ({n},), {w.fresh(n)}, 0.1)",
             f"F.normalize({x}, dim={w.choose(0, -1)}, eps=0.1)",
             f"F.layer_norm({x}, {tuple(shape[1:])}, eps=0.1)"]  # fmt: skip
    if len(shape) in (3, 4):
        texts += [f"F.group_norm({x}, {w.choose(1, c)}, {w.fresh(c)}, {w.fresh(c)}, 0.1)", f"F.instance_norm({x}, eps=0.1)"]
        texts += [f"F.batch_norm({x}, None, None, {w.fresh(c)}, {w.fresh(c)}, True, 0.1, 0.1)"] * 2
    return str(w.choose(*texts))


def attention(w: Writer) -> str | None:
    q = w.pick(lambda t: t.dim() in (3, 4))
    if q is None:
        return None
    *lead, t, d = w[q].shape
    s = w.choose(t, w.size())
    extra = w.choose("", ", is_causal=True", f", attn_mask={w.like(t, s)}")
    s = t if "causal" in extra else s
    k, v = w.like(*lead, s, d), w.like(*lead, s, w.choose(d, w.size()))
    return f"F.scaled_dot_product_attention({q}, {k}, {v}{extra})"


def loss(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    shape = tuple(w[x].shape)
    how = w.choose("mean", "sum", "none")
    y, z = w.like(*shape), w.like(*shape)
    regression = [f"F.mse_loss({x}, {y}, reduction='{how}')",
                  f"F.huber_loss({x}, {y}, reduction='{how}')",
                  f"F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(), reduction='{how}')",
                  f"F.kl_div(F.log_softmax({x}, -1), F.softmax({y}, -1), reduction='{how.replace('mean', 'batchmean')}')",
                  f"F.cosine_similarity({x}, {y}, dim={dim(w, x)})",
                  f"F.soft_margin_loss({x}, {z}.detach().tanh(), reduction='{how}')",
                  f"F.gaussian_nll_loss({x}, {y}, {z}.square() + 0.5, reduction='{how}')"]  # fmt: skip
    if len(shape) < 2 or w.choose(True, False):
        return str(w.choose(*regression))
    classes = shape[1]
    labels = w.index(classes, shape[0], *shape[2:])
    extra = w.choose("", f", weight={w.fresh(classes)}.detach().abs() + 0.5", ", label_smoothing=0.1", ", ignore_index=0")
    how = "none" if "ignore" in extra and how == "mean" else how  # all might be ignored
    return f"F.cross_entropy({x}, {labels}{extra}, reduction='{how}')"


BOTH: dict[str, Operator] = {
    **SHAPES,
    "unary": unary("-{x}", "2 * {x}", "{x}.square()", "{x} + 1", "(1 - {x})", "{x}.clone()", "{x}.detach()"),
    "binary": binary("{x} + {y}", "{x} - {y}", "{y} * {x}", "torch.rsub({x}, {y}, alpha=2)", "torch.lerp({x}, {y}, 0.5)",
                     "torch.addcmul({x}, {x}, {y}, value=2)", "torch.add({x}, {y}, alpha=3)"),
    "where": where, "sum": sum_over,
    "cumsum": reducing("{x}.cumsum({d})"),
    "matmul": matmul, "einsum": einsum, "linear": linear, "fused_sum": fused_sum, "outer": outer,
    "select": select, "gather": gather, "scatter": scatter, "index_into": index_into, "embedding": embedding,
    "one_hot": one_hot,
    "conv": conv, "pool": pool, "resize": resize,
}  # fmt: skip
WHOLE_NUMBERS: dict[str, Operator] = {
    "relu": unary("torch.relu({x})", "{x}.abs()", "{x}.clamp(-2, 3)", "{x}.clamp_min(0)", "F.leaky_relu({x}, 0.5)",
                  "{x}.sign()",
                  "F.hardtanh({x})", "F.relu6({x})", "torch.div({x}, 3, rounding_mode='floor')",
                  "{x}.detach().floor_divide(3)", "{x}.remainder(3)", "{x}.round()"),
    "compare": binary("{x} > {y}", "{x} == {y}", "{x}.le({y})", "torch.logical_and({x}, {y} > 1)", "torch.isclose({x}, {y})"),
    "chosen": binary("torch.maximum({x}, {y})", "torch.minimum({x}, {y})", "torch.fmod({x}, {y}.abs() + 1)"),
    "max": reducing("{x}.max({d}, keepdim={k})", "{x}.min({d}, keepdim={k})", "{x}.detach().amax({d}, keepdim={k})",
                    "{x}.detach().amin({d}, {k})", "{x}.detach().aminmax(dim={d})", "{x}.max({d}).values"),
    "arg": reducing("{x}.argmax({d}, {k})", "{x}.argmin({d})", "torch.argsort({x}, dim={d}, stable=True)", "{x}.argmax()"),
    "sort": reducing("{x}.sort(dim={d}, stable=True)", "{x}.sort(dim={d}, descending=True, stable=True)", "{x}.topk({n}, {d})",
                     "{x}.topk({n}, {d}, largest=False)", "{x}.cummax({d})", "{x}.cummin({d})", "{x}.kthvalue({n}, {d})",
                     "{x}.median({d}).values.detach()"),
    "count": reducing("({x} > 0).sum({d})", "({x} > 0).any({d}, {k})", "({x} < 2).all({d})", "({x} != 0).cumsum({d})"),
    "of_ints": reducing("{x}.sum({d})", "{x}.cumsum({d})", "{x}.double()", "{x} + 1", "{x}.amax({d})", "{x} > 1", "{x} // 2",
                        "{x}.flip({d})", "{x}.remainder(3)", "{x}.max({d})", kind="int"),
    "of_bools": reducing("{x}.any({d})", "{x}.all({d}, {k})", "{x}.double()", "~{x}", "{x}.sum({d})", "{x} & {x}.roll(1, {d})",
                         kind="bool"),
}  # fmt: skip
REAL_NUMBERS: dict[str, Operator] = {
    "smooth": unary("torch.tanh({x})", "F.gelu({x})", "F.silu({x})", "torch.sigmoid({x})", "F.softplus({x})", "{x}.sin()",
                    "F.mish({x})",
                    "{x}.tanh().exp()", "({x}.square() + 1).log()", "({x}.square() + 1).sqrt()", "({x}.square() + 1).rsqrt()",
                    "{x}.erf()", "1 / ({x}.square() + 1)", "{x}.atan()", "F.logsigmoid({x})", "{x}.clamp(-2.1, 2.3)",
                    "F.celu({x})"),
    "quotient": binary("{x} / ({y}.square() + 1)", "torch.atan2({x}, {y}.square() + 1)", "torch.logaddexp({x}, {y})",
                       "torch.addcdiv({x}, {x}, {y}.square() + 1)", "torch.hypot({x}, {y} + 9)"),
    "mean": reducing("{x}.mean({d}, keepdim={k})", "{x}.mean()", "{x}.logsumexp({d}, {k})", "{x}.logcumsumexp({d})"),
    "variance": reducing("{x}.var({d}, keepdim={k})", "{x}.var()", "({x} + 9).norm(dim={d}, keepdim={k})", "({x} + 9).norm()",
                         "torch.var_mean({x}, {d})", "(({x}.tanh() + 2).prod({d}))", "({x}.tanh() + 2).cumprod({d})",
                         "(({x}).var({d}, correction=0) + 0.1).sqrt()", "({x} + 9).norm(3, dim={d})", least=2),
    "softmax": softmax, "norm": norm, "attention": attention, "loss": loss,
}  # fmt: skip
EXACT: dict[str, Operator] = BOTH | WHOLE_NUMBERS
REAL: dict[str, Operator] = BOTH | REAL_NUMBERS
