"""Transforms and factorizations of matrices: what they mix is whole, batch dims pass."""

from __future__ import annotations

import math

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.rule import SUM, WHOLE, DimFactors, Rule


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


def cdist_backward(call: Call) -> Rule:
    """The gradient of the first operand sums over the rows of the second."""
    draft = Draft(call)
    grad, a, b = call.operands[:3]
    if not len(grad.shape) == len(a.shape) == len(b.shape):
        raise call.refuse("batch dims that are broadcast", "expand both operands to the same batch dims")
    lead = draft.fresh(a.shape[:-2])
    i, j, k = draft.new(a.shape[-2]), draft.new(b.shape[-2], SUM), draft.new(a.shape[-1], WHOLE)
    return draft.rule([[*lead, i, j], [*lead, i, k], [*lead, j, k], [*lead, i, j]], [[*lead, i, k]], sets("0"))


def trilinear(call: Call) -> Rule:
    """The product of three operands, each with dims of size one put in, summed over some dims."""
    draft = Draft(call)
    inserted = [[int(d) for d in call[f"expand{k}"]] for k in (1, 2, 3)]
    rank = len(call.operands[0].shape) + len(inserted[0])
    summed = {int(d) % rank for d in call["sumdim"]}
    dims: list[DimFactors | None] = [None] * rank
    operands: list[list[DimFactors]] = []
    for t, skip in zip(call.operands, inserted, strict=True):
        own: list[DimFactors] = []
        for d, n in zip([d for d in range(rank) if d not in skip], t.shape, strict=True):
            known = dims[d]
            if known is None:
                known = dims[d] = draft.new(n, SUM if d in summed else "pass")
            own.append(known)
        operands.append(own)
    out = [d for k, d in enumerate(dims) if k not in summed and d is not None]
    return draft.rule(operands, [out], sets("0 | 1 | 2"))


def whole(call: Call) -> Rule:
    """Nothing may be split: every part computes all of it."""
    draft = Draft(call)
    operands = [draft.fresh(t.shape, WHOLE) for t in call.operands]
    return draft.rule(operands, [None if r is None else draft.fresh(r.shape, WHOLE) for r in call.results])


def cross(call: Call) -> Rule:
    """A product of vectors along one dim, which is whole."""
    draft = Draft(call)
    result = call.results[0]
    assert result is not None
    k = call.dim("dim", len(result.shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(result.shape)]
    return draft.rule([draft.broadcast(t.shape, dims) for t in call.operands], [dims], sets("0 | 1"))


TABLE: dict[str, Builder] = {
    "aten._fft_r2c.default": transformed("dim", "0"),
    "aten._fft_c2r.default": transformed("dim", "0"),
    "aten._fft_c2c.default": transformed("dim", "0"),
    "aten._linalg_eigh.default": transformed(""),
    "aten._linalg_svd.default": transformed(""),
    "aten.linalg_qr.default": transformed(""),
    "aten.linalg_cholesky_ex.default": transformed(""),
    "aten.linalg_inv_ex.default": transformed(""),
    "aten._cdist_forward.default": cdist,
    "aten._cdist_backward.default": cdist_backward,
    "aten._trilinear.default": trilinear,
    "aten.linalg_cross.default": cross,
    "aten._embedding_bag.default": whole,
    "aten._embedding_bag_dense_backward.default": whole,
    "aten._embedding_bag_backward.default": whole,
    "aten.embedding_renorm.default": whole,
    "aten.affine_grid_generator.default": whole,
    "aten.affine_grid_generator_backward.default": whole,
    "aten.multi_margin_loss.default": whole,
    "aten.multi_margin_loss_backward.default": whole,
    "aten.multilabel_margin_loss_forward.default": whole,
    "aten.multilabel_margin_loss_backward.default": whole,
    "aten.bincount.default": whole,
    "aten.histc.default": whole,
    "aten.renorm.default": whole,
    "aten._amp_update_scale.default": whole,
}
