"""The pytree of what a step returns: nested lists, tuples, dicts, dataclasses and model outputs of tensors and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardc.capture.numbers import is_symbol
from shardc.program import Results


@dataclass(frozen=True)
class Tree:
    """A node of the returned structure; a leaf has no `type`.

    Args:
        type: class of the container; None for a leaf.
        keys: keys of a mapping, or names of fields.
        children: what it holds.
    """

    type: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()


_LEAF = Tree(None)


def flatten(obj: Any, leaf: Callable[[Any, str], tuple[str, Any]], path: str = "result") -> Results:
    """`obj` as a tree; `leaf(value, path)` gives ("node", position) or ("const", value)."""
    leaves: list[tuple[str, Any]] = []

    def walk(x: Any, where: str) -> Tree:
        if isinstance(x, Tensor) or is_symbol(x):
            pass
        elif isinstance(x, dict):
            return Tree(type(x), tuple(x), tuple(walk(v, f"{where}[{k!r}]") for k, v in x.items()))
        elif isinstance(x, tuple) and hasattr(x, "_fields"):
            return Tree(type(x), x._fields, tuple(walk(v, f"{where}.{k}") for k, v in zip(x._fields, x, strict=True)))
        elif isinstance(x, (list, tuple)):
            return Tree(type(x), (), tuple(walk(v, f"{where}[{i}]") for i, v in enumerate(x)))
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            names = tuple(f.name for f in dataclasses.fields(x))
            return Tree(type(x), names, tuple(walk(getattr(x, n), f"{where}.{n}") for n in names))
        leaves.append(leaf(x, where))
        return _LEAF

    tree = walk(obj, path)
    return Results(tree, tuple(leaves))


def rebuild(returns: Results, values: Sequence[Any]) -> Any:
    """The step's result from the values of the program's results, in order."""
    leaves = iter(values[what] if kind == "node" else what for kind, what in returns.leaves)

    def build(tree: Tree) -> Any:
        cls: Any = tree.type
        if cls is None:
            return next(leaves)
        parts = [build(c) for c in tree.children]
        if issubclass(cls, dict):
            if hasattr(cls, "__dataclass_fields__"):  # a model output: a dict that is also a dataclass
                return cls(**dict(zip(tree.keys, parts, strict=True)))
            out: dict[Any, Any] = cls()
            out.update(zip(tree.keys, parts, strict=True))
            return out
        if hasattr(cls, "__dataclass_fields__"):
            made = object.__new__(cls)
            for name, part in zip(tree.keys, parts, strict=True):
                object.__setattr__(made, name, part)
            return made
        return cls(*parts) if hasattr(cls, "_fields") else cls(parts)

    return build(returns.treespec)
