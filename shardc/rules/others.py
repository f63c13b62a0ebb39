"""Rarer operators, proved on torch's op_db (``shardc rules --check``): factorizations with batch dims, and what stays whole."""

from __future__ import annotations

from dataclasses import replace

from shardc.rules import joins, views, windows
from shardc.rules.call import Builder, Call, Draft, choosing, rising, sets
from shardc.rules.index import index_write
from shardc.rules.linalg import whole
from shardc.rules.pointwise import pointwise
from shardc.rules.reduce import reduction
from shardc.rules.rule import WHOLE, DimFactors, Rule


def batched(core: str, linear: str = "") -> Builder:
    """``"2,1->2"``: how many of the last dims of operands and results are whole; the dims before them, where all tensors
    have the same, pass."""
    left, right = ([int(n) for n in side.split(",") if n] for side in core.split("->"))

    def build(call: Call) -> Rule:
        draft = Draft(call)
        shapes = [t.shape[: len(t.shape) - n] for t, n in zip(call.operands, left, strict=False)]
        shapes += [r.shape[: len(r.shape) - n] for r, n in zip(call.results, right, strict=True) if r is not None]
        lead = shapes[0] if len(call.operands) == len(left) and all(s == shapes[0] for s in shapes) else ()
        batch = draft.fresh(lead)

        def dims(shape: tuple[int, ...]) -> list[DimFactors]:
            return [*batch, *draft.fresh(shape[len(lead) :], WHOLE)]

        operands = [dims(t.shape) for t in call.operands]
        return draft.rule(operands, [None if r is None else dims(r.shape) for r in call.results], sets(linear))

    return build


def outer_added(call: Call) -> Rule:
    """addr: ``[i, j] + [i] x [j]``."""
    draft = Draft(call)
    bias, a, b = call.operands
    i, j = draft.new(a.shape[0]), draft.new(b.shape[0])
    return draft.rule([draft.broadcast(bias.shape, [i, j]), [i], [j]], [[i, j]], sets("0&1 | 0&2"))


def summed_products(call: Call) -> Rule:
    """addbmm: the batch is summed with the products, beside an addition that may not be made twice."""
    draft = Draft(call)
    bias, a, b = call.operands
    n, i, k, j = draft.new(a.shape[0], WHOLE), draft.new(a.shape[1]), draft.new(a.shape[2], WHOLE), draft.new(b.shape[2])
    return draft.rule(
        [draft.broadcast(bias.shape, [i, j]), [n, i, k], [n, k, j]],
        [[i, j]],
        sets("0&1 | 0&2"),
        orders=rising(0) if call["beta"] == 1 else (),
    )


def solve_triangular(call: Call) -> Rule:
    """Columns of the right side pass, and so do batch dims that both have."""
    draft = Draft(call)
    a, b = call.operands
    left = bool(call["left"])
    lead = draft.fresh(a.shape[:-2]) if a.shape[:-2] == b.shape[:-2] else None
    if lead is None:
        return whole(call)
    n = draft.new(a.shape[-1], WHOLE)
    free = draft.new(b.shape[-1 if left else -2])
    out = [*lead, n, free] if left else [*lead, free, n]
    return draft.rule([[*lead, n, n], out], [out], sets("1"))


def moving(*chosen: int, any_partial: bool = False) -> Builder:
    """Nothing may be split, but each result is an element of one of these operands (of all, where none is named)."""

    def build(call: Call) -> Rule:
        rule = whole(call)
        which = chosen or tuple(range(len(call.operands)))
        return replace(rule, linear=() if any_partial else (frozenset(which),), any_partial=any_partial,
                       orders=() if any_partial else choosing(*which))  # fmt: skip

    return build


def shuffled_channels(call: Call) -> Rule:
    draft = Draft(call)
    dims = [draft.new(n, WHOLE if k == 1 else "pass") for k, n in enumerate(call.operands[0].shape)]
    return draft.rule([dims], [dims], any_partial=True)


WHOLE_ONES = """
    linalg_pinv.atol_rtol_tensor max_unpool2d.default max_unpool3d.default
    native_batch_norm.default segment_reduce.default _segment_reduce_backward.default
    _unsafe_masked_index.default _unsafe_masked_index_put_accumulate.default put.default take.default
    dist.default masked_scatter_backward.default fractional_max_pool2d.default
    fractional_max_pool2d_backward.default fractional_max_pool3d.default fractional_max_pool3d_backward.default
    _embedding_bag_per_sample_weights_backward.default _pdist_forward.default _pdist_backward.default
    nanmedian.default repeat_interleave.Tensor
"""

TABLE: dict[str, Builder] = {
    **{f"aten.{name}": whole for name in WHOLE_ONES.split()},
    "aten.linalg_lu_solve.default": batched("2,1,2->2", "2"),
    "aten.lu_unpack.default": batched("2,1->2,2,2"),
    "aten.cholesky.default": batched("2->2"),
    "aten.cholesky_inverse.default": batched("2->2"),
    "aten.cholesky_solve.default": batched("2,2->2", "0"),
    "aten.linalg_eig.default": batched("2->1,2"),
    "aten.linalg_householder_product.default": batched("2,1->2"),
    "aten.linalg_lu.default": batched("2->2,2,2"),
    "aten.linalg_matrix_exp.default": batched("2->2"),
    "aten.triangular_solve.default": batched("2,2->2,2"),
    "aten.ormqr.default": batched("2,1,2->2", "2"),
    "aten._linalg_det.default": batched("2->0,2,1"),
    "aten._linalg_slogdet.default": batched("2->0,0,2,1"),
    "aten.linalg_lu_factor_ex.default": batched("2->2,1,0"),
    "aten._linalg_solve_ex.default": batched("2,2->2,2,1,0"),
    "aten.linalg_solve_triangular.default": solve_triangular,
    "aten.masked_scatter.default": moving(0, 2),
    "aten.diagonal_scatter.default": moving(0, 1),
    "aten.block_diag.default": moving(),
    "aten.rot90.default": moving(any_partial=True),
    "aten.channel_shuffle.default": shuffled_channels,
    "aten.trace.default": batched("2->0", "0"),
    "aten.addr.default": outer_added,
    "aten.addbmm.default": summed_products,
    "aten.complex.default": pointwise("0&1"),
    "aten.polar.default": pointwise(),
    "aten.hardshrink_backward.default": pointwise("0"),
    "aten.softshrink_backward.default": pointwise("0"),
    "aten.rrelu_with_noise_backward.default": pointwise("0"),
    "aten.nanmedian.dim": reduction(WHOLE),
    "aten.index_fill.int_Tensor": index_write("0&2"),
    "aten.alias_copy.default": views.same,
    "aten.permute_copy.default": views.permute,
    "aten.transpose_copy.int": views.transpose,
    "aten.t_copy.default": views.t,
    "aten.unsqueeze_copy.default": views.unsqueeze,
    "aten.squeeze_copy.default": views.squeeze,
    "aten.squeeze_copy.dim": views.squeeze,
    "aten.unbind_copy.int": views.unbind,
    "aten.diagonal_copy.default": views.diagonal,
    "aten.split_with_sizes_copy.default": joins.split,
    "aten.unfold_copy.default": windows.unfold,
    "aten.adaptive_max_pool3d.default": windows.windows(3),
    "aten.adaptive_max_pool3d_backward.default": windows.windows(3, "0"),
    **{f"aten._upsample_nearest_exact{n}d.default": windows.windows(n, any_partial=True) for n in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{n}d_backward.default": windows.resize_backward(n) for n in (1, 2, 3)},
}
