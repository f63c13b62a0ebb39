"""Small helpers that several passes share: operands of a node, kinds of operators, a builder of new graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from shardc._torch import may_alias
from shardc.program import Info, Program, TensorType
from shardc.reshard import STEP_OPS

STEPS = frozenset(STEP_OPS.values())


def reshard(x: torch.Tensor) -> torch.Tensor:
    """Marks, between propagate and partition, that a value changes its spec; the destination is the node's own spec."""
    raise AssertionError("reshard nodes are lowered by the partition pass")  # pragma: no cover


def operands(program: Program, node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node in argument order, with repetitions."""
    out: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: out.append(n) if program.is_tensor(n) else None)
    return out


def typed(info: dict[fx.Node, Info], arg: Any) -> Any:
    """An argument tree with tensor nodes replaced by their types; number nodes stay."""
    return fx.node.map_aggregate(arg, lambda a: _type_of(info, a))


def _type_of(info: dict[fx.Node, Info], arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        kind = info[arg].type
        return kind if isinstance(kind, TensorType) else arg
    return arg


def is_op(node: fx.Node) -> bool:
    """A call of an ATen or shardc operator (not getitem, not number arithmetic, not a step)."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether the result may share storage with the first operand."""
    if not is_op(node):
        return node.target in STEPS and getattr(node.target, "__name__", "") == "slice"
    return may_alias(node.target)  # type: ignore[arg-type]


def is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default


def is_random(node: fx.Node) -> bool:
    return is_op(node) and torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


def kept(program: Program) -> set[fx.Node]:
    """Nodes whose value leaves the program."""
    return {*program.exit.values(), *program.results, *program.number_exit.values(), *(g.node for g in program.guards)}


def without_dead(program: Program) -> Program:
    """Erase call nodes that nothing uses (random draws stay: they advance the stream)."""
    for node in reversed(program.nodes):
        if node.op == "call_function" and not node.users and node not in program.draws:
            program.info.pop(node, None)
            program.versions.pop(node, None)
            program.graph.erase_node(node)
    return program


class Rewriter:
    """Builds a new program from an old one, node by node."""

    def __init__(self, program: Program) -> None:
        self.old = program
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.info: dict[fx.Node, Info] = {}

    def args(self, arg: Any) -> Any:
        return fx.node.map_arg(arg, lambda n: self.env[n])

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy a node of the old program, its inputs already being in `env`."""
        new = self.graph.node_copy(node, lambda n: self.env[n])
        self.env[node] = new
        self.info[new] = self.old.info[node]
        return new

    def call(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], info: Info, name: str | None = None
    ) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, kwargs, name)
        self.info[new] = info
        return new

    def finish(self, **changes: Any) -> Program:
        out = self.old.rebuilt(self.graph, self.env, **changes)
        out.info = self.info
        out.set_output()
        return out


def compute_order(program: Program) -> Iterator[fx.Node]:
    return (n for n in program.graph.nodes if n.op != "output")
