"""Collectives between pairs of ranks: the values of gloo's own, on any number of ranks; and how they end when a rank fails."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from shardc.runtime.pairs import SMALL, Pairs, buffer_length, paired
from shardc.testing import run_ranks

REDUCE = {"sum": torch.Tensor.sum, "max": torch.Tensor.amax, "min": torch.Tensor.amin}


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-50, 50, (length,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(lengths: list[int]) -> int:
    """On this rank; the number of collectives whose result is right."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    pairs, right = Pairs(dist.group.WORLD), 0
    for length in lengths:
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            own = [values(r, length, dtype) for r in range(size)]
            out = torch.empty(size * length, dtype=dtype)
            pairs.all_gather(out, own[rank]).result()
            right += torch.equal(out, torch.cat(own))
            for op, reduce in REDUCE.items():
                whole = [values(r, size * length, dtype) for r in range(size)]
                wanted = reduce(torch.stack(whole), 0).to(dtype)
                part, buffer = torch.empty(length, dtype=dtype), torch.empty(length, dtype=dtype)
                pairs.reduce_scatter(part, whole[rank], op, buffer).result()
                right += torch.equal(part, wanted.chunk(size)[rank])
                odd = size * length - 1  # parts of two lengths, some of them empty
                mine = whole[rank][:odd].clone()
                pairs.all_reduce(mine, op, torch.empty(buffer_length("all_reduce", odd, size), dtype=dtype)).result()
                right += torch.equal(mine, wanted[:odd])
    return right


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_values_are_those_of_all_ranks(ranks: int) -> None:
    lengths = [1, 7, 4097]
    assert run_ranks(ranks, collectives, lengths, timeout=120) == [len(lengths) * 3 * 7] * ranks


def one_stops() -> tuple[bool, float]:
    """Rank 0 waits for a message that rank 1 never sends, and is told to stop; rank 1 sees the connection break."""
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    pairs = Pairs(dist.group.WORLD)
    begin = time.monotonic()
    out, part = torch.empty(2_000_000), torch.empty(1_000_000)
    if dist.get_rank() == 0:
        waiting = pairs.all_gather(out, part)
        time.sleep(0.5)
        pairs.close()
    else:
        time.sleep(1.5)
        waiting = pairs.all_gather(out, part)
    return isinstance(error_of(waiting), RuntimeError), time.monotonic() - begin


def error_of(waiting: Future[None]) -> BaseException | None:
    return waiting.exception(20.0)


@pytest.mark.processes
def test_a_rank_that_stops_ends_the_waits_of_all() -> None:
    for broke, seconds in run_ranks(2, one_stops, timeout=60):
        assert broke and seconds < 10


def test_small_reductions_and_devices_are_left_to_the_library() -> None:
    small, large = torch.empty(SMALL // 4 - 1), torch.empty(SMALL // 4)
    assert not paired("all_reduce", small, "cpu") and paired("all_reduce", large, "cpu")
    assert paired("all_gather", small, "cpu") and not paired("all_gather", large, "cuda")
    assert not paired("all_to_all", large, "cpu")
