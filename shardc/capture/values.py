"""Which nodes of a graph in the making have equal values, because they compute the same."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import fx


class Values:
    """Value numbers of a graph that grows at its end.

    Args:
        graph: see above.
        draws: nodes whose value is new each time.
    """

    def __init__(self, graph: fx.Graph, draws: Container[fx.Node]) -> None:
        self.graph, self.draws = graph, draws
        self._first: dict[fx.Node, fx.Node] = {}
        self._seen: dict[Any, fx.Node] = {}

    def first(self, node: fx.Node) -> fx.Node:
        """The first node that has the value of `node`."""
        for new in self.graph.nodes:
            if new not in self._first:
                fresh = new.op == "placeholder" or new in self.draws
                self._first[new] = new if fresh else self._seen.setdefault(self._key(new), new)
        return self._first[node]

    def _key(self, node: fx.Node) -> Any:
        return node.target, self._plain(node.args), self._plain(node.kwargs)

    def _plain(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self._first[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._plain, arg))
        if isinstance(arg, dict):
            return tuple((k, self._plain(v)) for k, v in sorted(arg.items()))
        return type(arg), repr(arg) if isinstance(arg, float) else arg
