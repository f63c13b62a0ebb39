"""Python numbers of the step as recorded values: hyperparameters, counters and what `.item()` returns.

A `Number` is the node behind a `torch.SymFloat`, `SymInt` or `SymBool`. Arithmetic on it is written into the graph in the
order Python does it, so a replay in Python floats is bitwise what eager computes; no algebra is applied. A number whose value
the host knows before the step (a learning rate) has a hint; deciding on it records a guard. One that comes out of a tensor has
none: deciding on it asks the tape, which has the value computed and records a guard of the program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.experimental.sym_node import SymNode

from shardc.errors import CaptureError

Hint = float | int | bool | None


class NumberTape(Protocol):
    """Where numbers are written: the recorder of the trace."""

    def number_op(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node: ...
    def guard(self, node: fx.Node, value: float | int | bool) -> None: ...
    def decide(self, node: fx.Node, pytype: type) -> float | int | bool: ...
    def line(self) -> str: ...


class Number(SymNode):
    """A number of the step.

    Args:
        tape: the recorder.
        node: its node in the graph; None for a constant.
        pytype: float, int or bool.
        hint: its value in the call being captured where the host knows it; None where it comes out of a tensor.
        constant: its value if it is a literal.
    """

    def __init__(self, tape: NumberTape, node: fx.Node | None, pytype: type, hint: Hint, constant: Hint = None) -> None:
        self.tape, self.fx_node, self.pytype, self.constant = tape, node, pytype, constant
        self._hint: Any = hint
        self._expr, self.shape_env = None, None
        self.later = False

    @classmethod
    def set_later(cls, tape: NumberTape, pytype: type) -> Number:
        """A number that the host sets after the step: it must not be read any more."""
        out = cls(tape, None, pytype, None)
        out.later = True
        return out

    def recorded(self) -> Any:
        """Its node, or its value if it is a literal.

        Raises:
            CaptureError: it has no value inside this step.
        """
        if self.constant is not None:
            return self.constant
        if self.fx_node is None:
            raise CaptureError(
                "a number that a scheduler sets is read after scheduler.step() in the same step", where=self.tape.line(),
                hint="call scheduler.step() last, or outside of the compiled step",
            )  # fmt: skip
        return self.fx_node

    # -- what torch asks of a node -------------------------------------------------------------------------------------

    @property
    def expr(self) -> Any:
        raise CaptureError(f"torch asks for the symbolic form of {self._name()}", where=self.tape.line())

    def _name(self) -> str:
        return "a number computed from a tensor" if self._hint is None else "a number of the step"

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return self.constant is not None

    def is_symbolic(self) -> bool:
        return self.constant is None

    def maybe_as_int(self) -> int | None:
        return int(self.constant) if self.constant is not None else None

    def maybe_as_float(self) -> float | None:
        return float(self.constant) if self.constant is not None else None

    def maybe_as_bool(self) -> bool | None:
        return bool(self.constant) if self.constant is not None else None

    def wrap_int(self, num: int) -> Number:
        return Number(self.tape, None, int, num, num)

    def wrap_float(self, num: float) -> Number:
        return Number(self.tape, None, float, num, num)

    def wrap_bool(self, num: bool) -> Number:
        return Number(self.tape, None, bool, num, num)

    def with_shape_env(self, shape_env: Any) -> Number:
        return self

    def str(self) -> str:
        if self.constant is not None:
            return repr(self.constant)
        raise CaptureError(
            f"{self._name()} is printed or formatted inside the step, before it has a value",
            where=self.tape.line(),
            hint="return it from the step and print it outside",
        )

    def _graph_repr(self) -> Any:
        return self.str()

    def __repr__(self) -> Any:
        return f"Number({self.constant if self.fx_node is None else self.fx_node})"

    __str__ = __repr__

    # -- decisions -----------------------------------------------------------------------------------------------------

    def decide(self) -> float | int | bool:
        """Its value, as a decision that the program depends on from here."""
        if self.constant is not None:
            return self.constant
        node = self.recorded()
        assert isinstance(node, fx.Node)
        if self._hint is None:
            return self.tape.decide(node, self.pytype)
        value: float | int | bool = self._hint
        self.tape.guard(node, value)
        return value

    def evaluate(self, size_oblivious: bool = False) -> bool | int | float:
        return self.decide()

    def guard_int(self, file: Any, line: int) -> int:
        return int(self.sym_int().decide())

    def guard_float(self, file: Any, line: int) -> float:
        return float(self.decide())

    def guard_bool(self, file: Any, line: int) -> bool:
        return self.bool_()

    def bool_(self) -> bool:
        """Whether it is true: a guard on that alone, not on its exact value."""
        return bool(self.decide() if self.pytype is bool else self.apply(operator.truth, bool).decide())

    def guard_size_oblivious(self, file: Any, line: int) -> bool:
        return bool(self.decide())

    def guard_or_false(self, file: Any, line: int) -> bool:
        return bool(self._hint)

    def guard_or_true(self, file: Any, line: int) -> bool:
        return self._hint is None or bool(self._hint)

    def statically_known_true(self, file: Any, line: int) -> bool:
        return bool(self.constant)

    def expect_true(self, file: Any, line: int) -> bool:
        return self._hint is None or bool(self._hint)

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def apply(self, target: Callable[..., Any], pytype: type, *others: Number | int | None) -> Number:
        """``target(self, *others)`` as a new node."""
        numbers = [self, *(o for o in others if o is not None)]
        hints = [n._hint if isinstance(n, Number) else n for n in numbers]
        hint = None if any(h is None for h in hints) else target(*hints)
        if all(not isinstance(n, Number) or n.constant is not None for n in numbers):
            return Number(self.tape, None, pytype, hint, hint)
        args = tuple(n.recorded() if isinstance(n, Number) else n for n in numbers)
        return Number(self.tape, self.tape.number_op(target, args), pytype, hint)

    def _kind(self, other: Number | None = None) -> type:
        kinds = {self.pytype, *([other.pytype] if other is not None else [])}
        return float if float in kinds else int

    def round(self, ndigits: int | None = None) -> Number:
        return self.apply(round, int if ndigits is None else float, ndigits)

    def sym_float(self) -> Number:
        return self if self.pytype is float else self.apply(float, float)

    def sym_int(self) -> Number:
        return self if self.pytype is int else self.apply(int, int)

    def sym_ite(self, then_val: Any, else_val: Any) -> Number:
        return self.apply(_ite, then_val._kind(else_val), then_val, else_val)

    def sym_sum(self, args: list[Any]) -> Any:
        out = args[0]
        for arg in args[1:]:
            out = out.add(arg)
        return out

    def is_integer(self) -> Number:
        return self.apply(float.is_integer, bool)


def _ite(cond: bool, then: float, other: float) -> float:
    return then if cond else other


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod, "int_floordiv": operator.floordiv,
    "floordiv": operator.floordiv, "pow_by_natural": operator.pow, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor, "lshift": operator.lshift, "rshift": operator.rshift, "sym_min": min, "sym_max": max,
    "neg": operator.neg, "pos": operator.pos, "abs": operator.abs,
}  # fmt: skip
_FLOAT: dict[str, Callable[..., Any]] = {
    "float_pow": operator.pow, "float_truediv": operator.truediv, "int_truediv": operator.truediv, "truediv": operator.truediv,
    "pow": operator.pow, "sym_sqrt": math.sqrt, "sym_cos": math.cos, "sym_sin": math.sin, "sym_tan": math.tan,
    "sym_cosh": math.cosh, "sym_sinh": math.sinh, "sym_tanh": math.tanh, "sym_acos": math.acos, "sym_asin": math.asin,
    "sym_atan": math.atan, "sym_log2": math.log2,
}  # fmt: skip
_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and_": operator.and_, "or_": operator.or_, "sym_and": operator.and_, "sym_or": operator.or_, "sym_not": operator.not_,
}  # fmt: skip
_INTEGER: dict[str, Callable[..., Any]] = {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}


def _method(target: Callable[..., Any], pytype: type | None) -> Callable[..., Number]:
    def method(self: Number, *others: Number) -> Number:
        return self.apply(target, pytype or self._kind(*others), *others)

    return method


for _table, _pytype in ((_ARITHMETIC, None), (_FLOAT, float), (_COMPARE, bool), (_INTEGER, int)):
    for _name, _target in _table.items():
        setattr(Number, _name, _method(_target, _pytype))


_SYMBOLS: dict[type, type] = {float: torch.SymFloat, int: torch.SymInt, bool: torch.SymBool}


def symbol(number: Number) -> Any:
    """The `SymFloat`, `SymInt` or `SymBool` over a number."""
    return _SYMBOLS[number.pytype](number)


def is_symbol(x: Any) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) and isinstance(x.node, Number)
