"""Elementwise operators: every dim passes through; broadcast dims belong to no factor.

The table holds what torch's tag cannot tell: through which operands partial sums pass. Any other operator that torch tags as
pointwise has the same rule without linear sets.
"""

from __future__ import annotations

import torch

from shardc.rules.call import Builder, Call, Draft, choosing, falling, rising, sets
from shardc.rules.rule import Rule

LINEAR: dict[str, str] = {
    "aten.add.Tensor": "0&1",
    "aten.sub.Tensor": "0&1",
    "aten.rsub.Tensor": "0&1",
    "aten.mul.Tensor": "0 | 1",
    "aten.mul.Scalar": "0",
    "aten.div.Tensor": "0",
    "aten.div.Scalar": "0",
    "aten.neg.default": "0",
    "shardc.constrain.default": "0",
    "shardc.save_name.default": "0",
    "aten.positive.default": "0",
    "aten.lerp.Scalar": "0&1",
    "aten.lerp.Tensor": "0&1",
    "aten.addcmul.default": "0&1 | 0&2",
    "aten.addcdiv.default": "0&1",
    "aten.where.self": "1&2",
    "aten.masked_fill.Tensor": "0&2",
    "aten.conj_physical.default": "0",
    "aten.threshold_backward.default": "0",
    "aten.gelu_backward.default": "0",
    "aten.silu_backward.default": "0",
    "aten.tanh_backward.default": "0",
    "aten.sigmoid_backward.default": "0",
    "aten.softplus_backward.default": "0",
    "aten.leaky_relu_backward.default": "0",
    "aten.elu_backward.default": "0",
    "aten.hardtanh_backward.default": "0",
    "aten.hardswish_backward.default": "0",
    "aten.hardsigmoid_backward.default": "0",
    "aten.mish_backward.default": "0",
    "aten.logit_backward.default": "0",
    "aten.log_sigmoid_backward.default": "0",
    "aten.native_dropout_backward.default": "0",
    "aten._prelu_kernel_backward.default": "",
}

NONLINEAR = """
    add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar sqrt.default rsqrt.default exp.default
    exp2.default expm1.default log.default log2.default log10.default log1p.default sin.default cos.default tan.default
    tanh.default sigmoid.default relu.default gelu.default silu.default softplus.default leaky_relu.default elu.default
    hardtanh.default hardswish.default hardsigmoid.default mish.default erf.default erfc.default erfinv.default
    abs.default sign.default sgn.default reciprocal.default square.default floor.default ceil.default round.default
    trunc.default frac.default clamp.default clamp.Tensor clamp_min.default clamp_min.Tensor clamp_max.default
    clamp_max.Tensor maximum.default minimum.default fmax.default fmin.default remainder.Scalar remainder.Tensor
    fmod.Scalar fmod.Tensor atan2.default xlogy.Tensor xlogy.Scalar_Other eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar
    lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor isnan.default isinf.default isfinite.default
    logical_and.default logical_or.default logical_not.default logical_xor.default bitwise_and.Tensor bitwise_or.Tensor
    bitwise_xor.Tensor bitwise_not.default bitwise_and.Scalar bitwise_or.Scalar __and__.Tensor __or__.Tensor
    where.ScalarOther where.ScalarSelf where.Scalar floor_divide.default div.Tensor_mode div.Scalar_mode
    log_sigmoid_forward.default threshold.default nan_to_num.default lgamma.default digamma.default logaddexp.default
    hypot.default logit.default _prelu_kernel.default celu.default heaviside.default copysign.Tensor
    asin.default acos.default atan.default sinh.default cosh.default asinh.default acosh.default atanh.default
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor fill.Scalar softshrink.default hardshrink.default
    native_dropout.default bernoulli.default bernoulli.p bernoulli.Tensor rand_like.default randn_like.default
    randint_like.default randint_like.low_dtype normal_functional.default uniform.default exponential.default
    normal.Tensor_float normal.Tensor_Tensor normal.float_Tensor _standard_gamma_grad.default _dirichlet_grad.default
"""
"""Nonlinear ones, and the random ones that take their shape from an operand (the draw itself is the runtime's)."""


