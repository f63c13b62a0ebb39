"""Selections whose rows are where what they select is (see `ops.selection`): the rows are split as the dims they lie in."""

from __future__ import annotations

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.index import indexed
from shardc.rules.rule import WHOLE, Rule, Start


def nonzero_whole(call: Call) -> Rule:
    draft = Draft(call)
    (x,), result = call.operands, call.results[0]
    assert result is not None
    return draft.rule([draft.fresh(x.shape, WHOLE)], [draft.fresh(result.shape, WHOLE)])


def nonzero(call: Call) -> Rule:
    draft = Draft(call)
    (x,), result = call.operands, call.results[0]
    assert result is not None
    dims = draft.fresh(x.shape)
    rows, column = draft.new(result.shape[0]), draft.new(result.shape[1], WHOLE)
    sized = call.sized("start", tuple(Start(0, d) for d in range(len(x.shape))))
    tied = frozenset(pair for d in dims for pair in ((d[0], rows[0]), (rows[0], d[0])))
    return draft.rule([dims], [[rows, column]], sized=sized, tied=tied)


def index(call: Call) -> Rule:
    draft = Draft(call)
    dims, out, indices = indexed(call, draft, call.operands[0].shape)
    tied = _tie(draft, call, dims, out)
    sized = call.sized("start", tuple(Start(0, d) for d in range(len(dims))))
    return draft.rule([dims, *indices], [out], any_partial=True, sized=sized, tied=tied)


def index_put(call: Call) -> Rule:
    draft = Draft(call)
    dims, out, indices = indexed(call, draft, call.operands[0].shape)
    tied = _tie(draft, call, dims, out)
    values = len(indices) + 1
    sized = call.sized("start", tuple(Start(0, d) for d in range(len(dims))))
    linear = sets(f"0&{values}") if call["accumulate"] is True else ()
    operands = [dims, *indices, draft.broadcast(call.operands[values].shape, out)]
    return draft.rule(operands, [dims], linear, sized=sized, tied=tied)


def _tie(draft: Draft, call: Call, dims: list[tuple[str, ...]], out: list[tuple[str, ...]]) -> frozenset[tuple[str, str]]:
    """The dims that are indexed may be split as the rows are."""
    taken = [d[0] for d, i in zip(dims, call["indices"], strict=False) if i is not None]
    for f in taken:
        draft.kinds.pop(f, None)
    kept = {f for d in dims for f in d} - set(taken)
    rows = [f for d in out for f in d if f not in kept]
    return frozenset((a, b) for a in taken for b in rows) | frozenset((b, a) for a in taken for b in rows)


TABLE: dict[str, Builder] = {
    "aten.nonzero.default": nonzero_whole,
    "shardc.nonzero_part.default": nonzero,
    "shardc.index_part.default": index,
    "shardc.index_put_part.default": index_put,
}
