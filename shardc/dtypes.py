"""Short names of dtypes, as plans print them, and their bounds as identities of reductions."""

from __future__ import annotations

import torch

SHORT: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128", torch.complex32: "c32",
}  # fmt: skip


def short(dtype: torch.dtype) -> str:
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def from_short(name: str) -> torch.dtype:
    for dtype, text in SHORT.items():
        if text == name:
            return dtype
    out = getattr(torch, name)
    assert isinstance(out, torch.dtype)
    return out


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that leaves a reduction ("sum", "max", "min") unchanged."""
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max
