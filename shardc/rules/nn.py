"""Row-wise operators of networks: rows pass, what a row is reduced over is whole."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.reduce import along
from shardc.rules.rule import SUM, WHOLE, DimFactors, Extent, Rule


def softmax(call: Call) -> Rule:
    return along(call)


def softmax_backward(call: Call) -> Rule:
    return along(call, "0")


def _rows(
    draft: Draft, shape: Sequence[int], normalized: int, batch: str = "pass"
) -> tuple[list[DimFactors], list[DimFactors]]:
    lead = len(shape) - normalized
    return draft.fresh(shape[:lead], batch), draft.fresh(shape[lead:], WHOLE)


def layer_norm(call: Call) -> Rule:
    """native_layer_norm, _fused_rms_norm: statistics have the batch dims, with ones where the row was."""
    draft = Draft(call)
    batch, row = _rows(draft, call.operands[0].shape, len(call["normalized_shape"]))
    ones: list[DimFactors] = [()] * len(row)
    operands = [[*batch, *row], *([row] * (len(call.operands) - 1))]
    return draft.rule(operands, [[*batch, *row]] + [[*batch, *ones]] * (len(call.results) - 1))


def layer_norm_backward(call: Call) -> Rule:
    """Gradients of weight and bias sum over the batch."""
    draft = Draft(call)
    count = len(call["normalized_shape"])
    batch, row = _rows(draft, call.operands[0].shape, count, SUM)
    ones: list[DimFactors] = [()] * count
    stats = {call.position(n) for n in ("mean", "rstd") if n in call}
    operands = []
    for k, t in enumerate(call.operands):
        operands.append([*batch, *ones] if k in stats else row if len(t.shape) == count and k > 1 else [*batch, *row])
    results = [None if r is None else row for r in call.results]
    return draft.rule(operands, [[*batch, *row], *results[1:]], sets("0"))


def group_norm(call: Call) -> Rule:
    """Only the batch passes: channels are in groups, and the groups are counted in the arguments."""
    draft = Draft(call)
    n = draft.new(call.operands[0].shape[0])
    rest = draft.fresh(call.operands[0].shape[1:], WHOLE)
    stat = next(r for r in call.results[1:] if r is not None)
    stats = [n, draft.new(stat.shape[1], WHOLE)]
    return draft.rule(
        [[n, *rest], *([[rest[0]]] * (len(call.operands) - 1))], [[n, *rest], stats, stats], sized=call.sized("N", Extent(0, 0))
    )


def group_norm_backward(call: Call) -> Rule:
    draft = Draft(call)
    n = draft.new(call.operands[0].shape[0], SUM)
    rest = draft.fresh(call.operands[0].shape[1:], WHOLE)
    group = draft.new(call["group"], WHOLE)
    operands = [[n, *rest], [n, *rest], [n, group], [n, group], *([[rest[0]]] * (len(call.operands) - 4))]
    results = [None if r is None else [rest[0]] for r in call.results]
    sized = call.sized("N", Extent(0, 0)) if call.results[0] is not None else {}
    if not sized:
        draft.kinds[n[0]] = WHOLE
    return draft.rule(operands, [[n, *rest] if call.results[0] else None, *results[1:]], sets("0"), sized=sized)


def batch_norm_eval(call: Call) -> Rule:
    """With stored statistics it is elementwise. (In training it is decomposed: see `decompose`.)"""
    draft = Draft(call)
    shape = call.operands[0].shape
    dims = draft.fresh(shape)
    results = [None if r is None else dims if r.shape == shape else draft.fresh(r.shape, WHOLE) for r in call.results]
    return draft.rule([dims, *([[dims[1]]] * (len(call.operands) - 1))], results)


def glu_backward(call: Call) -> Rule:
    draft = Draft(call)
    grad, x = call.operands
    k = call.dim("dim", len(x.shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(x.shape)]
    return draft.rule([[*dims[:k], draft.new(grad.shape[k], WHOLE), *dims[k + 1 :]], dims], [dims], sets("0"))


def glu(call: Call) -> Rule:
    draft = Draft(call)
    shape, result = call.operands[0].shape, call.results[0]
    assert result is not None
    k = call.dim("dim", len(shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(shape)]
    return draft.rule([dims], [[*dims[:k], draft.new(result.shape[k], WHOLE), *dims[k + 1 :]]])


def weight_norm(call: Call) -> Rule:
    """Norms of the rows of a weight along one dim, which passes."""
    draft = Draft(call)
    shape = call.operands[0].shape
    k = call.dim("dim", len(shape))
    dims = [draft.new(n, "pass" if i == k else WHOLE) for i, n in enumerate(shape)]
    ones: list[DimFactors] = [dims[i] if i == k else () for i in range(len(shape))]

    def factors(other: Sequence[int]) -> list[DimFactors]:
        return dims if tuple(other) == shape else ones

    results = [None if r is None else factors(r.shape) for r in call.results]
    return draft.rule([factors(t.shape) for t in call.operands], results, sets("0" if "grad_w" in call else ""))


TABLE: dict[str, Builder] = {
    "aten._softmax.default": softmax,
    "aten._safe_softmax.default": softmax,
    "aten._log_softmax.default": softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._log_softmax_backward_data.default": softmax_backward,
    "aten.native_layer_norm.default": layer_norm,
    "aten._fused_rms_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm_backward.default": layer_norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_eval,
    "aten.glu.default": glu,
    "aten.glu_backward.default": glu_backward,
    "aten._weight_norm_interface.default": weight_norm,
    "aten._weight_norm_interface_backward.default": weight_norm,
}
