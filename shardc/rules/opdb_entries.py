"""The entries of torch's op_db (torch 2.13) that training can reach, and the common ones among them.

An entry is reachable if it takes floating point numbers and has a gradient; a variant stands after its name, ``var.unbiased``.
"""

from __future__ import annotations

_REACHABLE = """
    H T __getitem__ __radd__ __rdiv__ __rmatmul__ __rmod__ __rmul__ __rpow__ __rsub__ _batch_norm_with_update
    _native_batch_norm_legit _segment_reduce.lengths _segment_reduce.offsets _softmax_backward_data _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa abs acos acosh add addbmm addcdiv addcmul addmm
    addmm.decomposed addmv addr alias_copy amax amin aminmax angle as_strided as_strided.partial_views as_strided_copy
    as_strided_scatter asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d baddbmm bernoulli bfloat16
    block_diag bmm broadcast_tensors broadcast_to cartesian_prod cat cdist cdouble ceil cfloat chalf cholesky
    cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clone column_stack combinations complex conj
    conj_physical constant_pad_nd contiguous copysign corrcoef cos cosh cov cross cummax cummin cumprod cumsum
    cumulative_trapezoid deg2rad diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma dist
    div.floor_rounding div.no_rounding_mode div.trunc_rounding dot double dsplit dstack einsum erf erfc erfinv exp exp2
    expand expand_as expand_copy expm1 fft.fft fft.fft2 fft.fftn fft.fftshift fft.hfft fft.hfft2 fft.hfftn fft.ifft
    fft.ifft2 fft.ifftn fft.ifftshift fft.ihfft fft.ihfft2 fft.ihfftn fft.irfft fft.irfft2 fft.irfftn fft.rfft fft.rfft2
    fft.rfftn fill flatten flip fliplr flipud float float_power floor fmax fmin fmod frac frexp gather gradient
    grid_sampler_2d grid_sampler_3d half hsplit hstack hypot i0 index_add index_copy index_fill index_put
    index_reduce.amax index_reduce.amin index_reduce.mean index_reduce.prod index_select inner kron kthvalue ldexp lerp
    lgamma linalg.cholesky linalg.cholesky_ex linalg.cond linalg.cross linalg.det linalg.diagonal linalg.eig linalg.eigh
    linalg.eigvals linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex linalg.lstsq
    linalg.lstsq.grad_oriented linalg.lu linalg.lu_factor linalg.lu_factor_ex linalg.lu_solve linalg.matrix_norm
    linalg.matrix_power linalg.multi_dot linalg.norm linalg.norm.subgradients_at_zero linalg.pinv linalg.pinv.hermitian
    linalg.pinv.singular linalg.qr linalg.slogdet linalg.solve linalg.solve_ex linalg.solve_triangular linalg.svd
    linalg.svdvals linalg.tensorinv linalg.tensorsolve linalg.vander linalg.vecdot linalg.vector_norm log log10 log1p
    log2 log_softmax log_softmax.with_dtype logaddexp logaddexp2 logcumsumexp logdet logit logsumexp lu lu_solve
    lu_unpack mH mT masked.amax masked.amin masked.cumprod masked.cumsum masked.log_softmax masked.logaddexp
    masked.logsumexp masked.mean masked.median masked.norm masked.normalize masked.prod masked.softmax masked.softmin
    masked.std masked.sum masked.var masked_fill masked_scatter masked_select matmul matrix_exp max.binary
    max.reduction_no_dim max.reduction_with_dim max_pool2d_with_indices_backward maximum mean median
    meshgrid.list_of_tensors meshgrid.variadic_tensors min.binary min.reduction_no_dim min.reduction_with_dim minimum mm
    mode movedim msort mul mv mvlgamma.mvlgamma_p_1 mvlgamma.mvlgamma_p_3 mvlgamma.mvlgamma_p_5 nan_to_num nanmean
    nanmedian nanquantile nansum narrow narrow_copy native_batch_norm native_dropout_backward native_group_norm
    native_layer_norm neg nextafter nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
    nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
    nn.functional.adaptive_max_pool3d nn.functional.alpha_dropout nn.functional.avg_pool1d nn.functional.avg_pool2d
    nn.functional.avg_pool3d nn.functional.batch_norm nn.functional.bilinear nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.celu nn.functional.channel_shuffle nn.functional.conv1d
    nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
    nn.functional.conv_transpose3d nn.functional.cosine_embedding_loss nn.functional.cosine_similarity
    nn.functional.cross_entropy nn.functional.ctc_loss nn.functional.dropout nn.functional.dropout2d
    nn.functional.dropout3d nn.functional.elu nn.functional.embedding nn.functional.embedding_bag
    nn.functional.feature_alpha_dropout.with_train nn.functional.feature_alpha_dropout.without_train
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.gaussian_nll_loss
    nn.functional.gelu nn.functional.glu nn.functional.grid_sample nn.functional.group_norm nn.functional.hardshrink
    nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.hinge_embedding_loss
    nn.functional.huber_loss nn.functional.instance_norm nn.functional.interpolate.area
    nn.functional.interpolate.bicubic nn.functional.interpolate.bilinear nn.functional.interpolate.linear
    nn.functional.interpolate.nearest nn.functional.interpolate.nearest-exact nn.functional.interpolate.trilinear
    nn.functional.kl_div nn.functional.l1_loss nn.functional.layer_norm nn.functional.leaky_relu nn.functional.linear
    nn.functional.linear_cross_entropy nn.functional.linear_cross_entropy.chunked
    nn.functional.linear_cross_entropy.chunked_none nn.functional.local_response_norm nn.functional.logsigmoid
    nn.functional.margin_ranking_loss nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_pool3d
    nn.functional.max_unpool1d nn.functional.max_unpool1d.grad nn.functional.max_unpool2d
    nn.functional.max_unpool2d.grad nn.functional.max_unpool3d nn.functional.max_unpool3d.grad nn.functional.mish
    nn.functional.mse_loss nn.functional.multi_head_attention_forward nn.functional.multi_margin_loss
    nn.functional.multilabel_margin_loss nn.functional.multilabel_soft_margin_loss nn.functional.nll_loss
    nn.functional.normalize nn.functional.pad.circular nn.functional.pad.constant nn.functional.pad.reflect
    nn.functional.pad.replicate nn.functional.pad.replicate_negative nn.functional.pairwise_distance nn.functional.pdist
    nn.functional.pixel_shuffle nn.functional.pixel_unshuffle nn.functional.poisson_nll_loss nn.functional.prelu
    nn.functional.relu nn.functional.relu6 nn.functional.rms_norm nn.functional.rrelu
    nn.functional.scaled_dot_product_attention nn.functional.selu nn.functional.silu nn.functional.smooth_l1_loss
    nn.functional.soft_margin_loss nn.functional.softmin nn.functional.softmin.with_dtype nn.functional.softplus
    nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold
    nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss nn.functional.unfold
    nn.functional.upsample_bilinear nn.functional.upsample_nearest norm norm.fro norm.inf norm.nuc normal
    normal.number_mean ormqr outer pca_lowrank permute permute_copy pinverse polar polygamma.polygamma_n_0
    polygamma.polygamma_n_1 polygamma.polygamma_n_2 polygamma.polygamma_n_3 polygamma.polygamma_n_4 positive pow prod
    put qr quantile rad2deg ravel real reciprocal remainder renorm repeat repeat_interleave reshape reshape_as
    resolve_conj resolve_neg roll rot90 round round.decimals_0 round.decimals_3 round.decimals_neg_3 rsqrt rsub scatter
    scatter_add scatter_reduce.amax scatter_reduce.amin scatter_reduce.mean scatter_reduce.prod scatter_reduce.sum
    select select_scatter sgn sigmoid sign sin sinc sinh slice slice_scatter softmax softmax.with_dtype sort
    sparse.mm.reduce sparse.sampled_addmm special.entr special.erfcx special.i0e special.i1 special.i1e special.log_ndtr
    special.ndtr special.ndtri special.polygamma.special_polygamma_n_0 special.xlog1py split split.list_args
    split_with_sizes split_with_sizes_copy sqrt square squeeze squeeze.multiple squeeze_copy stack std std.unbiased
    std_mean std_mean.unbiased stft sub sum sum_to_size svd svd_lowrank t t_copy take take_along_dim tan tanh
    tensor_split tensordot tile to to_sparse topk torch.ops.aten._safe_softmax.default trace transpose transpose_copy
    trapezoid trapz triangular_solve tril triu true_divide trunc unbind unbind_copy unflatten unfold unfold_copy
    unsafe_chunk unsafe_split unsqueeze unsqueeze_copy var var.unbiased var_mean var_mean.unbiased vdot view view_as
    view_as_complex view_copy vsplit vstack where xlogy zero_
"""
_COMMON = """
    add sub mul div.floor_rounding exp log sqrt pow sin tanh sigmoid nn.functional.relu nn.functional.gelu
    nn.functional.silu clamp where maximum sum mean amax var cumsum logsumexp softmax log_softmax mm bmm matmul
    nn.functional.linear nn.functional.embedding nn.functional.layer_norm nn.functional.rms_norm
    nn.functional.group_norm nn.functional.batch_norm nn.functional.cross_entropy nn.functional.nll_loss
    nn.functional.mse_loss nn.functional.scaled_dot_product_attention nn.functional.conv2d nn.functional.max_pool2d
    nn.functional.avg_pool2d nn.functional.pad.circular view permute transpose expand cat stack split chunk gather
    scatter scatter_add index_select index_add masked_fill tril topk sort flip
"""
REACHABLE = tuple(_REACHABLE.split())
COMMON = tuple(_COMMON.split())
"""Sixty that most training programs are made of: what DTensor is compared on (benchmarks/dtensor_rules.py)."""

EXCLUDED: dict[str, str] = {}
"""Entry -> why it is not tried; it counts as not covered."""
