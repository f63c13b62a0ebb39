"""Random streams: parts fit together whatever the spec, numbers are torch's own, distributions are what they should be."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.errors import RuntimeFailure
from shardc.mesh import Mesh
from shardc.runtime.rng import RANDOM_OPS, CounterStream, TorchStream
from shardc.spec import Factor, ShardSpec

ONE = Mesh(dp=1)
F64, F32 = torch.float64, torch.float32


def whole_spec(*shape):
    return ShardSpec(tuple((Factor(n),) for n in shape))


def part_of(whole, spec, mesh, coord):
    for k, index in enumerate(spec.indices(mesh, coord)):
        whole = whole.index_select(k, torch.tensor(index, dtype=torch.int64))
    return whole


@st.composite
def layouts(draw):
    """A mesh and a spec on it, factors of any size over any axes."""
    mesh = Mesh({name: draw(st.integers(1, 4)) for name in ("a", "b", "c")[: draw(st.integers(1, 3))]})
    free = list(draw(st.permutations(mesh.names)))
    dims = []
    for _ in range(draw(st.integers(1, 3))):
        factors = []
        for _ in range(draw(st.integers(1, 2))):
            take = draw(st.integers(0, len(free)))
            factors.append(Factor(draw(st.integers(0, 7)), tuple(free.pop() for _ in range(take))))
        dims.append(tuple(factors))
    return mesh, ShardSpec(tuple(dims))


CALLS = {
    "aten.bernoulli.p": lambda x: ((x, 0.3), F64),
    "aten.bernoulli.default": lambda x: ((x,), F64),
    "aten.bernoulli.Tensor": lambda x: ((torch.zeros_like(x), x), F64),
    "aten.rand.default": lambda x: ((list(x.shape),), F64),
    "aten.rand_like.default": lambda x: ((x,), F64),
    "aten.uniform.default": lambda x: ((x, -2.0, 3.0), F64),
    "aten.randn.default": lambda x: ((list(x.shape),), F32),
    "aten.randn_like.default": lambda x: ((x,), F64),
    "aten.normal_functional.default": lambda x: ((x, 1.0, 2.0), F64),
    "aten.normal.float_float": lambda x: ((1.0, 2.0, list(x.shape)), F32),
    "aten.normal.Tensor_float": lambda x: ((x, 2.0), F64),
    "aten.normal.float_Tensor": lambda x: ((0.5, x), F64),
    "aten.normal.Tensor_Tensor": lambda x: ((x, x), F64),
    "aten.randint.default": lambda x: ((9, list(x.shape)), torch.int64),
    "aten.randint.low": lambda x: ((-4, 9, list(x.shape)), torch.int64),
    "aten.randint_like.default": lambda x: ((x, 5), F64),
    "aten.randint_like.low_dtype": lambda x: ((x, 2, 5), F64),
    "aten.random.default": lambda x: ((x,), F64),
    "aten.random.from": lambda x: ((x, 3, 100), F64),
    "aten.random.to": lambda x: ((x, 100), F64),
    "aten.exponential.default": lambda x: ((x, 2.0), F64),
    "aten.cauchy.default": lambda x: ((x, 1.0, 2.0), F64),
    "aten.geometric.default": lambda x: ((x, 0.4), F64),
    "aten.log_normal.default": lambda x: ((x, 0.5, 0.25), F64),
    "aten.native_dropout.default": lambda x: ((x, 0.4, True), F64),
}
REJECTED = {
    "aten._standard_gamma.default": (lambda: (torch.full((20000,), 2.5, dtype=F64),), 2.5, 2.5),
    "aten._sample_dirichlet.default": (lambda: (torch.tensor([[1.0, 2.0, 5.0]], dtype=F64).repeat(20000, 1),), 1 / 3, None),
    "aten.poisson.default": (lambda: (torch.full((20000,), 3.0, dtype=F64),), 3.0, 3.0),
    "aten.binomial.default": (lambda: (torch.full((20000,), 9.0, dtype=F64), torch.full((20000,), 0.3, dtype=F64)), 2.7, 1.89),
}  # fmt: skip
SPECIAL = {"aten.randperm.default", "aten.multinomial.default", *REJECTED}


def test_every_operator_is_covered():
    assert set(CALLS) | SPECIAL == set(RANDOM_OPS)
    for name in RANDOM_OPS:
        packet, overload = name.split(".")[1:]
        op = getattr(getattr(torch.ops.aten, packet), overload)
        assert torch.Tag.nondeterministic_seeded in op.tags and not op._schema.is_mutable


@pytest.mark.parametrize("name", REJECTED)
def test_draws_by_rejection(name):
    """torch's own numbers from its stream; from a counter the distribution: its mean and variance."""
    make, mean, variance = REJECTED[name]
    args = make()
    spec = whole_spec(*args[0].shape)
    g = torch.Generator().manual_seed(5)
    got = TorchStream(g).draw(name, args, {}, spec, ONE, (0,), 0, F64, "cpu")
    torch.manual_seed(5)
    assert torch.equal(got, getattr(torch.ops.aten, name.split(".")[1])(*args))
    assert torch.equal(g.get_state(), torch.default_generator.get_state())
    out = CounterStream(2).draw(name, args, {}, spec, ONE, (0,), 0, F64, "cpu")
    assert torch.equal(out, CounterStream(2).draw(name, args, {}, spec, ONE, (0,), 0, F64, "cpu"))
    assert abs(out.mean().item() - mean) < 0.05
    assert variance is None or abs(out.var().item() / variance - 1) < 0.05
    if variance is None:
        torch.testing.assert_close(out.sum(-1), torch.ones(20000, dtype=F64))
        torch.testing.assert_close(out.mean(0), args[0][0] / 8, rtol=0.03, atol=0)


