"""Operators that pick as many elements as the data says: all are reads and writes at the positions that ``nonzero`` gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from shardc import _torch
from shardc._torch import FakeTensorMode, is_size
from shardc.capture.lines import Place
from shardc.capture.numbers import is_symbol
from shardc.capture.sizes import Sizes
from shardc.capture.values import Values
from shardc.errors import CaptureError
from shardc.program import Draw, Info, Phase, TensorType, Types, op_name
from shardc.rows import rows_in
from shardc.rules import writes_one_value

aten = torch.ops.aten
RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default)


class Tape(Protocol):
    """Where operators are written: the recorder of the trace."""

    graph: fx.Graph
    info: dict[fx.Node, Info]
    draws: dict[fx.Node, Draw]
    fake_mode: FakeTensorMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any: ...
    def node_of(self, fake: Tensor) -> fx.Node | None: ...
    def stranger(self, x: Tensor, func: Any) -> CaptureError: ...
    def place(self, inputs: list[fx.Node]) -> tuple[Phase, Place]: ...
    def bind_results(self, node: fx.Node, out: Any) -> None: ...
    def item(self, x: Tensor) -> Any: ...
    def line(self) -> str: ...


class Selections:
    """The selections of one trace."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.sizes = Sizes(tape.fake_mode, _decided, tape.line)
        self.values = Values(tape.graph, tape.draws)
        self.found: dict[fx.Node, Tensor] = {}  # mask -> positions of its true elements

    def release(self) -> None:
        """Forget the fake tensors."""
        self.found.clear()

    def call(self, op: Any, *args: Any) -> Any:
        return self.tape.__torch_dispatch__(op, (), args)

    def counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments in which sizes that depend on data are numbers, where they are values and no shapes.

        Raises:
            CaptureError: a range of as many numbers.
        """
        if not any(map(is_size, (*args, *kwargs.values()))):
            return args, kwargs
        if func in RANGES:
            raise CaptureError(f"{op_name(func)} over a number of rows that depends on data", where=self.tape.line(),
                               hint="number the rows before they are selected")  # fmt: skip
        shapes = _torch.integer_arguments(func)
        count: Callable[[str, Any], Any] = lambda k, x: self.sizes.number(x) if k not in shapes and is_size(x) else x  # noqa: E731
        names = [a.name for a in func._schema.arguments]
        return tuple(map(count, names, args)), {k: count(k, v) for k, v in kwargs.items()}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of such an operator; None for all others.

        A mask is what ``nonzero`` makes of it. Where Python walks over the rows of a selection, it decides on their number.
        """
        if func is aten.nonzero.default:
            return self.positions(args[0])
        if func is aten.index_put.default and writes_one_value(*args[:3]):
            return None  # a choice by the mask, which needs no positions
        if func in (aten.index.Tensor, aten.index_put.default) and any(map(_is_mask, args[1])):
            return self.tape.__torch_dispatch__(func, (), (args[0], self.indices(args[1]), *args[2:]), kwargs)
        if func is aten.masked_select.default:
            x, mask = (self.call(aten.expand.default, t, _joint(*args)) for t in args)
            return self.call(aten.index.Tensor, x, self.indices([mask]))
        if func is aten.masked_scatter.default and args[2].dim() == 1 and is_size(args[2].shape[0]):
            mask = self.call(aten.expand.default, args[1], list(args[0].shape))
            return self.call(aten.index_put.default, args[0], self.indices([mask]), args[2])
        if func is aten.unbind.int and is_size(args[0].shape[dim := args[1] if len(args) > 1 else 0]):
            rows = _decided(self.sizes.number(args[0].shape[dim]))
            return [self.call(aten.select.int, args[0], dim, i) for i in range(rows)]
        return None

    def refuse_equal_sizes(self, func: Any, out: Any) -> None:
        """What is made after a selection may not have, by accident, a size that stands for its number of rows.

        Raises:
            CaptureError: a result that has.
        """
        primes = self.sizes.primes
        made = [t for t in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(t, Tensor)] if primes else []
        equal = [n for t in made for n in t.shape if isinstance(n, int) and rows_in(n, primes)]
        if equal:
            raise CaptureError(
                f"{op_name(func)} makes a tensor with a size of {equal[0]}, which stands for a number of rows that depends on "
                "data", where=self.tape.line(), hint="make it before the rows are selected, or of another size",
            )  # fmt: skip

    def indices(self, given: Any) -> list[Any]:
        """Indices in which each mask is replaced by the positions of its true elements."""
        out: list[Any] = []
        for i in given:
            if _is_mask(i):
                rows = self.positions(i)
                out += [self.call(aten.select.int, rows, 1, k) for k in range(i.dim())]
            else:
                out.append(i)
        return out

    def positions(self, x: Tensor) -> Tensor:
        """The positions of the elements that are not zero, [rows, dims]: the same for equal masks."""
        tape = self.tape
        source = tape.node_of(x)
        if source is None:
            raise tape.stranger(x, aten.nonzero.default)
        source = self.values.first(source)
        if source not in self.found:
            for node in tape.graph.nodes:
                self.sizes.note(_sizes_of(tape.info[node].type) if node in tape.info else ())
            rows = self.sizes.new(
                max(1, math.prod(map(_torch.plain_size, x.shape))), lambda: tape.item(self.call(aten.count_nonzero.default, x))
            )
            phase, where = tape.place([source])
            with tape.fake_mode:
                out = torch.empty((rows, x.dim()), dtype=torch.int64)
            node = tape.graph.call_function(aten.nonzero.default, (source,))
            tape.info[node] = Info(TensorType.of(out), phase, where.module, where.line)
            tape.bind_results(node, out)
            self.found[source] = out
        return self.found[source]


def _decided(number: Any) -> Any:
    return number.node.decide() if is_symbol(number) else number


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def _joint(*tensors: Tensor) -> list[int]:
    return list(torch.broadcast_shapes(*(t.shape for t in tensors)))  # type: ignore[no-untyped-call]


def _sizes_of(kind: Types) -> tuple[int, ...]:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return tuple(n for t in kinds if t is not None for n in t.shape)
