"""Sample calls of the fused operators of networks, and of optimizers' updates (see `samples`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.rules import optim
from shardc.rules.arithmetic import aten
from shardc.rules.call import overload
from shardc.rules.sample import Op, Sample, index, ints


def networks() -> Iterator[Sample]:
    """Fused operators."""
    x = ints(4, 3, 5)

    def call(op: Op, *args: Any, **kwargs: Any) -> Sample:
        return Sample(op, args, kwargs)

    ours = torch.ops.shardc
    at = torch.stack([index(4, 3, below=7), index(4, 3, below=5)], 2)
    yield call(ours.embedding_part.default, ints(7, 5), index(4, 3, below=7), 0)
    for given, along, rank in (
        ([None, index(4, below=3)], [0, -1, -1], 1), ([None, index(5, below=3)], [-1, -1, 0], 1),
        ([None, index(6, 1, below=3)], [1, -1, -1], 2), ([None, index(5, 4, below=3)], [1, -1, 0], 2),
        ([], [0, 2, -1], 4), ([index(6, below=4)], [-1, -1, -1], 1), ([None, index(2, 6, below=3)], [-1, -1, -1], 2),
    ):  # fmt: skip
        picked = ours.index_rows.default(x, given, along, rank)
        yield call(ours.index_rows.default, x, given, along, rank)
        yield call(ours.index_sum.default, ints(*picked.shape, hi=9), given, along, rank, [4, 3, 5])
    places = torch.arange(5)  # each row of a selection lies in the part that holds it, as propagate sees to it
    yield call(aten.nonzero.default, torch.arange(5) % 2)
    yield call(ours.nonzero_part.default, torch.arange(5) + 1, [0])
    yield call(ours.index_part.default, ints(5, 3), [places], [0, 0])
    yield call(ours.index_put_part.default, ints(5, 3), [places], ints(5, 3), True, [0, 0])
    yield call(ours.embedding_backward_part.default, x, index(4, 3, below=7), 7, 2, 0)
    yield call(ours.gather_part.default, ints(4, 3, 7), 2, at, 0)
    yield call(ours.scatter_part.default, ints(4, 3, 7), 2, index(4, 3, 1, below=7), ints(4, 3, 1, hi=9), 0)
    yield call(ours.scatter_add_part.default, ints(4, 3, 7), 2, at, ints(4, 3, 2), 0)
    for op in (aten._softmax, aten._log_softmax):
        yield call(op.default, x, 1, False)
    yield call(aten._safe_softmax.default, x, 1)
    y = aten._softmax.default(x, 1, False)
    yield call(aten._softmax_backward_data.default, x, y, 1, torch.float64)
    yield call(aten._log_softmax_backward_data.default, x, y.log(), 1, torch.float64)
    yield call(aten.glu.default, ints(4, 6), 1)
    yield call(aten.glu_backward.default, ints(4, 3), ints(4, 6), 1)
    for k, norms in ((0, ints(4, 1, 1, lo=1)), (2, ints(1, 1, 5, lo=1))):
        yield call(aten._weight_norm_interface.default, x, norms, k)
        saved = aten._weight_norm_interface.default(x, norms, k)[1]
        yield call(aten._weight_norm_interface_backward.default, ints(4, 3, 5, hi=9), x, norms, saved, k)
    for shape, w, b in (([5], ints(5), ints(5, hi=9)), ([3, 5], ints(3, 5), None), ([5], None, None)):
        out = aten.native_layer_norm.default(x, shape, w, b, 1e-5)
        yield call(aten.native_layer_norm.default, x, shape, w, b, 1e-5)
        yield call(
            aten.native_layer_norm_backward.default,
            ints(4, 3, 5, hi=9),
            x,
            shape,
            *out[1:],
            w,
            b,
            [True, w is not None, b is not None],
        )
    yield call(aten._fused_rms_norm.default, x, [5], ints(5), 1e-5)
    image, kernel, bias = ints(4, 3, 6, 7), ints(5, 3, 2, 3), ints(5)
    grad = ints(4, 5, 5, 5)
    tail = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    yield call(aten.convolution.default, image, kernel, bias, *tail)
    yield call(aten.convolution.default, image, kernel, None, *tail)
    yield call(aten.convolution.default, ints(4, 6, 7), ints(8, 3, 2), ints(8), [2], [1], [1], False, [0], 2)
    yield call(aten.convolution.default, ints(4, 5, 6), ints(5, 3, 2), None, [2], [1], [1], True, [0], 1)
    yield call(aten.convolution_backward.default, grad, image, kernel, [5], *tail, [True, True, True])
    yield call(aten.convolution_backward.default, grad, image, kernel, None, *tail, [True, True, False])
    yield call(aten.convolution_backward.default, grad, image, kernel, [5], *tail, [False, True, True])
    each = [1], [1], [1], False, [0], 5  # a group for each channel
    yield call(aten.convolution.default, ints(4, 5, 7), ints(5, 1, 3), ints(5), *each)
    yield call(aten.convolution.default, ints(4, 5, 7), ints(5, 1, 3), None, *each)
    yield call(aten.convolution.default, ints(4, 5, 7), ints(5, 1, 3), ints(5), [2], [1], [1], True, [0], 5)
    for mask in ([True, True, True], [False, True, True], [True, True, False], [False, False, True]):
        sizes = [5] if mask[2] else None
        yield call(aten.convolution_backward.default, ints(4, 5, 7), ints(4, 5, 7), ints(5, 1, 3), sizes, *each, mask)
    few = [1], [1], [1], False, [0], 2
    yield call(
        aten.convolution_backward.default, ints(4, 8, 7), ints(4, 6, 7), ints(8, 3, 3), [8], *few, [True, True, True]
    )
    group = aten.native_group_norm.default(ints(4, 6, 5), ints(6), ints(6, hi=9), 4, 6, 5, 2, 1e-5)
    yield call(aten.native_group_norm.default, ints(4, 6, 5), ints(6), ints(6, hi=9), 4, 6, 5, 2, 1e-5)
    yield call(aten.native_group_norm_backward.default, ints(4, 6, 5, hi=9), ints(4, 6, 5), *group[1:], ints(6), 4, 6, 5, 2,
               [True, True, True])  # fmt: skip
    yield call(aten._native_batch_norm_legit_no_training.default, x, ints(3), ints(3, hi=9), ints(3), ints(3, lo=1), 0.1, 1e-5)
    pooled, where = aten.max_pool2d_with_indices.default(image, [2, 2])
    yield call(aten.max_pool2d_with_indices.default, image, [2, 2])
    yield call(aten.max_pool2d_with_indices_backward.default, pooled, image, [2, 2], [], [0, 0], [1, 1], False, where)
    yield call(aten.avg_pool2d.default, image, [2, 2])
    yield call(aten.avg_pool2d_backward.default, pooled, image, [2, 2], [], [0, 0], False, True, None)
    yield call(aten._adaptive_avg_pool2d.default, image, [2, 3])
    yield call(aten._adaptive_avg_pool2d_backward.default, ints(4, 3, 2, 3), image)
    volume = ints(2, 3, 4, 6, 8)
    pooled, where = aten.max_pool3d_with_indices.default(volume, [2, 2, 2])
    yield call(aten.max_pool3d_with_indices.default, volume, [2, 2, 2])
    three: tuple[list[int], ...] = ([2, 2, 2], [], [0, 0, 0])
    yield call(aten.max_pool3d_with_indices_backward.default, pooled, volume, *three, [1, 1, 1], False, where)
    yield call(aten.avg_pool3d.default, volume, [2, 2, 2])
    yield call(aten.avg_pool3d_backward.default, pooled, volume, *three, False, True, None)
    pooled, where = aten.adaptive_max_pool2d.default(image, [2, 3])
    yield call(aten.adaptive_max_pool2d.default, image, [2, 3])
    yield call(aten.adaptive_max_pool2d_backward.default, pooled, image, where)
    yield call(aten._upsample_bicubic2d_aa.default, image, [8, 9], False)
    yield call(aten._upsample_bilinear2d_aa.default, image, [8, 9], False)
    yield call(aten.upsample_nearest1d.default, x, [8])
    yield call(aten.upsample_nearest1d_backward.default, ints(4, 3, 8), [8], [4, 3, 5])
    yield call(aten.upsample_bicubic2d_backward.default, ints(4, 3, 8, 9), [8, 9], [4, 3, 6, 7], False)
    yield call(aten.reflection_pad1d.default, x, [1, 2])
    yield call(aten.upsample_nearest2d.default, image, [8, 9])
    yield call(aten.upsample_bilinear2d.default, image, [8, 9], False)
    yield call(aten.upsample_bicubic2d.default, image, [8, 9], False)
    yield call(aten.upsample_nearest2d_backward.default, ints(4, 3, 8, 9), [8, 9], [4, 3, 6, 7])
    yield call(aten.upsample_bilinear2d_backward.default, ints(4, 3, 8, 9), [8, 9], [4, 3, 6, 7], False)
    yield call(aten.reflection_pad2d.default, image, [1, 2, 0, 1])
    yield call(aten.replication_pad2d.default, image, [1, 2, 0, 1])
    yield from sliding(image)
    yield call(aten._fft_r2c.default, x, [1], 0, True)
    yield call(aten._fft_c2c.default, torch.complex(x, x), [1], 0, True)
    yield call(aten._fft_c2r.default, torch.complex(x, x), [1], 0, 4)
    yield call(aten._cdist_forward.default, ints(2, 4, 5), ints(2, 3, 5), 2.0, None)
    yield call(aten._cdist_backward.default, ints(4, 3, lo=1), ints(4, 5), ints(3, 5, hi=9), 2.0, ints(4, 3, lo=1))
    yield call(aten._trilinear.default, ints(4, 3), ints(6, 3, 5), ints(4, 5), [1, 3], [0], [1, 2], [2, 3])
    yield call(aten.linalg_cross.default, ints(4, 3), ints(4, 3, hi=9))
    square = torch.eye(3, dtype=torch.float64) * 4 + ints(3, 3) / 8
    yield call(aten._linalg_solve_ex.default, square, ints(3, 2))
    yield call(aten._linalg_det.default, square)
    yield call(aten._linalg_slogdet.default, square)
    yield call(aten.linalg_lu_factor_ex.default, square)
    yield call(aten.linalg_solve_triangular.default, square.triu(), ints(3, 2), upper=True)
    bag = (index(6, below=7), torch.tensor([0, 2, 5]))
    out = aten._embedding_bag.default(ints(7, 5), *bag, False, 1)
    yield call(aten._embedding_bag.default, ints(7, 5), *bag, False, 1)
    yield call(aten._embedding_bag_dense_backward.default, ints(3, 5), bag[0], *out[1:], 7, False, 1, None)
    yield call(aten._embedding_bag_backward.default, ints(3, 5), *bag, *out[1:], 7, False, 1, False, None)
    yield call(aten.embedding_renorm.default, ints(7, 5), index(3, below=7), 1.0, 2.0)
    yield call(aten.affine_grid_generator.default, ints(4, 2, 3), [4, 3, 5, 6], False)
    yield call(aten.affine_grid_generator_backward.default, ints(4, 5, 6, 2), [4, 3, 5, 6], False)
    margin = aten.multilabel_margin_loss_forward.default(ints(4, 3), index(4, 3, below=3), 1)
    yield call(aten.multi_margin_loss.default, ints(4, 3), index(4, below=3))
    yield call(aten.multi_margin_loss_backward.default, ints(lo=1), ints(4, 3), index(4, below=3), 1, 1)
    yield call(aten.multilabel_margin_loss_forward.default, ints(4, 3), index(4, 3, below=3), 1)
    yield call(aten.multilabel_margin_loss_backward.default, ints(lo=1), ints(4, 3), index(4, 3, below=3), 1, margin[1])
    yield call(aten.bincount.default, index(6, below=4), None, 5)
    yield call(aten.histc.default, ints(6), 4, -5, 5)
    yield call(aten.renorm.default, x, 2, 0, 3)
    one = torch.tensor(1.0)
    yield call(aten._amp_update_scale.default, one * 4, torch.tensor(1, dtype=torch.int32), one, 2.0, 0.5, 3)
    yield call(aten.linalg_inv_ex.default, torch.eye(3, dtype=torch.float64).expand(4, 3, 3) * 4)
    yield call(aten.linalg_cholesky_ex.default, torch.eye(3, dtype=torch.float64).expand(4, 3, 3) * 4)
    # losses
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss"):
        for reduction in (0, 1, 2):
            extra = [] if name == "mse_loss" else [1.0]
            yield call(getattr(aten, name).default, ints(4, 3), ints(4, 3, hi=9), reduction, *extra)
            yield call(getattr(aten, f"{name}_backward").default, ints(4, 3, lo=1) if reduction == 0 else ints(lo=1),
                       ints(4, 3), ints(4, 3, hi=9), reduction, *extra)  # fmt: skip
    odds, labels = torch.sigmoid(ints(4, 3)), (ints(4, 3, hi=9) > 2).double()
    for reduction in (0, 1, 2):
        up = ints(4, 3, lo=1) if reduction == 0 else ints(lo=1)
        yield call(aten.binary_cross_entropy.default, odds, labels, ints(3, lo=1), reduction)
        yield call(aten.binary_cross_entropy_backward.default, up, odds, labels, ints(3, lo=1), reduction)
        yield call(aten.binary_cross_entropy_with_logits.default, ints(4, 3), labels, None, ints(3, lo=1), reduction)
        yield call(aten.soft_margin_loss.default, ints(4, 3), labels, reduction)
        yield call(aten.soft_margin_loss_backward.default, up, ints(4, 3), labels, reduction)
    logp, target = y.log()[:, :, 0], index(4, below=3)
    for reduction in (0, 1, 2):
        weight = ints(3, lo=1) if reduction else None
        out = aten.nll_loss_forward.default(logp, target, weight, reduction, 1)
        yield call(aten.nll_loss_forward.default, logp, target, weight, reduction, 1)
        yield call(aten.nll_loss_backward.default, torch.ones_like(out[0]), logp, target, weight, reduction, 1, out[1])
        plane = index(4, 5, 1, below=3)
        cube = y.log().unsqueeze(-1)
        out = aten.nll_loss2d_forward.default(cube, plane, weight, reduction, 1)
        yield call(aten.nll_loss2d_forward.default, cube, plane, weight, reduction, 1)
        yield call(aten.nll_loss2d_backward.default, torch.ones_like(out[0]), cube, plane, weight, reduction, 1, out[1])
    yield from attentions()
    yield from updates()


def sliding(image: Tensor) -> Iterator[Sample]:
    """Resizing, padding, windows as dims."""
    line, plane, volume = ints(4, 3, 5), image, ints(2, 3, 4, 6, 8)

    def call(op: Op, *args: Any, **kwargs: Any) -> Sample:
        return Sample(op, args, kwargs)

    for kind in ("reflection", "replication"):
        for n, whole, pad in ((1, line, [1, 2]), (2, plane, [1, 2, 0, 1]), (3, volume, [1, 2, 0, 1, 1, 1])):
            op, back = (getattr(aten, f"{kind}_pad{n}d{tail}").default for tail in ("", "_backward"))
            yield call(op, whole, pad)
            yield call(back, ints(*op(whole, pad).shape), whole, pad)
    yield call(aten._adaptive_avg_pool3d.default, volume, [2, 3, 4])
    yield call(aten._adaptive_avg_pool3d_backward.default, ints(2, 3, 2, 3, 4), volume)
    yield call(aten.upsample_linear1d.default, line, [8], False)
    yield call(aten.upsample_linear1d_backward.default, ints(4, 3, 8), [8], [4, 3, 5], False)
    yield call(aten.upsample_nearest3d.default, volume, [5, 7, 9])
    yield call(aten.upsample_nearest3d_backward.default, ints(2, 3, 5, 7, 9), [5, 7, 9], [2, 3, 4, 6, 8])
    yield call(aten.upsample_trilinear3d.default, volume, [5, 7, 9], False)
    yield call(aten.upsample_trilinear3d_backward.default, ints(2, 3, 5, 7, 9), [5, 7, 9], [2, 3, 4, 6, 8], False)
    yield call(aten._upsample_bicubic2d_aa_backward.default, ints(4, 3, 8, 9), [8, 9], [4, 3, 6, 7], False)
    yield call(aten._upsample_bilinear2d_aa_backward.default, ints(4, 3, 8, 9), [8, 9], [4, 3, 6, 7], False)
    yield call(aten.pixel_shuffle.default, ints(3, 20, 4, 6), 2)
    yield call(aten.pixel_unshuffle.default, ints(3, 5, 8, 6), 2)
    yield call(aten.im2col.default, plane, [2, 3], [1, 1], [0, 1], [2, 1])
    yield call(aten.col2im.default, ints(4, 18, 21), [6, 7], [2, 3], [1, 1], [0, 1], [2, 1])
    yield call(aten.unfold.default, line, 2, 2, 2)
    yield call(aten.unfold_backward.default, ints(4, 3, 2, 2), [4, 3, 5], 2, 2, 2)
    grid = ints(4, 5, 2, 2) / 6
    yield call(aten.grid_sampler_2d.default, plane, grid, 0, 0, False)
    yield call(aten.grid_sampler_2d_backward.default, ints(4, 3, 5, 2), plane, grid, 0, 0, False, [True, True])
    grid = ints(2, 5, 2, 7, 3) / 6
    yield call(aten.grid_sampler_3d.default, volume, grid, 0, 0, False)
    yield call(aten.grid_sampler_3d_backward.default, ints(2, 3, 5, 2, 7), volume, grid, 0, 0, False, [True, True])


def attentions() -> Iterator[Sample]:
    sdpa, backward = overload("shardc.sdpa.default"), overload("shardc.sdpa_backward.default")
    if sdpa is None or backward is None:  # shardc.ops has not been imported
        return
    q, k, v = ints(2, 6, 5, 4) / 4, ints(2, 6, 7, 4, hi=9) / 4, ints(2, 6, 7, 4, lo=-3) / 4
    few = (ints(2, 3, 7, 4) / 4, ints(2, 3, 7, 4, hi=9) / 4)
    cases: Sequence[tuple[Any, ...]] = (
        (q, k, v, None, False, None, False),
        (q, k, v, None, True, 0.3, False),
        (q, k, v, ints(5, 7), False, None, False),
        (q, k, v, ints(2, 1, 5, 7) > -3, False, None, False),
        (q, *few, None, False, None, True),
        (q[0], k[0], v[0], None, False, None, False),
        (q[0], few[0][0], few[1][0], None, False, None, True),
    )
    for case in cases:
        out, lse = sdpa(*case)
        yield Sample(sdpa, case)
        yield Sample(backward, (torch.ones_like(out), *case[:4], out, lse, *case[4:]))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = flash(q, k, v)
    yield Sample(flash, (q, k, v))
    yield Sample(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (torch.ones_like(out), q, k, v, out, lse, 0.0, False)
    )


def updates() -> Iterator[Sample]:
    """Each optimizer's update, on a parameter of two dims and on a number."""
    for name in optim.TABLE:
        if (op := overload(name)) is not None:  # None: shardc.ops has not been imported
            for shape in ((4, 3), ()):
                args: list[Any] = []
                for a in op._schema.arguments:
                    if str(a.type) == "Tensor":
                        numbers = ("step", "eta", "mu") if name == "shardc.asgd.default" else ("step",)
                        args.append(torch.tensor(2.0) if a.name in numbers else ints(*shape, lo=1, hi=6 + len(args)))
                    else:
                        args.append(True if a.name == "decoupled" else False if str(a.type) == "bool" else 0.1)
                yield Sample(op, tuple(args))
