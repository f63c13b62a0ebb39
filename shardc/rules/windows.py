"""Operators that slide a window: positions are whole, batch and channels pass."""

from __future__ import annotations

from shardc.rules.call import Builder, Call, Draft, rising, sets
from shardc.rules.rule import SUM, WHOLE, DimFactors, Extent, Rule, Shape


def convolution(call: Call) -> Rule:
    """Input channels are summed where there is no bias; windows are whole, and so are channels in groups of several."""
    draft = Draft(call)
    x, weight = call.operands[:2]
    result = call.results[0]
    assert result is not None
    biased = len(call.operands) > 2
    n = draft.new(x.shape[0])
    linear, orders = ("0&2 | 1&2", rising(2)) if biased else ("0 | 1", ())
    ci, co, channels = _channels(draft, call, x.shape[1], result.shape[1], WHOLE if biased else SUM, "pass")
    kernel = draft.fresh(weight.shape[2:], WHOLE)
    operands = [[n, ci, *draft.fresh(x.shape[2:], WHOLE)], [*channels, *kernel], *([[co]] if biased else [])]
    sized = call.sized("groups", Extent(0, 1)) if ci == co else {}
    return draft.rule(operands, [[n, co, *draft.fresh(result.shape[2:], WHOLE)]], sets(linear), orders=orders, sized=sized)


