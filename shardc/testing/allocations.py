"""What torch's profiler saw a call allocate: the yardstick for predicted memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardc import _torch


@dataclass(frozen=True)
class Operator:
    """One outermost operator of a profile: its name, operand shapes, and bytes held inside beyond those that it leaves."""

    name: str
    shapes: str
    inside: int


@dataclass(frozen=True)
class Allocations:
    """The most bytes alive at once, of those allocated during a call; and its operators."""

    peak: int
    operators: tuple[Operator, ...]


def allocations(call: Callable[[], Any]) -> Allocations:
    """Profile the CPU allocations of a call. Frees of memory from before the call do not show."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as run:
        call()
    moments, ranges = _torch.profiled_memory(run)
    live = peak = at = 0
    ends = -1
    operators = []
    for begin, end, name, shapes in [*ranges, (float("inf"), float("inf"), "", "")]:
        if begin < ends:
            continue  # called by the one before
        ends = end
        while at < len(moments) and moments[at][0] < begin:
            live += moments[at][1]
            peak = max(peak, live)
            at += 1
        before = most = live
        while at < len(moments) and moments[at][0] <= end:
            live += moments[at][1]
            most = max(most, live)
            at += 1
        peak = max(peak, most)
        if name:
            operators.append(Operator(name, shapes, most - max(before, live)))
    return Allocations(peak, tuple(operators))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct storages."""
    return sum({_torch.storage_id(t): t.untyped_storage().nbytes() for t in tensors}.values())
