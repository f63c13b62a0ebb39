"""Lookups in a table that is split along its rows (see `ops.lookup`)."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.rule import SUM, WHOLE, DimFactors, Extent, Rule, Start


def embedding(call: Call) -> Rule:
    """Rows that the part does not hold are zero: a sum over parts."""
    draft = Draft(call)
    weight, index = call.operands
    batch, row, col = draft.fresh(index.shape), draft.new(weight.shape[0], SUM), draft.new(weight.shape[1])
    return draft.rule([[row, col], batch], [[*batch, col]], sets("0"), sized=call.sized("start", Start(0, 0)))


def embedding_backward(call: Call) -> Rule:
    """Each part of the rows adds up its own."""
    draft = Draft(call)
    grad, index = call.operands
    result = call.results[0]
    assert result is not None
    batch, row, col = draft.fresh(index.shape, SUM), draft.new(result.shape[0]), draft.new(grad.shape[-1])
    sized = {**call.sized("num_weights", Extent(0, 0)), **call.sized("start", Start(0, 0, of_result=True))}
    return draft.rule([[*batch, col], batch], [[row, col]], sets("0"), sized=sized)


def _dims(draft: Draft, call: Call, kind: str) -> tuple[list[DimFactors], list[DimFactors], int]:
    """Dims of a tensor (with a factor of this kind at the dim that is looked up) and of the index."""
    shape, index = call.operands[0].shape, call.operands[1].shape
    k = call.dim("dim", len(shape))
    dims: list[DimFactors] = []
    at: list[DimFactors] = []
    for i, (n, m) in enumerate(zip(shape, index, strict=True)):
        dims.append(draft.new(n, kind if i == k else "pass" if n == m else WHOLE))
        at.append(dims[-1] if i != k and n == m else draft.new(m, "pass" if i == k and kind == SUM else WHOLE))
    return dims, at, k


def gather(call: Call) -> Rule:
    draft = Draft(call)
    dims, at, k = _dims(draft, call, SUM)
    return draft.rule([dims, at], [at], sets("0"), sized=call.sized("start", Start(0, k)))


def scatter(call: Call) -> Rule:
    """Each part takes what is written into it."""
    draft = Draft(call)
    dims, at, k = _dims(draft, call, "pass")
    src: Sequence[int] = call.operands[2].shape
    given = [d if draft.size(d) == n else draft.new(n, WHOLE) for d, n in zip(at, src, strict=True)]
    return draft.rule([dims, at, given], [dims], sets("0&2"), sized=call.sized("start", Start(0, k, of_result=True)))


TABLE: dict[str, Builder] = {
    "shardc.embedding_part.default": embedding,
    "shardc.embedding_backward_part.default": embedding_backward,
    "shardc.gather_part.default": gather,
    "shardc.scatter_part.default": scatter,
    "shardc.scatter_add_part.default": scatter,
}
