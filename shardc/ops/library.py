"""Declares operators in the namespace ``torch.ops.shardc``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("shardc", "DEF")  # type: ignore[no-untyped-call]


def operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define ``shardc::<schema>``.

    Args:
        schema: name, arguments and results in torch's schema language.
        kernel: computes the results on CPU and CUDA tensors; it does not modify or return its arguments.
        fake: makes empty results, for fake and meta tensors.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"shardc::{name}", fake, lib=LIBRARY)
    overload = getattr(torch.ops.shardc, name).default
    assert isinstance(overload, torch._ops.OpOverload)
    return overload
