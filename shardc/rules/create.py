"""Tensors from nothing, or from the shape of another: each part makes its own, where values do not depend on the place."""

from __future__ import annotations

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.linalg import whole
from shardc.rules.rule import WHOLE, Rule, Shape


def made(size: str = "size", kind: str = "pass") -> Builder:
    """Constant (or random) values of a given size; operands, if any, give dtype and device alone."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        result = call.results[0]
        assert result is not None
        dims = draft.fresh(result.shape, kind)
        operands = [draft.fresh(t.shape) for t in call.operands]  # unread: any layout will do
        sized = call.sized(size, Shape()) if size in call and kind == "pass" else {}
        return draft.rule(operands, [dims], sized=sized)

    return build


def like(linear: str = "") -> Builder:
    """The shape of an operand, and none of its values."""
    positions = sets(linear)

    def build(call: Call) -> Rule:
        draft = Draft(call)
        dims = draft.fresh(call.operands[0].shape)
        return draft.rule([dims], [dims], positions)

    return build


def number(call: Call) -> Rule:
    """A tensor as a Python number, or a size of it: whole."""
    draft = Draft(call)
    return draft.rule([draft.fresh(t.shape, WHOLE) for t in call.operands], [None])


def drawn(call: Call) -> Rule:
    """multinomial: the weights of a row are whole, and so is what is drawn from it."""
    draft = Draft(call)
    x, result = call.operands[0], call.results[0]
    assert result is not None
    rows = draft.fresh(x.shape[:-1])
    return draft.rule([[*rows, draft.new(x.shape[-1], WHOLE)]], [[*rows, draft.new(result.shape[-1], WHOLE)]])


TABLE: dict[str, Builder] = {
    "aten.full.default": made(),
    "aten.zeros.default": made(),
    "aten.ones.default": made(),
    "aten.empty.memory_format": made(),
    "aten.rand.default": made(),
    "aten.randn.default": made(),
    "aten.randint.default": made(),
    "aten.randint.low": made(),
    "aten.new_zeros.default": made(),
    "aten.new_ones.default": made(),
    "aten.new_full.default": made(),
    "aten.new_empty.default": made(),
    "aten.normal.float_float": made(),
    "aten.scalar_tensor.default": made(),
    "aten.arange.default": made(kind=WHOLE),
    "aten.arange.start": made(kind=WHOLE),
    "aten.arange.start_step": made(kind=WHOLE),
    "aten.linspace.default": made(kind=WHOLE),
    "aten.eye.default": made(kind=WHOLE),
    "aten.eye.m": made(kind=WHOLE),
    **{f"aten.{name}_window.{o}": made(kind=WHOLE) for name in ("hann", "hamming", "blackman", "bartlett", "kaiser")
       for o in ("default", "periodic")},
    "aten.tril_indices.default": made(kind=WHOLE),
    "aten.triu_indices.default": made(kind=WHOLE),
    "aten.randperm.default": made(kind=WHOLE),
    "aten.multinomial.default": drawn,
    "aten._standard_gamma.default": whole,
    "aten._sample_dirichlet.default": whole,
    "aten.poisson.default": whole,
    "aten.binomial.default": whole,
    "aten.zeros_like.default": like("0"),
    "aten.ones_like.default": like(),
    "aten.full_like.default": like(),
    "aten.empty_like.default": like(),
    "aten._local_scalar_dense.default": number,
    "aten.sym_size.int": number,
    "aten.sym_numel.default": number,
}
