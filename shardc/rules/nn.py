"""Fused operators of networks: rows pass, what a row (or window) is reduced over is whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.reduce import along
from shardc.rules.rule import SUM, WHOLE, DimFactors, Extent, Rule, Shape


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


def convolution(call: Call) -> Rule:
    """Input channels are summed where there is no bias; windows are whole, and so are channels in groups."""
    draft = Draft(call)
    x, weight = call.operands[:2]
    result = call.results[0]
    assert result is not None
    biased = len(call.operands) > 2
    grouped = call["groups"] != 1
    n = draft.new(x.shape[0])
    ci = draft.new(x.shape[1], WHOLE if grouped or biased else SUM)
    co = draft.new(result.shape[1], WHOLE if grouped else "pass")
    channels = _weight_channels(draft, call, weight.shape, ci, co)
    kernel = draft.fresh(weight.shape[2:], WHOLE)
    operands = [[n, ci, *draft.fresh(x.shape[2:], WHOLE)], [*channels, *kernel], *([[co]] if biased else [])]
    linear = "0&2 | 1&2" if biased else "0 | 1"
    return draft.rule(operands, [[n, co, *draft.fresh(result.shape[2:], WHOLE)]], sets(linear))


def _weight_channels(
    draft: Draft, call: Call, weight: Sequence[int], ci: DimFactors, co: DimFactors
) -> tuple[DimFactors, DimFactors]:
    first, second = (ci, co) if call["transposed"] else (co, ci)
    if call["groups"] != 1:
        return first, draft.new(weight[1], WHOLE)
    return first, second


def convolution_backward(call: Call) -> Rule:
    """dx sums over output channels, dw and db over the batch."""
    draft = Draft(call)
    grad, x, weight = call.operands[:3]
    grouped = call["groups"] != 1
    dx, dw, db = call["output_mask"]
    n = draft.new(x.shape[0], SUM)
    ci = draft.new(x.shape[1], WHOLE if grouped or db else "pass")  # db is the same on all parts of ci, an empty one lacks it
    co = draft.new(grad.shape[1], WHOLE if grouped else SUM)
    channels = _weight_channels(draft, call, weight.shape, ci, co)
    space, kernel = draft.fresh(x.shape[2:], WHOLE), draft.fresh(weight.shape[2:], WHOLE)
    left, w = [n, ci, *space], [*channels, *kernel]
    sized = call.sized("bias_sizes", Shape(2)) if db else {}
    return draft.rule(
        [[n, co, *draft.fresh(grad.shape[2:], WHOLE)], left, w],
        [left if dx else None, w if dw else None, [co] if db else None],
        sets("0"),
        sized=sized,
    )


def windows(spatial: int, linear: str = "") -> Builder:
    """Pooling and resizing: the last dims are whole, and each tensor has its own; batch and channels pass."""
    positions = sets(linear)

    def build(call: Call) -> Rule:
        draft = Draft(call)
        lead = draft.fresh(call.operands[0].shape[:-spatial])
        sizes: dict[tuple[int, ...], list[DimFactors]] = {}

        def dims(shape: tuple[int, ...]) -> list[DimFactors]:
            if shape not in sizes:
                sizes[shape] = draft.fresh(shape[-spatial:], WHOLE)
            return [*lead, *sizes[shape]]

        return draft.rule([dims(t.shape) for t in call.operands], [dims(r.shape) for r in call.results if r], positions)

    return build


def resize_backward(spatial: int) -> Builder:
    """The result's size is an argument."""
    plain = windows(spatial, "0")

    def build(call: Call) -> Rule:
        rule = plain(call)
        return Rule(rule.operands, rule.results, rule.sizes, rule.kinds, rule.linear, False, call.sized("input_size", Shape()))

    return build


