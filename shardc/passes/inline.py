"""Graphs of decompositions: a function of tensors, traced at the types of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardc._torch import FakeTensorMode, is_size, map_integers, shape_env, sized
from shardc.errors import PlanError
from shardc.program import TensorType, Types
from shardc.rows import rows_in, with_rows

SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)


class Tracer:
    """Traces each call once: calls of equal types share a graph.

    Args:
        table: operator -> function of the same arguments.
        primes: sizes that stand for numbers of rows which data decides (see `shardc.capture.sizes`). Where a function computes
            with such a size, its graph does too, from ``sym_size`` nodes; where it shapes a result, the graph has the stand-in.
    """

    def __init__(self, table: Mapping[Any, Callable[..., Any]], primes: Collection[int] = ()) -> None:
        self.table = table
        self.primes: dict[int, Any] = dict.fromkeys(primes)
        self._traced: dict[Any, fx.Graph] = {}
        self._fake = FakeTensorMode()

    def __contains__(self, target: Any) -> bool:
        return target in self.table

    def trace(self, target: Any, call: Any) -> fx.Graph:
        """The graph of the function for `target`.

        Args:
            call: (arguments, keyword arguments), tensors replaced by their types. Placeholders stand in their order.
        """
        key = (target, repr(call))
        if key not in self._traced:
            with self._fake:
                flat: list[torch.Tensor] = []

                def hole(a: Any) -> Any:
                    if isinstance(a, TensorType):
                        flat.append(torch.empty_strided(self._sizes(a.shape), self._sizes(a.stride), dtype=a.dtype))
                        return _Hole(len(flat) - 1)
                    return a

                holes = fx.node.map_aggregate(call, hole)

                def fn(*tensors: torch.Tensor) -> Any:
                    full: Any = fx.node.map_aggregate(holes, lambda a: tensors[a.index] if isinstance(a, _Hole) else a)
                    return self.table[target](*full[0], **full[1])

                self._traced[key] = _with_shapes(make_fx(fn)(*flat).graph)
        return self._traced[key]

    def _sizes(self, sizes: tuple[int, ...]) -> list[Any]:
        for prime in {p for n in sizes if (p := rows_in(n, self.primes)) is not None}:
            if self.primes[prime] is None:
                if self._fake.shape_env is None:
                    self._fake.shape_env = shape_env(_answer)
                self.primes[prime] = sized(self._fake.shape_env, f"u{prime}", prime)[0]
        return [with_rows(n, self.primes) for n in sizes]


def _answer(expr: Any, hint: Any) -> Any:
    """A function that asks whether a size is one or zero is told what holds for sizes of two and more; none gets to know it."""
    if not isinstance(hint, bool):
        raise PlanError(f"a decomposition takes the number of rows {expr} for a constant", hint="report it, with the operator")
    return hint


def _stand_in(node: fx.Node) -> Any:
    value: Any = node.meta.get("val")
    return value.node.hint if is_size(value) else node


def _with_shapes(graph: fx.Graph) -> fx.Graph:
    """Size arguments (not the schema's Scalars) as plain numbers; what is then unused is gone."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target not in SIZES:
            node.args, node.kwargs = map_integers(node.target, node.args, node.kwargs, lambda a: fx.node.map_arg(a, _stand_in))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and is_size(node.meta.get("val")):
            graph.erase_node(node)
    return graph


class _Hole:
    """The place of a tensor in an argument tree."""

    def __init__(self, index: int) -> None:
        self.index = index


def types_of(value: Any) -> Types:
    """The types of a traced value."""
    if isinstance(value, torch.Tensor):
        return TensorType.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(TensorType.of(v) if isinstance(v, torch.Tensor) else None for v in value)
    return None
