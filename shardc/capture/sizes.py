"""Sizes that depend on data: how many rows ``nonzero`` finds.

Such a size is a symbol of torch's, so that shapes and Python arithmetic on them are exact. In a program it is a prime larger
than every other size: dims that are made of it are told by division, and stay apart from all others. Framework code that asks
about a size is answered as for any size of two and more; a decision of the user's code on one is asked for and guarded, like
every decision on a value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from shardc import _torch
from shardc._torch import FakeTensorMode
from shardc.capture.lines import asks_itself
from shardc.errors import CaptureError

Count = Callable[[], Any]
"""Makes the number of rows, as a recorded number of the step."""

_FUNCTIONS = {
    "FloorDiv": operator.floordiv, "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv, "Mod": operator.mod,
    "PythonMod": operator.mod, "PowByNatural": operator.pow, "FloatPow": operator.pow, "ToFloat": torch.sym_float,
    "Max": torch.sym_max, "Min": torch.sym_min,
}  # fmt: skip


class Sizes:
    """The sizes of one trace.

    Args:
        fake_mode: the mode that computes shapes.
        value: the value of a number that the user's code decides on.
        line: the user's source line.
    """

    def __init__(self, fake_mode: FakeTensorMode, value: Callable[[Any], Any], line: Callable[[], str]) -> None:
        self.fake_mode, self.value, self.line = fake_mode, value, line
        self.counts: dict[Any, Count] = {}
        self.largest = 1009
        self.primes: list[int] = []
        self._primes = self._fresh()

    def note(self, shape: tuple[int, ...]) -> None:
        """A shape that occurs in the step: stand-ins are larger than its sizes."""
        self.largest = max(self.largest, *shape) if shape else self.largest

    def _fresh(self) -> Iterator[int]:
        prime = 1
        while True:
            prime = sympy.nextprime(max(prime, self.largest))
            yield prime

    def new(self, bound: int, count: Count) -> torch.SymInt:
        """A new size of at most `bound`."""
        self.largest = max(self.largest, bound)
        if self.fake_mode.shape_env is None:
            self.fake_mode.shape_env = _torch.shape_env(self._asked)
        prime = next(self._primes)
        size, expr = _torch.sized(self.fake_mode.shape_env, f"u{len(self.counts)}", prime)
        self.primes.append(prime)
        self.counts[expr] = count
        return size

    def number(self, size: Any) -> Any:
        """A size, or a condition on sizes, as a recorded number of the step.

        Raises:
            CaptureError: arithmetic on sizes that has no form as a number.
        """
        expr = size if isinstance(size, sympy.Basic) else size.node.expr
        names = sorted(expr.free_symbols, key=str)
        try:
            return sympy.lambdify(names, expr, modules=[_FUNCTIONS, "math"])(*(self.counts[n]() for n in names))
        except (TypeError, NameError) as error:
            raise CaptureError(f"the size {expr} depends on data in a way that cannot be recorded ({error})",
                               where=self.line()) from error  # fmt: skip

    def _asked(self, expr: Any, hint: Any) -> Any:
        """The answer to a question about sizes: the user's is decided, the framework's is that of the stand-in."""
        if asks_itself() and not getattr(expr, "is_number", False) and getattr(expr, "free_symbols", None):
            return self.value(self.number(expr))
        return hint
