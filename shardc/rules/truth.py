"""What holds over one axis in truth, found by trying every layout: the measure of what the rules know.

A layout says of each tensor operand whether it is whole on each of two ranks, split along a dim, or a pending sum, maximum or
minimum. It holds if the results of the two ranks make up the true results in one of these ways. Data that agree by chance
(zeros, positive factors, equal rows) are told apart by a second try on values that are moved and change their signs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.rules.call import map_operands, tensor_operands
from shardc.rules.layouts import Op, differs, fed, flat, is_tensor
from shardc.rules.proof import rule_of, terms
from shardc.rules.rule import WHOLE, Rule

Placement = str | int
"""Over one axis: "whole", a pending "sum", "max" or "min", or the dim that is split."""
Placements = tuple[Placement, ...]


EXACT = ("eq", "ne", "isnan", "isinf", "isfinite", "isclose", "nextafter")
"""Operators whose results almost no change of a real number changes: on them pending operands cannot be told from whole
ones."""


@dataclass(frozen=True)
class Layout:
    """Placements of operands and the results they give."""

    operands: Placements
    results: Placements

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


def missing(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, limit: int = 2000) -> list[str]:
    """One-axis layouts that hold on this data and that the rule does not know, ``0, whole -> 1`` each."""
    kwargs = dict(kwargs or {})
    known = known_layouts(rule_of(op, args, kwargs)[0], tensor_operands(args, kwargs, is_tensor))
    return [str(found) for found in true_layouts(op, args, kwargs, limit) if found.operands not in known]


def known_layouts(rule: Rule, operands: Sequence[Tensor]) -> set[Placements]:
    """The placements of the operands of a call that its rule lets be, but for all whole."""
    out: set[Placements] = set()
    for f in rule.sizes:
        if rule.kind(f) != WHOLE and rule.sizes[f] > 1:
            out.add(tuple(next((k for k, d in enumerate(t) if d[:1] == (f,)), "whole") for t in rule.operands))
    count = len(rule.operands)

    def held(which: frozenset[int], kind: str) -> Placements:
        return tuple(kind if k in which else "whole" for k in range(count))

    out |= {held(which, "sum") for which in rule.linear}
    out |= {held(which, kind) for which, kind, _ in rule.orders}
    if rule.any_partial:
        out |= {held(frozenset({0}), kind) for kind in ("sum", "max", "min")}
    legal = [set(_choices(x, True)) for x in operands]
    return {p for p in out if any(x != "whole" for x in p) and all(x in may for x, may in zip(p, legal, strict=True))}


def true_layouts(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int = 2000) -> Iterator[Layout]:
    """The layouts that hold, those with fewer operands that are not whole first; at most `limit` are tried."""
    operands: list[Tensor] = tensor_operands(args, kwargs, is_tensor)
    given = (args, kwargs, flat(op(*args, **kwargs)))
    data = [given, *(_moved(op, args, kwargs) or [given, given])]
    if max((x.numel() for x in operands), default=0) < 2 or not _telling([r for _, _, r in data]):
        return
    choices = [_choices(x, op.overloadpacket.__name__ not in EXACT) for x in operands]
    ordered = sorted(itertools.product(*choices), key=lambda p: sum(x != "whole" for x in p))
    for placements in ordered[1 : limit + 1]:
        found: list[set[Placement]] | None = None
        for salt, one in enumerate(data):
            again = _results(op, *one, placements, salt)
            if again is None:
                found = None
                break
            found = again if found is None else [a & b for a, b in zip(found, again, strict=True)]
        if found is not None and all(found):
            yield Layout(placements, tuple(min(f, key=_rank) for f in found))


def _choices(x: Tensor, pending_too: bool) -> list[Placement]:
    if not pending_too:
        return ["whole", *(k for k, n in enumerate(x.shape) if n > 1)]
    pending: list[Placement] = ["sum"] if x.dtype.is_floating_point or x.dtype.is_complex else []
    pending += ["max", "min"] if x.dtype.is_floating_point else []
    return ["whole", *(k for k, n in enumerate(x.shape) if n > 1), *pending]


def _rank(p: Placement) -> tuple[int, str]:
    return (0 if p == "whole" else 1 if isinstance(p, int) else 2, str(p))


def _telling(results: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether data tell layouts apart: of no elements, of values that are all equal and of infinities almost anything holds."""
    for k, first in enumerate(results[0]):
        if first is None:
            continue
        own = [r for one in results if (r := one[k]) is not None]
        if any(not r.numel() or not bool(torch.isfinite(r).all()) for r in own):
            return False
        values = torch.cat([r.reshape(-1) for r in own])
        if bool((values == values[0]).all()):
            return False
    return True