RISING = """
    relu.default exp.default exp2.default expm1.default tanh.default sigmoid.default softplus.default elu.default
    hardtanh.default hardsigmoid.default erf.default sign.default sgn.default floor.default ceil.default round.default
    round.decimals trunc.default clamp.default clamp_min.default clamp_max.default atan.default sinh.default asinh.default
    celu.default softshrink.default hardshrink.default add.Scalar sub.Scalar special_log_ndtr.default _to_copy.default
    positive.default relu6.default deg2rad.default rad2deg.default special_ndtr.default addcmul.default addcdiv.default
    masked_fill.Scalar
"""
"""What rises in its first operand, whatever its value: a pending maximum of the operand is one of the result, and so is a
minimum. Not those that have no value for some numbers (`log`, `sqrt`): a term of a maximum may be such a number."""
FALLING = "neg.default erfc.default rsub.Scalar"
BOTH = {
    "add.Tensor": rising(0, 1),
    "sub.Tensor": (*rising(0), *falling(1)),
    "rsub.Tensor": (*falling(0), *rising(1)),
    "logaddexp.default": rising(0, 1),
    "logaddexp2.default": rising(0, 1),
    "where.self": choosing(1, 2),
    "where.ScalarSelf": choosing(1),
    "where.ScalarOther": choosing(1),
    "masked_fill.Tensor": choosing(0, 2),
    "clamp.Tensor": rising(0, 1, 2),
    **{
        f"{name}.{kind}": (*rising(0), *(falling(1) if kind == "Tensor" else ()))
        for name in ("gt", "ge")
        for kind in ("Tensor", "Scalar")
    },
    **{
        f"{name}.{kind}": (*falling(0), *(rising(1) if kind == "Tensor" else ()))
        for name in ("lt", "le")
        for kind in ("Tensor", "Scalar")
    },
    **{
        name: (*choosing(0, 1, kinds=("max",)), *rising(0, 1))
        for name in ("maximum.default", "fmax.default", "clamp_min.Tensor")
    },
    **{
        name: (*choosing(0, 1, kinds=("min",)), *rising(0, 1))
        for name in ("minimum.default", "fmin.default", "clamp_max.Tensor")
    },
}
"""What rises or falls in its operands, or chooses among them."""


def _orders(name: str, scalar: object = None) -> tuple[tuple[frozenset[int], str, str], ...]:
    """`Rule.orders` of an elementwise operator; `scalar`: what it multiplies with or divides by."""
    if isinstance(scalar, (int, float)) and name in ("mul.Scalar", "div.Scalar", "mul.Tensor", "div.Tensor"):
        return rising(0) if scalar > 0 else falling(0) if scalar < 0 else ()
    return BOTH.get(name) or (rising(0) if name in RISING.split() else falling(0) if name in FALLING.split() else ())


def pointwise(linear: str = "") -> Builder:
    """All operands broadcast to the shape of the results."""
    positions = sets(linear)

    def build(call: Call) -> Rule:
        draft = Draft(call)
        shape = next(r.shape for r in call.results if r is not None)
        dims = draft.fresh(shape)
        operands = [draft.broadcast(t.shape, dims) for t in call.operands]
        for r in call.results:
            if r is not None and r.shape != shape and r.numel:
                raise call.refuse(f"results of shapes {list(shape)} and {list(r.shape)} are not elementwise")
        results = [None if r is None else dims if r.shape == shape else draft.fresh(r.shape) for r in call.results]
        ordered = all(not t.dtype.is_complex for t in call.operands)
        scalar = call["other"] if "other" in call else None  # noqa: SIM401 (a Call is no dict)
        orders = _orders(call.name.removeprefix("aten."), scalar) if ordered else ()
        return draft.rule(operands, results, positions, orders=orders)

    return build


def cast(call: Call) -> Rule:
    """A copy in another dtype: linear unless it rounds (`Draft.rule` drops the set then)."""
    same = call.results[0] is not None and call.results[0].dtype == call.operands[0].dtype
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape)
    orders = rising(0) if call.operands[0].dtype.is_floating_point and call.results[0].dtype.is_floating_point else ()  # type: ignore[union-attr]
    return draft.rule([dims], [dims], sets("0"), any_partial=same, orders=() if same else orders)


def masked_fill(call: Call) -> Rule:
    """Linear in what is kept where the fill is zero."""
    value = call["value"]
    return pointwise("0" if isinstance(value, (int, float)) and value == 0 else "")(call)


def copy(call: Call) -> Rule:
    """`copy(dst, src)`: the values of `src`, broadcast."""
    return pointwise("1 | 0&1")(call)


def fill(call: Call) -> Rule:
    """`fill(self, value)`: the shape of one, the value of the other."""
    return pointwise("1 | 0&1")(call)


def division(call: Call) -> Rule:
    return pointwise("0" if call["rounding_mode"] is None else "")(call)


TABLE: dict[str, Builder] = {
    **{f"aten.{name}": pointwise() for name in NONLINEAR.split()},
    **{name: pointwise(linear) for name, linear in LINEAR.items()},
    "aten._to_copy.default": cast,
    "prims.convert_element_type.default": cast,
    "aten.masked_fill.Scalar": masked_fill,
    "aten.copy.default": copy,
    "aten.fill.Tensor": fill,
    "aten.div.Tensor_mode": division,
    "aten.div.Scalar_mode": division,
}


def tagged(target: torch._ops.OpOverload) -> bool:
    """Whether torch itself calls the operator elementwise, and it is functional."""
    return torch.Tag.pointwise in target.tags and not target._schema.is_mutable