def draw(stream, name, x, spec, mesh, coord, index=0):
    args, dtype = CALLS[name](x)
    kwargs = {"dtype": dtype} if "size" in {a.name for a in overload(name)._schema.arguments} else {}
    out = stream.draw(name, args, kwargs, spec, mesh, coord, index, dtype, "cpu")
    return out if isinstance(out, tuple) else (out,)


def overload(name):
    packet, which = name.split(".")[1:]
    return getattr(getattr(torch.ops.aten, packet), which)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from(sorted(CALLS)), st.integers(0, 2**70), st.integers(0, 5))
def test_parts_are_parts_of_one_whole(layout, name, seed, index):
    mesh, spec = layout
    probabilities = torch.rand(spec.shape, dtype=F64)
    whole = draw(CounterStream(seed, 7), name, probabilities, whole_spec(*spec.shape), ONE, (0,), index)
    ordered = draw(TorchStream(torch.Generator().manual_seed(3)), name, probabilities, whole_spec(*spec.shape), ONE, (0,))
    for coord in mesh.coords():
        local = part_of(probabilities, spec, mesh, coord)
        for a, b in zip(draw(CounterStream(seed, 7), name, local, spec, mesh, coord, index), whole, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, part_of(b, spec, mesh, coord))
        stream = TorchStream(torch.Generator().manual_seed(3))
        for a, b in zip(draw(stream, name, local, spec, mesh, coord), ordered, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, part_of(b, spec, mesh, coord))


@pytest.mark.parametrize("split", ["[4096, 24@dp]", "[300@dp, 7, 24]", "[64, 3·50@dp, 40]", "[9, 8@dp, 70000]"])
def test_long_and_gappy_runs(split):
    mesh, spec = Mesh(dp=4), ShardSpec.parse(split)
    whole = CounterStream(1).draw("aten.rand", ([],), {}, whole_spec(*spec.shape), ONE, (0,), 0, F64, "cpu")
    for coord in mesh.coords():
        local = CounterStream(1).draw("aten.rand", ([],), {}, spec, mesh, coord, 0, F64, "cpu")
        assert torch.equal(local, part_of(whole, spec, mesh, coord))