def _moved(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any, list[Tensor | None]]]:
    """The same call on other values, if the operator takes them (no roots of negative numbers)."""
    out = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)

        def move(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            if x.dtype == torch.bool:
                return torch.rand(x.shape, generator=generator) < 0.5
            if not (x.dtype.is_floating_point or x.dtype.is_complex):
                return x
            sign = torch.randint(0, 2, x.shape, generator=generator).to(x.dtype) * 2 - 1
            shift = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
            return torch.where(torch.isfinite(x), sign * (x + shift), x)

        new = map_operands(args, kwargs, move, is_tensor)
        try:
            results = flat(op(*new[0], **new[1]))
        except (RuntimeError, IndexError, ValueError):
            return []
        if any(r is not None and r.dtype.is_floating_point and not bool(torch.isfinite(r).all()) for r in results):
            return []
        out.append((*new, results))
    return out


def _results(
    op: Op, args: Any, kwargs: Any, results: Sequence[Tensor | None], placements: Placements, salt: int
) -> list[set[Placement]] | None:
    """How each result lies; None where the operator does not take such parts."""
    operands = tensor_operands(args, kwargs, is_tensor)
    cuts = [_cut(x, place, k + 16 * salt) for k, (x, place) in enumerate(zip(operands, placements, strict=True))]
    parts = []
    for rank in range(2):
        local = map_operands(args, kwargs, fed([cut[rank] for cut in cuts]), is_tensor)
        try:
            parts.append(flat(op(*local[0], **local[1])))
        except (RuntimeError, IndexError, ValueError):
            return None
    if any(len(p) != len(results) for p in parts):
        return None
    out = []
    for k, whole in enumerate(results):
        found = _placed(whole, [p[k] for p in parts])
        if not found:
            return None
        out.append(found)
    return out


def _cut(x: Tensor, place: Placement, salt: int) -> list[Tensor]:
    if isinstance(place, int):
        border = -(-x.shape[place] // 2)
        return [x.narrow(place, 0, border), x.narrow(place, border, x.shape[place] - border)]
    return [x, x] if place == "whole" else terms(x, place, 2, salt)


def _placed(whole: Tensor | None, pieces: list[Tensor | None]) -> set[Placement]:
    """All the ways in which the pieces of two ranks make up a result."""
    if whole is None:
        return {"whole"}
    a, b = pieces
    if a is None or b is None or a.dtype != whole.dtype:
        return set()
    out: set[Placement] = set()
    if a.shape == b.shape == whole.shape:
        if not differs(a, whole) and not differs(b, whole):
            out.add("whole")
        if whole.dtype != torch.bool and not differs(a + b, whole):
            out.add("sum")
        if not whole.dtype.is_complex:
            out |= {kind for kind, f in (("max", torch.maximum), ("min", torch.minimum)) if not differs(f(a, b), whole)}
    for k in range(whole.dim()):
        rest = [n for i, n in enumerate(whole.shape) if i != k]
        fits = all(p.dim() == whole.dim() and [n for i, n in enumerate(p.shape) if i != k] == rest for p in (a, b))
        if fits and not differs(torch.cat([a, b], k), whole):
            out.add(k)
    return out
