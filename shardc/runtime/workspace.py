"""What kernels hold inside: bytes of the temporaries of one operator on CPU, from the shapes and strides of a call.

An allocation profile of a step shows more than operands and results: oneDNN packs the operands of a convolution, attention
keeps blocks of scores, mixed dtypes are cast first. The formulas here follow from what was measured (torch 2.13, one thread,
AVX-512: ``python benchmarks/memory.py --operators``); with more threads the blocks of attention and the sums of norms exist
once for each. Half precision products of matrices are not covered (what oneDNN packs depends on the processor).

Each function takes the call's arguments, then its results, and returns the bytes beyond the results at the kernel's own peak.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.pairs import buffer_length, paired

BLOCK = 16
"""Channels in a block of oneDNN's layouts on AVX-512."""

Workspace = Callable[[Sequence[Any], Sequence[Any]], int]


def workspace_of(op: str, function: Callable[..., Any], device: str) -> Workspace | None:
    """The formula of an operator; None if its kernel holds nothing but its results, or nothing is known of the device.

    Args:
        op: as in ``Compute.op``.
        function: what it resolves to.
        device: kind of the device.
    """
    if device != "cpu":
        return None
    found = TABLE.get(op)
    if found is None and isinstance(function, torch._ops.OpOverload) and torch.Tag.pointwise in function.tags:
        return _cast_operands
    return found


def collective_workspace(kind: str, out: Tensor, ranks: int, device: str) -> int:
    """Bytes that a communicator holds besides what is sent and received (see `shardc.runtime.pairs`)."""
    return buffer_length(kind, out.numel(), ranks) * out.dtype.itemsize if paired(kind, out, device) else 0


def _bytes(t: Tensor) -> int:
    return t.numel() * t.dtype.itemsize


def _copies(*tensors: Any) -> int:
    """Kernels that need contiguous operands copy the others."""
    return sum(_bytes(t) for t in tensors if isinstance(t, Tensor) and not t.is_contiguous())


# -- elementwise and reductions: operands of another dtype are cast --------------------------------------------------------


def _cast_operands(args: Sequence[Any], results: Sequence[Any], skip: int = 0) -> int:
    tensors = [a for a in args[skip:] if isinstance(a, Tensor)]
    if not tensors or not isinstance(results[0], Tensor):
        return 0
    common = results[0].dtype
    if common == torch.bool:  # comparisons
        numbers = [a for a in args[skip:] if isinstance(a, Tensor) or type(a) in (bool, int, float)]
        pairs = [torch.result_type(a, b) for a, b in itertools.pairwise(numbers)]
        common = functools.reduce(torch.promote_types, pairs) if pairs else tensors[0].dtype
    return sum(t.numel() * common.itemsize for t in tensors if t.dim() and t.dtype != common)


def _where(args: Sequence[Any], results: Sequence[Any]) -> int:
    return _cast_operands(args, results, skip=1)


def _cast_to_result(args: Sequence[Any], results: Sequence[Any]) -> int:
    x, out = args[0], results[0]
    return 0 if x.dtype == out.dtype else int(x.numel() * out.dtype.itemsize)


def _none(args: Sequence[Any], results: Sequence[Any]) -> int:
    return 0


# -- lookups and norms -----------------------------------------------------------------------------------------------------


def _contiguous(args: Sequence[Any], results: Sequence[Any]) -> int:
    return _copies(*args)


def _runs(args: Sequence[Any], results: Sequence[Any]) -> int:
    """The positions 0, 1, ... along each dim that is not looked up."""
    shape = args[4] if len(args) > 4 else args[0].shape
    return sum(8 * n for n, d in zip(shape, args[2], strict=True) if d >= 0)


