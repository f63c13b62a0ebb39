"""Reductions: a reduced dim that is split leaves a partial result (sum, max, min) or has to be whole."""

from __future__ import annotations

from shardc.rules.call import Builder, Call, Draft, sets
from shardc.rules.rule import MAX, MIN, SUM, WHOLE, Rule


def reduction(kind: str, linear: str = "", name: str = "dim") -> Builder:
    """The dims named by an argument (all, where there is none) are reduced."""
    positions = sets(linear)

    def build(call: Call) -> Rule:
        draft = Draft(call)
        shape = call.operands[0].shape
        reduced = call.dims(name, len(shape)) if name in call else tuple(range(len(shape)))
        dims = [draft.new(n, kind if k in reduced else "pass") for k, n in enumerate(shape)]
        keep = "keepdim" in call and bool(call["keepdim"])
        left = [() if k in reduced else d for k, d in enumerate(dims) if keep or k not in reduced]
        floating = all(r is None or r.dtype.is_floating_point for r in call.results)
        orders = ((frozenset({0}), kind, kind),) if kind in (MAX, MIN) and floating else ()
        return draft.rule([dims], [left] * len(call.results), positions, orders=orders)

    return build


def along(call: Call, linear: str = "") -> Rule:
    """The dim is whole, shapes stay: cumsum, sort, softmax."""
    draft = Draft(call)
    shape = call.operands[0].shape
    whole = call.dims("dim", len(shape))
    dims = [draft.new(n, WHOLE if k in whole else "pass") for k, n in enumerate(shape)]
    if any(r is not None and r.shape != shape for r in call.results):
        raise call.refuse("a result of another shape than the operand")
    return draft.rule([dims] * len(call.operands), [dims] * len(call.results), sets(linear))


def scan(call: Call) -> Rule:
    return along(call)


def linear_scan(call: Call) -> Rule:
    return along(call, "0")


def topk(call: Call) -> Rule:
    draft = Draft(call)
    shape = call.operands[0].shape
    result = call.results[0]
    assert result is not None
    k = call.dim("dim", len(shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(shape)]
    kept = draft.new(result.shape[k], WHOLE) if shape else ()
    return draft.rule([dims], [[*dims[:k], kept, *dims[k + 1 :]] if shape else []] * len(call.results))


TABLE: dict[str, Builder] = {
    "aten.sum.dim_IntList": reduction(SUM, "0"),
    "aten.sum.default": reduction(SUM, "0"),
    "aten.nansum.default": reduction(SUM),
    "aten.mean.dim": reduction(WHOLE, "0"),
    "aten.mean.default": reduction(WHOLE, "0"),
    "aten.amax.default": reduction(MAX),
    "aten.amin.default": reduction(MIN),
    "aten.max.default": reduction(MAX),
    "aten.min.default": reduction(MIN),
    "aten.max.dim": reduction(WHOLE),
    "aten.min.dim": reduction(WHOLE),
    "aten.aminmax.default": reduction(WHOLE),
    "aten.median.dim": reduction(WHOLE),
    "aten.median.default": reduction(WHOLE),
    "aten.mode.default": reduction(WHOLE),
    "aten.kthvalue.default": reduction(WHOLE),
    "aten.any.default": reduction(MAX), "aten._is_any_true.default": reduction(MAX),
    "aten.any.dim": reduction(MAX),
    "aten.any.dims": reduction(MAX),
    "aten.all.default": reduction(MIN), "aten._is_all_true.default": reduction(MIN),
    "aten.all.dim": reduction(MIN),
    "aten.all.dims": reduction(MIN),
    "aten.prod.default": reduction(WHOLE),
    "aten.prod.dim_int": reduction(WHOLE),
    "aten.argmax.default": reduction(WHOLE),
    "aten.argmin.default": reduction(WHOLE),
    "aten.count_nonzero.default": reduction(SUM),
    "aten.count_nonzero.dim_IntList": reduction(SUM),
    "aten.logsumexp.default": reduction(WHOLE),
    "aten.var.correction": reduction(WHOLE),
    "aten.std.correction": reduction(WHOLE),
    "aten.var_mean.correction": reduction(WHOLE),
    "aten.std_mean.correction": reduction(WHOLE),
    "aten.linalg_vector_norm.default": reduction(WHOLE),
    "aten.norm.ScalarOpt_dim": reduction(WHOLE),
    "aten.norm.Scalar": reduction(WHOLE),
    "aten.cumsum.default": linear_scan,
    "aten.cumprod.default": scan,
    "aten.cummax.default": scan,
    "aten.cummin.default": scan,
    "aten.logcumsumexp.default": scan,
    "aten.sort.default": scan,
    "aten.sort.stable": scan,
    "aten.argsort.default": scan,
    "aten.argsort.stable": scan,
    "aten.topk.default": topk,
}
