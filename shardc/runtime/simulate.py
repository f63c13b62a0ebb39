"""All ranks in one process: a driver that steps their generators, moves their data and tells when they do not fit."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardc.errors import RuntimeFailure
from shardc.instructions import Input, Instruction, Read, outs_of
from shardc.mesh import Coord, Mesh
from shardc.runtime import kernels
from shardc.runtime.accounting import MemoryProfile
from shardc.runtime.comm import NullCommunicator, Request, Start, Wait, drive
from shardc.runtime.executor import Executor, Outcome, Stream
from shardc.spec import ShardSpec


@contextlib.contextmanager
def execution(device: torch.device) -> Iterator[None]:
    """How instructions run: no gradients, no autocast (the program has its casts)."""
    with torch.no_grad(), torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
        yield


@dataclass
class Meeting:
    """One collective of one group: who has come, in the group's order."""

    name: str
    requests: list[Start | None]
    done: bool = False


@dataclass
class SimulatedCommunicator:
    """Matches the requests of all ranks and executes them, in rank order; ranks of a group meet in the order of their calls."""

    mesh: Mesh
    seconds: float = 0.0
    _calls: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    _open: dict[tuple[str, Coord, int], Meeting] = field(default_factory=dict)

    def start(self, coord: Coord, request: Start) -> Meeting:
        """Rank `coord` comes to its next meeting on the request's axis; the last to come does the work.

        Raises:
            RuntimeFailure: the ranks of a group meet with different collectives.
        """
        axis = request.move.step.axis
        rank, k = self.mesh.rank(coord), self.mesh.index(axis)
        line = (*coord[:k], 0, *coord[k + 1 :])
        number = self._calls[rank, axis]
        self._calls[rank, axis] += 1
        key = (axis, line, number)
        meeting = self._open.setdefault(key, Meeting(request.name, [None] * self.mesh.axes[axis]))
        for index, other in enumerate(meeting.requests):
            if other is not None and _signature(other) != _signature(request):
                there = self.mesh.rank((*coord[:k], index, *coord[k + 1 :]))
                raise RuntimeFailure(
                    f"collective {number} over {axis} differs: rank {rank} calls {request}, rank {there} calls {other}",
                    hint="all ranks have to run the same plan",
                )
        meeting.requests[coord[k]] = request
        if all(r is not None for r in meeting.requests):
            begun = time.perf_counter()
            _execute([r for r in meeting.requests if r is not None])
            self.seconds += time.perf_counter() - begun
            meeting.requests, meeting.done = [], True
            del self._open[key]
        return meeting

    def missing(self, coord: Coord, meeting: Meeting) -> list[int]:
        """Ranks that have not come to a meeting that `coord` waits for."""
        for (axis, line, _), other in self._open.items():
            if other is meeting:
                group = self.mesh.group(line, axis)
                return [self.mesh.rank(c) for c, r in zip(group, meeting.requests, strict=True) if r is None]
        return []


def _signature(r: Start) -> tuple[object, ...]:
    step = r.move.step
    return r.name, step.kind, step.op, r.move.dtype, r.move.size


def _execute(requests: list[Start]) -> None:
    """A collective of a whole group, without memory of its own."""
    move = requests[0].move
    ins = [r.inp for r in requests if r.inp is not None]
    outs = [r.out for r in requests if r.out is not None]
    if move.step.kind == "all_gather":
        for out in outs:
            for part, source in zip(out.chunk(len(ins)), ins, strict=True):
                part.copy_(source)
    elif move.step.kind == "all_reduce":
        for other in outs[1:]:
            _reduce(outs[0], other, move.op)
        for other in outs[1:]:
            other.copy_(outs[0])
    elif move.step.kind == "reduce_scatter":
        for k, out in enumerate(outs):
            n = out.numel()
            out.copy_(ins[0].narrow(0, k * n, n))
            for other in ins[1:]:
                _reduce(out, other.narrow(0, k * n, n), move.op)
    else:
        for r in requests:
            assert r.inp is not None
            at = 0
            for k, n in enumerate(n * move.scale for n in r.move.sends):
                into = requests[k]
                assert into.out is not None
                before = sum(into.move.receives[: r.move.me]) * move.scale
                into.out.narrow(0, before, n).copy_(r.inp.narrow(0, at, n))
                at += n


def _reduce(into: Tensor, other: Tensor, op: str) -> None:
    if op == "sum":
        into.add_(other)
    else:
        (torch.maximum if op == "max" else torch.minimum)(into, other, out=into)


