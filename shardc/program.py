"""The IR: one training step as a functional `fx.Graph` of ATen (and `shardc`) operators, with typed tables beside it.

A program starts as what capture saw, at global shapes and without specs; passes return new programs with specs filled in and,
after `partition`, with collectives as nodes. The graph is:

- placeholders, in this order: one for each slot that exists on entry, one for each tensor input, one for each number;
- call_function nodes: `torch._ops.OpOverload`s, `operator.getitem` on operators with several results, `operator` / `math` /
  `torch.sym_*` functions on numbers, and, after `partition`, `shardc.reshard.Step`s (see `Program.is_step`);
- one output node whose single argument is the flat list: slot exits, results, number results, guarded numbers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc._torch import plain_size
from shardc.dtypes import short
from shardc.mesh import Mesh
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE


class Phase(str, enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"

    def __str__(self) -> str:
        return self.value


class SlotKind(str, enum.Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    GRADIENT = "gradient"
    TENSOR = "tensor"  # a plain tensor held by an argument (an EMA list, a cache, a plain attribute)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TensorType:
    """Global shape, dtype and stride of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @staticmethod
    def of(t: torch.Tensor) -> TensorType:
        return TensorType(tuple(map(plain_size, t.shape)), t.dtype, tuple(map(plain_size, t.stride())))

    def __str__(self) -> str:
        return f"{short(self.dtype)}[{', '.join(map(str, self.shape))}]"


Types = TensorType | tuple["TensorType | None", ...] | None
Specs = ShardSpec | tuple["ShardSpec | None", ...] | None


@dataclass(frozen=True)
class Info:
    """What is known of a node.

    Args:
        type: of its value; a tuple for operators with several results (None where a result is absent); None for a number.
        phase: forward, backward or update.
        module: path of the owner (``model.h.0.attn``), or the slot's path for placeholders.
        line: the user's source line, ``train.py:41``.
        spec: layout of its value, of the same structure as `type`; None before propagation.
        why: the reason for the spec.
        tier: where its value lies: "device", "host" or "disk".
    """

    type: Types
    phase: Phase = Phase.FORWARD
    module: str = ""
    line: str = ""
    spec: Specs = None
    why: str = ""
    tier: str = DEVICE

    def but(self, **changes: Any) -> Info:
        return replace(self, **changes)

    @property
    def where(self) -> str:
        return ", ".join(x for x in (self.module, self.line) if x)


@dataclass(frozen=True)
class Slot:
    """A piece of state: an input of the program paired with the output that replaces it.

    Args:
        path: ``model.h.0.attn.weight``, ``optimizer.state[3].exp_avg``, ``model.h.0.attn.weight.grad``.
        kind: parameter, buffer, optimizer state, gradient, or another tensor.
        type: global shape, dtype, stride.
        of: path of the parameter that optimizer state or a gradient belongs to ("" otherwise).
        aliases: further paths of the same tensor (tied parameters).
        trainable: requires_grad.
        storage: how it rests between steps, and how every version of it rests.
        compute: how forward and backward read it.
        tier: where it rests between its uses: "device", "host" or "disk".
    """

    path: str
    kind: SlotKind
    type: TensorType
    of: str = ""
    aliases: tuple[str, ...] = ()
    trainable: bool = False
    storage: ShardSpec | None = None
    compute: ShardSpec | None = None
    tier: str = DEVICE


@dataclass(frozen=True)
class Draw:
    """A random draw: its position among the draws of the step."""

    index: int


@dataclass(frozen=True)
class Guard:
    """A decision that Python took on a value of the step: the program is right only while it comes out the same.

    Args:
        node: the number that was asked for (a comparison, ``bool(t)``, ``int(t)``, ``float(t)``).
        expected: what it was: a bool for decisions, the exact number where Python needed one.
        line: the user's source line, ``train.py:41``.
        text: what it says.
    """

    node: fx.Node
    expected: bool | int | float
    line: str = ""
    text: str = ""

    def holds(self, value: Any) -> bool:
        """Whether `value` is the expected one."""
        return alike(value, self.expected)


def alike(value: Any, expected: Any) -> bool:
    """Equality of numbers in which a NaN equals a NaN."""
    return bool(value == expected) or bool(value != value and expected != expected)


@dataclass(frozen=True)
class Results:
    """What the step returns: a pytree whose leaves are nodes (tensors, numbers) or constants.

    Args:
        treespec: `torch.utils._pytree.TreeSpec`.
        leaves: for each leaf either ("node", position among the program's results) or ("const", value).
    """

    treespec: Any
    leaves: tuple[tuple[str, Any], ...]


