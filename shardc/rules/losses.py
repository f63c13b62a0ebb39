"""Losses: elementwise without reduction, a sum over their elements with it. Means are decomposed (see `decompose`)."""

from __future__ import annotations

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.pointwise import pointwise
from shardc.rules.rule import SUM, WHOLE, DimFactors, Rule

NONE, MEAN, TOTAL = 0, 1, 2
"""torch's numbers for the reductions of a loss."""


def loss(call: Call) -> Rule:
    if call["reduction"] == NONE:
        return pointwise()(call)
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape, SUM if call["reduction"] == TOTAL else WHOLE)
    return draft.rule([draft.broadcast(t.shape, dims) for t in call.operands], [[]])


def loss_backward(call: Call) -> Rule:
    """Linear in the gradient. A mean divides by the number of elements at hand."""
    rule = pointwise("0")(call)
    if call["reduction"] != MEAN:
        return rule
    kinds = {f: WHOLE for f in rule.sizes}
    return Rule(rule.operands, rule.results, rule.sizes, kinds, rule.linear)


def _target(draft: Draft, shape: tuple[int, ...], kind: str) -> tuple[list[DimFactors], list[DimFactors], DimFactors]:
    """Dims of log-probabilities, of targets, and the class dim, for nll_loss and nll_loss2d."""
    c = draft.new(shape[1 if len(shape) > 1 else 0], WHOLE)
    batch = draft.fresh([*shape[:1], *shape[2:]] if len(shape) > 1 else [], kind)
    return [*batch[:1], c, *batch[1:]], batch, c


def nll(call: Call) -> Rule:
    """The class dim is whole. The count of a mean depends on the data: its rows are whole."""
    draft = Draft(call)
    reduction = call["reduction"]
    kind = {NONE: "pass", MEAN: WHOLE, TOTAL: SUM}[reduction]
    x, batch, c = _target(draft, call.operands[0].shape, kind)
    scalar = not batch and len(call.operands[1].shape) == 1
    operands = [x, [()] if scalar else batch, *([[c]] * (len(call.operands) - 2))]
    out = batch if reduction == NONE else []
    return draft.rule(operands, [out, []])


def nll_backward(call: Call) -> Rule:
    """Linear in the gradient; the total weight is read for a mean alone, and is the global one."""
    draft = Draft(call)
    x, batch, c = _target(draft, call.operands[1].shape, "pass")
    grad = call.operands[0].shape
    target = call.operands[2].shape
    weight = [[c]] if call.position("weight") is not None else []
    operands = [batch if grad else [], x, batch if target or not batch else [], *weight, []]
    if not batch and target:
        operands[2] = [()]
    return draft.rule(operands, [x], sets("0"))


ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")

TABLE: dict[str, Builder] = {
    **{f"aten.{name}.default": loss for name in ELEMENTWISE},
    **{f"aten.{name}_backward.default": loss_backward for name in ELEMENTWISE},
    "aten.binary_cross_entropy_with_logits.default": loss,
    "aten.nll_loss_forward.default": nll,
    "aten.nll_loss2d_forward.default": nll,
    "aten.nll_loss_backward.default": nll_backward,
    "aten.nll_loss2d_backward.default": nll_backward,
}
