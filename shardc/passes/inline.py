"""Graphs of decompositions: a function of tensors, traced at the types of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardc._torch import FakeTensorMode
from shardc.program import TensorType, Types


class Tracer:
    """Traces each call once: calls of equal types share a graph.

    Args:
        table: operator -> function of the same arguments.
    """

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        self.table = table
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
                        flat.append(torch.empty_strided(a.shape, a.stride, dtype=a.dtype))
                        return _Hole(len(flat) - 1)
                    return a

                holes = fx.node.map_aggregate(call, hole)

                def fn(*tensors: torch.Tensor) -> Any:
                    full: Any = fx.node.map_aggregate(holes, lambda a: tensors[a.index] if isinstance(a, _Hole) else a)
                    return self.table[target](*full[0], **full[1])

                self._traced[key] = make_fx(fn)(*flat).graph
        return self._traced[key]


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
