"""Attention: batch and heads pass, keys and features are whole.

Heads of the query that share one of the key pass too; the gradient of that one is a sum over them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.rule import PASS, SUM, WHOLE, DimFactors, Rule


def _heads(draft: Draft, q: Sequence[int], k: Sequence[int], backward: bool) -> tuple[list[DimFactors], list[DimFactors]]:
    """Leading dims of query and of key/value: heads of the query are (heads of the key) x (how many share one)."""
    lead = draft.fresh(q[:-3])
    if len(q) < 3:
        return lead, lead
    if q[-3] == k[-3]:
        last = draft.new(q[-3])
        return [*lead, last], [*lead, last]
    shared = draft.new(k[-3])
    return [*lead, (*shared, *draft.new(q[-3] // k[-3], SUM if backward else PASS))], [*lead, shared]


def attention(backward: bool) -> Builder:
    """Batch and heads pass; queries pass where the mask does not count positions (forward), keys and features are whole."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        at = {n: call.position(n) for n in ("query", "key", "value", "attn_mask")}
        q, k, v = (call.operands[at[n] or 0].shape for n in ("query", "key", "value"))
        if len(q) != len(k) or q[:-3] != k[:-3] or k[:-2] != v[:-2] or len(q) > 2 and q[-3] % k[-3]:
            raise call.refuse("batch dims that are broadcast", "expand query, key and value to the same batch dims")
        heads, shared = _heads(draft, q, k, backward)
        t = draft.new(q[-2], WHOLE if backward or call["is_causal"] else "pass")
        s, e = draft.new(k[-2], WHOLE), draft.new(q[-1], WHOLE)
        ev = e if v[-1] == q[-1] else draft.new(v[-1], WHOLE)
        query, key, value, out = [*heads, t, e], [*shared, s, e], [*shared, s, ev], [*heads, t, ev]
        given = {"grad_out": out, "query": query, "key": key, "value": value, "out": out, "logsumexp": [*heads, t]}
        places = {call.position(n): d for n, d in given.items() if n in call}
        if at["attn_mask"] is not None:
            places[at["attn_mask"]] = list(draft.broadcast(call.operands[at["attn_mask"]].shape, [*heads, t, s]))
        operands = [places[i] for i in range(len(call.operands))]
        if backward:
            return draft.rule(operands, [query, key, value], sets("0"))
        return draft.rule(operands, [out, [*heads, t]])

    return build


def aten_attention(backward: bool) -> Builder:
    """aten's CPU flash kernels, where a program calls them itself: batch and heads pass."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        q, k = call.operands[1 if backward else 0].shape, call.operands[2 if backward else 1].shape
        batch, heads = draft.new(q[0]), draft.new(q[1])
        t, s, e = draft.new(q[2], WHOLE), draft.new(k[2], WHOLE), draft.new(q[3], WHOLE)
        query, key, lse = [batch, heads, t, e], [batch, heads, s, e], [batch, heads, t]
        operands = [query, query, key, key, query, lse] if backward else [query, key, key]
        for mask in call.operands[len(operands) :]:
            operands.append(list(draft.broadcast(mask.shape, [batch, heads, t, s])))
        return draft.rule(operands, [query, key, key] if backward else [query, lse], sets("0" if backward else ""))

    return build


TABLE: dict[str, Builder] = {
    "shardc.sdpa.default": attention(backward=False),
    "shardc.sdpa_backward.default": attention(backward=True),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": aten_attention(backward=False),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": aten_attention(backward=True),
}
