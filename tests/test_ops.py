"""The operators equal what they stand for, are one node each in a functional graph, and update in place."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardc import _torch, ops
from shardc.errors import CaptureError, ShardcError

F64 = torch.float64
sdpa_eager = F.scaled_dot_product_attention


def randn(*shape, dtype=F64, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def nodes(graph, name):
    return [n for n in graph.nodes if n.op == "call_function" and str(n.target) == name]


# -- attention -------------------------------------------------------------------------------------------------------------

SHAPES = {
    "plain": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), False),
    "odd": ((1, 1, 33, 5), (1, 1, 33, 5), (1, 1, 33, 5), False),
    "wide values": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3), False),
    "gqa": ((2, 6, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), True),
    "mqa, wide values": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 3), True),
    "3-d": ((3, 5, 8), (3, 7, 8), (3, 7, 8), False),
    "3-d gqa": ((4, 5, 8), (2, 7, 8), (2, 7, 8), True),
    "5-d": ((2, 2, 3, 5, 4), (2, 2, 3, 7, 4), (2, 2, 3, 7, 4), False),
    "one query": ((2, 3, 1, 8), (2, 3, 9, 8), (2, 3, 9, 8), False),
    "empty batch": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8), False),
    "no keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8), False),
    "no queries": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8), False),
}
MASKS = ["none", "causal", "bool", "float", "row", "batch", "full", "dead rows"]


def mask_of(kind, q, k):
    t, s = q.shape[-2], k.shape[-2]
    if kind in ("none", "causal"):
        return None
    if kind in ("bool", "dead rows"):
        mask = torch.rand(t, s) > 0.3
        mask[: t // 2] &= kind == "bool"
        return mask
    if kind == "row":
        return torch.rand(1, s) > 0.3
    if kind == "batch" and q.dim() == 4:
        return torch.rand(q.shape[0], 1, 1, s) > 0.2
    return torch.randn(*q.shape[:-1], s, dtype=q.dtype) if kind == "full" else torch.randn(t, s, dtype=q.dtype)


def outcome(fn, tensors, mask, causal, gqa, scale=None):
    q, k, v = tensors
    out = fn(q, k, v, mask, is_causal=causal, enable_gqa=gqa, scale=scale)
    weight = torch.linspace(-1, 1, max(out.numel(), 1), dtype=F64)[: out.numel()].view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SHAPES)
def test_sdpa_equals_eager(name, mask):
    torch.manual_seed(0)
    *shapes, gqa = SHAPES[name]
    tensors = [randn(*s) for s in shapes]
    m = mask_of(mask, *tensors[:2])
    for scale in (None, 0.3):
        want = outcome(sdpa_eager, tensors, m, mask == "causal", gqa, scale)
        got = outcome(ops.sdpa, tensors, m, mask == "causal", gqa, scale)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert got[0].stride() == want[0].stride() or gqa or not want[0].numel()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("name", ["plain", "gqa", "wide values", "3-d"])
def test_sdpa_in_lower_precision(name, dtype, tolerance):
    *shapes, gqa = SHAPES[name]
    exact = [randn(*s) for s in shapes]
    low = [x.detach().to(dtype).requires_grad_() for x in exact]
    mask = torch.rand(exact[0].shape[-2], exact[1].shape[-2]) > 0.2
    mask[:, 0] = True
    got, want = outcome(ops.sdpa, low, mask, False, gqa), outcome(sdpa_eager, exact, mask, False, gqa)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * 2)


@pytest.mark.parametrize("layout", [(0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_fake_results_look_like_real_ones(name, layout):
    *shapes, gqa = SHAPES[name]
    tensors = [torch.randn(s, dtype=torch.float32) for s in shapes]
    if tensors[0].dim() == 4:
        back = [layout.index(d) for d in range(4)]
        tensors = [x.permute(layout).contiguous().permute(back) for x in tensors]

    def both(make):
        q, k, v = map(make, tensors)
        out, lse = torch.ops.shardc.sdpa(q, k, v, None, False, None, gqa)
        return out, lse, *torch.ops.shardc.sdpa_backward(out, q, k, v, None, out, lse, False, None, gqa)

    fake = FakeTensorMode()
    for a, b, c in zip(both(lambda x: x), both(fake.from_tensor), both(lambda x: x.to("meta")), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) == (c.shape, c.stride(), c.dtype)


def test_logsumexp_is_that_of_the_scores():
    q, k, v = (randn(2, 3, 5, 8, grad=False) for _ in range(3))
    for values in (v, v[..., :3]):
        _, lse = torch.ops.shardc.sdpa(q, k, values, None, False, 0.25, False)
        torch.testing.assert_close(lse, (q @ k.mT * 0.25).logsumexp(-1), rtol=1e-12, atol=1e-12)


class Attention(torch.nn.Module):
    """Every way to reach attention: by attribute, by name, and inside torch's own modules."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=F64)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=F64)

    def forward(self, x):
        h = x.unflatten(-1, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True) + sdpa_eager(h, h, h)
        x = h.transpose(1, 2).flatten(2)
        return self.layer(self.inner(x, x, x, need_weights=False)[0])


