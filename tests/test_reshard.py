"""Reshard plans, executed by the numpy reference, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.errors import SpecError
from shardc.mesh import Mesh
from shardc.reshard import KINDS, Step, reshard
from shardc.spec import ShardSpec
from shardc.testing import strategies as sh
from shardc.testing.reference import Parts, part_of, run_steps, shards

REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def plan(src: str, dst: str, **axes: int) -> list[str]:
    mesh = Mesh(axes)
    return [f"{s.kind}@{s.axis} {s.dst}" for s in reshard(ShardSpec.parse(src), ShardSpec.parse(dst), mesh)]


def reduced(parts: Parts, spec: ShardSpec, mesh: Mesh) -> Parts:
    """What the parts stand for: pending reductions done, on the same index sets."""
    for axis, op in spec.partial:
        parts = {c: REDUCE[op].reduce([parts[d] for d in mesh.group(c, axis)]) for c in parts}
    return parts


@settings(max_examples=500, deadline=None)
@given(st.data(), sh.meshes())
def test_every_plan_ends_with_the_right_parts(data: st.DataObject, mesh: Mesh) -> None:
    shape = data.draw(sh.shapes(max_size=16))
    src = data.draw(sh.specs(shape, mesh))
    dst = data.draw(sh.specs(shape, mesh, partial=False))
    kept = data.draw(st.sampled_from(["none", "all"]))
    if kept == "all":
        dst = dst.with_partial(p for p in src.partial if p[0] not in dst.axes)
    whole = np.arange(1.0, 1.0 + np.prod(shape, dtype=int)).reshape(shape)
    steps = reshard(src, dst, mesh)
    out = run_steps(shards(whole, src, mesh), steps, mesh)
    got = reduced(out, dst, mesh)
    for c in mesh.coords():
        assert out[c].shape == dst.local_shape(mesh, c)
        assert np.array_equal(got[c], part_of(whole, dst, mesh, c)), [str(s) for s in steps]
    assert (steps == []) == src.same(dst, mesh)
    assert all(s.kind in KINDS and s.src != s.dst and s.nbytes(torch.float32, mesh) >= 0 for s in steps)
    assert [s.dst for s in steps[:-1]] == [s.src for s in steps[1:]]


def test_the_reference_refuses_wrong_steps() -> None:
    """The property above is worth something only if the reference can fail."""
    mesh, a, b = Mesh(dp=2, tp=2), ShardSpec.parse("[8@dp]"), ShardSpec.parse("[8]")
    parts = shards(np.arange(8.0), a, mesh)
    with pytest.raises(SpecError, match="needs elements that no rank of its group holds"):
        run_steps(parts, [Step("slice", "dp", a, b)], mesh)
    with pytest.raises(SpecError, match="needs elements"):
        run_steps(parts, [Step("all_gather", "tp", a, b)], mesh)
    with pytest.raises(SpecError, match="hold different elements"):
        run_steps(parts, [Step("all_reduce", "dp", a, a)], mesh)
    with pytest.raises(SpecError, match="holds"):
        run_steps(parts, [Step("all_gather", "dp", b, b)], mesh)
    partial = ShardSpec.parse("[8] +sum@dp")
    with pytest.raises(SpecError, match="different values of one element"):
        run_steps(shards(np.arange(8.0), partial, mesh), [Step("all_gather", "dp", partial, b)], mesh)


@pytest.mark.parametrize(("src", "dst", "axes", "steps"), [
    # a partial value becomes a shard by one reduce-scatter
    ("[8, 4] +sum@dp", "[8@dp, 4]", {"dp": 2}, ["reduce_scatter@dp [8@dp, 4]"]),
    ("[7@tp, 4] +sum@dp", "[7@(tp,dp), 4]", {"dp": 2, "tp": 2}, ["reduce_scatter@dp [7@(tp,dp), 4]"]),
    ("[3·8@tp·64, 5] +sum@dp", "[3·8@tp·64, 5@dp]", {"dp": 3, "tp": 2}, ["reduce_scatter@dp [3·512@tp, 5@dp]"]),
    ("[8, 4] +sum@dp +sum@tp", "[8@(dp,tp), 4]", {"dp": 2, "tp": 2},
     ["reduce_scatter@dp [8@dp, 4] +sum@tp", "reduce_scatter@tp [8@(dp,tp), 4]"]),
    # over several axes scatter first, then reduce the shard
    ("[8, 4] +sum@a +sum@dp", "[8@dp, 4]", {"a": 2, "dp": 2}, ["reduce_scatter@dp [8@dp, 4] +sum@a", "all_reduce@a [8@dp, 4]"]),
    # slices are free and come first
    ("[8, 4] +sum@dp", "[8@tp, 4]", {"dp": 2, "tp": 2}, ["slice@tp [8@tp, 4] +sum@dp", "all_reduce@dp [8@tp, 4]"]),
    ("[8, 4] +sum@dp", "[8@tp, 4@dp]", {"dp": 2, "tp": 2}, ["slice@tp [8@tp, 4] +sum@dp", "reduce_scatter@dp [8@tp, 4@dp]"]),
    # gathers come last: what is reduced is the part
    ("[8@tp] +max@dp", "[8]", {"dp": 2, "tp": 2}, ["all_reduce@dp [8@tp]", "all_gather@tp [8]"]),
    # moves
    ("[8@dp, 6]", "[8, 6@dp]", {"dp": 3}, ["all_to_all@dp [8, 6@dp]"]),
    ("[8@dp, 8@tp]", "[8@tp, 8]", {"dp": 2, "tp": 2}, ["all_gather@dp [8, 8@tp]", "all_to_all@tp [8@tp, 8]"]),
    ("[8@(dp,tp), 6]", "[8@dp, 6@tp]", {"dp": 2, "tp": 3}, ["all_to_all@tp [8@dp, 6@tp]"]),
    # one axis on both sides, at other borders
    ("[5, 18@tp]", "[5, 3@tp·6]", {"tp": 2}, ["all_to_all@tp [5, 3@tp·6]"]),
    ("[7@dp, 18@tp]", "[7, 3@tp·6]", {"dp": 2, "tp": 2}, ["all_to_all@tp [7@dp, 3@tp·6]", "all_gather@dp [7, 3@tp·6]"]),
    # gathers only what differs
    ("[8@(dp,tp)]", "[8@dp]", {"dp": 3, "tp": 2}, ["all_gather@tp [8@dp]"]),
    ("[6@(dp,tp)]", "[2·3@tp]", {"dp": 2, "tp": 3}, ["all_gather@dp [2·3@tp]"]),
    ("[3·8@tp, 5@dp]", "[3·8@tp, 5]", {"dp": 2, "tp": 2}, ["all_gather@dp [3·8@tp, 5]"]),
    # equal on every rank, written differently: nothing to do
    ("[8@dp·12]", "[96@dp]", {"dp": 2}, []),
    ("[6@dp·2]", "[3@dp·4]", {"dp": 4}, []),
    ("[0@dp, 4]", "[0, 4]", {"dp": 2}, []),
    ("[1@tp·3@dp]", "[3@(dp,tp)]", {"dp": 3, "tp": 2}, []),
    ("[8] +sum@one", "[8]", {"one": 1}, []),
])  # fmt: skip
def test_plans(src: str, dst: str, axes: dict[str, int], steps: list[str]) -> None:
    assert plan(src, dst, **axes) == steps


@settings(max_examples=150, deadline=None)
@given(st.data(), sh.meshes())
def test_scattering_partial_values_takes_one_step_for_each_axis(data: st.DataObject, mesh: Mesh) -> None:
    dst = data.draw(sh.specs(data.draw(sh.shapes()), mesh, partial=False, products=False)).canonical(mesh)
    src = ShardSpec.replicated(dst.shape).with_partial((axis, "sum") for axis in dst.axes)
    steps = reshard(src, dst, mesh)
    assert sorted(s.axis for s in steps) == sorted(dst.axes) and all(s.kind == "reduce_scatter" for s in steps)
    assert sorted(s.axis for s in reshard(dst, src.with_partial(()), mesh)) == sorted(dst.axes), "and back one gather each"


def test_a_value_is_reduced_before_a_move_that_makes_it_larger() -> None:
    mesh = Mesh(dp=2, tp=2, simulated=True)
    steps = reshard(ShardSpec.parse("[2@dp, 2, 3] +sum@tp"), ShardSpec.parse("[1@dp·2, 2, 3]"), mesh)
    assert [s.kind for s in steps] == ["all_reduce", "all_to_all"]


@settings(max_examples=150, deadline=None)
@given(st.data(), sh.meshes())
def test_no_plan_sends_more_than_reducing_and_gathering_everything(data: st.DataObject, mesh: Mesh) -> None:
    shape = data.draw(sh.shapes(max_size=16))
    src = data.draw(sh.specs(shape, mesh))
    dst = data.draw(sh.specs(shape, mesh, partial=False))
    whole = ShardSpec.replicated(shape)

    def sent(a: ShardSpec, b: ShardSpec) -> int:
        return sum(s.nbytes(torch.float32, mesh) for s in reshard(a, b, mesh))

    # rounding: one element for each step
    assert sent(src, dst) <= sent(src, whole) + sent(whole, dst) + 4 * len(reshard(src, dst, mesh))


@pytest.mark.parametrize(("kind", "src", "dst", "sent"), [
    ("all_gather", "[8@dp]", "[8]", 8 * 4 * 3 // 4),
    ("reduce_scatter", "[8] +sum@dp", "[8@dp]", 8 * 4 * 3 // 4),
    ("all_reduce", "[8] +sum@dp", "[8]", 2 * 8 * 4 * 3 // 4),
    ("all_to_all", "[8@dp, 4]", "[8, 4@dp]", 2 * 4 * 4 * 3 // 4),
    ("all_to_all", "[5, 36@dp]", "[5, 6@dp·6]", 5 * 9 * 4),  # rank 3 of parts of 9 keeps nothing of 12, 12, 12, 0
    ("slice", "[8]", "[8@dp]", 0),
])  # fmt: skip
def test_bytes_follow_the_ring_convention(kind: str, src: str, dst: str, sent: int) -> None:
    (step,) = reshard(ShardSpec.parse(src), ShardSpec.parse(dst), Mesh(dp=4))
    assert step.kind == kind and step.nbytes(torch.float32, Mesh(dp=4)) == sent


def test_what_cannot_be_resharded_says_so() -> None:
    mesh = Mesh(dp=2)
    with pytest.raises(SpecError, match=r"shapes \[8\] and \[4\] differ"):
        reshard(ShardSpec.parse("[8]"), ShardSpec.parse("[4]"), mesh)
    with pytest.raises(SpecError, match="no pending sum@dp"):
        reshard(ShardSpec.parse("[8]"), ShardSpec.parse("[8] +sum@dp"), mesh)
    with pytest.raises(SpecError, match="no pending max@dp"):
        reshard(ShardSpec.parse("[8] +sum@dp"), ShardSpec.parse("[8] +max@dp"), mesh)
