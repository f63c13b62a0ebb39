"""What a factor rule is: the factors of an operator call, and which dims of which operands and results they make up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardc.errors import RuleError

PASS, SUM, MAX, MIN, WHOLE = "pass", "sum", "max", "min", "whole"
KINDS = (PASS, SUM, MAX, MIN, WHOLE)

DimFactors = tuple[str, ...]
"""The factors of one dim, major first; empty for a dim of size 1 that belongs to no factor (a broadcast dim)."""
Factors = tuple[DimFactors, ...]
"""One `DimFactors` for each dim of a tensor."""


@dataclass(frozen=True)
class Shape:
    """A size argument that is the local shape of a result."""

    result: int = 0


@dataclass(frozen=True)
class Start:
    """An argument that is where the local part of one dim begins: of a result, or of an operand."""

    tensor: int
    dim: int
    of_result: bool = False


@dataclass(frozen=True)
class Extent:
    """A size argument, or an entry of one, that is the local size of one dim of a result."""

    result: int
    dim: int


Sized = Shape | Start | Extent | tuple[Extent, ...] | tuple[Start, ...]


@dataclass(frozen=True)
class Rule:
    """How one operator *call* may be split. Sizes are global, so a rule is made for the types of the call's operands.

    Args:
        operands: the factors of each tensor operand, in the order in which `tensor_operands` finds them in the arguments.
        results: the factors of each result (one entry for a single tensor; None for an absent result).
        sizes: factor -> number of elements.
        kinds: factor -> "pass" (default: split alike wherever it appears; a result that lacks the factor is the same on all
            parts, and is computed by empty parts too), "sum" / "max" / "min" (results that lack the factor are partial
            over its axes), "whole" (never split: gather first).
        linear: sets of operand positions. If, over one axis, exactly the operands of one set are partial sums (and the
            others are not partial), every result is a partial sum over that axis.
        any_partial: operand 0 may be partial with *any* reduction and the result keeps it (views, copies).
        orders: (operand positions, max or min, max or min): if, over one axis, exactly these operands are partial maxima (or
            minima), every result is a partial maximum (or minimum) over it. What rises or falls in an element has these.
        sized: arguments that hold sizes and must be localised: argument position (int) or keyword -> what it is the size of.
            See `shardc.rules.localise`.
        tied: pairs of factors (each both ways) that may be split over the same axis, as every element of the one lies in the
            part of the other that the same rank holds (rows of a selection, and the dim that they were selected from).
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors | None, ...]
    sizes: Mapping[str, int]
    kinds: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    any_partial: bool = False
    sized: Mapping[int | str, Sized] = field(default_factory=dict)
    orders: tuple[tuple[frozenset[int], str, str], ...] = ()
    tied: frozenset[tuple[str, str]] = frozenset()

    def through(self, held: frozenset[int], reduction: str) -> str | None:
        """The pending reduction of the results where exactly the operands of `held` have one; None: it has to be made first."""
        if (reduction == "sum" and held in self.linear) or (self.any_partial and held == {0}):
            return reduction
        return next((out for where, kind, out in self.orders if where == held and kind == reduction), None)

    @property
    def makes(self) -> bool:
        """Whether its one result has a factor that no operand has."""
        given = {f for t in self.operands for d in t for f in d}
        return len(self.results) == 1 and any(f not in given for d in self.results[0] or () for f in d)

    def kind(self, factor: str) -> str:
        return self.kinds.get(factor, PASS)

    def __post_init__(self) -> None:
        used = {f for t in (*self.operands, *self.results) if t is not None for d in t for f in d}
        missing = used - set(self.sizes)
        if missing:
            raise RuleError(f"factors without a size: {sorted(missing)} in {self}")
        bad = {k for k in self.kinds.values() if k not in KINDS}
        if bad:
            raise RuleError(f"unknown factor kinds {sorted(bad)}", hint=f"one of {', '.join(KINDS)}")

    def __str__(self) -> str:
        """``[i,k],[k,j]->[i,j]; k: sum; linear: 0 | 1``"""
        left = ",".join(map(_text, self.operands))
        right = ",".join("-" if r is None else _text(r) for r in self.results)
        tail = [f"{f}: {k}" for f, k in self.kinds.items() if k != PASS]
        if self.any_partial:
            tail.append("partial: any")
        if self.linear:
            tail.append("linear: " + " | ".join("&".join(map(str, sorted(s))) for s in self.linear))
        if self.orders:
            tail.append("order: " + " | ".join(_order_text(self.orders)))
        if self.sized:
            tail.append("sized: " + ", ".join(map(str, self.sized)))
        if self.tied:
            tail.append("tied: " + ", ".join(sorted("".join(pair) for pair in self.tied if pair[0] < pair[1])))
        return "; ".join([f"{left}->{right}", *tail])


def _order_text(orders: tuple[tuple[frozenset[int], str, str], ...]) -> list[str]:
    """``0`` rises in operand 0, ``-1`` falls in operand 1, ``0&1 max`` takes the maximum of both."""
    out = []
    for held in dict.fromkeys(held for held, _, _ in orders):
        pairs = {(a, b) for h, a, b in orders if h == held}
        name = "&".join(map(str, sorted(held)))
        if pairs == {("max", "max"), ("min", "min")}:
            out.append(name)
        elif pairs == {("max", "min"), ("min", "max")}:
            out.append("-" + name)
        else:
            out += [f"{name} {a}" for a, _ in sorted(pairs)]
    return out


def _text(factors: Factors) -> str:
    return "[" + ",".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in factors) + "]"


def parse_factors(text: str) -> tuple[Factors | None, ...]:
    """``"[i,k],[(b t),1]"`` -> the factors of two tensors."""
    out: list[Factors | None] = []
    for part in re.findall(r"\[[^\]]*\]|-", text):
        if part == "-":
            out.append(None)
            continue
        dims = [d.strip() for d in part[1:-1].split(",")] if part[1:-1].strip() else []
        out.append(tuple(() if d == "1" else tuple(d.strip("()").split()) for d in dims))
    return tuple(out)