def trace(fn, *tensors):
    """The functional graph of fn, over fake tensors."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def functional(*values):
        with FunctionalTensorMode():
            wrapped = [FunctionalTensor.to_functional(x) for x in values]
            out = fn(*wrapped)
            return [_torch.current_value(x) if isinstance(x, FunctionalTensor) else x for x in out]

    with fake:
        return make_fx(functional)(*(fake.from_tensor(x) for x in tensors))


def test_mode_gives_one_node_for_each_attention():
    torch.manual_seed(0)
    net, x = Attention(), randn(3, 5, 8, grad=False)
    names, values = zip(*net.named_parameters(), strict=True)

    def step(x, *values):
        values = [v.detach().requires_grad_() for v in values]
        with ops.sdpa_mode():
            loss = torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,)).square().sum()
            return [loss, *torch.autograd.grad(loss, values)]

    want = step(x, *values)
    graph = trace(step, x, *(v.detach() for v in values))
    assert len(nodes(graph.graph, "shardc.sdpa.default")) == 4
    assert len(nodes(graph.graph, "shardc.sdpa_backward.default")) == 2  # x needs no gradient
    assert not any("softmax" in str(n.target) or "dot_product" in str(n.target) for n in graph.graph.nodes)
    for a, b in zip(graph(x, *values), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    plain = torch.autograd.grad(net(x).square().sum(), values)
    for a, b in zip(want[1:], plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert F.scaled_dot_product_attention is sdpa_eager


def test_mode_leaves_the_rest_to_torch():
    q, k, v = (randn(2, 3, 5, 8) for _ in range(3))
    learned = randn(5, 5)

    def covered(fn):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            graph = trace(lambda *t: [fn(*t)], q.detach(), k.detach(), v.detach(), learned.detach())
        return len(nodes(graph.graph, "shardc.sdpa.default"))

    assert covered(lambda q, k, v, m: ops.sdpa(q, k, v)) == 1
    assert covered(lambda q, k, v, m: ops.sdpa(q, k, v, m)) == 1
    assert covered(lambda q, k, v, m: ops.sdpa(q, k, v, m.requires_grad_())) == 0
    assert covered(lambda q, k, v, m: ops.sdpa(q, k, v, dropout_p=0.5)) == 0
    assert covered(lambda q, k, v, m: ops.sdpa(q[:1], k, v)) == 0
    with sdpa_kernel(SDPBackend.MATH):
        assert covered(lambda q, k, v, m: ops.sdpa(q, k, v)) == 0


def test_gradient_of_a_gradient_is_refused_with_a_way_out():
    q = randn(2, 3, 5, 8)
    (grad,) = torch.autograd.grad(ops.sdpa(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(CaptureError, match="sdpa_kernel"):
        grad.sum().backward()


def test_autocast():
    q = randn(2, 3, 5, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = ops.sdpa(q, q, q), sdpa_eager(q, q, q)
    assert got.dtype == want.dtype == torch.bfloat16 and torch.equal(got, want)


def test_opcheck():
    q, k, v = (randn(2, 4, 5, 8) for _ in range(3))
    args = (q, k, v, torch.rand(5, 5) > 0.3, False, None, False)
    torch.library.opcheck(torch.ops.shardc.sdpa.default, args)
    args = (q, randn(2, 2, 5, 8), randn(2, 2, 5, 8), None, True, 0.5, True)
    torch.library.opcheck(torch.ops.shardc.sdpa.default, args)


# -- optimizers ------------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adam int lr": lambda p: torch.optim.Adam(p, lr=1, foreach=False),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=False),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1, foreach=False),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.1, foreach=False),
    "adagrad maximize": lambda p: torch.optim.Adagrad(p, lr=0.1, maximize=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, weight_decay=0.1, foreach=False),
    "rmsprop momentum": lambda p: torch.optim.RMSprop(p, momentum=0.9, maximize=True, foreach=False),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, centered=True, foreach=False),
    "rmsprop both": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9, foreach=False),
    "asgd": lambda p: torch.optim.ASGD(p, weight_decay=0.1, t0=2, foreach=False),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), foreach=False),
    "radam decoupled": lambda p: torch.optim.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
}


def parameters(dtype=F64):
    torch.manual_seed(1)
    values = [torch.randn(7, 5), torch.randn(()), torch.randn(0, 4), torch.randn(33), torch.randn(2, 3, 4, 5)]
    values[-1] = values[-1].to(memory_format=torch.channels_last)
    values.append(torch.randn(6, 4).t())
    values = [v.to(dtype) for v in values]
    values.append(torch.randn(6, 4).to(dtype)[:, ::2])  # with gaps: fused kernels do not take it
    out = [torch.nn.Parameter(v) for v in values]
    assert not out[-1].is_contiguous()
    return out


def train(make, kernels, dtype=F64, steps=7, lr=None):
    ps = parameters(dtype)
    opt = make(ps)
    for step in range(steps):
        torch.manual_seed(step + 10)
        for k, p in enumerate(ps):
            grad = torch.randn(p.shape, dtype=dtype)
            p.grad = None if (k, step) == (3, 1) else grad if step % 2 else torch.empty_like(p).copy_(grad)
        for group in opt.param_groups:
            group["lr"] = group["lr"] if lr is None else lr(step)
        if kernels:
            with ops.optimizer_kernels():
                opt.step()
        else:
            opt.step()
    return ps, opt


def tensors_of(ps, opt):
    out = {f"p{k}": p.detach() for k, p in enumerate(ps)}
    for k, p in enumerate(ps):
        out.update({f"{k}.{name}": value for name, value in opt.state[p].items()})
    return out


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_torchs_loop(name):
    want = tensors_of(*train(OPTIMIZERS[name], False, lr=lambda step: 0.1 / (step + 1)))
    got = tensors_of(*train(OPTIMIZERS[name], True, lr=lambda step: 0.1 / (step + 1)))
    assert list(got) == list(want)
    for key, value in want.items():
        if value is None:
            assert got[key] is None
            continue
        assert got[key].dtype == value.dtype
        torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("name", ["adam", "adamw amsgrad", "sgd momentum", "adagrad", "rmsprop both", "radam", "asgd"])
def test_updates_in_lower_precision(name, dtype, tolerance):
    want, got = (tensors_of(*train(OPTIMIZERS[name], kernels, dtype, steps=2)) for kernels in (False, True))
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")


def test_in_place_forms_update_their_arguments():
    for name, form in ops.INPLACE.items():
        op = getattr(torch.ops.shardc, name.split(".")[1]).default
        schema = op._schema
        torch.manual_seed(0)
        args = []
        for a in schema.arguments:
            if str(a.type) == "Tensor":
                value = torch.rand(5, 3, dtype=F64) + (a.name == "square_avg")  # variances are positive
                args.append(torch.tensor(2.0) if a.name in ("step", "mu", "eta") else value)
            else:
                args.append(False if str(a.type) == "bool" else 0.125)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        want = op(*args)
        want = want if isinstance(want, tuple) else (want,)
        for a, b in zip(args, before, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, f"{name} changed an argument"
        got = form(*args)
        got = got if isinstance(got, tuple) else (got,)
        aliases = dict(form.aliases)
        assert len(got) == len(want) and list(aliases) == list(range(len(aliases)))
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b)
            if k in aliases:
                assert a is args[aliases[k]] and not torch.equal(a, before[aliases[k]])
            else:
                assert all(a is not x for x in args)
        read_only = [k for k, a in enumerate(schema.arguments) if a.name in ("grad", "part")]
        for k in read_only:
            assert torch.equal(args[k], before[k]) and k not in aliases.values()
        assert read_only, f"{name} reads nothing"
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in before]
        for results in (form(*meta), op(*meta)):
            results = results if isinstance(results, tuple) else (results,)
            assert [(r.shape, r.stride(), r.dtype) for r in results] == [(r.shape, r.stride(), r.dtype) for r in want]
        assert form(*meta)[0] is meta[0] if isinstance(form(*meta), tuple) else form(*meta) is meta[0]


@pytest.mark.parametrize("shape", [(700, 901), (3, 200_001), (4, 130, 7, 90)])
@pytest.mark.parametrize("name", ["shardc.adam.default", "shardc.sgd_momentum.default", "shardc.adagrad.default"])
def test_gradients_of_another_layout_are_copied_by_blocks(name, shape):
    torch.manual_seed(0)
    layouts = [torch.rand(shape, dtype=F64), torch.rand(shape[::-1], dtype=F64).permute(*reversed(range(len(shape))))]
    for layout in layouts:
        state = [torch.empty_like(layout).copy_(torch.rand(shape)) for _ in range(3)]
        grad = torch.rand(shape, dtype=F64)
        args = {
            "shardc.adam.default": (*state[1:], torch.tensor(3.0), 0.1, 0.9, 0.99, 1e-8, 0.1, False, False),
            "shardc.sgd_momentum.default": (state[1], 0.1, 0.9, 0.0, 0.1, True, False),
            "shardc.adagrad.default": (state[1], torch.tensor(3.0), 0.1, 0.1, 1e-8, 0.1, False),
        }[name]
        outcomes = []
        for slope in (torch.empty_like(layout).copy_(grad), torch.empty_like(layouts[layout is layouts[0]]).copy_(grad)):
            own = [a.clone() if isinstance(a, torch.Tensor) else a for a in (state[0], slope, *args)]
            with torch.profiler.profile(profile_memory=True) as profile:
                outcomes.append(ops.INPLACE[name](*own))
            largest = max(e.self_cpu_memory_usage for e in profile.events() if e.name != "[memory]")
            assert largest <= 8 << 18
        assert slope.stride() != layout.stride()
        for a, b in zip(*outcomes, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-15, atol=0)


def test_in_place_is_fused_where_it_can_be():
    p, grad, m, v = (torch.rand(4, 6, dtype=F64) for _ in range(4))
    numbers = (0.1, 0.9, 0.99, 1e-8, 0.0, False, True)
    with torch.profiler.profile() as profile:
        ops.INPLACE["shardc.adam.default"](p, grad.t().contiguous().t(), m, v, torch.tensor(3.0), *numbers)
    calls = [e.key for e in profile.key_averages()]
    assert "aten::_fused_adamw_" in calls and "aten::addcdiv_" not in calls


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=F64), foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True, foreach=False),
        lambda p: torch.optim.Adagrad(p, lr=0.1, differentiable=True, foreach=False),
    ],
)
def test_other_cases_keep_torchs_loop(make):
    value, grad = torch.randn(3, dtype=F64), torch.randn(3, dtype=F64)
    results = []
    for kernels in (False, True):
        p = value.clone()
        p.grad = grad.clone()
        opt = make([p])
        with torch.profiler.profile() as profile:
            if kernels:
                with ops.optimizer_kernels():
                    opt.step()
            else:
                opt.step()
        assert not any(e.key.startswith("shardc::") for e in profile.key_averages())
        results.append(p.detach())
    assert torch.equal(*results)


def test_complex_parameters_keep_torchs_loop():
    results = []
    for kernels in (False, True):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(3, dtype=torch.complex128))
        p.grad = torch.randn(3, dtype=torch.complex128)
        opt = torch.optim.AdamW([p], foreach=False)
        if kernels:
            with ops.optimizer_kernels():
                opt.step()
        else:
            opt.step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_kernels_are_restored_after_an_error():
    loops = [_torch.lookup(*where) for where in _torch.OPTIMIZER_LOOPS.values()]
    with pytest.raises(KeyError), ops.optimizer_kernels():
        assert all(_torch.lookup(*where) not in loops for where in _torch.OPTIMIZER_LOOPS.values())
        raise KeyError
    assert [_torch.lookup(*where) for where in _torch.OPTIMIZER_LOOPS.values()] == loops


def test_an_unknown_torch_is_refused_by_name():
    with pytest.raises(ShardcError, match=r"has no torch\.optim\.adam\._single_tensor_future"):
        _torch.lookup("torch.optim.adam", "_single_tensor_future")


def symbolic(fake, value, name):
    """A symbolic float, as capture makes them of the numbers of param_groups."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env, source = fake.shape_env, ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


