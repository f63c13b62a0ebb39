"""Specs against a brute-force model: the set of global indices that each rank holds."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.errors import SpecError
from shardc.mesh import Coord, Mesh
from shardc.spec import Dim, Factor, P, ShardSpec, canonical_dim, dim_key, dim_size, finest_dim, join_dims, split_dim
from shardc.testing import strategies as sh

MANY = settings(max_examples=200, deadline=None)


def chunk(held: list[int], parts: int, k: int) -> list[int]:
    """Part k as `torch.chunk` cuts; chunks that torch leaves out are empty."""
    got = torch.tensor(held, dtype=torch.int64).chunk(parts) if held else ()
    return got[k].tolist() if k < len(got) else []


def brute(dim: Dim, mesh: Mesh, coord: Coord) -> list[int]:
    """The indices that a rank holds, from the definition: chunk every factor, axis by axis, and take the product."""
    per_factor = []
    for f in dim:
        held = list(range(f.size))
        for axis in f.axes:
            held = chunk(held, mesh.axes[axis], coord[mesh.index(axis)])
        per_factor.append(held)
    strides = [math.prod(f.size for f in dim[k + 1 :]) for k in range(len(dim))]
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*per_factor)]


def sets(dim: Dim, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(brute(dim, mesh, c)) for c in mesh.coords())


@st.composite
def mesh_and_dim(draw: st.DrawFn, max_size: int = 24) -> tuple[Mesh, Dim]:
    mesh = draw(sh.meshes())
    axes = draw(st.lists(st.sampled_from(mesh.names), unique=True))
    return mesh, draw(sh.dims(draw(st.integers(0, max_size)), axes))


@MANY
@given(mesh_and_dim())
def test_indices_and_local_sizes_are_those_of_chunk(case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    spec = ShardSpec((dim,))
    for c in mesh.coords():
        held = brute(dim, mesh, c)
        assert spec.indices(mesh, c) == (held,) and held == sorted(held)
        assert spec.local_shape(mesh, c) == (len(held),)


@MANY
@given(mesh_and_dim())
def test_canonical_and_finest_forms_keep_every_index_set_and_are_fixed_points(case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    for form in (canonical_dim, finest_dim):
        assert sets(form(dim, mesh), mesh) == sets(dim, mesh)
        assert form(form(dim, mesh), mesh) == form(dim, mesh)
    assert canonical_dim(finest_dim(dim, mesh), mesh) == canonical_dim(dim, mesh)
    assert len(canonical_dim(dim, mesh)) <= len(finest_dim(dim, mesh))


def all_dims(size: int, axes: tuple[str, ...], max_factors: int) -> Iterator[Dim]:
    """Every way to write a dim of `size` over any of `axes`, in any order."""

    def products(n: int, factors: int) -> Iterator[tuple[int, ...]]:
        yield (n,)
        for d in range(1, n + 1) if factors > 1 else ():
            if n % d == 0:
                yield from ((d, *rest) for rest in products(n // d, factors - 1))

    for sizes in {*products(size, max_factors)}:
        for r in range(len(axes) + 1):
            for order in itertools.permutations(axes, r):
                for at in itertools.combinations_with_replacement(range(len(sizes)), r):
                    parts = [tuple(a for a, j in zip(order, at, strict=True) if j == k) for k in range(len(sizes))]
                    yield tuple(map(Factor, sizes, parts))


@pytest.mark.parametrize("axes", [(2,), (3,), (4,), (5,), (2, 2), (3, 2), (4, 2), (2, 3), (1, 3), (2, 2, 2), (4, 2, 3)])
def test_canonical_forms_are_equal_exactly_where_index_sets_are(axes: tuple[int, ...]) -> None:
    """Exhaustive up to a size: all products, all axis orders."""
    mesh = Mesh(dict(zip("xyz", axes, strict=False)))
    for size in (*range(13), 16) if len(axes) < 3 else (1, 2, 3, 4, 6):
        forms = defaultdict(set)
        for dim in all_dims(size, mesh.names, 3 if len(axes) < 3 else 2):
            forms[tuple(map(tuple, (ShardSpec((dim,)).indices(mesh, c)[0] for c in mesh.coords())))].add(dim_key(dim, mesh))
        clashes = [f for f in forms.values() if len(f) > 1]
        assert not clashes, f"one layout of {size} on {mesh} has several canonical forms: {clashes[0]}"


@pytest.mark.parametrize(("mesh", "text", "canonical"), [
    (Mesh(dp=2), "[8@dp·12, 64]", "[96@dp, 64]"),
    (Mesh(dp=3), "[8@dp·12, 64]", "[8@dp·12, 64]"),
    (Mesh(tp=2), "[3·8@tp·64, 512]", "[3·512@tp, 512]"),
    (Mesh(dp=2, tp=2), "[3·8@(dp,tp)]", "[3·8@(dp,tp)]"),
    (Mesh(dp=2, tp=3), "[2@dp·3@tp]", "[6@(dp,tp)]"),
    (Mesh(dp=4), "[6@dp·2]", "[3@dp·4]"),
    (Mesh(dp=1, tp=2), "[6@dp, 4@tp] +sum@dp", None),
    (Mesh(dp=8, tp=2), "[8@(dp,tp)]", "[8@(dp,tp)]"),
    (Mesh(dp=8, tp=2), "[1@tp·8@dp]", "[8@(dp,tp)]"),
    (Mesh(dp=2), "[0@dp, 3]", "[0, 3]"),
    (Mesh(dp=2), "[1@dp·1·1]", "[1@dp]"),
    (Mesh(dp=1, tp=2), "[4@tp] +max@dp", "[4@tp]"),
])  # fmt: skip
def test_canonical_forms_are_readable(mesh: Mesh, text: str, canonical: str | None) -> None:
    if canonical is None:
        with pytest.raises(SpecError, match="'dp' is used twice"):
            ShardSpec.parse(text)
        return
    assert str(ShardSpec.parse(text).canonical(mesh)) == canonical


@MANY
@given(st.data(), sh.meshes())
def test_print_and_parse_round_trip(data: st.DataObject, mesh: Mesh) -> None:
    spec = data.draw(sh.specs(data.draw(sh.shapes()), mesh))
    assert ShardSpec.parse(str(spec)) == spec
    assert ShardSpec.parse(f"f32{spec}") == spec and ShardSpec.parse(f"bf16{spec}") == spec


@MANY
@given(mesh_and_dim(), st.data())
def test_split_keeps_the_elements_of_every_rank(case: tuple[Mesh, Dim], data: st.DataObject) -> None:
    mesh, dim = case
    sizes = [f.size for f in data.draw(sh.dims(dim_size(dim), max_factors=4))]
    cut = split_dim(dim, sizes, mesh)
    if cut is not None:
        assert [dim_size(d) for d in cut] == sizes
        assert sets(join_dims(cut), mesh) == sets(dim, mesh)
        assert all(canonical_dim(d, mesh) == d for d in cut)


@pytest.mark.parametrize("axes", [(2,), (3,), (4,), (2, 2), (3, 2)])
def test_split_gives_up_only_where_no_pair_of_dims_has_the_elements(axes: tuple[int, ...]) -> None:
    """Exhaustive: all dims of a size, all cuts in two, against all pairs of dims."""
    mesh = Mesh(dict(zip("xy", axes, strict=False)))
    for size in (4, 6, 8, 9):
        all_of = {n: {canonical_dim(d, mesh) for d in all_dims(n, mesh.names, 3)} for n in range(1, size + 1) if size % n == 0}
        for first in all_of:
            pairs = {
                dim_key(join_dims((a, b)), mesh)
                for a, b in itertools.product(all_of[first], all_of[size // first])
                if not {x for f in a for x in f.axes} & {x for f in b for x in f.axes}
            }
            for dim in all_of[size]:
                assert (split_dim(dim, [first, size // first], mesh) is not None) == (dim in pairs), (dim, first)


@MANY
@given(st.data(), sh.meshes())
def test_join_then_split_is_the_identity(data: st.DataObject, mesh: Mesh) -> None:
    spec = data.draw(sh.specs(data.draw(sh.shapes()), mesh, partial=False)).canonical(mesh)
    joined = join_dims(spec.dims)
    for c in mesh.coords():
        assert math.prod(spec.local_shape(mesh, c)) == len(brute(joined, mesh, c))
    cut = split_dim(joined, spec.shape, mesh)
    if cut is not None and math.prod(spec.shape) > 0 and 1 not in spec.shape:
        factors = [f for d in spec.dims for f in finest_dim(d, mesh) if f.axes]
        ones = any(all(len(brute((f,), mesh, c)) <= 1 for c in mesh.coords()) for f in factors)
        assert cut == spec.dims or ones, "only axes that cut single elements may come back on another dim"


def test_split_of_a_fused_projection() -> None:
    mesh = Mesh(tp=2)
    dim = ShardSpec.parse("[3·8@tp·64]").dims[0]
    cut = split_dim(dim, [3, 8, 64], mesh)
    assert cut is not None and str(ShardSpec(cut)) == "[3, 8@tp, 64]"
    assert split_dim(ShardSpec.parse("[1536@tp]").dims[0], [3, 8, 64], mesh) is None
    with pytest.raises(SpecError, match=r"a dim of 1536 into \[3, 8\]"):
        split_dim(dim, [3, 8], mesh)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: ShardSpec.parse("[8@dp"), "not a shard spec: '[8@dp'"),
    (lambda: ShardSpec.parse("[8@]"), "not a factor: '8@'"),
    (lambda: ShardSpec.parse("[8@dp, 4@dp]"), "'dp' is used twice in [8@dp, 4@dp]"),
    (lambda: ShardSpec.parse("[8] +mean@dp"), "unknown reduction 'mean'"),
    (lambda: P("dp", "dp"), "'dp' stands on two dims of P('dp', 'dp')"),
    (lambda: P(3), "P takes axis names, tuples of names and None, not 3"),
    (lambda: P("dp", None, None).to_spec((8, 4), Mesh(dp=2), "w"), "has 3 entries, the tensor has 2 dims [8, 4]\n  at: w"),
])  # fmt: skip
def test_errors(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError) as error:
        make()
    assert words in str(error.value)


def test_pins() -> None:
    mesh = Mesh(dp=2, tp=2, one=1)
    assert str(P(("dp", "tp"), None).to_spec((8, 4), mesh)) == "[8@(dp,tp), 4]"
    assert str(P("one", "tp").to_spec((8, 4, 3), mesh)) == "[8, 4@tp, 3]"
    assert str(P().to_spec((), mesh)) == "[]" and repr(P("dp", None)) == "P('dp', None)"
