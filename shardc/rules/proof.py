"""Proof of factor rules by execution: split real data along each factor, run the operator per part, recombine, compare.

Data are whole numbers in float64, so that sums are exact; dims have distinct sizes; cuts are uneven and some parts are empty.
Partial operands are split into unequal terms. The same machine looks for what holds in truth and a rule does not say
(`missing`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.mesh import Mesh
from shardc.program import TensorType
from shardc.rules.call import map_operands, tensor_operands
from shardc.rules.layouts import Layout, Op, differs, fed, flat, is_tensor, reduce, run_split
from shardc.rules.registry import rule_for
from shardc.rules.rule import WHOLE, Rule

AXIS = "x"


@dataclass(frozen=True)
class Violation:
    """A claim of a rule that does not hold.

    Args:
        op: the operator.
        rule: the rule as printed.
        claim: what it says, ``factor b (sum) over 3 parts``.
        found: what came out instead.
    """

    op: str
    rule: str
    claim: str
    found: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule}\n  {self.claim}: {self.found}"


def rule_of(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Rule, list[Tensor | None]]:
    """The rule of a concrete call, and its results."""
    whole = op(*args, **kwargs)
    results = flat(whole)
    kinds = tuple(None if r is None else TensorType.of(r) for r in results)
    typed = map_operands(args, kwargs, TensorType.of, is_tensor)
    return rule_for(op, *typed, kinds if isinstance(whole, (tuple, list)) else kinds[0]), results


def prove(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, parts: Sequence[int] = (2, 3)
) -> list[Violation]:
    """All claims of the rule of this call that do not hold on its data.

    Args:
        op: a functional operator that draws no random numbers.
        args, kwargs: real arguments on CPU; whole numbers in float64 make sums exact.
        parts: numbers of parts to cut each factor into; a cut into more parts than elements, with empty ones, is added.
    """
    kwargs = dict(kwargs or {})
    rule, results = rule_of(op, args, kwargs)
    operands = tensor_operands(args, kwargs, is_tensor)
    out: list[Violation] = []

    def fail(claim: str, found: str) -> None:
        out.append(Violation(str(op), str(rule), claim, found))

    for kind, values, factors in (("operand", operands, rule.operands), ("result", results, rule.results)):
        for k, (value, dims) in enumerate(itertools.zip_longest(values, factors)):
            shape = None if value is None else tuple(value.shape)
            said = None if dims is None else tuple(math.prod(rule.sizes[f] for f in d) for d in dims)
            if shape != said:
                fail(f"{kind} {k}", f"has shape {shape}, the rule says {said}")
    if out:
        return out
    for factor, size in rule.sizes.items():
        if rule.kind(factor) == WHOLE or size == 0:
            continue
        for n in sorted({*parts, size + 1}):
            layout = {factor: (AXIS,), **{b: (AXIS,) for a, b in sorted(rule.tied) if a == factor}}
            found = run_split(op, args, kwargs, rule, results, layout, Mesh({AXIS: n}))
            if found:
                fail(f"factor {factor} ({rule.kind(factor)}) over {n} parts", found)
    for linear in rule.linear:
        found = _partial(op, args, kwargs, results, linear, "sum")
        if found:
            fail(f"linear in {sorted(linear)}", found)
    for reduction in ("sum", "max", "min") if rule.any_partial else ():
        found = _partial(op, args, kwargs, results, frozenset({0}), reduction)
        if found:
            fail(f"partial {reduction} of operand 0 passes", found)
    for held, before, after in rule.orders:
        found = _partial(op, args, kwargs, results, held, before, after)
        if found:
            fail(f"partial {before} of {sorted(held)} gives {after}", found)
    return out


def prove_layout(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, layout: Layout, mesh: Mesh) -> str:
    """What goes wrong when several factors are split at once, over several axes; empty if nothing does."""
    kwargs = dict(kwargs or {})
    rule, results = rule_of(op, args, kwargs)
    return run_split(op, args, kwargs, rule, results, layout, mesh)


# -- partial operands ------------------------------------------------------------------------------------------------------


def terms(x: Tensor, reduction: str, n: int = 3, salt: int = 0) -> list[Tensor]:
    """Unequal parts of a partial value, as it would be on n ranks; operands of one call take different `salt`."""
    generator = torch.Generator().manual_seed(x.numel() + 7919 * salt)

    def noise(lo: int, hi: int) -> Tensor:
        return torch.randint(lo, hi, x.shape, generator=generator).to(x.dtype)

    if reduction == "sum":
        some = [noise(-9, 9) * (k + 1) for k in range(n - 1)]
        return [*some, x - sum(some, torch.zeros_like(x))]
    sign = -1 if reduction == "max" else 1
    owner = torch.randint(0, n, x.shape, generator=generator)
    return [torch.where(owner == k, x, x + sign * noise(0, 5)) for k in range(n)]


def _partial(
    op: Op,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: list[Tensor | None],
    linear: frozenset[int],
    reduction: str,
    after: str | None = None,
) -> str:
    operands = tensor_operands(args, kwargs, is_tensor)
    if any(operands[k].dtype == torch.bool or reduction != "sum" and operands[k].is_complex() for k in linear):
        return ""  # no partial value is of such a dtype
    cut = {k: terms(operands[k], reduction, salt=k) for k in linear}
    parts = []
    for rank in range(3):
        own = [cut[k][rank] if k in cut else x for k, x in enumerate(operands)]
        local = map_operands(args, kwargs, fed(own), is_tensor)
        parts.append(flat(op(*local[0], **local[1])))
    for k, whole in enumerate(results):
        pieces = [p[k] for p in parts]
        if whole is not None:  # infinities and nans of the whole do not come from sums
            out, finite = reduce([p for p in pieces if p is not None], after or reduction), torch.isfinite(whole)
            if out.shape != whole.shape:
                return f"result {k} has shape {list(out.shape)}, not {list(whole.shape)}"
            found = differs(torch.where(finite, out, 0), torch.where(finite, whole, 0))
            if found:
                return f"result {k} {found}"
    return ""
