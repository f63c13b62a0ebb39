"""Run a function on several local gloo ranks and collect what each of them returned or raised.

    def target(rank_argument): ...            # module-level, so that it can be pickled
    results = run_ranks(2, target, argument)  # one result for each rank

The ranks see the environment that torchrun gives them. The parent holds the rendezvous store, so no free port is guessed and
any number of such runs may go on at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from shardc.errors import ShardcError


class RankFailure(ShardcError):
    """A rank raised, died or did not end in time; carries every rank's `Outcome`."""

    def __init__(self, what: str, outcomes: list[Outcome], *, hint: str = "") -> None:
        super().__init__(what, hint=hint)
        self.outcomes = outcomes


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Args:
        value: what the target returned.
        error: what it raised: the exception itself where it can be pickled, else a RuntimeError of its text.
        traceback: of the exception, as text.
        exit_code: of the process, negative for a signal; None if it had to be killed at the timeout.
        seconds: from the start of the run to the rank's report or end.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code == 0

    def __str__(self) -> str:
        if self.ok:
            return f"rank {self.rank}: ended after {self.seconds:.1f} s"
        if self.error is not None:
            return f"rank {self.rank}: {type(self.error).__name__} after {self.seconds:.1f} s\n{self.traceback}"
        if self.exit_code is None:
            return f"rank {self.rank}: still running after {self.seconds:.1f} s, killed"
        return f"rank {self.rank}: died with exit code {self.exit_code} after {self.seconds:.1f} s"


def run_ranks(
    n: int, target: Callable[..., Any], *args: Any, timeout: float = 300.0, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Call `target(*args)` on `n` ranks.

    Args:
        n: number of processes.
        target: a module-level function; its result must be picklable.
        timeout: seconds for the whole run; ranks still alive are killed then.
        env: further environment variables.

    Returns:
        The result of each rank, in rank order.

    Raises:
        RankFailure: a rank raised, died or was too slow; the message holds every rank's traceback.
    """
    outcomes = run_outcomes(n, target, *args, timeout=timeout, env=env, grace=10.0)
    bad = [o for o in outcomes if not o.ok]
    if bad:
        text = "\n".join(str(o) for o in bad)
        raise RankFailure(f"{len(bad)} of {n} ranks failed in {target.__qualname__}\n{text}", outcomes)
    return [o.value for o in outcomes]


def run_outcomes(
    n: int,
    target: Callable[..., Any],
    *args: Any,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    grace: float | None = None,
) -> list[Outcome]:
    """Like `run_ranks`, for tests of failures: returns how each rank ended and never raises for a rank.

    Args:
        grace: seconds that the others have after the first failure, before they are killed; None: all of `timeout`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    begin = time.monotonic()
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            variables = {**_environment(rank, n, store.port), **(env or {})}
            process: BaseProcess = context.Process(target=_child, args=(theirs, variables, target, args), name=f"rank {rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(processes, pipes, begin, timeout, grace)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _environment(rank: int, n: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: the store is already there, ranks only connect to it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def _child(pipe: Connection, variables: Mapping[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    code = 0
    try:
        message = pickle.dumps((target(*args), None, ""))
    except BaseException as error:
        code, text = 1, traceback.format_exc()
        try:
            message = pickle.dumps((None, error, text))
            pickle.loads(message)
        except Exception:
            message = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), text))
    pipe.send_bytes(message)
    pipe.close()
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    # A failed rank must not linger in the destructors of groups whose peers are gone.
    os._exit(code)


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], begin: float, timeout: float, grace: float | None
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = begin + timeout
    open_ranks = set(range(len(processes)))
    while open_ranks and (left := deadline - time.monotonic()) > 0:
        ready = wait([pipes[r] for r in open_ranks], timeout=left)
        for rank in [r for r in open_ranks if pipes[r] in ready]:
            outcomes[rank] = _receive(rank, processes[rank], pipes[rank], time.monotonic() - begin)
            open_ranks.discard(rank)
            if grace is not None and not outcomes[rank].ok:
                deadline = min(deadline, time.monotonic() + grace)
    for rank in open_ranks:
        outcomes[rank] = Outcome(rank, exit_code=None, seconds=time.monotonic() - begin)
    return [outcomes[r] for r in range(len(processes))]


def _receive(rank: int, process: BaseProcess, pipe: Connection, seconds: float) -> Outcome:
    try:
        value, error, text = pickle.loads(pipe.recv_bytes())
    except EOFError:  # the process ended without a word
        process.join(timeout=10)
        return Outcome(rank, exit_code=process.exitcode, seconds=seconds)
    return Outcome(rank, value, error, text, exit_code=0 if error is None else 1, seconds=seconds)
