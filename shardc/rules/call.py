"""One call of an operator, seen through its schema, and the draft of the rule that is made for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from shardc.errors import RuleError
from shardc.program import TensorType, Types
from shardc.rules.rule import PASS, DimFactors, Factors, Rule, Sized

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def is_type(value: object) -> bool:
    """The default test for a tensor operand in an argument tree."""
    return isinstance(value, TensorType)


def tensor_operands(args: Any, kwargs: Mapping[str, Any], is_tensor: Callable[[Any], bool] = is_type) -> list[Any]:
    """The tensor operands of a call, in the order that rules number them: arguments first, nested lists flattened."""
    out: list[Any] = []

    def walk(value: Any) -> None:
        if is_tensor(value):
            out.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)

    walk(tuple(args))
    walk(tuple(kwargs.values()))
    return out


def map_operands(
    args: Any, kwargs: Mapping[str, Any], fn: Callable[[Any], Any], is_tensor: Callable[[Any], bool] = is_type
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same argument tree with `fn` applied to each tensor operand, in the order of `tensor_operands`."""

    def walk(value: Any) -> Any:
        if is_tensor(value):
            return fn(value)
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        return value

    return tuple(walk(a) for a in args), {k: walk(v) for k, v in kwargs.items()}


class Call:
    """A call with its arguments by schema name.

    Args:
        target: the operator.
        args, kwargs: its arguments, tensors replaced by `TensorType`; numbers may be anything (symbols are opaque).
        result: the type of what it returns.
    """

    def __init__(self, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Types) -> None:
        self.target, self.args, self.kwargs = target, tuple(args), dict(kwargs)
        self.operands: list[TensorType] = tensor_operands(self.args, self.kwargs)
        self.results: tuple[TensorType | None, ...] = result if isinstance(result, tuple) else (result,)

    @property
    def name(self) -> str:
        return str(self.target)

    @cached_property
    def _bound(self) -> dict[str, tuple[int | str | None, Any]]:
        """Argument name -> where it stands, and its value. Made when first asked for: elementwise rules never do."""
        out: dict[str, tuple[int | str | None, Any]] = {}
        for k, a in enumerate(self.target._schema.arguments):
            name = a.name
            if k < len(self.args):
                out[name] = (k, self.args[k])
            elif name in self.kwargs:
                out[name] = (name, self.kwargs[name])
            else:
                out[name] = (None, a.default_value)
        return out

    def __getitem__(self, name: str) -> Any:
        """Value of an argument, or its default."""
        return self._bound[name][1]

    def __contains__(self, name: str) -> bool:
        return name in self._bound

    def key(self, name: str) -> int | str | None:
        """Where the argument stands in the call: a position, a keyword, or None where it is left out."""
        return self._bound.get(name, (None, None))[0]

    def sized(self, name: str, how: Sized) -> dict[int | str, Sized]:
        key = self.key(name)
        return {} if key is None else {key: how}

    def position(self, name: str) -> int | None:
        """Number among the operands of a tensor argument (of the first tensor of a list); None where it is absent."""
        before, wanted = 0, self.key(name)
        for key, value in [*enumerate(self.args), *self.kwargs.items()]:
            found = len(tensor_operands((value,), {}))
            if key == wanted:
                return before if found else None
            before += found
        return None

    def dim(self, name: str, rank: int) -> int:
        """A dim argument as a non-negative int."""
        return int(self[name]) % max(rank, 1)

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """A list of dims; None and an empty list stand for all."""
        value = self[name]
        if value is None or (isinstance(value, (list, tuple)) and not value):
            return tuple(range(rank))
        return tuple(sorted({int(d) % max(rank, 1) for d in (value if isinstance(value, (list, tuple)) else [value])}))

    def refuse(self, what: str, hint: str = "") -> RuleError:
        types = ", ".join(map(str, self.operands))
        return RuleError(f"{self.name}({types}): {what}", hint=hint or f"shardc.rules.register(torch.ops.{self.name}, ...)")


Builder = Callable[[Call], Rule]
"""Makes the rule of one call."""