def simulate(
    executors: Sequence[Executor],
    slots: Sequence[Mapping[str, Tensor]],
    inputs: Sequence[Mapping[str, Any]],
    streams: Sequence[Stream | None] | None = None,
    trusted: int = 0,
) -> list[Outcome]:
    """Run all ranks of a mesh in this process, one after another from collective to collective.

    Args:
        executors, slots, inputs, streams: one for each rank, in rank order.
        trusted: see `Executor.run`.

    Returns:
        The outcome of each rank.

    Raises:
        RuntimeFailure: a rank failed; ranks wait for each other; or they call different collectives.
    """
    mesh = executors[0].mesh
    if len(executors) != mesh.size:
        raise RuntimeFailure(f"{len(executors)} executors for the {mesh.size} ranks of {mesh}")
    comm = SimulatedCommunicator(mesh)
    streams = streams or [None] * len(executors)
    runs: list[Generator[Request, Any, Outcome] | None] = [
        e.run(s, i, r, trusted) for e, s, i, r in zip(executors, slots, inputs, streams, strict=True)
    ]
    waits: list[Meeting | None] = [None] * len(runs)
    outcomes: list[Outcome | None] = [None] * len(runs)
    spent = [[0.0, 0.0] for _ in runs]
    try:
        while any(run is not None for run in runs):
            moved = False
            for rank, run in enumerate(runs):
                waiting = waits[rank]
                if run is None or (waiting is not None and not waiting.done):
                    continue
                moved, waits[rank] = True, None
                with execution(executors[rank].device):
                    waits[rank], outcomes[rank] = _advance(run, executors[rank].coord, comm, spent[rank])
                if outcomes[rank] is not None:
                    runs[rank] = None
            if not moved:
                raise _deadlock(executors, waits, comm)
    finally:
        for run in runs:
            if run is not None:
                run.close()
    done = [o for o in outcomes if o is not None]
    for outcome, (compute, communication) in zip(done, spent, strict=True):
        outcome.stats.seconds |= {"compute": compute, "communication": communication}
    return done


def _advance(
    run: Generator[Request, Any, Outcome], coord: Coord, comm: SimulatedCommunicator, spent: list[float]
) -> tuple[Meeting | None, Outcome | None]:
    """Step a rank until it has to wait for another, or to its end."""
    request: Request | None = None
    reply: Any = None
    while True:
        begun = time.perf_counter()
        try:
            request = None
            request = run.send(reply)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return None, outcome
        finally:
            spent[0] += time.perf_counter() - begun
        reply = None
        if isinstance(request, Wait):
            meeting: Meeting = request.handle
            if not meeting.done:
                return meeting, None
            continue
        before = comm.seconds
        reply = comm.start(coord, request)
        spent[1] += comm.seconds - before


def _deadlock(executors: Sequence[Executor], waits: Sequence[Meeting | None], comm: SimulatedCommunicator) -> RuntimeFailure:
    lines = [
        f"rank {e.rank} waits in {m.name} for ranks {comm.missing(e.coord, m)}"
        for e, m in zip(executors, waits, strict=True)
        if m is not None
    ]
    return RuntimeFailure(f"deadlock: {'; '.join(lines)}", hint="all ranks have to run the same plan")


def dry_run(
    instructions: Sequence[Instruction],
    mesh: Mesh,
    coord: Coord | None = None,
    *,
    slots: Mapping[str, tuple[ShardSpec, torch.dtype]] | None = None,
    inputs: Mapping[str, tuple[ShardSpec, torch.dtype]] | None = None,
    categories: Mapping[str, str] | None = None,
) -> MemoryProfile:
    """The memory of a rank over a run, from a run of the same executor on meta tensors.

    Args:
        instructions, mesh: the plan's.
        coord: the rank; by default the first, which has the largest parts.
        slots, inputs: spec and dtype of state and tensor arguments that exist at the start. Those that the instructions read
            need not be given; state that is only overwritten, or not used, has to.
        categories: slot, input path or instruction name -> category of the memory it brings; "other" by default.

    Raises:
        RuntimeFailure: an instruction that fails on meta tensors, or whose results are not what the plan says.
    """
    coord = coord if coord is not None else (0,) * len(mesh.shape)
    have: list[dict[str, Any]] = [dict(slots or {}), dict(inputs or {})]
    for i in instructions:
        if isinstance(i, (Read, Input)):
            (out,) = outs_of(i)
            table, key = (have[0], i.slot) if isinstance(i, Read) else (have[1], i.path)
            table.setdefault(key, (out.spec, out.dtype))

    def make(spec: ShardSpec | None, dtype: torch.dtype | None) -> Any:
        if spec is None or dtype is None:
            return kernels.STAND_IN
        return torch.empty(spec.local_shape(mesh, coord), dtype=dtype, device="meta")

    made = [{key: make(*kind) for key, kind in table.items()} for table in have]
    executor = Executor(instructions, mesh, coord, "meta", categories=categories, timeline=True)
    with execution(executor.device):
        drive(executor.run(made[0], made[1]), NullCommunicator())
    assert executor.profile is not None
    return executor.profile
