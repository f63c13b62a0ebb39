from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from shardc.errors import MeshError
from shardc.mesh import Mesh
from shardc.testing.strategies import meshes


@given(meshes())
def test_ranks_and_coordinates_are_inverse_and_the_first_axis_is_slowest(mesh: Mesh) -> None:
    coords = list(mesh.coords())
    assert coords == sorted(coords) and len(coords) == mesh.size
    assert [mesh.rank(c) for c in coords] == list(range(mesh.size))
    assert [mesh.coord(r) for r in range(mesh.size)] == coords


@given(meshes())
def test_groups_of_an_axis_partition_the_ranks(mesh: Mesh) -> None:
    for axis in mesh.names:
        groups = {tuple(mesh.group(c, axis)) for c in mesh.coords()}
        assert sorted(itertools.chain(*groups)) == list(mesh.coords())
        assert all(len(g) == mesh.axes[axis] for g in groups)
        assert all(len({c[: mesh.index(axis)] + c[mesh.index(axis) + 1 :] for c in g}) == 1 for g in groups)


def test_keywords_and_mapping_are_the_same_mesh() -> None:
    assert Mesh(dp=4, tp=2) == Mesh({"dp": 4, "tp": 2}) and hash(Mesh(dp=4)) == hash(Mesh({"dp": 4}))
    assert Mesh(dp=4, tp=2) != Mesh(tp=2, dp=4), "the order of the axes is the order of the ranks"
    assert str(Mesh(dp=4, tp=2)) == "dp=4 tp=2" and repr(Mesh(dp=4, simulated=True)) == "Mesh(dp=4, simulated=True)"


def test_minus_one_takes_the_rest_of_the_world() -> None:
    mesh = Mesh(dp=-1, tp=2, simulated=True, profile="H100").resolve(6)
    assert mesh == Mesh(dp=3, tp=2) and mesh.simulated and mesh.profile == "H100"
    assert Mesh(dp=2).resolve(2) == Mesh(dp=2)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Mesh(), "at least one axis"),
    (lambda: Mesh(dp=0), "'dp' has size 0"),
    (lambda: Mesh(dp=2.0), "'dp' has size 2.0"),
    (lambda: Mesh(dp=True), "'dp' has size True"),
    (lambda: Mesh({"d p": 2}), "'d p' is not an identifier"),
    (lambda: Mesh(dp=-1, tp=-1), "more than one axis of size -1"),
    (lambda: Mesh(dp=2).resolve(3), "holds 2 ranks, the world has 3\n  try: torchrun --nproc-per-node 2"),
    (lambda: Mesh(dp=-1, tp=2).resolve(3), "holds 2 x n ranks, the world has 3"),
    (lambda: Mesh(dp=2).index("tp"), "unknown mesh axis 'tp'\n  try: the axes of this mesh are dp"),
])  # fmt: skip
def test_errors_say_what_and_the_numbers(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MeshError) as error:
        make()
    assert words in str(error.value)
