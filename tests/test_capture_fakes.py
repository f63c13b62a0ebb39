"""The dtypes that the trace records are those that torch's kernels give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc._torch import FakeTensorMode
from shardc.capture.fakes import corrected

aten = torch.ops.aten
Arguments = Callable[[torch.dtype, torch.dtype], tuple[Any, ...]]


def statistics(x: torch.dtype, w: torch.dtype) -> torch.dtype:
    return w if w == torch.float32 else x


CALLS: dict[Any, Arguments] = {
    aten.native_layer_norm.default: lambda x, w: (torch.ones(4, 8, dtype=x), [8], torch.ones(8, dtype=w), None, 1e-5),
    aten.native_layer_norm_backward.default: lambda x, w: (
        torch.ones(4, 8, dtype=x), torch.ones(4, 8, dtype=x), [8], *[torch.ones(4, 1, dtype=statistics(x, w))] * 2,
        *[torch.ones(8, dtype=w)] * 2, [True] * 3,
    ),
    aten.native_group_norm.default: lambda x, w: (
        torch.ones(4, 8, 3, dtype=x), torch.ones(8, dtype=w), torch.ones(8, dtype=w), 4, 8, 3, 2, 1e-5
    ),
    aten.native_group_norm_backward.default: lambda x, w: (
        torch.ones(4, 8, 3, dtype=x), torch.ones(4, 8, 3, dtype=x), *[torch.ones(4, 2, dtype=statistics(x, w))] * 2,
        torch.ones(8, dtype=w), 4, 8, 3, 2, [True] * 3,
    ),
    aten._fused_rms_norm.default: lambda x, w: (torch.ones(4, 8, dtype=x), [8], torch.ones(8, dtype=x), 1e-5),
}  # fmt: skip


def kinds(out: Any) -> list[torch.dtype | None]:
    return [t.dtype if isinstance(t, Tensor) else None for t in out]


@pytest.mark.parametrize("weight", [torch.float32, None], ids=["wide", "alike"])
@pytest.mark.parametrize("x", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", CALLS, ids=str)
def test_normalisation(op: Any, x: torch.dtype, weight: torch.dtype | None) -> None:
    real = op(*CALLS[op](x, weight or x))
    with FakeTensorMode():
        args = CALLS[op](x, weight or x)
        fake = corrected(op, args, op(*args), "cpu")
    assert kinds(fake) == kinds(real) and [t.shape for t in fake] == [t.shape for t in real]


def test_statistics_on_cuda_are_wide() -> None:
    with FakeTensorMode():
        args = CALLS[aten.native_layer_norm.default](torch.bfloat16, torch.bfloat16)
        out = corrected(aten.native_layer_norm.default, args, aten.native_layer_norm.default(*args), "cuda")
    assert kinds(out) == [torch.bfloat16, torch.float32, torch.float32]
