"""Placements against torch's own cutting: every element that DTensor would give a rank, in its order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_local_shape
from torch.distributed.tensor.placement_types import _StridedShard

from shardc.errors import MeshError, SpecError
from shardc.mesh import Coord, Mesh
from shardc.placements import check_storage, from_placements, to_placements
from shardc.spec import ShardSpec
from shardc.testing import strategies as sh
from shardc.testing.reference import part_of

MANY = settings(max_examples=200, deadline=None)


def torch_part(whole: torch.Tensor, placements: tuple[Placement, ...], mesh: Mesh, coord: Coord) -> torch.Tensor:
    """What `distribute_tensor` gives the rank: torch's own splitting, placement by placement."""
    for p, n, k in zip(placements, mesh.shape, coord, strict=True):
        if isinstance(p, (Shard, _StridedShard)):
            whole = p._split_tensor(whole, n, with_padding=False)[0][k]
    return whole


def assert_torch_agrees(spec: ShardSpec, placements: tuple[Placement, ...], mesh: Mesh) -> None:
    whole = torch.arange(float(torch.Size(spec.shape).numel())).reshape(spec.shape)
    for c in mesh.coords():
        shape, offset = torch_local_shape(spec.shape, mesh.shape, list(c), placements)
        held = spec.indices(mesh, c)
        assert tuple(shape) == spec.local_shape(mesh, c)
        assert all(not h or h[0] == o for h, o in zip(held, offset, strict=True))
        mine = torch_part(whole, placements, mesh, c)
        assert torch.equal(mine, torch.from_numpy(part_of(whole.numpy(), spec, mesh, c)).float())


@MANY
@given(st.data(), sh.meshes())
def test_every_layout_that_is_converted_is_torchs_and_comes_back(data: st.DataObject, mesh: Mesh) -> None:
    spec = data.draw(sh.specs(data.draw(sh.shapes(max_size=16)), mesh))
    try:
        placements = to_placements(spec, mesh)
    except SpecError as error:
        assert "cannot be stored" in str(error) and "try:" in str(error)
        return
    assert_torch_agrees(spec, placements, mesh)
    assert from_placements(placements, spec.shape, mesh) == spec.canonical(mesh)


@MANY
@given(st.data(), sh.meshes())
def test_axes_in_the_order_of_the_mesh_or_even_are_always_expressible(data: st.DataObject, mesh: Mesh) -> None:
    """What `P` pins and `zero` adds: uneven, nested, with empty parts."""
    spec = data.draw(sh.specs(data.draw(sh.shapes(max_size=16)), mesh, partial=False, products=False))
    in_order = all([*d[0].axes] == sorted(d[0].axes, key=mesh.index) for d in spec.dims)
    even = all(d[0].size % math.prod(mesh.axes[a] for a in d[0].axes) == 0 for d in spec.dims)
    if not in_order and not even:  # 13@(tp,dp) on dp=3 tp=2: the parts of dp are 5, 5, 3 and tp cuts the last at 2
        return
    placements = to_placements(spec, mesh)
    assert_torch_agrees(spec, placements, mesh)
    check_storage(spec, mesh)
    assert not in_order or not any(isinstance(p, _StridedShard) for p in placements)


@MANY
@given(st.data(), sh.meshes())
def test_shard_placements_of_dtensor_are_read(data: st.DataObject, mesh: Mesh) -> None:
    shape = data.draw(sh.shapes(max_size=16))
    kinds: list[Placement] = [Replicate(), Partial("sum"), *(Shard(k) for k in range(len(shape)))]
    placements = tuple(data.draw(st.sampled_from(kinds)) for _ in mesh.names)
    spec = from_placements(placements, shape, mesh)
    assert_torch_agrees(spec, placements, mesh)
    pending = [a for a, p in zip(mesh.names, placements, strict=True) if p.is_partial() and mesh.axes[a] > 1]
    assert spec.partial_axes == tuple(sorted(pending))


@pytest.mark.parametrize(("text", "mesh", "placements"), [
    ("[8@dp, 4]", Mesh(dp=3, tp=2), (Shard(0), Replicate())),
    ("[8@(dp,tp), 4]", Mesh(dp=2, tp=2), (Shard(0), Shard(0))),
    ("[7@(tp,dp), 4]", Mesh(dp=2, tp=2), (_StridedShard(0, split_factor=2), Shard(0))),
    ("[3·8@tp·64, 5@dp]", Mesh(dp=2, tp=2), (Shard(1), _StridedShard(0, split_factor=3))),
    ("[3·8@(tp,dp)·64, 5]", Mesh(dp=2, tp=2), (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=3))),
    ("[8] +sum@dp", Mesh(dp=2), (Partial("sum"),)),
    ("[8@one]", Mesh(one=1, dp=2), (Replicate(), Replicate())),
])  # fmt: skip
def test_examples(text: str, mesh: Mesh, placements: tuple[Placement, ...]) -> None:
    spec = ShardSpec.parse(text)
    assert to_placements(spec, mesh) == placements
    assert from_placements(placements, spec.shape, mesh) == spec.canonical(mesh)


def test_large_tensors_are_converted_once() -> None:
    mesh = Mesh(dp=64, tp=8)
    spec = ShardSpec.parse("[50257@(tp,dp), 768]")
    assert from_placements(to_placements(spec, mesh), (50257, 768), mesh) == spec
    assert to_placements(spec, mesh) == (_StridedShard(0, split_factor=8), Shard(0))


def test_what_cannot_be_stored_names_the_tensor_and_a_way_out() -> None:
    mesh = Mesh(dp=2, tp=2)
    with pytest.raises(SpecError) as error:
        check_storage(ShardSpec.parse("[3@dp·8@tp·64]"), mesh, "model.qkv.weight")
    assert "dim 0 of [3@dp·512@tp] on mesh dp=2 tp=2 cannot be stored" in str(error.value).replace("8@tp·64", "512@tp")
    assert "at: model.qkv.weight" in str(error.value) and "1536@(dp,tp)" in str(error.value)
    with pytest.raises(SpecError, match=r"\[8\] \+sum@dp cannot be a storage spec: a reduction is pending"):
        check_storage(ShardSpec.parse("[8] +sum@dp"), mesh)
    with pytest.raises(MeshError, match="unknown mesh axis 'ep'"):
        to_placements(ShardSpec.parse("[8@ep]"), mesh)


def test_placements_that_are_no_spec_are_refused() -> None:
    mesh = Mesh(dp=2, tp=2)
    with pytest.raises(SpecError, match="1 placements for the 2 axes"):
        from_placements((Shard(0),), (8,), mesh)
    with pytest.raises(SpecError, match="over axis 'dp' on a tensor of shape"):
        from_placements((Shard(1), Replicate()), (8,), mesh)
    with pytest.raises(SpecError, match="unknown reduction"):
        from_placements((Partial("avg"), Replicate()), (8,), mesh)
    with pytest.raises(SpecError, match="no product of evenly nested factors"):
        from_placements((_StridedShard(0, split_factor=2), Replicate()), (5,), mesh)
