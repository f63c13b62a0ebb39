"""Collectives on CPUs as messages between pairs of ranks: each part goes straight from where it lies to where it is needed.

gloo gathers into a buffer of its own and copies, and reduces everything everywhere where each rank wants a part. In pairs a
gather needs no copy, and a reduce-scatter of n bytes over N ranks sends n (N - 1) / N of them. A rank adds the others' parts to
its own in the order of their distance, so that results do not depend on timing; every part is summed by one rank alone.

The messages wait in a thread, since gloo gives up a group when a wait for a message times out, and a rank has to see meanwhile
whether another one has failed. Just that ends the thread: `Pairs.close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 7919
"""Of these messages: the user's own on the same group have others."""

SMALL = 1 << 16
"""Tensors of fewer bytes are all-reduced by gloo: one round of latency counts more than bytes."""

Job = Callable[[], None]


def _add(a: Tensor, b: Tensor) -> None:
    a.add_(b)


def _larger(a: Tensor, b: Tensor) -> None:
    torch.maximum(a, b, out=a)


def _smaller(a: Tensor, b: Tensor) -> None:
    torch.minimum(a, b, out=a)


REDUCE = {"sum": _add, "max": _larger, "min": _smaller}


def paired(kind: str, out: Tensor, device: str) -> bool:
    """Whether a collective that fills `out` is done in pairs on such a device."""
    large = kind == "all_reduce" and out.numel() * out.dtype.itemsize >= SMALL
    return device == "cpu" and (large or kind in ("all_gather", "reduce_scatter"))


def buffer_length(kind: str, length: int, ranks: int) -> int:
    """Elements of the buffer that a rank needs besides a result of `length`: one part, where parts are reduced."""
    return {"reduce_scatter": length, "all_reduce": -(-length // ranks)}.get(kind, 0)


class Pairs:
    """The ranks of a gloo group, and the thread of this rank that talks with the others, one collective after another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.me, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._jobs: SimpleQueue[tuple[Job, Future[None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_gather(self, out: Tensor, part: Tensor) -> Future[None]:
        """`out`, flat: the parts of all ranks in order, all of one length."""
        return self._start(lambda: self._gather(list(out.chunk(self.size)), part))

    def reduce_scatter(self, out: Tensor, whole: Tensor, op: str, buffer: Tensor) -> Future[None]:
        """`out`: this rank's part of the reduced `whole`, flat.

        Args:
            op: "sum", "max" or "min".
            buffer: as long as `out`; overwritten.
        """

        def job() -> None:
            parts = whole.chunk(self.size)
            out.copy_(parts[self.me])
            self._reduce(out, list(parts), op, buffer)

        return self._start(job)

    def all_reduce(self, whole: Tensor, op: str, buffer: Tensor) -> Future[None]:
        """`whole`, flat, reduced in place.

        Args:
            buffer: as long as the longest part; overwritten.
        """

        def job() -> None:
            parts = list(whole.tensor_split(self.size))
            self._reduce(parts[self.me], parts, op, buffer)
            self._gather(parts, parts[self.me])

        return self._start(job)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, t: Tensor, to: int) -> dist.Work | None:
        return dist.isend(t, group=self.group, group_dst=to, tag=TAG) if t.numel() else None

    def _receive(self, t: Tensor, source: int) -> dist.Work | None:
        return dist.irecv(t, group=self.group, group_src=source, tag=TAG) if t.numel() else None

    def _gather(self, parts: list[Tensor], mine: Tensor) -> None:
        works = []
        for r in range(1, self.size):
            works.append(self._receive(parts[(self.me - r) % self.size], (self.me - r) % self.size))
            works.append(self._send(mine, (self.me + r) % self.size))
        if parts[self.me].data_ptr() != mine.data_ptr():
            parts[self.me].copy_(mine)
        _finish(works)

    def _reduce(self, out: Tensor, parts: list[Tensor], op: str, buffer: Tensor) -> None:
        got = buffer.narrow(0, 0, out.numel())
        for r in range(1, self.size):
            to, source = (self.me + r) % self.size, (self.me - r) % self.size
            works = [self._receive(got, source), self._send(parts[to], to)]
            _finish(works[:1])
            REDUCE[op](out, got)
            _finish(works[1:])

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _start(self, job: Job) -> Future[None]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shardc pairs", daemon=True)
            self._thread.start()
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def _work(self) -> None:
        with torch.no_grad():
            while True:
                job, done = self._jobs.get()
                failed: Exception | None = None
                try:
                    job()
                except Exception as error:  # whoever waits raises it
                    failed = error
                del job  # with its tensors, before anyone goes on
                if failed is None:
                    done.set_result(None)
                else:
                    done.set_exception(failed)
                del done, failed

    def close(self) -> None:
        """End what is under way, here and, since the connections break, on the other ranks. The group is of no use any more."""
        if self.size > 1 and self._thread is not None:
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), group=self.group, group_src=(self.me + 1) % self.size, tag=TAG + 1)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _finish(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
