"""Products: the contracted factor is a sum, and each side alone is linear."""

from __future__ import annotations

import re

from shardc.rules.call import Builder, Call, Draft, rising, sets
from shardc.rules.rule import SUM, WHOLE, DimFactors, Rule, parse_factors


def contraction(text: str) -> Builder:
    """``"[i,k],[k,j]->[i,j]"``: a factor of the operands that the result lacks is summed."""
    left, right = (parse_factors(part) for part in re.split("->", text))
    out = {f for t in right if t is not None for d in t for f in d}

    def build(call: Call) -> Rule:
        draft = Draft(call)
        names: dict[str, DimFactors] = {}
        operands = []
        for pattern, t in zip(left, call.operands, strict=True):
            assert pattern is not None
            dims = []
            for (f,), n in zip(pattern, t.shape, strict=True):
                if f not in names:
                    names[f] = draft.new(n, "pass" if f in out else SUM)
                dims.append(names[f])
            operands.append(dims)
        results = [None if t is None else [names[d[0]] for d in t] for t in right]
        return draft.rule(operands, results, sets("0 | 1"))

    return build


def added(batch: bool) -> Builder:
    """addmm and baddbmm: the sum may not be split, or every part would add `self`."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        bias, a, b = call.operands
        lead = draft.fresh(a.shape[:1]) if batch else []
        i, j = draft.new(a.shape[-2]), draft.new(b.shape[-1])
        k = draft.new(a.shape[-1], WHOLE)
        out = [*lead, i, j]
        zero = isinstance(call["beta"], (int, float)) and call["beta"] == 0
        linear = "1 | 2" if zero else "0&1 | 0&2"
        return draft.rule(
            [draft.broadcast(bias.shape, out), [*lead, i, k], [*lead, k, j]],
            [out],
            sets(linear),
            orders=rising(0) if call["beta"] == 1 else (),
        )

    return build


def addmv(call: Call) -> Rule:
    draft = Draft(call)
    bias, a, b = call.operands
    i, k = draft.new(a.shape[0]), draft.new(b.shape[0], WHOLE)
    return draft.rule(
        [draft.broadcast(bias.shape, [i]), [i, k], [k]], [[i]], sets("0&1 | 0&2"), orders=rising(0) if call["beta"] == 1 else ()
    )


TABLE: dict[str, Builder] = {
    "aten.mm.default": contraction("[i,k],[k,j]->[i,j]"),
    "aten.bmm.default": contraction("[b,i,k],[b,k,j]->[b,i,j]"),
    "aten.mv.default": contraction("[i,k],[k]->[i]"),
    "aten.dot.default": contraction("[k],[k]->[]"),
    "aten.vdot.default": contraction("[k],[k]->[]"),
    "aten.addmm.default": added(batch=False),
    "aten.baddbmm.default": added(batch=True),
    "aten.addmv.default": addmv,
}
