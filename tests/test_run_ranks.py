"""`run_ranks`: the tool that all tests with real processes stand on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardc.testing.processes import RankFailure, run_outcomes, run_ranks

pytestmark = pytest.mark.processes


def add_ranks(base: int) -> tuple[int, torch.Tensor]:
    dist.init_process_group("gloo")
    total = torch.full((2,), float(base + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_one() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")


def die_on_one() -> str:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def sleep_on_one() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(600)
    raise ValueError("rank zero gives up")


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(3, add_ranks, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.tolist() == [33.0, 33.0] for _, total in results)


def test_an_exception_names_the_rank_and_holds_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)1 of 2 ranks.*rank 1: ValueError.*rank one is unhappy") as caught:
        run_ranks(2, fail_on_one)
    assert isinstance(caught.value.outcomes[1].error, ValueError) and caught.value.outcomes[0].ok


def test_death_and_timeout_are_told_apart() -> None:
    first, second = run_outcomes(2, die_on_one)
    assert first.value == "alive" and second.exit_code == -signal.SIGKILL
    first, second = run_outcomes(2, sleep_on_one, grace=0.5)
    assert isinstance(first.error, ValueError) and second.exit_code is None and "killed" in str(second)
    assert [o.exit_code for o in run_outcomes(2, sleep_on_one, timeout=0.1)] == [None, None]
