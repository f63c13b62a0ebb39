"""Reading and writing by index: the indexed dims are whole, all others (and those of the index) pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardc.rules.call import Builder, Call, Draft, choosing, rising, sets
from shardc.rules.rule import SUM, WHOLE, DimFactors, Rule, Shape


def embedding(call: Call) -> Rule:
    draft = Draft(call)
    weight, index = call.operands
    batch, row, col = draft.fresh(index.shape), draft.new(weight.shape[0], WHOLE), draft.new(weight.shape[1])
    return draft.rule([[row, col], batch], [[*batch, col]], any_partial=True)


def embedding_backward(call: Call) -> Rule:
    """Each part adds up its own rows; scaling by frequency needs all of them."""
    draft = Draft(call)
    grad, index = call.operands
    result = call.results[0]
    assert result is not None
    batch = draft.fresh(index.shape, WHOLE if call["scale_grad_by_freq"] else SUM)
    row, col = draft.new(result.shape[0], WHOLE), draft.new(grad.shape[-1])
    return draft.rule([[*batch, col], batch], [[row, col]], sets("0"))


def indexed(
    call: Call, draft: Draft, shape: Sequence[int]
) -> tuple[list[DimFactors], list[DimFactors], list[list[DimFactors]]]:
    """Dims of the indexed tensor, of what the index picks from it, and of each index tensor.

    A dim that runs along another one of what is picked (`ops.indexing`) is made of the same factor.
    """
    given = list(call["indices"])
    along: Sequence[int] = call["along"] if "along" in call else [-1] * len(shape)
    tensors = [i for i in given if i is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        raise call.refuse(
            "a boolean mask picks as many elements as the data says",
            "torch.where(mask, x, 0), x * mask, or masked_fill keep the shape",
        )
    runs = [[n if i == d else 1 for i in range(call["rank"])] for n, d in zip(shape, along, strict=True) if d >= 0]
    picked = torch.broadcast_shapes(*(t.shape for t in tensors), *runs)  # type: ignore[no-untyped-call]
    taken = [k for k in range(len(shape)) if along[k] >= 0 or k < len(given) and given[k] is not None]
    whole = [() if along[k] >= 0 else draft.new(n, WHOLE if k in taken else "pass") for k, n in enumerate(shape)]
    batch = draft.fresh(picked)
    whole = [batch[along[k]] if along[k] >= 0 else d for k, d in enumerate(whole)]
    rest = [d for k, d in enumerate(whole) if k not in taken]
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    at = taken[0] if adjacent else 0
    return whole, [*rest[:at], *batch, *rest[at:]], [list(draft.broadcast(t.shape, batch)) for t in tensors]


def index(call: Call) -> Rule:
    draft = Draft(call)
    dims, out, indices = indexed(call, draft, call.operands[0].shape)
    return draft.rule([dims, *indices], [out], any_partial=True)


def index_sum(call: Call) -> Rule:
    """Each part adds up its own values."""
    draft = Draft(call)
    result = call.results[0]
    assert result is not None
    dims, out, indices = indexed(call, draft, result.shape)
    for f in {f for d in out for f in d} - {f for d in dims for f in d}:
        draft.kinds[f] = SUM
    values = list(draft.broadcast(call.operands[0].shape, out))
    return draft.rule([values, *indices], [dims], sets("0"), sized=call.sized("size", Shape()))


def index_put(call: Call) -> Rule:
    """The elements written are whole: any of them may go anywhere. Adding is jointly linear."""
    draft = Draft(call)
    dims, out, indices = indexed(call, draft, call.operands[0].shape)
    for f in {f for t in indices for d in t for f in d}:
        draft.kinds[f] = WHOLE
    values = len(indices) + 1
    adds = call["accumulate"] is True
    linear = [frozenset({0, values})] if adds else []  # which of two writes lasts may differ by rank
    operands = [dims, *indices, draft.broadcast(call.operands[values].shape, out)]
    return draft.rule(operands, [dims], linear, orders=rising(0) if adds else ())


def _beside(draft: Draft, shape: tuple[int, ...], index: tuple[int, ...], k: int) -> tuple[list[DimFactors], list[DimFactors]]:
    """Dims of a tensor and of an index into its dim `k`; other dims pass where the index covers them."""
    dims, at = [], []
    for i, (n, m) in enumerate(zip(shape, index, strict=True)):
        if i != k and n == m:
            dims.append(draft.new(n))
            at.append(dims[-1])
        else:
            dims.append(draft.new(n, WHOLE))
            at.append(draft.new(m) if i == k else draft.new(m, WHOLE))
    return dims, at


def gather(call: Call) -> Rule:
    draft = Draft(call)
    x, index = call.operands
    if not x.shape or not index.shape:
        return draft.rule(
            [draft.fresh(t.shape, WHOLE) for t in call.operands], [draft.fresh(index.shape, WHOLE)], any_partial=True
        )
    dims, at = _beside(draft, x.shape, index.shape, call.dim("dim", len(x.shape)))
    return draft.rule([dims, at], [at], any_partial=True)


def scatter(linear: str) -> Builder:
    """`self` gets values at an index along one dim, which is whole, and so is the index along it."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        x, index = call.operands[:2]
        if not x.shape or not index.shape:
            whole = [draft.fresh(t.shape, WHOLE) for t in call.operands]
            return draft.rule(whole, [whole[0]])
        dims, at = _beside(draft, x.shape, index.shape, call.dim("dim", len(x.shape)))
        for d in at:
            if d not in dims:
                draft.kinds[d[0]] = WHOLE
        operands = [dims, at]
        for src in call.operands[2:]:
            same = src.shape == index.shape
            operands.append([d if same or d in dims and draft.size(d) == n else draft.new(n, WHOLE)
                             for d, n in zip(at, src.shape, strict=True)])  # fmt: skip
        zero = "value" in call and isinstance(call["value"], (int, float)) and call["value"] == 0
        reduce = call["reduce"] if "reduce" in call else None  # noqa: SIM401 (a Call is no dict)
        orders = (
            choosing(0, 2) if call.name == "aten.scatter.src" else rising(0) if call.name != "aten.scatter_reduce.two" else ()
        )
        if reduce in ("amax", "amin") and call["include_self"]:
            orders = (*choosing(0, 2, kinds=(reduce[1:],)), *rising(0))
        summed = reduce == "sum" and call["include_self"] and call.name == "aten.scatter_reduce.two"
        orders = rising(0) if summed else orders
        return draft.rule(operands, [dims], sets("0" if zero else "0&2" if summed else linear), orders=orders)

    return build