@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (40, 33)])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_torch_stream_has_torchs_own_numbers(name, shape):
    x = torch.rand(shape, dtype=F64)
    args, dtype = CALLS[name](x)
    kwargs = {"dtype": dtype} if "size" in {a.name for a in overload(name)._schema.arguments} else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        want = [overload(name)(*args, **kwargs) for _ in range(2)]
        state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(5)
    stream = TorchStream(generator)
    for k, value in enumerate(want):
        got = draw(stream, name, x, whole_spec(*shape), ONE, (0,), k)
        for a, b in zip(got, value if isinstance(value, tuple) else (value,), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
    assert torch.equal(generator.get_state(), state)


DENSE = sorted(set(CALLS) - {"aten.randint.default", "aten.randint.low", "aten.rand.default", "aten.randn.default"})


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("name", DENSE)
def test_torch_stream_other_dtypes_and_layouts(name, dtype):
    for x in (torch.rand(3, 4, 5, 6).to(dtype), torch.rand(3, 4, 5, 6).to(dtype, memory_format=torch.channels_last)):
        args, _ = CALLS[name](x)
        eager = torch.Tensor.bernoulli_ if name == "aten.bernoulli.p" else overload(name)  # functional, it has lost its layout
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            want = eager(x.clone() if eager is not overload(name) else args[0], *args[1:])
            state = torch.get_rng_state()
        generator = torch.Generator().manual_seed(5)
        of = want.dtype if isinstance(want, torch.Tensor) else dtype
        got = TorchStream(generator).draw(name, args, {}, whole_spec(*x.shape), ONE, (0,), 0, of, "cpu")
        for a, b in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("replacement, count", [(True, 1), (True, 4), (False, 1), (False, 4)])
def test_multinomial(replacement, count):
    mesh, spec = Mesh(dp=3), ShardSpec.parse(f"[7@dp, {count}]")
    weights = torch.rand(7, 6, dtype=F64)
    args = (weights, count, replacement)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        want = torch.multinomial(*args)
    counted = CounterStream(1).draw("aten.multinomial", args, {}, whole_spec(7, count), ONE, (0,), 0, torch.int64, "cpu")
    assert counted.shape == (7, count) and (replacement or all(len(set(row)) == count for row in counted.tolist()))
    for coord in mesh.coords():
        local = (part_of(weights, ShardSpec.parse("[7@dp, 6]"), mesh, coord), count, replacement)
        call = ("aten.multinomial", local, {}, spec, mesh, coord, 0, torch.int64, "cpu")
        assert torch.equal(TorchStream(torch.Generator().manual_seed(5)).draw(*call), part_of(want, spec, mesh, coord))
        assert torch.equal(CounterStream(1).draw(*call), part_of(counted, spec, mesh, coord))
    many = torch.tensor([0.1, 0.6, 0.3]).expand(20000, 3)
    out = CounterStream(2).draw("aten.multinomial", (many, 1), {}, whole_spec(20000, 1), ONE, (0,), 0, torch.int64, "cpu")
    assert torch.allclose(out.flatten().bincount() / 20000, many[0], atol=0.015)


@pytest.mark.parametrize("n", [0, 1, 17, 1000])
def test_randperm(n):
    mesh, spec = Mesh(dp=3), ShardSpec.parse(f"[{n}@dp]")
    call = ("aten.randperm", (n,), {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        want = torch.randperm(n)
    stream = CounterStream(4)
    whole = stream.draw(*call, whole_spec(n), ONE, (0,), 2, torch.int64, "cpu")
    assert sorted(whole.tolist()) == list(range(n)) and (n < 17 or whole.tolist() != list(range(n)))
    for coord in mesh.coords():
        rest = (spec, mesh, coord, 0, torch.int64, "cpu")
        assert torch.equal(TorchStream(torch.Generator().manual_seed(5)).draw(*call, *rest), part_of(want, spec, mesh, coord))
        got = stream.draw(*call, spec, mesh, coord, 2, torch.int64, "cpu")
        assert torch.equal(got, part_of(whole, spec, mesh, coord))


N = 200_000


def sample(op, *args, dtype=F64, seed=11, step=3, index=1):
    blank = torch.empty(N, dtype=dtype)
    return CounterStream(seed, step).draw(f"aten.{op}", (blank, *args), {}, whole_spec(N), ONE, (0,), index, dtype, "cpu")


def distance(sample, cdf):
    """Kolmogorov and Smirnov's statistic times sqrt(n): above 1.95 with probability 0.001."""
    x = cdf(sample.double().sort()[0])
    grid = torch.arange(1, N + 1, dtype=F64) / N
    return float(torch.maximum((x - grid).abs(), (x - grid + 1 / N).abs()).max()) * math.sqrt(N)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_continuous_distributions(dtype):
    assert distance(sample("rand_like", dtype=dtype), lambda x: x) < 1.95
    assert distance(sample("uniform.default", -2.0, 3.0, dtype=dtype), lambda x: (x + 2) / 5) < 1.95
    normal = torch.distributions.Normal(torch.tensor(1.0, dtype=F64), 2.0)
    assert distance(sample("normal_functional", 1.0, 2.0, dtype=dtype), normal.cdf) < 1.95
    assert distance(sample("randn_like", dtype=dtype), lambda x: normal.cdf(2 * x + 1)) < 1.95
    assert distance(sample("exponential", 2.0, dtype=dtype), lambda x: 1 - (-2 * x).exp()) < 1.95
    assert distance(sample("cauchy", 1.0, 2.0, dtype=dtype), lambda x: ((x - 1) / 2).atan() / math.pi + 0.5) < 1.95
    assert distance(sample("log_normal", 0.5, 0.25, dtype=dtype), lambda x: normal.cdf((x.log() - 0.5) * 8 + 1)) < 1.95


def test_discrete_distributions():
    for p in (0.0, 0.1, 0.9, 1.0):
        assert abs(float(sample("bernoulli.p", p).mean()) - p) <= 4 * math.sqrt(p * (1 - p) / N)
    counts = sample("random.from", 3, 10).long().bincount(minlength=10)
    assert counts[:3].sum() == 0 and ((counts[3:] - N / 7).abs() < 5 * math.sqrt(N / 7)).all()
    geometric = sample("geometric", 0.4)
    assert geometric.min() == 1 and abs(float(geometric.mean()) - 2.5) < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32])
def test_uniform_never_rounds_to_one(dtype):
    u = sample("rand_like", dtype=dtype)
    assert u.dtype == dtype and u.min() >= 0 and u.max() < 1 and u.isfinite().all()
    assert sample("randn_like", dtype=dtype).isfinite().all()


def test_draws_steps_seeds_and_elements_are_independent():
    samples = [sample("randn_like"), sample("randn_like", seed=12), sample("randn_like", step=4), sample("randn_like", index=2)]
    samples.append(samples[0].roll(1))
    correlations = torch.corrcoef(torch.stack(samples)) - torch.eye(5, dtype=F64)
    assert correlations.abs().max() < 5 / math.sqrt(N)
    assert torch.equal(samples[0], sample("randn_like"))
    assert torch.equal(sample("randn_like", seed=-1), sample("randn_like", seed=2**64 - 1))


def test_a_repeated_draw_repeats_and_leaves_the_generator_alone():
    stream = TorchStream(torch.Generator().manual_seed(0))
    call = ("aten.bernoulli.p", (torch.empty(30), 0.5), {}, whole_spec(30), ONE, (0,))
    first, second = (stream.draw(*call, k, F32, "cpu") for k in range(2))
    state = stream.generator.get_state()
    assert torch.equal(stream.draw(*call, 0, F32, "cpu"), first) and not torch.equal(first, second)
    assert torch.equal(stream.generator.get_state(), state)
    with pytest.raises(RuntimeFailure, match=r"draw 3 .* comes before draw 2"):
        stream.draw(*call, 3, F32, "cpu")


@pytest.mark.parametrize("make", [lambda: CounterStream(5, 2), lambda: TorchStream(torch.Generator().manual_seed(5))])
def test_a_discarded_step_is_undone(make):
    stream = make()
    call = ("aten.rand_like", (torch.empty(9),), {}, whole_spec(9), ONE, (0,))
    stream.draw(*call, 0, F32, "cpu")
    state = stream.state()
    first = stream.draw(*call, 1, F32, "cpu")
    stream.restore(state)
    assert torch.equal(stream.draw(*call, 1, F32, "cpu"), first)


def test_meta_draws_nothing():
    generator = torch.Generator().manual_seed(5)
    stream, state = TorchStream(generator), generator.get_state()
    x = torch.empty(7, 3, device="meta")
    out, mask = stream.draw("aten.native_dropout", (x, 0.5, True), {}, whole_spec(7, 3), ONE, (0,), 0, F32, "meta")
    assert out.is_meta and mask.dtype == torch.bool and torch.equal(generator.get_state(), state)


def test_what_cannot_be_drawn_is_refused():
    stream = CounterStream(0)
    with pytest.raises(RuntimeFailure, match=r"aten\.rrelu_with_noise\.default cannot be drawn"):
        stream.draw("aten.rrelu_with_noise.default", (torch.ones(2),), {}, whole_spec(2), ONE, (0,), 0, F32, "cpu")
    with pytest.raises(RuntimeFailure, match="cannot be partial"):
        spec = ShardSpec.parse("[2] +sum@dp")
        stream.draw("aten.rand_like", (torch.ones(2),), {}, spec, ONE, (0,), 0, F32, "cpu")
    with pytest.raises(RuntimeFailure, match="a generator of its own"):
        given = {"generator": torch.Generator()}
        stream.draw("aten.bernoulli.p", (torch.ones(2), 0.5), given, whole_spec(2), ONE, (0,), 0, F32, "cpu")