def _safe_softmax(args: Sequence[Any], results: Sequence[Any]) -> int:
    """Which elements, and which rows, are masked."""
    x, dim = args[0], args[1]
    return int(x.numel() + x.numel() // max(x.shape[dim], 1) + x.dtype.itemsize)


def _layer_norm_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    """The sums for weight and bias, of each thread."""
    return int(2 * math.prod(args[2]) * args[1].dtype.itemsize) + _copies(args[0], args[1])


def _group_norm_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    x, n, c = args[1], args[5], args[6]
    return int(2 * n * c * x.dtype.itemsize) + _copies(args[0], x)


# -- products: BLAS reads rows or columns without gaps -----------------------------------------------------------------------


def _product(args: Sequence[Any], results: Sequence[Any]) -> int:
    return sum((_bytes(t) for t in args if isinstance(t, Tensor) and t.dim() >= 2 and not _dense(t)), 0)


def _dense(t: Tensor) -> bool:
    rows, columns = t.shape[-2:]
    a, b = t.stride()[-2:]
    return 0 in t.shape or (b == 1 and a >= max(1, columns)) or (a == 1 and b >= max(1, rows)) or 1 in (rows, columns)


# -- attention ---------------------------------------------------------------------------------------------------------------


def _sdpa(args: Sequence[Any], results: Sequence[Any]) -> int:
    q, k, v, mask = args[:4]
    acc = 8 if q.dtype == torch.float64 else 4
    if q.dim() != 4 or q.shape[3] != v.shape[3]:  # scores of the whole call, and what their logsumexp holds
        return int(2 * q.numel() // max(q.shape[-1], 1) * k.shape[-2] * acc)
    rows, keys = _blocks(q, k)
    block = (rows * keys + 2 * rows + rows * v.shape[3]) * acc + (rows * keys * q.dtype.itemsize if q.dtype.itemsize < 4 else 0)
    mask_made = _mask(mask, q)
    if mask_made:  # it is inverted before results exist
        block = max(block, mask.numel() - sum(_bytes(t) for t in results))
    return int(block) + mask_made + _repeated(q, k, v)


def _sdpa_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    grad, q, k, v, mask = args[:5]
    acc = 8 if q.dtype == torch.float64 else 4
    if q.dim() != 4 or q.shape[3] != v.shape[3]:
        return int(2 * q.numel() // max(q.shape[-1], 1) * k.shape[-2] * acc)
    rows, keys = _blocks(q, k)
    block = (2 * rows * keys + rows) * acc + (2 * rows * keys * q.dtype.itemsize if q.dtype.itemsize < 4 else 0)
    shared = _repeated(q, k, v)
    if shared:  # and so are their gradients, before they are summed
        shared += shared - _bytes(k) - _bytes(v)
    return int(block) + _mask(mask, q) + shared + _copies(grad.transpose(1, 2))


def _blocks(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Rows and keys of a block of scores."""
    t = q.shape[2]
    return min(t, 256 if t >= 768 else 64 if t >= 192 else 32), min(k.shape[2], 512)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Keys and values, with a head for each head of the query."""
    heads = q.shape[1] // max(k.shape[1], 1)
    return 0 if heads <= 1 else heads * (_bytes(k) + _bytes(v))


def _mask(mask: Any, q: Tensor) -> int:
    """A boolean mask is made one that is added."""
    return int(mask.numel() * q.dtype.itemsize) if isinstance(mask, Tensor) and mask.dtype == torch.bool else 0


# -- convolution: oneDNN packs channels in blocks ------------------------------------------------------------------------------


def _padded(channels: int, block: int = BLOCK) -> int:
    return -(-channels // block) * block


class _Convolution:
    """Bytes of the operands of a convolution, plain and packed."""

    def __init__(
        self, x: Tensor, w: Tensor, y: Tensor,
        stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    ) -> None:  # fmt: skip
        self.x, self.w, self.y, self.groups = x, w, y, groups
        item = x.dtype.itemsize
        self.item, self.ci, self.co = item, x.shape[1], y.shape[1]
        self.taps, self.places = math.prod(w.shape[2:]), math.prod(y.shape[2:])
        self.strided = any(s != 1 for s in stride)
        self.dilated = any(d != 1 for d in dilation)
        self.padding = any(p != 0 for p in padding)
        self.pointwise = self.taps == 1
        self.row = self.ci * self.places * item + 128 if self.pointwise and self.strided else 0  # one strided image, gathered

    @property
    def packs(self) -> bool:
        """Whether torch calls oneDNN (``use_mkldnn`` in its Convolution.cpp), for one thread."""
        x = self.x
        return (
            x.dtype == torch.float32
            and (self.strided or self.dilated or x.shape[0] >= 16 or not self.pointwise)
            and (self.groups > 1 or all(n > 3 for n in self.w.shape[2:]) or x.shape[0] > 1 or x.numel() > 20480)
        )

    @property
    def channels_last(self) -> bool:
        return self.x.dim() == 4 and not self.x.is_contiguous() and self.x.is_contiguous(memory_format=torch.channels_last)

    def packed(self, t: Tensor) -> int:
        return _bytes(t) // max(t.shape[1], 1) * _padded(t.shape[1])

    def weight(self, co: int, ci: int) -> int:
        return _bytes(self.w) if self.groups > 1 else co * ci * self.taps * self.item

    def columns(self) -> int:
        """Where torch's own kernel unfolds the input."""
        unfolds = not self.pointwise or self.strided or self.padding
        return self.x.shape[0] * self.ci * self.taps * self.places * self.item if unfolds else 0


def _convolution(args: Sequence[Any], results: Sequence[Any]) -> int:
    x, w, _, stride, padding, dilation, transposed, _, groups = args
    y = results[0]
    if transposed:  # the gradient of a convolution that reads y and gives x
        return _of_input(_Convolution(y, w, x, stride, padding, dilation, groups)) - _bytes(y)
    c = _Convolution(x, w, y, stride, padding, dilation, groups)
    copied = _copies(x, w) if not c.channels_last else 0
    if not c.packs:
        return c.columns() + copied
    if c.channels_last:
        return 2 * _bytes(w) + 8216
    first = groups == 1 and c.ci < BLOCK  # few channels are read as they are
    xb = 0 if first else c.packed(x)
    wb, yb = c.weight(_padded(c.co), c.ci if first else _padded(c.ci)), c.packed(y)
    return copied + max(c.row + xb + wb + yb, yb + _bytes(y)) - _bytes(y)


def _of_input(c: _Convolution) -> int:
    """Peak while the gradient of the input is made; it is part of it."""
    x = _bytes(c.x)
    if c.strided:  # in channels-last order, then copied twice
        return max(_bytes(c.y) + c.weight(c.co, _padded(c.ci)) + x + 36888, 3 * x)
    return max(c.packed(c.y) + c.weight(_padded(c.co), _padded(c.ci)) + c.packed(c.x), c.packed(c.x) + x)


def _of_weight(c: _Convolution, bias: int) -> int:
    """Peak while the gradients of weight and bias are made; they are part of it."""
    if c.groups == 1 and c.ci <= 3:
        xb, yb, wb = 0, c.packed(c.y), c.weight(_padded(c.co), c.ci)
    elif c.ci <= 8 and c.co <= 8:
        xb, yb, wb = _bytes(c.x), _bytes(c.y), _bytes(c.w)
    else:
        xb, yb, wb = c.packed(c.x), c.packed(c.y), c.weight(_padded(c.co), _padded(c.ci))
    return max(c.row + xb + yb + wb + bias, wb + _bytes(c.w) + 2 * bias)


def _convolution_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    dy, x, w, _, stride, padding, dilation, transposed, _, groups, mask = args
    c = _Convolution(x, w, dy, stride, padding, dilation, groups)
    if transposed:
        c = _Convolution(dy, w, x, stride, padding, dilation, groups)
        return _bytes(x) + max(c.packed(dy), 0) + c.packed(x)
    if not c.packs:
        return (c.columns() if mask[1] else 0) + _copies(dy, x, w)
    if c.channels_last:
        return 3 * _bytes(w) if mask[1] else 2 * _bytes(w) + 8344
    copied = _copies(dy, x, w)
    dx, bias = _bytes(x) if mask[0] else 0, c.co * c.item if mask[2] else 0
    peak = _of_input(c) if mask[0] else 0
    if mask[1]:
        peak = max(peak, dx + _of_weight(c, bias))
    return copied + max(0, peak - dx - (_bytes(w) if mask[1] else 0) - bias)


TABLE: dict[str, Workspace] = {
    "aten._to_copy.default": _none,
    "aten._safe_softmax.default": _safe_softmax,
    "aten._softmax.default": _contiguous,
    "aten._log_softmax.default": _contiguous,
    "aten.addmm.default": _product,
    "aten.all.dim": _cast_to_result,
    "aten.any.dim": _cast_to_result,
    "aten.bmm.default": _product,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.copy.default": _none,
    "aten.cumsum.default": _cast_to_result,
    "aten.embedding.default": _contiguous,
    "aten.embedding_dense_backward.default": _contiguous,
    "shardc.index_rows.default": _runs,
    "shardc.index_sum.default": _runs,
    "aten.masked_fill.Scalar": _none,
    "aten.masked_fill.Tensor": _none,
    "aten.mean.default": _cast_to_result,
    "aten.mean.dim": _cast_to_result,
    "aten.mm.default": _product,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_layer_norm.default": _contiguous,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.prod.dim_int": _cast_to_result,
    "aten.sum.default": _cast_to_result,
    "aten.sum.dim_IntList": _cast_to_result,
    "aten.where.self": _where,
    "shardc.sdpa.default": _sdpa,
    "shardc.sdpa_backward.default": _sdpa_backward,
}