def _heads(draft: Draft, q: Sequence[int], k: Sequence[int]) -> tuple[list[DimFactors], list[DimFactors]]:
    """Leading dims of query and of key/value: heads of the query are (heads of the key) x (how many share one)."""
    lead = draft.fresh(q[:-3])
    if len(q) < 3:
        return lead, lead
    if len(q) < 4 or q[-3] == k[-3]:
        last = draft.new(q[-3])
        return [*lead, last], [*lead, last]
    shared = draft.new(k[-3])
    return [*lead, (*shared, *draft.new(q[-3] // k[-3], WHOLE))], [*lead, shared]


def attention(backward: bool) -> Builder:
    """Batch and heads pass; queries pass where the mask does not count positions (forward), keys and features are whole."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        at = {n: call.position(n) for n in ("query", "key", "value", "attn_mask")}
        q, k, v = (call.operands[at[n] or 0].shape for n in ("query", "key", "value"))
        if any(a != b and 1 in (a, b) for a, b in zip(q[:-3], k[:-3], strict=True)) or k[:-2] != v[:-2]:
            raise call.refuse("batch dims that are broadcast", "expand query, key and value to the same batch dims")
        heads, shared = _heads(draft, q, k)
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


def transformed(name: str, linear: str = "") -> Builder:
    """Fourier transforms, factorizations of matrices: the named dims (or the last two) are whole."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        shape = call.operands[0].shape
        named = call.dims(name, len(shape)) if name else tuple(range(len(shape) - 2, len(shape)))
        dims = [draft.new(n, WHOLE if k in named else "pass") for k, n in enumerate(shape)]
        batch = [d for k, d in enumerate(dims) if k not in named]
        results: list[list[DimFactors] | None] = []
        for r in call.results:
            if name:
                kept = [d if k not in named else draft.new(r.shape[k], WHOLE) for k, d in enumerate(dims)] if r else None
                results.append(kept)
            else:
                results.append([*batch, *draft.fresh(r.shape[len(batch) :], WHOLE)] if r else None)
        return draft.rule([dims], results, sets(linear))

    return build


def cdist(call: Call) -> Rule:
    draft = Draft(call)
    a, b = call.operands
    if math.prod(a.shape[:-2]) != math.prod(b.shape[:-2]) or a.shape[:-2] != b.shape[:-2]:
        raise call.refuse("batch dims that are broadcast", "expand both operands to the same batch dims")
    lead = draft.fresh(a.shape[:-2])
    i, j, k = draft.new(a.shape[-2]), draft.new(b.shape[-2]), draft.new(a.shape[-1], WHOLE)
    return draft.rule([[*lead, i, k], [*lead, j, k]], [[*lead, i, j]])


TABLE: dict[str, Builder] = {
    "aten._softmax.default": softmax,
    "aten._safe_softmax.default": softmax,
    "aten._log_softmax.default": softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._log_softmax_backward_data.default": softmax_backward,
    "aten.glu.default": transformed("dim"),
    "aten.native_layer_norm.default": layer_norm,
    "aten._fused_rms_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm_backward.default": layer_norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_eval,
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten.max_pool2d_with_indices.default": windows(2),
    "aten.max_pool2d_with_indices_backward.default": windows(2, "0"),
    "aten.max_pool3d_with_indices.default": windows(3),
    "aten.max_pool3d_with_indices_backward.default": windows(3, "0"),
    "aten.avg_pool2d.default": windows(2, "0"),
    "aten.avg_pool2d_backward.default": windows(2, "0"),
    "aten.avg_pool3d.default": windows(3, "0"),
    "aten.avg_pool3d_backward.default": windows(3, "0"),
    "aten._adaptive_avg_pool2d.default": windows(2, "0"),
    "aten._adaptive_avg_pool2d_backward.default": windows(2, "0"),
    "aten.adaptive_max_pool2d.default": windows(2),
    "aten.adaptive_max_pool2d_backward.default": windows(2, "0"),
    "aten.upsample_nearest1d.default": windows(1, "0"),
    "aten.upsample_nearest2d.default": windows(2, "0"),
    "aten.upsample_bilinear2d.default": windows(2, "0"),
    "aten.upsample_bicubic2d.default": windows(2, "0"),
    "aten._upsample_bicubic2d_aa.default": windows(2, "0"),
    "aten._upsample_bilinear2d_aa.default": windows(2, "0"),
    "aten.upsample_nearest1d_backward.default": resize_backward(1),
    "aten.upsample_nearest2d_backward.default": resize_backward(2),
    "aten.upsample_bilinear2d_backward.default": resize_backward(2),
    "aten.upsample_bicubic2d_backward.default": resize_backward(2),
    "aten.reflection_pad1d.default": windows(1, "0"),
    "aten.reflection_pad2d.default": windows(2, "0"),
    "aten.replication_pad2d.default": windows(2, "0"),
    "shardc.sdpa.default": attention(backward=False),
    "shardc.sdpa_backward.default": attention(backward=True),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": aten_attention(backward=False),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": aten_attention(backward=True),
    "aten._fft_r2c.default": transformed("dim", "0"),
    "aten._fft_c2r.default": transformed("dim", "0"),
    "aten._fft_c2c.default": transformed("dim", "0"),
    "aten._linalg_eigh.default": transformed(""),
    "aten._linalg_svd.default": transformed(""),
    "aten.linalg_qr.default": transformed(""),
    "aten.linalg_cholesky_ex.default": transformed(""),
    "aten.linalg_inv_ex.default": transformed(""),
    "aten._cdist_forward.default": cdist,
}
