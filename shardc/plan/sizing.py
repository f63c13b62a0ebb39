"""The peak of a step at other sizes: the largest batch that fits, and closed forms in batch, length and mesh size.

Both plan the step again at other sizes, so that nothing is assumed of how memory grows. A closed form is the maximum, over the
moments of the step, of polynomials that pass through the planned sizes exactly; it is checked at a size that was not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import sympy  # type: ignore[import-untyped]

from shardc.errors import PlanError
from shardc.mesh import Mesh

if TYPE_CHECKING:
    from shardc.plan.plan import Plan

DEGREE = {"batch": 1, "length": 2}
"""Bytes grow with the batch, and with up to the square of the length; with the inverse of a mesh axis."""

MOST = 1 << 40
"""No batch is larger."""


class Again(Protocol):
    """How a plan's step is planned at other sizes."""

    rows: int
    length: int | None

    def plan(self, rows: int | None = None, length: int | None = None, mesh: Mesh | None = None) -> Plan:
        """The plan with so many rows in the global batch, so long a dim 1, on another mesh."""
        ...  # pragma: no cover

    def lowest(self, rows: int) -> int:
        """The lowest predicted peak with so many rows."""
        ...  # pragma: no cover


def largest_batch(again: Again, budget: int, unit: int) -> int:
    """The most rows of the global batch whose predicted peak fits; 0 if not even `unit` rows do.

    Args:
        unit: ranks that share the batch: each has the same number of rows.
    """
    seen: dict[int, int] = {}

    def peak(k: int) -> int:
        if k not in seen:
            seen[k] = again.lowest(k * unit)
        return seen[k]

    k = max(again.rows // unit, 1)
    low, high = 0, MOST // unit  # low fits, high does not
    while high - low > 1:
        if peak(k) <= budget:
            low = k
        else:
            high = k
        points = sorted(seen.items())
        if len(points) == 1:
            k = 2 * k if low else k // 2
        else:
            near = sorted(points, key=lambda item: abs(item[1] - budget))[:2]
            (k0, p0), (k1, p1) = sorted(near)
            k = int(k0 + (budget - p0) * (k1 - k0) // (p1 - p0)) if p1 > p0 else 2 * k1
        k = min(max(k, low + 1), high - 1)
        if high - low > 1 and k in seen:
            k = (low + high) // 2
    return low * unit


def formula(again: Again, mesh: Mesh, names: Sequence[str]) -> Any:
    """See `Plan.peak_formula`."""
    symbols = [sympy.Symbol(n, positive=True) for n in names]
    most = 1
    sizes: list[list[int]] = []
    for name in names:
        if name in mesh.axes:
            n = mesh.axes[name]
            sizes.append([n, 2 * n, 4 * n])
            most *= 4 * n
    values = dict(zip([n for n in names if n in mesh.axes], sizes, strict=True))
    for name in names:
        if name == "batch":
            unit = -(-again.rows // most) * most
            values[name] = [unit, 2 * unit, 3 * unit]
        elif name == "length":
            if again.length is None or again.length < 8:
                raise PlanError(f"the inputs have no dim 1 of at least 8 elements to vary: {again.length}")
            values[name] = [again.length, again.length // 2, again.length // 4, again.length - again.length // 4]
        elif name not in mesh.axes:
            raise PlanError(f"{name!r} is no size of this plan", hint=f"batch, length or a mesh axis: {', '.join(mesh.axes)}")

    def terms(point: Sequence[int]) -> list[Fraction]:
        powers = []
        for name, x in zip(names, point, strict=True):
            inverse = name in mesh.axes
            powers.append([Fraction(1, x) ** d if inverse else Fraction(x) ** d for d in range(DEGREE.get(name, 1) + 1)])
        out = []
        for combination in itertools.product(*powers):
            term = Fraction(1)
            for factor in combination:
                term *= factor
            out.append(term)
        return out

    def plan(point: Sequence[int]) -> Plan:
        given = dict(zip(names, point, strict=True))
        axes = {a: given.get(a, n) for a, n in mesh.axes.items()}
        rows = given.get("batch", again.rows)
        return again.plan(rows, given.get("length"), mesh.like(axes))

    samples = list(itertools.product(*(values[n][: DEGREE.get(n, 1) + 1] for n in names)))
    moments, first = [], None
    for point in samples:
        made = plan(point)
        first = made if first is None else first
        if [m.name for m in made.memory.timeline] != [m.name for m in first.memory.timeline]:
            raise PlanError(
                f"the plan at {dict(zip(names, point, strict=True))} has other instructions than at the first size",
                hint="closed forms need sizes that every rank shares evenly; plan the sizes one by one",
            )
        moments.append([made.memory.start_bytes, *(m.bytes for m in made.memory.timeline)])
    matrix = sympy.Matrix([[sympy.Rational(t.numerator, t.denominator) for t in terms(p)] for p in samples]).inv()
    inverse = np.array([[Fraction(int(c.p), int(c.q)) for c in matrix.row(r)] for r in range(matrix.rows)], dtype=object)
    coefficients = _undominated({tuple(column) for column in (inverse @ np.array(moments, dtype=object)).T})
    held_out = [values[n][-1] for n in names]
    wanted = plan(held_out).memory.peak_bytes
    found = max(sum(c * t for c, t in zip(cs, terms(held_out), strict=True)) for cs in coefficients)
    if found != wanted:
        raise PlanError(
            f"the peak is no polynomial in {', '.join(names)} here: at {dict(zip(names, held_out, strict=True))} it is"
            f" {wanted:,} bytes, not {float(found):,.0f}",
            hint="sizes that every rank shares evenly; or plan the sizes one by one",
        )
    bases = [1 / s if n in mesh.axes else s for n, s in zip(names, symbols, strict=True)]
    powers = [[b**d for d in range(DEGREE.get(n, 1) + 1)] for n, b in zip(names, bases, strict=True)]
    monomials = [sympy.Mul(*c) for c in itertools.product(*powers)]
    polynomials = [
        sympy.Add(*(sympy.Rational(c.numerator, c.denominator) * m for c, m in zip(cs, monomials, strict=True)))
        for cs in sorted(coefficients, reverse=True)
    ]
    return sympy.Max(*polynomials, evaluate=False) if len(polynomials) > 1 else polynomials[0]


def _undominated(rows: set[tuple[Fraction, ...]]) -> list[tuple[Fraction, ...]]:
    """Polynomials of which no other is larger in every coefficient (all terms are positive)."""
    out: list[tuple[Fraction, ...]] = []
    for row in sorted(rows, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in out):
            out.append(row)
    return out
