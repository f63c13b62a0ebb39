"""Values that Python asks for while a step is captured: how ``if loss > 3`` is answered before there is a plan.

`Whole` computes the program so far on whole tensors in this process, node by node, as one device would: on one rank, on a
simulated mesh, and in `lower`. `Sharded` runs the program so far through passes and plan on all ranks, for state of which no
rank holds the whole. Neither changes anything of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc import _torch
from shardc.capture import OVERFLOW, Decide, World
from shardc.errors import PlanError
from shardc.hosts import Call, Host, LocalHost, Streams
from shardc.mesh import Mesh
from shardc.plan import Plan
from shardc.program import Program, SlotKind, TensorType, op_name
from shardc.rows import with_rows
from shardc.runtime.rng import Stream
from shardc.runtime.simulate import execution
from shardc.spec import ShardSpec

DRY_LIMIT = 1 << 30
"""Bytes of values that `lower` may compute to answer decisions."""


def decider(host: Host, world: World, call: Call, streams: Streams, planned: Callable[[Program], Plan]) -> Decide:
    """How a call's decisions are answered during its capture.

    Args:
        streams: of the step; made before the trace, which plays with torch's generator.
        planned: makes the plan of a program.
    """
    meta = any(ref.get().is_meta for ref in world.slots.values())
    if isinstance(host, LocalHost) and not meta:
        return Whole(world, streams.make)
    parameters = [ref.get() for ref in world.slots.values() if ref.kind is SlotKind.PARAMETER]
    placed = not meta and all(hasattr(p, "placements") for p in parameters)
    return Sharded(lambda program: planned(replace(program, mesh=host.ranks.mesh)), placed, host, world, call, streams)


def dry(world: World, streams: Streams) -> Decide:
    """Without a run, decisions are answered from real tensors of at most `DRY_LIMIT` bytes in this process. A step in
    float16 is planned as one that does not overflow."""
    whole = Whole(world, streams.make, DRY_LIMIT)

    def decide(program: Program, node: fx.Node, constants: dict[str, Tensor], line: str) -> float | int | bool:
        return False if line == OVERFLOW else whole(program, node, constants, line)

    return decide


def prefix(program: Program, node: fx.Node) -> Program:
    """The part of a program that the number `node` depends on, as a program that returns it and changes nothing.

    Draws before it are part of it too: a stream that is shared by all draws is where it would be.
    """
    keep: set[fx.Node] = set()
    todo = [node, *program.draws]
    while todo:
        n = todo.pop()
        if n not in keep:
            keep.add(n)
            todo.extend(n.all_input_nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in program.graph.nodes:
        if n.op == "placeholder" or n in keep:
            env[n] = graph.node_copy(n, lambda m: env[m])
    out = program.rebuilt(graph, env)
    out.exit, out.results, out.number_exit, out.guards, out.returns = dict(out.entry), [env[node]], {}, [], None
    out.slots = {path: slot for path, slot in out.slots.items() if path in out.entry}
    out.set_output()
    return out


class Whole:
    """Answers from whole tensors. Values are kept from one question to the next, until the capture ends.

    Args:
        world: of the call.
        stream: makes the random stream of the step, from its start.
        limit: bytes of values that may be computed; None for no limit.
    """

    def __init__(self, world: World, stream: Callable[[], Stream], limit: int | None = None) -> None:
        self.world, self.make, self.limit = world, stream, limit
        self.graph: fx.Graph | None = None
        self.values: dict[fx.Node, Any] = {}
        self.rows: dict[int, int] = {}  # size that stands for a number of rows -> the number
        self.mesh = Mesh(one=1, simulated=True)
        self.spent = 0
        self.device = torch.device("cpu")

    def __call__(self, program: Program, node: fx.Node, constants: Mapping[str, Tensor], line: str) -> Any:
        if self.graph is not program.graph:  # a new trace
            self.graph, self.values, self.rows, self.stream, self.spent = program.graph, {}, {}, self.make(), 0
        with _torch.without_modes(), execution(self.device), torch.autocast("cpu", enabled=False):
            self._placeholders(program, constants)
            for draw in sorted(program.draws, key=lambda n: program.draws[n].index):
                self._value(program, draw, line)
            return self._value(program, node, line)

    def _placeholders(self, program: Program, constants: Mapping[str, Tensor]) -> None:
        self.known: dict[fx.Node, Callable[[], Any]] = {}
        for path, node in program.entry.items():
            self.known[node] = self.world.slots[path].get
        for path, node in program.inputs.items():
            self.known[node] = lambda p=path: constants[p] if p in constants else self.world.inputs[p]  # type: ignore[misc]
        for path, node in program.numbers.items():
            self.known[node] = lambda p=path: self.world.numbers[p]  # type: ignore[misc]

    def _value(self, program: Program, node: fx.Node, line: str) -> Any:
        todo = [node]
        while todo:
            top = todo[-1]
            if top in self.values:
                todo.pop()
                continue
            missing = [n for n in top.all_input_nodes if n not in self.values]
            if missing:
                todo.extend(missing)
                continue
            self.values[top] = (
                self._placeholder(top, program, line) if top.op == "placeholder" else self._call(program, top, line)
            )
            todo.pop()
        return self.values[node]

    def _placeholder(self, node: fx.Node, program: Program, line: str) -> Any:
        value = self.known[node]()
        if isinstance(value, Tensor):
            if value.is_meta or hasattr(value, "placements"):
                path = program.info[node].module
                what = "is on the meta device" if value.is_meta else "is sharded over processes"
                raise PlanError(
                    f"a decision depends on values, and {path} {what}", where=line,
                    hint="plan with real tensors on one process, or call the step and read step.plan",
                )  # fmt: skip
            wanted = program.type(node).shape
            if tuple(value.shape) != wanted:
                raise PlanError(
                    f"a decision depends on values, and {program.info[node].module} is a part, of shape {list(value.shape)}, "
                    f"of a tensor of shape {list(wanted)}", where=line, hint="lower with a simulated mesh and the global batch",
                )  # fmt: skip
            self.device = value.device if value.device.type != "cpu" else self.device
            return value.detach()
        return value

    def _call(self, program: Program, node: fx.Node, line: str) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n])
        if self.device.type != "cpu" and "device" in kwargs:
            kwargs = {**kwargs, "device": self.device}
        info = program.info[node]
        if self.limit is not None and isinstance(info.type, TensorType):
            self.spent += info.type.nbytes
            if self.spent > self.limit:
                raise PlanError(
                    f"a decision depends on values, and computing them takes more than {self.limit:,} bytes", where=line,
                    hint="call the step and read step.plan, or lower it with a smaller batch",
                )  # fmt: skip
        if node in program.draws:
            assert isinstance(info.type, TensorType)
            spec = ShardSpec.replicated(info.type.shape)
            index = program.draws[node].index
            return self.stream.draw(
                f"{node.target}", tuple(args), dict(kwargs), spec, self.mesh, (0,), index, info.type.dtype, self.device
            )
        try:
            if not isinstance(node.target, torch._ops.OpOverload):
                return node.target(*args, **kwargs)  # type: ignore[operator]
            if self.rows:
                args, kwargs = _torch.map_integers(node.target, args, kwargs, self._found)
            out = node.target(*args, **kwargs)
            if node.target is torch.ops.aten.nonzero.default:
                self.rows[program.type(node).shape[0]] = out.shape[0]
            return out
        except (RuntimeError, ValueError, ArithmeticError, NotImplementedError) as error:
            raise PlanError(
                f"a decision depends on {op_name(node.target)} at {info.where}, which fails: {error}", where=line
            ) from error

    def _found(self, arg: Any) -> Any:
        """Sizes that stand for numbers of rows as the numbers that were found."""
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(self._found, arg))
        return with_rows(arg, self.rows) if isinstance(arg, int) else arg


class PlaceFirst(BaseException):
    """State has to be put in place before a value can be computed; `plan` says where. The capture then starts anew. No failure:
    all ranks come here, and what handles errors lets it pass."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class Sharded:
    """Answers by a run of the program so far on all ranks, which ask the same questions in the same order.

    Args:
        planned: makes the plan of a program.
        placed: whether state lies as plans want it.
        trace of the call: host, world, call, streams.
    """

    def __init__(
        self,
        planned: Callable[[Program], Plan],
        placed: bool,
        host: Host,
        world: World,
        call: Call,
        streams: Streams,
    ) -> None:
        self.planned, self.placed, self.host, self.world, self.call, self.streams = planned, placed, host, world, call, streams

    def __call__(self, program: Program, node: fx.Node, constants: Mapping[str, Tensor], line: str) -> Any:
        with _torch.without_modes(), torch.no_grad():
            plan = self.planned(prefix(program, node))
            if not self.placed:
                raise PlaceFirst(plan)
            inputs = {**self.world.inputs, **constants, **self.world.numbers}
            done = self.host.run(self.host.executors(plan), plan, self.world, self.call, inputs, self.streams)
        return done.results[0]