STATES = {
    "adamw": ["exp_avg", "exp_avg_sq", "step"],
    "adamw amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
    "sgd": [],
    "sgd momentum": ["momentum_buffer"],
    "adagrad": ["sum", "step"],
    "rmsprop both": ["square_avg", "step", "grad_avg", "momentum_buffer"],
    "radam": ["exp_avg", "exp_avg_sq", "step"],
    "asgd": ["ax", "mu", "eta", "step"],
}
NODE = {
    "sgd momentum": "sgd_momentum",
    "rmsprop both": "rmsprop_centered_momentum",
    "adamw": "adam",
    "adamw amsgrad": "adam_amsgrad",
}


@pytest.mark.parametrize("name", STATES)
def test_one_node_for_each_parameter_with_a_symbolic_rate(name):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    torch.manual_seed(0)
    shapes, keys = [(4, 6), (6,), ()], STATES[name]
    values = [torch.rand(s, dtype=F64) for s in shapes]
    grads = [torch.rand(s, dtype=F64) for s in shapes]
    state = [torch.tensor(3.0) if key in ("step", "mu", "eta") else torch.rand(s, dtype=F64) for s in shapes for key in keys]
    if name == "rmsprop both":  # variances are positive
        state = [x + 1 if key == "square_avg" else x for x, key in zip(state, keys * len(shapes), strict=True)]
    flat = [*values, *grads, *state]

    def step(lr, *flat):
        ps = [torch.nn.Parameter(x) for x in flat[: len(shapes)]]
        opt = OPTIMIZERS[name](ps)
        opt.param_groups[0]["lr"] = lr * 2
        for k, p in enumerate(ps):
            p.grad = flat[len(shapes) + k]
            begin = 2 * len(shapes) + k * len(keys)
            opt.state[p] = dict(zip(keys, flat[begin : begin + len(keys)], strict=True))
        with ops.optimizer_kernels():
            opt.step()
        return [x for p in ps for x in (p, *opt.state[p].values())]

    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def functional(lr, *flat):
        with FunctionalTensorMode():
            out = step(lr, *(FunctionalTensor.to_functional(x) for x in flat))
            return [_torch.current_value(x) for x in out]

    with fake:
        graph = make_fx(functional)(symbolic(fake, 0.125, "lr"), *(fake.from_tensor(x) for x in flat))
    found = nodes(graph.graph, f"shardc.{NODE.get(name, name)}.default")
    assert len(found) == len(shapes)
    assert all(any(isinstance(a, torch.fx.Node) and not isinstance(a.meta["val"], torch.Tensor) for a in n.args) for n in found)
    allowed = {"shardc", "getitem", "detach", "mul", "profiler", "lift_fresh", "full_like"}  # the last: Adagrad
    calls = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert not [c for c in calls if not any(word in c for word in allowed)], calls
    for lr in (0.125, 0.5):  # the number is an input
        got = graph(lr, *(x.clone() for x in flat))
        want = [x.detach() for x in step(lr, *(x.clone() for x in flat))]
        for a, b in itertools.zip_longest(got, want):
            assert torch.equal(a, b)


