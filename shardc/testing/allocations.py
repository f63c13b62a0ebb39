"""What torch's profiler saw a call or a step allocate on CPU: the yardstick for predicted memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardc import _torch
from shardc.capture import observe
from shardc.hosts import ProcessHost
from shardc.instructions import Transfer
from shardc.runtime.comm import Start
from shardc.runtime.disk import Region, aligned
from shardc.runtime.process import Pending, ProcessGroupCommunicator
from shardc.runtime.state import to_local
from shardc.runtime.tiers import Tiers, rest_of, tier_of
from shardc.tiers import DEVICE

if TYPE_CHECKING:
    from shardc.api import CompiledStep


@dataclass(frozen=True)
class Operator:
    """One outermost operator of a profile: its name, operand shapes, and bytes held inside beyond those that it leaves."""

    name: str
    shapes: str
    inside: int


@dataclass(frozen=True)
class Allocations:
    """The most bytes alive at once, of those allocated during a call; its operators; and bytes alive when it ends."""

    peak: int
    operators: tuple[Operator, ...]
    end: int


def allocations(call: Callable[[], Any]) -> Allocations:
    """Profile the CPU allocations of a call. Frees of memory from before the call do not show."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as run:
        call()
    moments, ranges = _torch.profiled_memory(run)
    live = peak = at = 0
    ends = -1
    operators = []
    for begin, end, name, shapes in [*ranges, (2**63, 2**63, "", "")]:
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
    return Allocations(peak, tuple(operators), sum(n for _, n in moments))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct storages."""
    return sum({_torch.storage_id(t): t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True)
class StepMemory:
    """Bytes on this rank.

    Args:
        state: of the step's state between steps, as far as it rests on the device.
        base: of state, inputs and constants when a step starts.
        peak: the most within a step, the base included.
    """

    state: int
    base: int
    peak: int


LET_GO = 0.005
"""Seconds in which a thread of the process group lets go of a finished collective, and of buffers that only it knows."""


class _Settling(ProcessGroupCommunicator):
    """Goes on when the threads of the process group have let go of the buffers, on busy cores some time after a collective: if
    one of them were the last to hold a buffer, it would free it unseen by the profiler, which follows this thread alone."""

    def start(self, request: Start) -> Pending:
        self.counts = [(t, _torch.references(t)) for t in (request.inp, request.out) if t is not None]
        return super().start(request)

    def wait(self, handle: Pending) -> None:
        super().wait(handle)
        time.sleep(LET_GO)
        del handle.work
        until = time.monotonic() + 2.0
        while any(_torch.references(t) > n for t, n in self.counts) and time.monotonic() < until:
            time.sleep(0.0001)
        self.counts = []


@contextmanager
def _device_alone(tiers: Tiers) -> Iterator[None]:
    """On a CPU all tiers are one memory: let the profiler see what is moved to the device, not what is moved to the host.

    Tensors on the host are made in pages of their own, which it does not see. What is read from disk is made so too; as long as
    it lives it holds another allocation of its size, which the profiler sees.
    """
    move, made = tiers.move, tiers._made

    def counted(i: Transfer, src: Tensor, into: Tensor | None, device: torch.device) -> Tensor:
        out = move(i, src, into, device)
        if i.out.tier == DEVICE and isinstance(rest_of(src), Region):
            out.untyped_storage()._shardc_seen = torch.empty(storage_bytes([out]), dtype=torch.uint8)  # type: ignore[attr-defined]
        return out

    def hidden(src: Tensor, stride: tuple[int, ...], tier: str, device: torch.device) -> Tensor:
        return aligned(src.shape, stride, src.dtype) if tier != DEVICE and src.numel() else made(src, stride, tier, device)

    tiers.__dict__.update(move=counted, _made=hidden)
    try:
        yield
    finally:
        del tiers.__dict__["move"], tiers.__dict__["_made"]


def step_memory(step: CompiledStep, *args: Any) -> StepMemory:
    """Measure a step that has reached its steady state: the memory of the device, without what rests elsewhere.

    Args:
        args: the step's; inputs are this rank's parts.
    """
    host = step._host
    if isinstance(host, ProcessHost):
        plain = host.communicator
        host.communicator = _Settling(plain.mesh, plain.coord, plain.groups.__getitem__)
    try:
        with _device_alone(host.tiers) if isinstance(host, ProcessHost) else nullcontext():
            seen = allocations(lambda: step(*args))
    finally:
        if isinstance(host, ProcessHost):
            host.communicator = plain
    world = observe(step.fn, args, {})
    state = [t for t in (to_local(ref.get()) for ref in world.slots.values()) if tier_of(t) == DEVICE]
    constants = [t for v in step.variants for t in v.captured.constants.values() if isinstance(t, Tensor)]
    base = storage_bytes([*state, *world.inputs.values(), *constants])
    return StepMemory(storage_bytes(state), base, base + seen.peak)
