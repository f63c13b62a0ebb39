"""Factor rules: printed forms, localised sizes, proof by execution, decompositions, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardc.ops  # noqa: F401  (defines the operators of shardc)
from shardc.errors import RuleError
from shardc.instructions import Local, LocalDim
from shardc.program import TensorType
from shardc.rules import (
    decompositions,
    has_rule,
    localise,
    map_operands,
    register,
    rule_for,
    table,
    tensor_operands,
    unregister,
)
from shardc.rules import prove as by_prove
from shardc.rules.call import overload
from shardc.rules.layouts import differs
from shardc.rules.proof import Violation, prove, rule_of
from shardc.rules.registry import BUILT_IN, TABLES, parse_rule
from shardc.rules.rule import WHOLE
from shardc.rules.sample import Sample, index, ints
from shardc.rules.samples import is_random, samples
from shardc.rules.truth import missing
from shardc.spec import ShardSpec

aten: Any = torch.ops.aten


def printed(op: Any, *args: Any, **kwargs: Any) -> str:
    return str(rule_of(op, args, kwargs)[0])


def f64(*shape: int) -> TensorType:
    return TensorType(shape, torch.float64)


# -- printed rules ---------------------------------------------------------------------------------------------------------

GOLDEN = [
    ((aten.mm.default, ints(4, 6), ints(6, 5)), "[a,b],[b,c]->[a,c]; b: sum; linear: 0 | 1"),
    ((aten.addmm.default, ints(5), ints(4, 6), ints(6, 5)), "[b],[a,c],[c,b]->[a,b]; c: whole; linear: 0&1 | 0&2; order: 0"),
    ((aten.add.Tensor, ints(4, 5), ints(5)), "[a,b],[b]->[a,b]; linear: 0&1; order: 0 | 1"),
    ((aten.add.Tensor, ints(4, 5), 1.0), "[a,b]->[a,b]; order: 0"),
    ((aten.mul.Tensor, ints(4, 1), ints(4, 5)), "[a,1],[a,b]->[a,b]; linear: 0 | 1"),
    ((aten.mul.Tensor, ints(1, 1), ints(1, 5)), "[a,1],[a,b]->[a,b]; linear: 0 | 1"),
    ((aten.div.Tensor, ints(4), ints(4, lo=1)), "[a],[a]->[a]; linear: 0"),
    ((aten.where.self, ints(4) > 0, ints(4), ints(4)), "[a],[a],[a]->[a]; linear: 1&2; order: 1 | 2 | 1&2"),
    ((aten.view.default, ints(4, 3, 5), [12, 5]), "[a,b,c]->[(a b),c]; partial: any; sized: 1"),
    ((aten.view.default, ints(12, 5), [2, 2, 3, 5]), "[(a b c),d]->[a,b,c,d]; partial: any; sized: 1"),
    ((aten.view.default, ints(1, 8), [8]), "[1,a]->[a]; partial: any; sized: 1"),
    ((aten.view.default, ints(1, 8), [1, 2, 4]), "[a,(b c)]->[a,b,c]; partial: any; sized: 1"),
    ((aten.view.default, ints(6, 4), [4, 6]),
     "[(a b),c]->[(a d),e]; b: whole; c: whole; d: whole; e: whole; partial: any; sized: 1"),
    ((aten.view.default, ints(0, 4), [0, 2, 2]), "[a,b]->[a,c,d]; b: whole; c: whole; d: whole; partial: any; sized: 1"),
    ((aten.expand.default, ints(1, 5), [3, 4, 5]), "[1,c]->[a,b,c]; partial: any; sized: 1"),
    ((aten.split.Tensor, ints(4, 12), 4, 1), "[a,(c b)]->[a,b],[a,b],[a,b]; c: whole; partial: any; sized: 1"),
    ((aten.split_with_sizes.default, ints(4, 16), [8, 4, 4], 1),
     "[a,(d b)]->[a,(c b)],[a,b],[a,b]; c: whole; d: whole; partial: any; sized: 1"),
    ((aten.cat.default, [ints(4, 3), ints(4, 3)], 1), "[a,b],[a,b]->[a,(c b)]; c: whole; linear: 0&1; order: 0 | 1 | 0&1"),
    ((aten.sum.dim_IntList, ints(4, 5), [0], True), "[a,b]->[1,b]; a: sum; linear: 0"),
    ((aten.amax.default, ints(4, 5), [1]), "[a,b]->[a]; b: max; order: 0 max"),
    ((aten.embedding.default, ints(7, 5), index(4, 3, below=7)), "[c,d],[a,b]->[a,b,d]; c: whole; partial: any"),
    ((aten.embedding_dense_backward.default, ints(4, 3, 5), index(4, 3, below=7), 7, -1, False),
     "[a,b,d],[a,b]->[c,d]; a: sum; b: sum; c: whole; linear: 0"),
    ((aten.index.Tensor, ints(4, 3, 5), [None, index(2, 6, below=3)]), "[a,b,c],[d,e]->[a,d,e,c]; b: whole; partial: any"),
    ((aten.native_layer_norm.default, ints(4, 5), [5], ints(5), None, 1e-5), "[a,b],[b]->[a,b],[a,1],[a,1]; b: whole"),
    ((aten.full.default, [4, 3], 1.0), "->[a,b]; sized: 0"),
    ((aten._to_copy.default, ints(4)), "[a]->[a]; partial: any; linear: 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), GOLDEN, ids=lambda v: str(v[0]) if isinstance(v, tuple) else "")
def test_printed_rules(call: tuple[Any, ...], text: str) -> None:
    assert printed(*call) == text


def test_a_cast_that_rounds_is_not_linear() -> None:
    wide, narrow = ints(4), ints(4).to(torch.float32)
    assert printed(aten._to_copy.default, wide, dtype=torch.float32) == "[a]->[a]; order: 0"
    assert printed(aten._to_copy.default, narrow, dtype=torch.float64) == "[a]->[a]; linear: 0; order: 0"
    assert printed(aten._to_copy.default, narrow.bfloat16(), dtype=torch.float16) == "[a]->[a]; order: 0"
    assert printed(aten._to_copy.default, wide, dtype=torch.int64) == "[a]->[a]"


def test_attention_splits_batch_and_heads_and_groups_of_heads() -> None:
    q, k = f64(2, 6, 5, 4), f64(2, 3, 7, 4)
    op = torch.ops.shardc.sdpa.default
    out = (f64(2, 6, 5, 4), f64(2, 6, 5))
    assert str(rule_for(op, (q, k, k, None, False, None, True), {}, out)) == (
        "[a,(b c),d,f],[a,b,e,f],[a,b,e,f]->[a,(b c),d,f],[a,(b c),d]; e: whole; f: whole"
    )
    grads = (f64(2, 6, 5, 4), k, k)
    back = rule_for(torch.ops.shardc.sdpa_backward.default, (q, q, k, k, None, *out, False, None, True), {}, grads)
    assert str(back).startswith("[a,(b c),d,f],[a,(b c),d,f],[a,b,e,f]") and back.kind("c") == "sum"  # of those that share b
    causal = rule_for(op, (q, q, q, None, True, None, False), {}, out)
    assert causal.kind(causal.operands[0][2][0]) == WHOLE


# -- the proof -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [f for f in TABLES if f != "others"])  # those are proved on op_db: test_opdb.py
def test_every_rule_holds_on_real_data(family: str) -> None:
    proved = 0
    for sample in samples():
        if str(sample.op) in TABLES[family]:
            found = prove(sample.op, sample.args, sample.kwargs)
            assert not found, f"{sample}\n" + "\n".join(map(str, found))
            proved += 1
    assert proved >= len(TABLES[family]) // 2


UNPROVED = """
    aten.as_strided.default aten.as_strided_scatter.default aten._local_scalar_dense.default aten.sym_size.int
    aten.sym_numel.default aten.empty.memory_format aten.new_empty.default aten.empty_like.default
    aten._linalg_eigh.default aten._linalg_svd.default aten.linalg_qr.default aten._fused_rms_norm_backward.default
