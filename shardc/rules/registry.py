"""The tables together, and the rules that users add."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardc.errors import RuleError
from shardc.program import Types
from shardc.rules import (
    attention,
    create,
    index,
    joins,
    linalg,
    lookup,
    losses,
    matmul,
    nn,
    optim,
    others,
    pointwise,
    reduce,
    selection,
    views,
    windows,
)
from shardc.rules.call import Builder, Call, Draft, overload, sets
from shardc.rules.rule import KINDS, DimFactors, Rule, parse_factors

TABLES: dict[str, Mapping[str, Builder]] = {
    "pointwise": pointwise.TABLE,
    "reduce": reduce.TABLE,
    "matmul": matmul.TABLE,
    "views": views.TABLE,
    "joins": joins.TABLE,
    "index": index.TABLE,
    "lookup": lookup.TABLE,
    "selection": selection.TABLE,
    "create": create.TABLE,
    "nn": nn.TABLE,
    "attention": attention.TABLE,
    "windows": windows.TABLE,
    "linalg": linalg.TABLE,
    "losses": losses.TABLE,
    "others": others.TABLE,
    "optim": optim.TABLE,
}
BUILT_IN: Mapping[str, Builder] = {name: builder for table in TABLES.values() for name, builder in table.items()}
_BY_OPERATOR: Mapping[torch._ops.OpOverload, Builder] = {
    op: builder for name, builder in BUILT_IN.items() if (op := overload(name)) is not None
}
_REGISTERED: dict[torch._ops.OpOverload, Builder] = {}  # what `register` was told: the one thing that outlives a compilation


def builder_of(target: torch._ops.OpOverload) -> Builder | None:
    """What makes the rules of an operator: the user's, the tables', or the elementwise one if torch says it is that."""
    found = _REGISTERED.get(target) or _BY_OPERATOR.get(target) or BUILT_IN.get(str(target))
    return found or (pointwise.pointwise() if pointwise.tagged(target) else None)


def has_rule(target: torch._ops.OpOverload) -> bool:
    """Whether `rule_for` knows the operator."""
    return builder_of(target) is not None


def rule_for(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Types) -> Rule:
    """The factor rule of one call.

    Args:
        args, kwargs: arguments with each tensor replaced by its `TensorType` at global shape; numbers may be anything.
        result: the type of what it returns.

    Raises:
        RuleError: an operator without a rule, or a call that its rule does not cover.
    """
    builder = builder_of(target)
    if builder is None:
        raise RuleError(
            f"operator {target} has no factor rule, so it cannot be split over ranks",
            hint=f'shardc.rules.register(torch.ops.{target}, "{linalg.whole(Call(target, args, kwargs, result))}") computes it '
            "whole on every rank; take out what its dims do not need (see shardc.rules.register)",
        )
    rule = builder(Call(target, args, kwargs, result))
    count = len(result) if isinstance(result, tuple) else 1
    if len(rule.results) != count:
        raise RuleError(f"the rule {rule} of {target} has {len(rule.results)} results, the call {count}")
    return rule


def register(op: torch._ops.OpOverload, rule: str) -> None:
    """Give an operator of yours a factor rule.

    Args:
        op: ``torch.ops.mylib.myop.default``.
        rule: the factors of operands and results, then kinds, then what is linear:
            ``"[i,k],[k,j]->[i,j]; k: sum; linear: 0|1"``. Factors that are not named pass; ``1`` is a dim of size one;
            ``(b t)`` a dim made of two factors, of which all calls must show one alone; ``-`` an absent result.
            Kinds are pass, sum, max, min (what results that lack the factor are over its parts) and whole. An operator
            that takes sizes as arguments can be split in dims alone that they do not count.

    Raises:
        RuleError: text that is not a rule, or an operator that writes its arguments.
    """
    if not isinstance(op, torch._ops.OpOverload):
        raise RuleError(f"{op} is not an operator overload", hint="torch.ops.mylib.myop.default")
    if op._schema.is_mutable:
        raise RuleError(f"{op} writes its arguments", hint="register a functional operator")
    _REGISTERED[op] = parse_rule(rule)


def unregister(op: torch._ops.OpOverload) -> None:
    """Forget what `register` was told of an operator."""
    _REGISTERED.pop(op, None)


def parse_rule(text: str) -> Builder:
    """The builder that a rule in text stands for; see `register`.

    Raises:
        RuleError: text that is not a rule.
    """
    hint = 'for example "[i,k],[k,j]->[i,j]; k: sum; linear: 0|1"'
    body, *clauses = [part.strip() for part in text.split(";")]
    if body.count("->") != 1 or re.sub(r"\[[^\[\]]*\]|->|[\s,-]", "", body):
        raise RuleError(f"not a rule: {text!r}", hint=hint)
    left, right = (parse_factors(part) for part in body.split("->"))
    known = {f for t in (*left, *right) if t is not None for d in t for f in d}
    kinds: dict[str, str] = {}
    linear: tuple[frozenset[int], ...] = ()
    any_partial = False
    for clause in filter(None, clauses):
        name, _, value = (part.strip() for part in clause.partition(":"))
        if name == "linear" and re.fullmatch(r"[\d&|\s]+", value):
            linear = sets(value)
        elif name == "partial" and value == "any":
            any_partial = True
        elif name in known and value in KINDS:
            kinds[name] = value
        else:
            raise RuleError(f"not a clause of a rule: {clause!r} in {text!r}", hint=hint)

    def build(call: Call) -> Rule:
        draft = Draft(call)
        if len(left) != len(call.operands) or len(right) != len(call.results):
            raise RuleError(f"{call.name} has {len(call.operands)} operands and {len(call.results)} results, its rule {text!r} "
                            f"{len(left)} and {len(right)}")  # fmt: skip
        for t, pattern in zip([*call.operands, *call.results], [*left, *right], strict=True):
            if t is None or pattern is None:
                continue
            if len(t.shape) != len(pattern):
                raise RuleError(f"{call.name}: {t} has {len(t.shape)} dims, its rule {text!r} {len(pattern)}")
            for n, names in zip(t.shape, pattern, strict=True):
                _solve(draft, call, names, n, text)
        draft.kinds.update(kinds)
        return draft.rule([t for t in left if t is not None], right, linear, any_partial)

    return build


def _solve(draft: Draft, call: Call, names: DimFactors, n: int, text: str) -> None:
    """The size of the one factor of a dim that is not known yet."""
    unknown = [f for f in names if f not in draft.sizes]
    known = draft.size(tuple(f for f in names if f in draft.sizes))
    if len(unknown) == 1 and known and n % known == 0:
        draft.sizes[unknown[0]] = n // known
    elif unknown or known != n:
        raise RuleError(f"{call.name}: a dim of {n} is not made of ({' '.join(names)}) with {draft.sizes}: rule {text!r}")
