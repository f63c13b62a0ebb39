"""Ranks as processes: requests become collectives of torch.distributed, and a failure of one rank ends all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc import _torch
from shardc.errors import RuntimeFailure
from shardc.mesh import Coord, Mesh
from shardc.runtime.comm import WIRE_DTYPES, Request, Start, drive
from shardc.runtime.executor import Executor, Outcome
from shardc.runtime.failure import POLL, first_failure, leave_failure, refuse, wait, wait_for
from shardc.runtime.pairs import Pairs, buffer_length, paired
from shardc.runtime.simulate import execution


@dataclass
class Pending:
    """A collective under way.

    Args:
        buffer: what it needs besides the tensors of `request`.
        wide: what is sent where the communicator does not know their dtype.
    """

    work: dist.Work | Future[None]
    request: Start
    buffer: Tensor | None = None
    wide: tuple[Tensor | None, Tensor] | None = None


class ProcessGroupCommunicator:
    """Executes the requests of the rank at `coord` over process groups.

    Args:
        mesh, coord: who this process is.
        group: axis -> the process group of the ranks along it, in the order of the axis (`Ranks.group`).
    """

    def __init__(self, mesh: Mesh, coord: Coord, group: Callable[[str], dist.ProcessGroup]) -> None:
        self.mesh, self.coord, self.rank = mesh, coord, mesh.rank(coord)
        self.groups = {axis: group(axis) for axis, n in mesh.axes.items() if n > 1}
        self.pairs: dict[str, Pairs] = {}
        self.seconds = 0.0

    def start(self, request: Start) -> Pending:
        begun = time.perf_counter()
        out, inp = request.out, request.inp
        assert out is not None
        move, group, wide = request.move, self.groups[request.move.step.axis], None
        if out.dtype not in WIRE_DTYPES:  # a reduction of small integers
            wide = (None if inp is None else inp.to(torch.int32), out.to(torch.int32))
            inp, out = wide
        op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[move.op]
        work: dist.Work | Future[None]
        buffer = None
        if paired(move.step.kind, out, out.device.type):
            if move.step.axis not in self.pairs:
                self.pairs[move.step.axis] = Pairs(group)
            pairs = self.pairs[move.step.axis]
            buffer = out.new_empty(buffer_length(move.step.kind, out.numel(), pairs.size))
            if inp is None:
                work = pairs.all_reduce(out, move.op, buffer)
            elif move.step.kind == "all_gather":
                work = pairs.all_gather(out, inp)
            else:
                work = pairs.reduce_scatter(out, inp, move.op, buffer)
        elif move.step.kind == "all_reduce":
            work = dist.all_reduce(out, op, group=group, async_op=True)
        elif move.step.kind == "all_gather":
            work = _torch.all_gather_single(out, inp, group=group, async_op=True)
        elif move.step.kind == "reduce_scatter":
            work = _torch.reduce_scatter_single(out, inp, op=op, group=group, async_op=True)
        else:
            sizes = [n * move.scale for n in move.receives], [n * move.scale for n in move.sends]
            work = dist.all_to_all_single(out, inp, *sizes, group=group, async_op=True)
        self.seconds += time.perf_counter() - begun
        return Pending(work, request, buffer, wide)

    def wait(self, handle: Pending) -> None:
        """Return when the collective is done.

        Raises:
            RuntimeFailure: another rank has failed (the message is its own), or is gone.
        """
        begun = time.perf_counter()
        out = handle.request.out
        assert out is not None
        if isinstance(handle.work, Future):
            wait_for(handle.work, str(handle.request), f"waiting in {handle.request.name}")
        elif out.device.type == "cuda":
            handle.work.wait()
        else:
            wait(handle.work, str(handle.request), f"waiting in {handle.request.name}")
        if handle.wide is not None:
            out.copy_(handle.wide[1])
        self.seconds += time.perf_counter() - begun

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, and leave the groups: no pending collective may hold up this process."""
        if not self.groups:
            return
        leave_failure(error)
        for pairs in self.pairs.values():
            pairs.close()
        for group in self.groups.values():
            with suppress(RuntimeError):
                group.abort()

    def drive(self, executor: Executor, run: Generator[Request, Any, Outcome]) -> Outcome:
        """Run this rank to its end.

        Raises:
            RuntimeFailure: this rank failed, or another one; the groups cannot be used any more.
        """
        if self.groups and (first := first_failure()):
            raise RuntimeFailure(f"rank {self.rank} cannot run: an earlier step failed\n{first}", hint="start all ranks anew")
        cuda = executor.device.type == "cuda"
        self.seconds, begun = 0.0, time.perf_counter()
        if cuda:
            torch.cuda.reset_peak_memory_stats(executor.device)
            before = torch.cuda.memory_allocated(executor.device)
        try:
            with execution(executor.device):
                outcome: Outcome = drive(run, self)
            if cuda:
                self._finish(executor.device)
        except BaseException as error:
            self.fail(error)
            raise
        total, profile = time.perf_counter() - begun, executor.profile
        if cuda and profile is not None:
            outcome.stats.peak_bytes = profile.base + torch.cuda.max_memory_allocated(executor.device) - before
        outcome.stats.seconds |= {"compute": total - self.seconds, "communication": self.seconds}
        return outcome

    def _finish(self, device: torch.device) -> None:
        """Wait for the device; a peer that fails meanwhile would leave its collectives hanging."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        checked = time.monotonic()
        while not done.query():  # type: ignore[no-untyped-call]
            time.sleep(0.0002)
            if time.monotonic() - checked > POLL.total_seconds():
                refuse("", "waiting for the device")
                checked = time.monotonic()