def index_select(call: Call) -> Rule:
    draft = Draft(call)
    x, index = call.operands
    k = call.dim("dim", len(x.shape))
    if not x.shape:
        return draft.rule([[], draft.fresh(index.shape, WHOLE)], [[]], any_partial=True)
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(x.shape)]
    at = draft.fresh(index.shape)
    return draft.rule([dims, at], [[*dims[:k], *(at or [()]), *dims[k + 1 :]]], any_partial=True)


def index_write(linear: str) -> Builder:
    """index_add, index_copy, index_fill: along one dim, which is whole, and so is the index."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        x, index = call.operands[:2]
        k = call.dim("dim", len(x.shape))
        dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(x.shape)]
        at = draft.fresh(index.shape, WHOLE)
        src = [[*dims[:k], *(at or [()]), *dims[k + 1 :]]] if len(call.operands) > 2 and call.operands[2].shape else []
        rest: list[list[DimFactors]] = [[]] * (len(call.operands) - 2 - len(src))
        orders = rising(0) if call.name == "aten.index_add.default" or not src and not rest else ()
        if call.name in ("aten.index_copy.default", "aten.index_fill.int_Tensor"):
            orders = choosing(0, 2)
        if call.name == "aten.index_reduce.default" and call["reduce"] in ("amax", "amin") and call["include_self"]:
            orders = choosing(0, 2, kinds=(call["reduce"][1:],))
        return draft.rule([dims, at, *src, *rest], [dims], sets(linear), orders=orders)

    return build


def select_scatter(call: Call) -> Rule:
    draft = Draft(call)
    shape = call.operands[0].shape
    k = call.dim("dim", len(shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(shape)]
    return draft.rule([dims, [*dims[:k], *dims[k + 1 :]]], [dims], sets("0&1"), orders=choosing(0, 1))


def slice_scatter(call: Call) -> Rule:
    draft = Draft(call)
    shape, src = call.operands[0].shape, call.operands[1].shape
    k = call.dim("dim", len(shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(shape)]
    return draft.rule([dims, [*dims[:k], draft.new(src[k], WHOLE), *dims[k + 1 :]]], [dims], sets("0&1"), orders=choosing(0, 1))


def searchsorted(call: Call) -> Rule:
    """bucketize, searchsorted with one row of borders: the borders are whole."""
    draft = Draft(call)
    border = call.position("boundaries" if "boundaries" in call else "sorted_sequence")
    dims = draft.fresh(next(t.shape for k, t in enumerate(call.operands) if k != border))
    if border is None or len(call.operands[border].shape) != 1 or len(call.operands) > 2:
        raise call.refuse("borders of several rows, or with a sorter")
    borders = draft.fresh(call.operands[border].shape, WHOLE)
    return draft.rule([borders if k == border else dims for k in range(len(call.operands))], [dims])


TABLE: dict[str, Builder] = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
    "shardc.index_rows.default": index,
    "shardc.index_sum.default": index_sum,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
    "aten.gather.default": gather,
    "aten.scatter.src": scatter("0&2"),
    "aten.scatter.value": scatter(""),
    "aten.scatter_add.default": scatter("0&2"),
    "aten.scatter_reduce.two": scatter(""),
    "aten.index_select.default": index_select,
    "aten.index_add.default": index_write("0&2"),
    "aten.index_copy.default": index_write("0&2"),
    "aten.index_fill.int_Scalar": index_write(""),
    "aten.index_reduce.default": index_write(""),
    "aten.select_scatter.default": select_scatter,
    "aten.slice_scatter.default": slice_scatter,
    "aten.bucketize.Tensor": searchsorted,
    "aten.searchsorted.Tensor": searchsorted,
}