@dataclass
class Program:
    """See the module docstring. Passes do not modify a program; they `copy` it first."""

    graph: fx.Graph
    info: dict[fx.Node, Info]
    slots: dict[str, Slot] = field(default_factory=dict)
    entry: dict[str, fx.Node] = field(default_factory=dict)  # slot path -> placeholder; absent: created by this variant
    exit: dict[str, fx.Node] = field(default_factory=dict)  # slot path -> final value; absent: deleted by this variant
    versions: dict[fx.Node, str] = field(default_factory=dict)  # node -> slot whose value it is at some point of the step
    inputs: dict[str, fx.Node] = field(default_factory=dict)  # pytree path of a tensor argument -> placeholder
    numbers: dict[str, fx.Node] = field(default_factory=dict)  # "optimizer.param_groups[0].lr" -> placeholder
    number_exit: dict[str, fx.Node] = field(default_factory=dict)  # numbers that the step changes -> new value
    outputs: dict[str, tuple[fx.Node, ...]] = field(default_factory=dict)  # what modules return, by path; see capture.outputs
    results: list[fx.Node] = field(default_factory=list)  # the returned tensors and numbers, in order
    returns: Results | None = None
    draws: dict[fx.Node, Draw] = field(default_factory=dict)
    batched: tuple[str, ...] = ()  # inputs whose dim 0 is the batch (filled in by annotate)
    guards: list[Guard] = field(default_factory=list)  # decisions on values, in the order in which Python took them
    notes: list[str] = field(default_factory=list)
    mesh: Mesh | None = None

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @property
    def output(self) -> fx.Node:
        node: fx.Node = next(iter(reversed(self.graph.nodes)))
        return node

    def type(self, node: fx.Node) -> TensorType:
        """Type of a node that is one tensor."""
        t = self.info[node].type
        assert isinstance(t, TensorType), f"{node} is not one tensor"
        return t

    def spec(self, node: fx.Node) -> ShardSpec:
        """Spec of a node that is one tensor."""
        s = self.info[node].spec
        assert isinstance(s, ShardSpec), f"{node} has no spec"
        return s

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.info[node].type, TensorType) if node in self.info else False

    def compute_nodes(self) -> Iterator[fx.Node]:
        return (n for n in self.graph.nodes if n.op == "call_function")

    # -- writing ---------------------------------------------------------------------------------------------------

    def copy(self) -> Program:
        """A copy that shares no mutable structure (types, specs and slots are frozen values)."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            env[node] = graph.node_copy(node, lambda n: env[n])
        return self.rebuilt(graph, env)

    def rebuilt(self, graph: fx.Graph, env: dict[fx.Node, fx.Node], **changes: Any) -> Program:
        """The same tables over a new graph; `env` maps old nodes to new ones, dropped nodes are absent from it."""

        def keys(table: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
            return {env[n]: v for n, v in table.items() if n in env}

        def values(table: dict[str, fx.Node]) -> dict[str, fx.Node]:
            return {k: env[n] for k, n in table.items()}

        out = replace(
            self, graph=graph, info=keys(self.info), slots=dict(self.slots), entry=values(self.entry), exit=values(self.exit),
            versions=keys(self.versions), inputs=values(self.inputs), numbers=values(self.numbers),
            number_exit=values(self.number_exit), results=[env[n] for n in self.results], draws=keys(self.draws),
            guards=[replace(g, node=env[g.node]) for g in self.guards], notes=list(self.notes),
            outputs={path: tuple(dict.fromkeys(env[n] for n in nodes if n in env)) for path, nodes in self.outputs.items()},
        )  # fmt: skip
        return replace(out, **changes)

    def set_output(self) -> None:
        """(Re)create the output node from the exits, results and guards."""
        for node in [n for n in self.graph.nodes if n.op == "output"]:
            self.info.pop(node, None)
            self.graph.erase_node(node)
        self.graph.output([*self.exit.values(), *self.results, *self.number_exit.values(), *(g.node for g in self.guards)])

    # -- printing --------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """One line for each node: name, type or spec, operator, arguments; owner and line at the end."""
        return "\n".join(self.line_of(n) for n in self.graph.nodes)

    def line_of(self, node: fx.Node) -> str:
        if node.op == "output":
            exits = [f"{path} = %{n.name}" for path, n in self.exit.items()]
            numbers = [f"{path} = %{n.name}" for path, n in self.number_exit.items()]
            guards = [f"guard %{g.node.name} is {g.expected}  # {g.line}\n" for g in self.guards]
            return "".join(guards) + "return " + ", ".join([f"%{n.name}" for n in self.results] + exits + numbers)
        info = self.info[node]
        kind = describe(info.type, info.spec) + (f" on {info.tier}" if info.tier != DEVICE else "")
        if node.op == "placeholder":
            return f"%{node.name}: {kind} = {info.module}"
        args = [_show(a) for a in node.args] + [f"{k}={_show(v)}" for k, v in node.kwargs.items()]
        slot = f" -> {self.versions[node]}" if node in self.versions else ""
        where = f"  # {info.phase}{', ' + info.where if info.where else ''}"
        return f"%{node.name}: {kind} = {op_name(node.target)}({', '.join(args)}){slot}{where}"


def describe(type_: Types, spec: Specs) -> str:
    """``f32[8@dp, 64]``; ``num`` for a number; a tuple in parentheses."""
    if type_ is None:
        return "num"
    if isinstance(type_, tuple):
        specs = spec if isinstance(spec, tuple) else (None,) * len(type_)
        return "(" + ", ".join("-" if t is None else describe(t, s) for t, s in zip(type_, specs, strict=True)) + ")"
    return f"{short(type_.dtype)}{spec}" if isinstance(spec, ShardSpec) else str(type_)


def op_name(target: Callable[..., Any] | str) -> str:
    """``aten.mm``, ``aten.add.Tensor``, ``shardc.adamw``, ``getitem``; steps print themselves."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def _show(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(map(_show, arg)) + "]"
    if isinstance(arg, torch.dtype):
        return short(arg)
    return str(arg)
