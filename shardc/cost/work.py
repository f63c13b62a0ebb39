"""Floating-point operations of an operator call, from the local shapes of its operands and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]
Shapes = Sequence[Shape]


def _mm(operands: Shapes, results: Shapes, args: Sequence[Any]) -> int:
    a, b = operands[-2], operands[-1]  # addmm and baddbmm have a bias in front
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _convolution(operands: Shapes, results: Shapes, args: Sequence[Any]) -> int:
    weight = operands[1]
    transposed = len(args) > 6 and args[6] is True
    out = operands[0] if transposed else results[0]
    return 2 * math.prod(out) * math.prod(weight[1:])


def _convolution_backward(operands: Shapes, results: Shapes, args: Sequence[Any]) -> int:
    grad, _, weight = operands[:3]
    wanted = args[-1] if args and isinstance(args[-1], (list, tuple)) else (True, True, False)
    return 2 * math.prod(grad) * math.prod(weight[1:]) * (int(bool(wanted[0])) + int(bool(wanted[1])))


def _attention(operands: Shapes, results: Shapes, args: Sequence[Any]) -> int:
    q, k, v = operands[:3]
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward(operands: Shapes, results: Shapes, args: Sequence[Any]) -> int:
    q, k, v = operands[1:4]
    return 5 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


_TABLE: dict[str, Callable[[Shapes, Shapes, Sequence[Any]], int]] = {
    "aten._scaled_dot_product_efficient_attention": _attention,
    "aten._scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten._scaled_dot_product_flash_attention": _attention,
    "aten._scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten.addbmm": _mm,
    "aten.addmm": _mm,
    "aten.addmv": _mm,
    "aten.baddbmm": _mm,
    "aten.bmm": _mm,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten.dot": _mm,
    "aten.mm": _mm,
    "aten.mv": _mm,
    "shardc.sdpa": _attention,
    "shardc.sdpa_backward": _attention_backward,
}


def flops(op: str, operands: Shapes, results: Shapes, args: Sequence[Any] = ()) -> tuple[int, bool]:
    """Operations of a call, and whether it is bound by a matrix product.

    Args:
        op: ``aten.mm.default``.
        operands, results: local shapes, tensors only, in order.
        args: the call's positional arguments (flags of convolutions).

    Operators without an entry count one operation for each element they read or make.
    """
    fn = _TABLE.get(op.rpartition(".")[0])
    if fn is not None:
        return fn(operands, results, args), True
    return max((math.prod(s) for s in (*operands, *results)), default=0), False