""".split()  # noqa: SIM905
"""Refused, numbers, uninitialised, unique up to a sign alone, or without a CPU kernel."""


@pytest.mark.filterwarnings("ignore")
def test_every_operator_of_the_tables_has_a_sample() -> None:
    shown = {str(s.op) for s in samples()}
    left = [n for n in BUILT_IN if n not in shown and (op := overload(n)) is not None and not is_random(op)]
    assert sorted(set(left) - set(UNPROVED) - set(TABLES["others"])) == []


def false_rule(op: Any, args: tuple[Any, ...], text: str) -> list[Violation]:
    register(op, text)
    try:
        return prove(op, args)
    finally:
        unregister(op)


@pytest.mark.parametrize(
    ("op", "args", "text", "claim"),
    [
        (aten.mm.default, (ints(4, 6), ints(6, 5)), "[i,k],[k,j]->[i,j]; k: max", "factor k (max) over 2 parts"),
        (aten.mm.default, (ints(4, 6), ints(6, 5)), "[i,k],[k,j]->[i,j]; k: sum; linear: 0&1", "linear in [0, 1]"),
        (aten.cumsum.default, (ints(4, 3), 0), "[a,b]->[a,b]", "factor a (pass) over 2 parts"),
        (aten._softmax.default, (ints(4, 3), 1, False), "[a,b]->[a,b]", "factor b (pass) over 2 parts"),
        (aten.amax.default, (ints(4, 3), [0]), "[a,b]->[b]; a: sum", "factor a (sum) over 2 parts"),
        (aten.relu.default, (ints(4, 3),), "[a,b]->[a,b]; linear: 0", "linear in [0]"),
        (aten.neg.default, (ints(4, 3),), "[a,b]->[a,b]; partial: any", "partial max of operand 0 passes"),
        (aten.mean.dim, (ints(5, 3), [0]), "[a,b]->[b]; a: sum", "factor a (sum) over 2 parts"),
        (aten.addmm.default, (ints(5), ints(4, 6), ints(6, 5)), "[j],[i,k],[k,j]->[i,j]; k: sum",
         "factor k (sum) over 2 parts"),
        (aten.squeeze.default, (ints(2, 3),), "[a,b]->[a,b]", "factor a (pass) over 2 parts"),
    ],
)  # fmt: skip
def test_the_proof_finds_false_claims(op: Any, args: tuple[Any, ...], text: str, claim: str) -> None:
    assert claim in {v.claim for v in false_rule(op, args, text)}


def test_a_rule_of_wrong_shape_is_refused() -> None:
    with pytest.raises(RuleError, match="is not made of"):
        false_rule(aten.t.default, (ints(4, 3),), "[a,b]->[a,b]")


def test_missing_lists_what_holds_and_is_not_said() -> None:
    register(aten.mm.default, "[i,k],[k,j]->[i,j]; k: whole")
    try:
        assert missing(aten.mm.default, (ints(4, 6), ints(6, 5))) == ["whole, sum -> sum", "sum, whole -> sum", "1, 0 -> sum"]
    finally:
        unregister(aten.mm.default)
    for sample in (
        Sample(aten.mm.default, (ints(4, 6), ints(6, 5))),
        Sample(aten.bmm.default, (ints(3, 4, 6), ints(3, 6, 5))),
        Sample(aten.add.Tensor, (ints(4, 5), ints(5))),
        Sample(aten.embedding.default, (ints(7, 5), index(4, 3, below=7))),
        Sample(aten.view.default, (ints(4, 3, 5), [12, 5])),
        Sample(aten.sum.dim_IntList, (ints(4, 3, 5), [0])),
    ):
        assert missing(sample.op, sample.args) == []


@pytest.mark.filterwarnings("ignore")
def test_the_table_prints_one_rule_for_each_operator() -> None:
    rows = table()
    assert rows["aten.mm.default"] == "[a,b],[b,c]->[a,c]; b: sum; linear: 0 | 1"
    assert len(rows) > 250 and set(UNPROVED).isdisjoint(rows)
    assert by_prove("aten.mm.default") == ""


# -- arguments -------------------------------------------------------------------------------------------------------------


def test_operands_are_found_in_order_and_replaced() -> None:
    args = (f64(1), [None, f64(2), [f64(3)]], 2.0)
    assert [t.shape for t in tensor_operands(args, {"other": f64(4)})] == [(1,), (2,), (3,), (4,)]
    new, named = map_operands(args, {"other": f64(4)}, lambda t: t.shape[0])
    assert (new, named) == ((1, [None, 2, [3]], 2.0), {"other": 4})


def spec(text: str) -> ShardSpec:
    return ShardSpec.parse(text)


def test_sizes_are_localised_where_the_result_is_split() -> None:
    x, op = f64(4, 3, 5), aten.view.default
    rule = rule_for(op, (x, [12, 5]), {}, f64(12, 5))
    out = spec("[4@dp·3, 5] +sum@tp")
    assert localise(op, rule, (x, [12, 5]), {}, [out], [spec("[4@dp, 3, 5]")]) == ((x, Local(spec("[4@dp·3, 5]"))), {})
    whole = spec("[12, 5] +sum@tp")
    assert localise(op, rule, (x, [12, 5]), {}, [whole], [spec("[4, 3, 5]")]) == ((x, [12, 5]), {})


def test_split_sizes_are_those_of_the_pieces() -> None:
    x, op = f64(4, 16), aten.split_with_sizes.default
    rule = rule_for(op, (x, [8, 4, 4]), {"dim": 1}, (f64(4, 8), f64(4, 4), f64(4, 4)))
    outs = [spec("[4, 2·4@tp]"), spec("[4, 4@tp]"), spec("[4, 4@tp]")]
    (_, sizes), named = localise(op, rule, (x, [8, 4, 4]), {"dim": 1}, outs, [spec("[4, 4·4@tp]")])
    assert sizes == [LocalDim(o.dims[1]) for o in outs] and named == {"dim": 1}


def test_specs_that_do_not_fit_are_refused() -> None:
    rule = rule_for(aten.t.default, (f64(4, 3),), {}, f64(3, 4))
    with pytest.raises(RuleError, match="specs for 2 operands"):
        localise(aten.t.default, rule, (f64(4, 3),), {}, [spec("[3, 4]")], [spec("[4, 3]")] * 2)


# -- errors ----------------------------------------------------------------------------------------------------------------


def test_an_unknown_operator_is_named_with_the_way_out() -> None:
    op = aten._unique2.default
    assert not has_rule(op)
    with pytest.raises(RuleError, match=r"aten._unique2.default has no factor rule") as error:
        rule_for(op, (f64(4),), {}, f64(3))
    text = error.value.hint.split('"')[1]
    assert text == "[a]->[b]; a: whole; b: whole"
    register(op, text)  # what the message says works as it stands
    try:
        assert str(rule_for(op, (f64(4),), {}, f64(3))) == text
    finally:
        unregister(op)


def test_refusals_say_what_to_write() -> None:
    with pytest.raises(RuleError, match=r"as_strided.*addresses the storage[\s\S]*view, permute"):
        rule_for(aten.as_strided.default, (f64(4), [2], [1]), {}, f64(2))
    mask = TensorType((4,), torch.bool)
    with pytest.raises(RuleError, match=r"boolean mask[\s\S]*torch.where"):
        rule_for(aten.index.Tensor, (f64(4), [mask]), {}, f64(3))


def test_attention_over_broadcast_batches_is_refused() -> None:
    q, k = f64(2, 6, 5, 4), f64(1, 6, 7, 4)
    with pytest.raises(RuleError, match=r"batch dims that are broadcast[\s\S]*expand"):
        rule_for(torch.ops.shardc.sdpa.default, (q, k, k, None, False, None, False), {}, (q, f64(2, 6, 5)))


@pytest.mark.parametrize(
    "text", ["[a],[b]", "a->b", "[a]->[a]; a: maybe", "[a]->[a]; b: sum", "[a]->[a]; linear: x", "[a->[a]", "[a]->[a]->[a]"]
)
def test_text_that_is_no_rule(text: str) -> None:
    with pytest.raises(RuleError, match="not a"):
        parse_rule(text)


def test_registered_rules_are_used_and_checked() -> None:
    op = aten.nonzero_static.default
    register(op, "[(a b)]->[1,a]; b: whole")
    try:
        with pytest.raises(RuleError, match="is not made of"):
            rule_for(op, (f64(4),), {}, f64(1, 3))
        with pytest.raises(RuleError, match="has 2 dims"):
            rule_for(op, (f64(4, 2),), {}, f64(1, 3))
    finally:
        unregister(op)
    with pytest.raises(RuleError, match="writes its arguments"):
        register(aten.add_.Tensor, "[a],[a]->[a]")


# -- decompositions --------------------------------------------------------------------------------------------------------


def decomposed(op: Any, *args: Any, **kwargs: Any) -> None:
    """The decomposition gives what the operator gives, and is made of operators that have rules."""
    seen: list[Any] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    want = op(*args, **kwargs)
    with Watch():
        got = decompositions(split_products=True)[op](*args, **kwargs)
    got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
    for a, b in zip(got, want, strict=False):
        if isinstance(b, Tensor) and b.numel():
            assert a is not None and a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-10 if b.dtype == torch.float64 else 1e-2, atol=1e-10, check_dtype=False)
    assert op not in seen
    assert [str(o) for o in seen if not has_rule(o)] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_means_and_moments(dtype: torch.dtype) -> None:
    x = ints(4, 3, 5).to(dtype)
    decomposed(aten.mean.default, x)
    for keep in (False, True):
        decomposed(aten.mean.dim, x, [0, -1], keep)
        for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction):
            decomposed(op, x, [0, 2], correction=1, keepdim=keep)
            decomposed(op, x, correction=0, keepdim=keep)
        decomposed(aten.logsumexp.default, x, [1], keep)
        for order in (0, 1, 2, 3.0, float("inf"), float("-inf")):
            decomposed(aten.linalg_vector_norm.default, x, order, [0, 2], keep)
            decomposed(aten.linalg_vector_norm.default, x, order, None, keep)
    decomposed(aten.linalg_vector_norm.default, torch.tensor(-3.0, dtype=dtype))


def test_squeeze_keeps_dims_that_only_a_part_has_at_size_one() -> None:
    x = ints(4, 1, 5)
    decomposed(aten.squeeze.default, x)
    decomposed(aten.squeeze.dim, x, 1)
    decomposed(aten.squeeze.dims, x, [0, 1])
    assert decompositions()[aten.squeeze.dims](x, []).shape == (4, 1, 5)


def test_zeroing() -> None:
    decomposed(aten.zero.default, ints(4, 3))
    got = decompositions()[aten._foreach_zero.default]([ints(2, 3), torch.ones(5)])
    assert [(t.shape, t.dtype, int(t.count_nonzero())) for t in got] == [((2, 3), torch.float64, 0), ((5,), torch.float32, 0)]


def test_writing_where_a_mask_says_so() -> None:
    from shardc.rules import masked_writes, writes_one_value

    x, row = ints(4, 3, 5), ints(4) > 1
    element, inner = ints(4, 3, 5) > 1, ints(3) > 1
    one, line = torch.tensor(7.0, dtype=x.dtype), ints(1, 3, 5)
    for indices, value in (
        ([element], one), ([element], one.view(1)), ([row], one), ([row], line), ([row], line[0]), ([row], line[:, :1]),
        ([None, inner], one), ([None, inner], ints(4, 1, 5)), ([None, inner], ints(5)), ([row.new_zeros(4)], line),
    ):  # fmt: skip
        assert writes_one_value(x, indices, value)
        for op, write in masked_writes().items():
            for add in (False, True):
                assert torch.equal(op(x, indices, value, add), write(x, indices, value, add))
    assert not writes_one_value(x, [row], ints(2, 3, 5)) and not writes_one_value(x, [index(2, below=4)], line)
    assert not writes_one_value(x, [row, inner], one)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses(reduction: int) -> None:
    x, y, g = ints(4, 3) / 2, ints(4, 3, hi=9) / 3, ints(4, 3) if reduction == 0 else torch.tensor(2.0, dtype=torch.float64)
    for name, extra in (("mse_loss", []), ("smooth_l1_loss", [0.7]), ("huber_loss", [0.7]), ("soft_margin_loss", [])):
        decomposed(getattr(aten, name).default, x, y, reduction, *extra)
        decomposed(getattr(aten, f"{name}_backward").default, g, x, y, reduction, *extra)
    p, t = torch.sigmoid(x), (y > 0).double()
    p[0, 0], p[1, 1] = 0.0, 1.0
    for weight in (None, ints(3, lo=1)):
        decomposed(aten.binary_cross_entropy.default, p, t, weight, reduction)
        decomposed(aten.binary_cross_entropy_backward.default, g, p, t, weight, reduction)
        decomposed(aten.binary_cross_entropy_with_logits.default, x, t, weight, ints(3, lo=1), reduction)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_counts_targets(reduction: int, weighted: bool) -> None:
    weight = ints(3, lo=1) if weighted else None
    for shape, forward, backward in (
        ((6, 3), aten.nll_loss_forward.default, aten.nll_loss_backward.default),
        ((3,), aten.nll_loss_forward.default, aten.nll_loss_backward.default),
        ((2, 3, 4, 5), aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
    ):
        x = torch.log_softmax(ints(*shape), 1 if len(shape) > 1 else 0)
        target = index(*(shape[:1] + shape[2:] if len(shape) > 1 else ()), below=3)
        for ignore in (-100, 1):
            if target.numel() == 1 and int(target) == ignore:
                continue
            if reduction != 0:  # no one reads the total weight then
                decomposed(forward, x, target, weight, reduction, ignore)
            out, count = forward(x, target, weight, reduction, ignore)
            torch.testing.assert_close(decompositions()[forward](x, target, weight, reduction, ignore)[0], out)
            decomposed(backward, torch.full_like(out, 2.0), x, target, weight, reduction, ignore, count)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
def test_batch_norm(training: bool, shape: tuple[int, ...]) -> None:
    x, w, b = ints(*shape) + 0.5, ints(3, lo=1), ints(3)
    mean, variance = ints(3, hi=8), ints(3, lo=2)
    forward = aten._native_batch_norm_legit_functional.default
    decomposed(forward, x, w, b, mean, variance, training, 0.1, 1e-5)
    decomposed(forward, x, None, None, mean, variance, training, 0.1, 1e-5)
    _, saved, rstd, *_ = forward(x, w, b, mean, variance, training, 0.1, 1e-5)
    grad = ints(*shape, hi=9)
    for mask, weight in (([True, True, True], w), ([True, False, False], None)):
        decomposed(aten.native_batch_norm_backward.default, grad, x, weight, mean, variance, saved, rstd, training, 1e-5, mask)


def test_constants_and_products() -> None:
    x = ints(4, 3)
    for op in (aten.zeros_like, aten.ones_like):
        decomposed(op.default, x)
        decomposed(op.default, x, dtype=torch.int64)
    decomposed(aten.full_like.default, x, 3)
    decomposed(aten.new_full.default, x, [2], 3)
    decomposed(aten.new_zeros.default, x, [2, 5])
    decomposed(aten.addmm.default, ints(5), ints(4, 6), ints(6, 5), beta=2, alpha=3)
    decomposed(aten.baddbmm.default, ints(3, 1, 5), ints(3, 4, 6), ints(3, 6, 5))


def test_differs_says_how() -> None:
    assert differs(ints(3), ints(3)) == ""
    assert differs(ints(3), ints(3) + torch.tensor([0, 0, 2.0])) == "differs in 1 of 3 elements, by up to 2"