class Draft:
    """Names factors while a rule is made."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.sizes: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        self._names = _names()

    def new(self, size: int, kind: str = PASS) -> DimFactors:
        """A dim of one fresh factor."""
        name = next(self._names)
        self.sizes[name] = size
        if kind != PASS:
            self.kinds[name] = kind
        return (name,)

    def fresh(self, shape: Sequence[int], kind: str = PASS) -> list[DimFactors]:
        return [self.new(n, kind) for n in shape]

    def broadcast(self, shape: Sequence[int], dims: Sequence[DimFactors]) -> Factors:
        """The factors of an operand of `shape` that is broadcast (aligned at the right) against `dims`."""
        if len(shape) > len(dims):
            raise self.call.refuse(f"an operand of shape {list(shape)} does not broadcast to {len(dims)} dims")
        out: list[DimFactors] = []
        for n, d in zip(shape, dims[len(dims) - len(shape) :], strict=True):
            full = self.size(d)
            if n != full and n != 1:
                raise self.call.refuse(f"an operand of shape {list(shape)} does not broadcast: {n} against {full}")
            out.append(d if n == full else ())
        return tuple(out)

    def size(self, dim: DimFactors) -> int:
        out = 1
        for f in dim:
            out *= self.sizes[f]
        return out

    def rule(
        self,
        operands: Iterable[Sequence[DimFactors]],
        results: Iterable[Sequence[DimFactors] | None],
        linear: Sequence[frozenset[int]] = (),
        any_partial: bool = False,
        sized: Mapping[int | str, Sized] | None = None,
        orders: Sequence[tuple[frozenset[int], str, str]] = (),
        tied: frozenset[tuple[str, str]] = frozenset(),
    ) -> Rule:
        left = tuple(map(tuple, operands))
        right = tuple(None if r is None else tuple(r) for r in results)
        used = {f for t in (*left, *right) if t is not None for d in t for f in d}
        return Rule(
            left,
            right,
            {f: n for f, n in self.sizes.items() if f in used},
            {f: k for f, k in self.kinds.items() if f in used},
            tuple(s for s in linear if holds(self.call, s)),
            any_partial,
            sized or {},
            tuple(o for o in orders if all(k < len(self.call.operands) for k in o[0])),
            tied,
        )


def rising(*operands: int) -> tuple[tuple[frozenset[int], str, str], ...]:
    """`Rule.orders` of an elementwise operator that rises in each of these operands."""
    return tuple((frozenset({k}), kind, kind) for k in operands for kind in ("max", "min"))


def choosing(*operands: int, kinds: tuple[str, ...] = ("max", "min")) -> tuple[tuple[frozenset[int], str, str], ...]:
    """`Rule.orders` of an operator each of whose results is an element of one of these operands (a choice that is the
    same on all ranks): any of them may be pending. With one kind: of one that takes the maximum (minimum) of its
    operands."""
    counts = range(1, len(operands) + 1) if len(operands) <= 5 else (1, len(operands))
    some = [frozenset(c) for n in counts for c in itertools.combinations(operands, n)]
    return tuple((held, kind, kind) for held in some for kind in kinds)


def falling(*operands: int) -> tuple[tuple[frozenset[int], str, str], ...]:
    """The same of one that falls: the maximum of the operand gives the minimum of the result."""
    return tuple((frozenset({k}), a, b) for k in operands for a, b in (("max", "min"), ("min", "max")))


def sets(text: str) -> tuple[frozenset[int], ...]:
    """``"0&1 | 2"`` -> the sets of operand positions of `Rule.linear`."""
    return tuple(frozenset(int(p) for p in part.split("&")) for part in text.split("|") if part.strip())


def holds(call: Call, linear: frozenset[int]) -> bool:
    """Whether the operands are there, and no result rounds more coarsely than what is summed up later."""
    if any(k >= len(call.operands) for k in linear):
        return False
    return all(_at_least(r.dtype, call.operands[k].dtype) for k in linear for r in call.results if r is not None)


def _at_least(result: torch.dtype, operand: torch.dtype) -> bool:
    if result == torch.bool or operand == torch.bool:
        return False
    if result.is_complex:
        return not operand.is_complex or result.itemsize >= operand.itemsize
    if operand.is_complex:
        return result.is_floating_point and 2 * result.itemsize >= operand.itemsize
    if operand.is_floating_point:
        if not result.is_floating_point or result.itemsize < operand.itemsize:
            return False
        new, old = torch.finfo(result), torch.finfo(operand)
        return new.eps <= old.eps and new.max >= old.max
    return result.is_floating_point or result.itemsize >= operand.itemsize


def _names() -> Iterator[str]:
    for n in itertools.count():
        for letter in LETTERS:
            yield letter + (str(n) if n else "")


def overload(name: str) -> torch._ops.OpOverload | None:
    """The operator of a table's name (``aten.mm.default``); None where it is not defined in this process."""
    space, packet, which = name.split(".")
    op = getattr(getattr(getattr(torch.ops, space), packet, None), which, None)
    return op if isinstance(op, torch._ops.OpOverload) else None
