"""Which nodes of a local program lie in one storage: a root, and the links made of it alone (views; casts of state)."""

from __future__ import annotations

import math
from collections.abc import Collection

from torch import fx

from shardc.passes.graphs import is_cast, is_getitem, is_view
from shardc.program import Program, TensorType
from shardc.spec import ShardSpec


class Storages:
    """Roots and links of the nodes of a program.

    Args:
        program: local; specs are complete.
        recast: placeholders whose casts count as links: they are made again rather than kept.
    """

    def __init__(self, program: Program, recast: Collection[fx.Node] = ()) -> None:
        self.program = program
        assert program.mesh is not None
        self._mesh, self._first = program.mesh, (0,) * len(program.mesh.axes)
        self._shapes: dict[ShardSpec, int] = {}
        self._root: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for node in program.nodes:
            if node.op == "output":
                continue
            source = self._source(node, recast)
            self._root[node] = node if source is None else self._root[source]
            if source is None:
                for root in self.read_by(node):
                    self._readers.setdefault(root, []).append(node)

    def _source(self, node: fx.Node, recast: Collection[fx.Node]) -> fx.Node | None:
        """The operand whose storage a link shares."""
        if node.op != "call_function":
            return None
        values = [n for n in node.all_input_nodes if self.program.info[n].type is not None]
        roots = {self._root[n] for n in values}
        if len(roots) != 1:
            return None
        (root,) = roots
        if is_getitem(node):
            return values[0] if self.is_link(values[0]) else None
        if self.program.info[node].type is None:
            return None
        return values[0] if is_view(node) or (is_cast(node) and root in recast) else None

    def root(self, node: fx.Node) -> fx.Node:
        """The node that owns the storage."""
        return self._root[node]

    def is_link(self, node: fx.Node) -> bool:
        return self._root[node] is not node

    def readers(self, root: fx.Node) -> list[fx.Node]:
        """What reads a storage, links left out, in order."""
        return self._readers.get(root, [])

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """The roots that a node reads; none for an item of an operator's results, which is a storage of its own."""
        if is_getitem(node) and not self.is_link(node):
            return []
        return list(dict.fromkeys(self._root[n] for n in node.all_input_nodes if self.program.info[n].type is not None))

    def nbytes(self, node: fx.Node) -> int:
        """Bytes of a value on the rank with the largest parts."""
        info = self.program.info[node]
        kinds = info.type if isinstance(info.type, tuple) else (info.type,)
        specs = info.spec if isinstance(info.spec, tuple) else (info.spec,)
        return sum(
            self.numel(s) * t.dtype.itemsize
            for t, s in zip(kinds, specs, strict=False)
            if isinstance(t, TensorType) and isinstance(s, ShardSpec)
        )

    def numel(self, spec: ShardSpec) -> int:
        """Elements of a part of `spec` on that rank."""
        if spec not in self._shapes:
            self._shapes[spec] = math.prod(spec.local_shape(self._mesh, self._first))
        return self._shapes[spec]
