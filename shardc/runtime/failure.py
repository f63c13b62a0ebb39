"""How ranks learn that one of them has failed: it leaves a message in the store, which the others look at while they wait."""

from __future__ import annotations

import concurrent.futures
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from shardc import _torch
from shardc.errors import RuntimeFailure

FAILED = "shardc/failed"
"""Key of the default store under which the first rank to fail leaves what happened."""

POLL = timedelta(seconds=1)
"""How long a rank waits for others before it looks whether one of them has failed."""

PATIENCE = 3.0
"""Seconds to wait for the message of a rank whose connection broke."""


def first_failure() -> str:
    """What the first rank that failed has left, or nothing."""
    with suppress(RuntimeError):  # the store may live in the process that died
        store = _torch.default_store()
        if store.check([FAILED]):
            return str(store.get(FAILED).decode())
    return ""


def leave_failure(error: BaseException) -> None:
    """Tell the other ranks why this one stops."""
    with suppress(RuntimeError):
        _torch.default_store().compare_set(FAILED, "", f"{type(error).__name__}: {error}")


def wait(work: dist.Work, what: str, where: str) -> None:
    """Return when a collective on the CPU is done.

    Args:
        what, where: for the message: the collective, and what this rank is doing.

    Raises:
        RuntimeFailure: another rank has failed (the message is its own), or is gone.
    """
    while True:
        try:
            work.wait(POLL)
            return
        except RuntimeError as error:
            if work.is_completed():
                if work.is_success():
                    return
                refuse(f"in {what}: {error}", where)
        refuse("", where)


def wait_for(done: concurrent.futures.Future[None], what: str, where: str) -> None:
    """The same for one that a thread does."""
    while True:
        try:
            done.result(POLL.total_seconds())
            return
        except concurrent.futures.TimeoutError:
            refuse("", where)
        except RuntimeError as error:
            refuse(f"in {what}: {error}", where)


def refuse(lost: str, where: str) -> None:
    """Raise the failure of another rank if there is one; with `lost` (what broke) raise in any case, after some patience."""
    until = time.monotonic() + (PATIENCE if lost else 0.0)
    rank = dist.get_rank()
    while True:
        if first := first_failure():
            raise RuntimeFailure(
                f"rank {rank} stops, since another rank has failed\n{first}", where=where, hint="see what that rank prints"
            )
        if time.monotonic() >= until:
            break
        time.sleep(0.1)
    if lost:
        raise RuntimeFailure(
            f"rank {rank} lost the other ranks {lost}",
            where=where,
            hint="see what the other ranks print; one of them was killed or cannot be reached",
        )