def _channels(
    draft: Draft, call: Call, inputs: int, outputs: int, kind: str, out: str
) -> tuple[DimFactors, DimFactors, tuple[DimFactors, DimFactors]]:
    """Input channels, output channels, and those of the weight. With a group for each channel they are the same ones."""
    groups = call["groups"]
    if groups == inputs == outputs != 1:
        both = draft.new(inputs)
        return both, both, (both, draft.new(1, WHOLE))
    ci = draft.new(inputs, kind if groups == 1 else WHOLE)
    co = draft.new(outputs, out if groups == 1 else WHOLE)
    first, second = (ci, co) if call["transposed"] else (co, ci)
    if groups != 1:
        second = draft.new((outputs if call["transposed"] else inputs) // groups, WHOLE)
    return ci, co, (first, second)


def convolution_backward(call: Call) -> Rule:
    """dx sums over output channels, dw and db over the batch."""
    draft = Draft(call)
    grad, x, weight = call.operands[:3]
    dx, dw, db = call["output_mask"]
    n = draft.new(x.shape[0], SUM)
    # db is the same on all parts of the input channels, an empty one lacks it
    ci, co, channels = _channels(draft, call, x.shape[1], grad.shape[1], WHOLE if db else "pass", SUM)
    space, kernel = draft.fresh(x.shape[2:], WHOLE), draft.fresh(weight.shape[2:], WHOLE)
    left, w = [n, ci, *space], [*channels, *kernel]
    sized = call.sized("bias_sizes", Shape(2)) if db else {}
    if ci == co:
        sized |= call.sized("groups", Extent(0, 1) if dx else Extent(1, 0) if dw else Extent(2, 0))
    return draft.rule(
        [[n, co, *draft.fresh(grad.shape[2:], WHOLE)], left, w],
        [left if dx else None, w if dw else None, [co] if db else None],
        sets("0"),
        sized=sized,
    )


def windows(spatial: int, linear: str = "", any_partial: bool = False) -> Builder:
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

        return draft.rule(
            [dims(t.shape) for t in call.operands], [dims(r.shape) for r in call.results if r], positions, any_partial
        )

    return build


def resize_backward(spatial: int) -> Builder:
    """The result's size is an argument."""
    plain = windows(spatial, "0")

    def build(call: Call) -> Rule:
        rule = plain(call)
        return Rule(rule.operands, rule.results, rule.sizes, rule.kinds, rule.linear, False, call.sized("input_size", Shape()))

    return build


def pixel_shuffle(call: Call) -> Rule:
    """``[(c p q), h, w] -> [c, (h p), (w q)]``: what moves between channels and positions is whole."""
    draft = Draft(call)
    fine = "upscale_factor" in call
    r = int(call["upscale_factor" if fine else "downscale_factor"])
    many, result = call.operands[0].shape, call.results[0]
    assert result is not None
    shape = many if fine else result.shape  # the side with more channels
    lead = draft.fresh(shape[:-3])
    c, h, w = draft.new(shape[-3] // (r * r)), draft.new(shape[-2]), draft.new(shape[-1])
    p, q = draft.new(r, WHOLE), draft.new(r, WHOLE)
    deep, flat = [*lead, (*c, *p, *q), h, w], [*lead, c, (*h, *p), (*w, *q)]
    return draft.rule([deep if fine else flat], [flat if fine else deep], any_partial=True)


def columns(call: Call) -> Rule:
    """im2col and col2im: ``[n, c, h, w]`` and ``[n, (c window), places]``."""
    draft = Draft(call)
    unfolding = "output_size" not in call
    x, result = call.operands[0], call.results[0]
    assert result is not None
    image, cols = (x.shape, result.shape) if unfolding else (result.shape, x.shape)
    lead = draft.fresh(image[:-3])
    c = draft.new(image[-3])
    window = draft.new(cols[-2] // image[-3], WHOLE) if image[-3] else ()
    left = [*lead, c, *draft.fresh(image[-2:], WHOLE)]
    right = [*lead, (*c, *window), draft.new(cols[-1], WHOLE)]
    return draft.rule([left if unfolding else right], [right if unfolding else left], sets("0"))


def unfold(call: Call) -> Rule:
    """Windows along one dim, which is whole, as a new last dim."""
    draft = Draft(call)
    backward = "input_sizes" in call
    x, result = call.operands[0], call.results[0]
    assert result is not None
    plain, cut = (result.shape, x.shape) if backward else (x.shape, result.shape)
    k = call.dim("dim" if backward else "dimension", len(plain))
    if not plain:
        window = [draft.new(cut[-1], WHOLE)]
        return draft.rule([window if backward else []], [[] if backward else window])
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(plain)]
    parts = [*dims[:k], draft.new(cut[k], WHOLE), *dims[k + 1 :], draft.new(cut[-1], WHOLE)]
    if backward:
        return draft.rule([parts], [dims], sets("0"), sized=call.sized("input_sizes", Shape()))
    return draft.rule([dims], [parts], any_partial=True)


def grid_sample(call: Call) -> Rule:
    """``[n, c, h, w]`` read at ``[n, p, q, 2]``."""
    draft = Draft(call)
    x, grid = call.operands
    n, c = draft.new(x.shape[0]), draft.new(x.shape[1])
    places = draft.fresh(grid.shape[1:-1])
    left, at = [n, c, *draft.fresh(x.shape[2:], WHOLE)], [n, *places, draft.new(grid.shape[-1], WHOLE)]
    return draft.rule([left, at], [[n, c, *places]], sets("0"))


def grid_sample_backward(call: Call) -> Rule:
    """The gradient of the image sums over the places that are read, that of the grid over the channels."""
    draft = Draft(call)
    _, x, grid = call.operands
    both = all(call["output_mask"])  # a gradient that is not asked for may come as anything
    n, c = draft.new(x.shape[0]), draft.new(x.shape[1], SUM if both else WHOLE)
    places = draft.fresh(grid.shape[1:-1], SUM if both else WHOLE)
    left, at = [n, c, *draft.fresh(x.shape[2:], WHOLE)], [n, *places, draft.new(grid.shape[-1], WHOLE)]
    results = [None if r is None else side for r, side in zip(call.results, (left, at), strict=True)]
    return draft.rule([[n, c, *places], left, at], results, sets("0"))


TABLE: dict[str, Builder] = {
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
    "aten.upsample_nearest1d.default": windows(1, any_partial=True),
    "aten.upsample_nearest2d.default": windows(2, any_partial=True),
    "aten.upsample_bilinear2d.default": windows(2, "0"),
    "aten.upsample_bicubic2d.default": windows(2, "0"),
    "aten._upsample_bicubic2d_aa.default": windows(2, "0"),
    "aten._upsample_bilinear2d_aa.default": windows(2, "0"),
    "aten.upsample_nearest1d_backward.default": resize_backward(1),
    "aten.upsample_nearest2d_backward.default": resize_backward(2),
    "aten.upsample_bilinear2d_backward.default": resize_backward(2),
    "aten.upsample_bicubic2d_backward.default": resize_backward(2),
    "aten.reflection_pad1d.default": windows(1, any_partial=True),
    "aten.reflection_pad2d.default": windows(2, any_partial=True),
    "aten.replication_pad2d.default": windows(2, any_partial=True),
    "aten._adaptive_avg_pool3d.default": windows(3, "0"),
    "aten._adaptive_avg_pool3d_backward.default": windows(3, "0"),
    "aten.upsample_linear1d.default": windows(1, "0"),
    "aten.upsample_linear1d_backward.default": resize_backward(1),
    "aten.upsample_nearest3d.default": windows(3, any_partial=True),
    "aten.upsample_nearest3d_backward.default": resize_backward(3),
    "aten.upsample_trilinear3d.default": windows(3, "0"),
    "aten.upsample_trilinear3d_backward.default": resize_backward(3),
    "aten._upsample_bicubic2d_aa_backward.default": resize_backward(2),
    "aten._upsample_bilinear2d_aa_backward.default": resize_backward(2),
    "aten.reflection_pad3d.default": windows(3, any_partial=True),
    "aten.replication_pad1d.default": windows(1, any_partial=True),
    "aten.replication_pad3d.default": windows(3, any_partial=True),
    **{f"aten.{kind}_pad{n}d_backward.default": windows(n, "0") for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "aten.pixel_shuffle.default": pixel_shuffle,
    "aten.pixel_unshuffle.default": pixel_shuffle,
    "aten.im2col.default": columns,
    "aten.col2im.default": columns,
    "aten.unfold.default": unfold,
    "aten.unfold_backward.default": unfold,
    "aten.grid_sampler_2d.default": grid_sample,
    "aten.grid_sampler_3d.default": grid_sample,
    "aten.grid_sampler_2d_backward.default": grid_sample_backward,
    "aten.grid_sampler_3d_backward.default": grid_sample_backward,
}
