"""Rules under several axes at once: any factors over any axes give the whole result; any reshape has a true rule."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardc.ops  # noqa: F401  (defines the operators of shardc)
from shardc.mesh import Mesh
from shardc.rules.call import overload
from shardc.rules.layouts import Layout
from shardc.rules.proof import prove, prove_layout, rule_of
from shardc.rules.rule import WHOLE
from shardc.rules.sample import Sample, index, ints

aten: Any = torch.ops.aten
TAIL = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
SAMPLES = [
    Sample(aten.mm.default, (ints(4, 6), ints(6, 5))),
    Sample(aten.bmm.default, (ints(3, 4, 6), ints(3, 6, 5))),
    Sample(aten.add.Tensor, (ints(4, 1, 5), ints(3, 1))),
    Sample(aten.view.default, (ints(4, 3, 10), [12, 2, 5])),
    Sample(aten.expand.default, (ints(4, 1, 5), [2, 4, 3, 5])),
    Sample(aten.split_with_sizes.default, (ints(4, 16), [8, 4, 4], 1)),
    Sample(aten.cat.default, ([ints(4, 3), ints(4, 6)], 1)),
    Sample(aten.sum.dim_IntList, (ints(4, 3, 5), [0, 2])),
    Sample(aten.amax.default, (ints(4, 3, 5), [0, 2])),
    Sample(aten.embedding.default, (ints(7, 5), index(4, 3, below=7))),
    Sample(aten.embedding_dense_backward.default, (ints(4, 3, 5), index(4, 3, below=7), 7, -1, False)),
    Sample(aten.index.Tensor, (ints(4, 3, 5), [None, index(2, 6, below=3)])),
    Sample(aten.convolution.default, (ints(4, 3, 6, 7), ints(5, 3, 2, 3), None, *TAIL)),
    Sample(
        aten.convolution_backward.default,
        (ints(4, 5, 5, 5), ints(4, 3, 6, 7), ints(5, 3, 2, 3), [5], *TAIL, [True, True, True]),
    ),
    Sample(overload("shardc.sdpa.default"), (ints(2, 6, 5, 4) / 4, *[ints(2, 3, 7, 4) / 4] * 2, None, False, None, True)),  # type: ignore[arg-type]
]
AXES = ("a", "b", "c")


@st.composite
def layouts(draw: st.DrawFn, sample: Sample) -> tuple[Mesh, Layout]:
    """A mesh of up to three axes, and factors of the sample's rule over them, several on one factor at times."""
    rule, _ = rule_of(sample.op, sample.args, sample.kwargs)
    free = [f for f in rule.sizes if rule.kind(f) != WHOLE]
    mesh = Mesh({axis: draw(st.integers(1, 3)) for axis in AXES[: draw(st.integers(1, 3))]})
    out: dict[str, tuple[str, ...]] = {}
    for axis in draw(st.permutations(mesh.names)):
        factor = draw(st.sampled_from([*free, None]))
        if factor is not None:
            out[factor] = (*out.get(factor, ()), axis)
    return mesh, out


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_layout_gives_the_whole_result(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES))
    mesh, layout = data.draw(layouts(sample))
    assert prove_layout(sample.op, sample.args, sample.kwargs, layout, mesh) == ""


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two ways to cut the same small factors into dims."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=5))

    def shape(factors: list[int]) -> list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
        borders = [0, *cuts, len(factors)]
        return [math.prod(factors[a:b]) for a, b in zip(borders, borders[1:], strict=False)]

    other = draw(st.permutations(primes)) if draw(st.booleans()) else primes
    return shape(primes), shape(list(other))


@settings(max_examples=150, deadline=None)
@given(reshapes())
def test_any_reshape_has_a_true_rule(shapes: tuple[list[int], list[int]]) -> None:
    old, new = shapes
    x = torch.arange(math.prod(old), dtype=torch.float64).reshape(old)
    assert prove(aten.view.default, (x, new)) == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_a_reshape_that_only_merges_keeps_every_dim_free(shape: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(shape)))))
    borders = sorted({0, *cuts, len(shape)})
    new = [math.prod(shape[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    rule, _ = rule_of(aten.view.default, (ints(*shape), new), {})
    assert not rule.kinds
    assert [math.prod(rule.sizes[f] for f in d) for d in rule.operands[0]] == shape