def test_sgd_creates_its_momentum_buffer():
    def step(p, grad):
        param = torch.nn.Parameter(p)
        param.grad = grad
        opt = torch.optim.SGD([param], lr=0.1, momentum=0.9, foreach=False)
        with ops.optimizer_kernels():
            opt.step()
        return [param, opt.state[param]["momentum_buffer"]]

    p, grad = torch.rand(3, 4), torch.rand(3, 4)
    graph = trace(step, p, grad)
    assert len(nodes(graph.graph, "shardc.sgd_momentum_first.default")) == 1
    updated, buffer = graph(p, grad)
    assert torch.equal(buffer, grad)
    torch.testing.assert_close(updated, p - 0.1 * grad)


def test_update_opcheck():
    p, g, m, v = (torch.rand(3, 4) for _ in range(4))
    args = (p, g, m, v, torch.tensor(2.0), 0.1, 0.9, 0.99, 1e-8, 0.1, False, True)
    torch.library.opcheck(torch.ops.shardc.adam.default, args, test_utils=("test_schema", "test_faketensor"))


def test_updates_reach_whatever_shares_the_parameters_memory():
    def step(flat, grad):
        parts = [torch.nn.Parameter(flat[:6].view(2, 3)), torch.nn.Parameter(flat[6:])]
        for p in parts:
            p.grad = grad[: p.numel()].view(p.shape) + 0.5
        with ops.optimizer_kernels():
            torch.optim.SGD(parts, lr=0.5, foreach=False).step()
        return [flat * 2, *(p.detach() + 0 for p in parts)]

    flat, grad = torch.rand(10), torch.rand(6)
    got = trace(step, flat, grad)(flat.clone(), grad)
    want = torch.cat([flat[:6] - (grad + 0.5) / 2, flat[6:] - (grad[:4] + 0.5) / 2])
    torch.testing.assert_close(got[0], want * 2)
    torch.testing.assert_close(torch.cat([x.flatten() for x in got[1:]]), want)
