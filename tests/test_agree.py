"""Ranks meet before they run: equal hashes pass, a difference is named on all ranks; batches are re-dealt exactly."""

from __future__ import annotations

import pytest
import torch

from shardc.errors import AgreementError, InputError, MeshError
from shardc.mesh import Mesh
from shardc.runtime.agree import WIDTH, _first_difference, agree, agree_values, digest, exchange
from shardc.runtime.batch import chunk_rows, global_rows, unchunk_rows
from shardc.runtime.world import Ranks, setup
from shardc.spec import Factor
from shardc.testing.processes import run_outcomes, run_ranks


def test_the_difference_is_named_with_the_odd_rank_and_the_line() -> None:
    base = {"signature": "tokens: f32[_, 8]\nmask: bool[_]", "plan": "3f"}
    other = {**base, "signature": "tokens: f32[_, 8]\nmask: i64[_]"}
    assert _first_difference([base, base, other]) == (
        "the ranks differ in signature, line 2: rank 2: mask: i64[_]; rank 0: mask: bool[_]"
    )
    assert "rank 1" in _first_difference([base, other])
    assert "nothing of the kind" in _first_difference([base, {"plan": "3f"}])
    assert "hashes are not made of the same text" in _first_difference([base, base])


def test_without_process_group_a_rank_agrees_with_itself() -> None:
    ranks = setup(Mesh(dp=-1))
    assert (ranks.world, ranks.rank, ranks.coord, ranks.mesh.axes, ranks.distributed) == (1, 0, (0,), {"dp": 1}, False)
    assert exchange(ranks, 1, [5, 0]) == [[5, 0]]
    agree(ranks, {"plan": "x"})
    local = torch.arange(6.0).view(3, 2)
    assert chunk_rows(ranks, local, [3], ("dp",)) is local


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MeshError, match="holds 4 ranks, the world has 1"):
        setup(Mesh(dp=4))
    with pytest.raises(MeshError, match="size -1"):
        setup(Mesh(dp=-1, simulated=True))
    with pytest.raises(MeshError, match="no process groups"):
        setup(Mesh(dp=2, simulated=True)).group("dp")


def test_rows_of_ranks_that_share_a_part_are_counted_once_and_must_agree() -> None:
    class Fake(Ranks):
        @property
        def distributed(self) -> bool:
            return True

    ranks = Fake(Mesh(dp=2, tp=2), 0, torch.device("cpu"))
    assert global_rows(ranks, [3, 3, 0, 0], ("dp",)) == 3
    assert global_rows(ranks, [3, 3, 0, 0], ("dp", "tp")) == 6
    with pytest.raises(InputError, match="ranks 2 and 3 hold the same part.*0 and 1 rows"):
        global_rows(ranks, [3, 3, 0, 1], ("dp",), "tokens")
    with pytest.raises(InputError, match="no rows"):
        global_rows(ranks, [0, 0, 0, 0], ("dp",), "tokens")
    assert ranks.members(("tp", "dp")) == [0, 2, 1, 3]
    assert ranks.members(("dp",)) == [0, 2]


def _agree_on_two() -> list[str]:
    ranks = setup(Mesh(dp=2))
    assert ranks.world == 2 and ranks.coord == (ranks.rank,)
    sizes = [10 * ranks.rank + i for i in range(WIDTH + 7)]
    assert exchange(ranks, digest("a"), sizes) == [[10 * r + i for i in range(WIDTH + 7)] for r in range(2)]
    agree(ranks, {"plan": "3f9a1c", "signature": "tokens"})
    agree_values(ranks, ["w", "b"], [1, 2], "initial state")
    seen = []
    attempts = [
        lambda: agree(ranks, {"plan": "3f9a1c", "code": f"def step(): return {ranks.rank}"}),
        lambda: exchange(ranks, digest("a"), [1] * (1 + ranks.rank), lambda: {"inputs": str(1 + ranks.rank)}),
        lambda: exchange(ranks, digest("step"), [4]) if ranks.rank else agree(ranks, {"call": "full_state_dict"}),
        lambda: agree_values(ranks, ["w", "b"], [1, 2 + ranks.rank], "initial state"),
    ]
    for attempt in attempts:  # the group is still in step after each error
        try:
            attempt()
        except AgreementError as error:
            seen.append(str(error))
        else:
            seen.append("no error")
    assert exchange(ranks, 7, [ranks.rank]) == [[0], [1]]
    return seen


@pytest.mark.processes
def test_two_ranks_agree_or_both_raise() -> None:
    first, second = run_ranks(2, _agree_on_two)
    assert first == second
    assert "differ in code: rank 1: def step(): return 1; rank 0: def step(): return 0" in first[0]
    assert "differ in inputs: rank 1: 2; rank 0: 1" in first[1]
    assert "differ in call" in first[2]
    assert "initial state: b has other values on rank 1" in first[3]


def _redeal(axes: tuple[str, ...], mesh: dict[str, int], sizes: list[int]) -> None:
    ranks = setup(Mesh(mesh))
    members = ranks.members(axes)
    total = global_rows(ranks, sizes, axes)
    offset = sum(sizes[r] for r in members[: members.index(ranks.rank)])
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for inner, tail in ((1, (3,)), (1, ()), (5, (2, 2))):
            numbers = torch.arange(total * inner * max(1, torch.Size(tail).numel())).view(total * inner, *tail)
            whole = numbers.to(dtype) if dtype != torch.bool else numbers % 3 == 0
            mine = whole[offset * inner : (offset + sizes[ranks.rank]) * inner]
            lo, hi = Factor(total, axes).interval(ranks.mesh, ranks.coord)
            dealt = chunk_rows(ranks, mine, sizes, axes, inner)
            assert torch.equal(dealt, whole[lo * inner : hi * inner]), (dtype, inner, tail)
            assert torch.equal(unchunk_rows(ranks, dealt, sizes, axes, inner), mine)
    images = torch.randn(sizes[ranks.rank], 3, 4, 4).contiguous(memory_format=torch.channels_last)
    if sizes[ranks.rank]:
        assert chunk_rows(ranks, images, sizes, axes).is_contiguous(memory_format=torch.channels_last)
    else:
        chunk_rows(ranks, images, sizes, axes)
    assert chunk_rows(ranks, torch.empty(sizes[ranks.rank], 0), sizes, axes).shape == (hi - lo, 0)


def _redeal_all() -> None:
    for sizes in ([4, 0, 3], [0, 0, 1], [2, 2, 1], [1, 5, 5]):
        _redeal(("dp",), {"dp": 3}, sizes)


def _redeal_axes() -> None:
    _redeal(("tp", "dp"), {"dp": 2, "tp": 2}, [3, 1, 0, 6])
    _redeal(("dp", "tp"), {"dp": 2, "tp": 2}, [3, 1, 0, 6])
    _redeal(("tp",), {"dp": 2, "tp": 2}, [3, 1, 3, 1])


@pytest.mark.processes
def test_parts_of_any_size_are_dealt_as_chunk_deals_and_back() -> None:
    run_ranks(3, _redeal_all)


@pytest.mark.processes
def test_batches_over_two_axes_in_either_order() -> None:
    run_ranks(4, _redeal_axes)


def _wrong_world() -> None:
    setup(Mesh(dp=3))


@pytest.mark.processes
def test_a_mesh_of_other_size_than_the_world_is_refused_on_all_ranks() -> None:
    outcomes = run_outcomes(2, _wrong_world, timeout=60)
    assert [type(o.error) for o in outcomes] == [MeshError, MeshError]
    assert "torchrun --nproc-per-node 3" in str(outcomes[0].error)
