"""Scaled dot product attention as one operator, whatever device the step is captured on or planned for.

``shardc.sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa) -> (out, logsumexp)`` and
``shardc.sdpa_backward(grad_out, query, key, value, attn_mask, out, logsumexp, is_causal, scale, enable_gqa) -> (dq, dk, dv)``.

query [..., H, T, D], key [..., H', S, D], value [..., H', S, D']; H' divides H with `enable_gqa`, else they are equal;
attn_mask broadcasts to [..., H, T, S], bool (True takes part) or added to the scores; out [..., H, T, D'];
logsumexp [..., H, T] of the masked, scaled scores, float64 for float64 and float32 otherwise. A row without any key gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardc import _torch
from shardc.errors import CaptureError
from shardc.ops.library import operator

_EAGER: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _flash_fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's blocked CPU kernel covers the case. Reads metadata only, so fake and real tensors agree."""
    return (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[3] == v.shape[3] > 0
        and q.shape[2] > 0
        and k.shape[2] > 0
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and (mask is None or mask.dim() in (2, 4))
    )


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """key and value with a head for each head of the query."""
    heads = q.shape[-3] if q.dim() > 2 else 1
    if q.dim() < 3 or k.shape[-3] == heads:
        return k, v
    return k.repeat_interleave(heads // k.shape[-3], -3), v.repeat_interleave(heads // v.shape[-3], -3)


def _folded(grad: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_repeated` for gradients: sum over the heads that share one."""
    if grad.shape == like.shape:
        return grad
    heads = like.shape[-3]
    return grad.reshape(*like.shape[:-2], grad.shape[-3] // heads, *like.shape[-2:]).sum(-3).contiguous()


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as flash kernels want it: added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    s = (q * scale) @ k.transpose(-2, -1)
    if is_causal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), float("-inf"))
    if mask is not None:
        s = s.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else s.add_(mask)
    return s


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """softmax from the logsumexp, in place; rows that are masked everywhere have none to take part."""
    return s.sub_(lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp_()


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    acc = _accumulate(q.dtype)
    s = _scores(q.to(acc), k.to(acc), mask, is_causal, scale)
    lse = s.logsumexp(-1)
    return (_probabilities(s, lse) @ v.to(acc)).to(q.dtype).contiguous(), lse.contiguous()


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2 (Dao 2023), section 3.1, without the blocks."""
    acc, dtype = _accumulate(q.dtype), q.dtype
    grad, q, k, v, out = (t.to(acc) for t in (grad, q, k, v, out))
    p = _probabilities(_scores(q, k, mask, is_causal, scale), lse)
    dv = p.transpose(-2, -1) @ grad
    ds = (grad @ v.transpose(-2, -1)).sub_((grad * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    return tuple(t.to(dtype).contiguous() for t in (ds @ k, ds.transpose(-2, -1) @ q, dv))  # type: ignore[return-value]


def _cuda_kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """"flash", "efficient" or "math"."""
    if q.dim() != 4 or q.dtype == torch.float64 or not q.numel() or not v.numel() or q.shape[3] % 8 or v.shape[3] % 8:
        return "math"
    same = q.shape[3] == v.shape[3] <= 256
    return "flash" if mask is None and same and q.dtype in (torch.float16, torch.bfloat16) else "efficient"


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias of the memory-efficient kernels: rows start at multiples of 16 elements."""
    bias, keys = _additive(mask, q), k.shape[2]
    if bias is None:
        return None
    room = bias.new_empty((*bias.shape[:-1], -(-keys // 16) * 16), dtype=q.dtype)[..., :keys]
    return room.copy_(bias).expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    if not q.numel() and _flash_fits(q, k, v, mask):  # no batch or no heads: nothing to compute
        return _fake_forward(q, k, v, mask, is_causal, scale, enable_gqa)
    k, v = _repeated(q, k, v) if enable_gqa else (k, v)
    if q.device.type == "cuda":
        kind = _cuda_kernel(q, v, mask)
        if kind == "flash":
            out, lse, *_ = _torch.flash_cuda(q, k, v, 0.0, is_causal, scale=scale)
            return out, lse
        if kind == "efficient":
            out, lse, *_ = _torch.efficient_cuda(q, k, v, _aligned(mask, q, k), True, 0.0, is_causal, scale=scale)
            return out, lse[..., : q.shape[2]].contiguous()
    elif _flash_fits(q, k, v, mask):
        out, lse = _torch.flash_cpu(q, k, v, 0.0, is_causal, attn_mask=_additive(mask, q), scale=scale)
        return out, lse
    return _math(q, k, v, mask, is_causal, _scale(q, scale))


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    acc = _accumulate(q.dtype)
    if _flash_fits(q, k, v, mask):
        b, h, t, _ = q.shape
        return torch.empty_like(q), q.new_empty((b, t, h), dtype=acc).transpose(1, 2)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=acc)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not q.numel() and _flash_fits(q, k, v, mask):
        return _fake_backward(grad, q, k, v, mask, out, lse, is_causal, scale, enable_gqa)
    key, value = k, v
    k, v = _repeated(q, k, v) if enable_gqa else (k, v)
    kind = _cuda_kernel(q, v, mask) if q.device.type == "cuda" else "math"
    if kind == "flash":
        seed = torch.empty((2,), dtype=torch.uint64, device=q.device)  # read with dropout only
        dq, dk, dv = _torch.flash_cuda_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, seed[:1], scale=scale
        )
    elif kind == "efficient":
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = _torch.efficient_cuda_backward(
            grad, q, k, v, _aligned(mask, q, k), out, padded, seed, seed, 0.0, [True, True, True, False], is_causal, scale=scale
        )
    elif q.device.type == "cpu" and _flash_fits(q, k, v, mask):
        dq, dk, dv = _torch.flash_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=_additive(mask, q), scale=scale
        )
    else:
        dq, dk, dv = _math_backward(grad, q, k, v, mask, out, lse, is_causal, _scale(q, scale))
    return dq, _folded(dk, key), _folded(dv, value)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def like(x: Tensor) -> Tensor:
        if _flash_fits(q, k, v, mask) and (x is q or x.shape[1] == q.shape[1]):
            b, h, t, d = x.shape
            return x.new_empty((b, t, h, d)).transpose(1, 2)
        return x.new_empty(x.shape)

    return like(q), like(k), like(v)


_ARGUMENTS = "bool is_causal, float? scale, bool enable_gqa"
operator(
    f"sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _forward, _fake_forward,
)  # fmt: skip
operator(
    "sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor out, Tensor logsumexp, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _backward, _fake_backward,
)  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    query, key, value, mask, out, lse = ctx.saved_tensors
    grads = torch.ops.shardc.sdpa_backward(grad, query, key, value, mask, out, lse, *ctx.options)
    return (*grads, None, None, None, None)


def _no_second_gradient(ctx: Any, *grads: Tensor | None) -> None:
    raise CaptureError(
        "scaled_dot_product_attention is differentiated twice; its fused form has no second derivative",
        hint="with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): around the attention",
    )


torch.library.register_autograd("shardc::sdpa", _gradient, setup_context=_setup)
torch.library.register_autograd("shardc::sdpa_backward", _no_second_gradient)


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool) -> bool:
    """Whether the operator covers this call; eager's own path, traced as it is, covers the rest and raises its own errors."""
    if dropout_p or (mask is not None and (is_causal or mask.requires_grad)):
        return False
    if not _torch.flash_enabled():  # the user asks for the plain formula: sdpa_kernel(SDPBackend.MATH)
        return False
    tensors = [q, k, v, *([] if mask is None else [mask])]
    if any(t.is_nested or t.layout != torch.strided or t.device != q.device for t in tensors):
        return False
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _FLOATS and q.dim() == k.dim() == v.dim() and q.dim() >= 3):
        return False
    lead = q.shape[:-3] if enable_gqa else q.shape[:-2]
    if any(t.shape[: len(lead)] != lead for t in (k, v)) or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return False
    if enable_gqa and (k.shape[-3] != v.shape[-3] or not k.shape[-3] or q.shape[-3] % k.shape[-3]):
        return False
    if mask is None:
        return True
    scores = (*q.shape[:-1], k.shape[-2])
    fits = 2 <= mask.dim() <= q.dim() and all(m in (1, n) for m, n in zip(mask.shape[::-1], scores[::-1], strict=False))
    return fits and mask.dtype in (torch.bool, torch.float32, q.dtype)


def _autocast(t: Tensor | None, device: str) -> Tensor | None:
    """What autocast does to an argument of scaled_dot_product_attention."""
    if t is None or not t.is_floating_point() or t.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return t
    return t.to(torch.get_autocast_dtype(device))


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_dot_product_attention` as one operator. Calls that it does not cover (dropout, a mask that
    requires grad, batches that broadcast, nested tensors, `sdpa_kernel(MATH)`) are torch's own."""
    q, k, v, mask = (_autocast(t, query.device.type) for t in (query, key, value, attn_mask))
    assert q is not None and k is not None and v is not None
    if _fits(q, k, v, mask, dropout_p, is_causal, enable_gqa):
        out: Tensor = torch.ops.shardc.sdpa(q, k, v, mask, is_causal, scale, enable_gqa)[0]
        return out
    return _EAGER(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class _SdpaMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (sdpa if func is _EAGER else func)(*args, **(kwargs or {}))


@contextmanager
def sdpa_mode() -> Iterator[None]:
    """While inside, `torch.nn.functional.scaled_dot_product_attention` is `sdpa`, also inside torch's own modules and where it
    was imported by name. (A mode alone does not see calls that torch's Python functions make; a name alone not the others.)"""
    with _torch.replaced("torch.nn.functional", "scaled_dot_product_attention", lambda original: sdpa), _SdpaMode():
        yield
