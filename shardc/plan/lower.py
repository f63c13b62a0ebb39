"""lower: a scheduled, partitioned program -> a flat list of instructions, in graph order, without frees and writes.

`getitem` nodes are folded into the results of their producer; every value gets a register.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc._torch import is_random
from shardc.errors import PlanError
from shardc.instructions import (
    Arrive,
    Collective,
    Compute,
    Input,
    Instruction,
    Local,
    LocalDim,
    LocalStart,
    Out,
    Read,
    Ref,
    Reg,
    Transfer,
)
from shardc.program import Info, Program, TensorType, op_name
from shardc.reshard import STEP_OPS, Step
from shardc.spec import ShardSpec
from shardc.tiers import MOVES, arrive

_STEPS = frozenset(STEP_OPS.values())


@dataclass
class Lowered:
    """Instructions and where the program's values ended up.

    Args:
        instructions: one for each node but getitem and output.
        reg: node -> its register; nodes with several results are absent.
        types: register -> global type (strides included) of tensors.
        next_reg: the first unused register.
    """

    instructions: list[Instruction] = field(default_factory=list)
    reg: dict[fx.Node, Reg] = field(default_factory=dict)
    types: dict[Reg, TensorType] = field(default_factory=dict)
    next_reg: int = 0


def target_name(target: Callable[..., Any] | str) -> str:
    """How the runtime finds a function: ``aten.mm.default``, ``operator.mul``, ``math.sqrt``, ``torch.sym_float``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    if module is None or name is None:
        raise PlanError(f"a node calls {target!r}, which has no name that a plan could hold")
    return f"{'operator' if module == '_operator' else module}.{name}"


def lower(program: Program) -> Lowered:
    """See the module docstring.

    Raises:
        PlanError: a tensor without a spec, a node of unknown kind, an argument that a plan cannot hold.
    """
    return _Lowering(program).run()


class _Lowering:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.out = Lowered()
        self.results: dict[fx.Node, tuple[Reg | None, ...]] = {}
        self.slot_of = {node: path for path, node in program.entry.items()}
        self.input_of = {node: path for table in (program.inputs, program.numbers) for path, node in table.items()}

    def run(self) -> Lowered:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op != "output":
                raise PlanError(f"node %{node.name} is a {node.op}, a plan has only placeholders and calls")
        return self.out

    def _register(self, node: fx.Node, type_: TensorType | None, spec: object, info: Info) -> Out:
        reg = self.out.next_reg
        self.out.next_reg += 1
        if type_ is None:
            return Out(reg, None, None)
        if not isinstance(spec, ShardSpec):
            raise PlanError(
                f"%{node.name} ({op_name(node.target)}) has no shard spec", where=info.where, hint="run the propagate pass"
            )
        self.out.types[reg] = type_
        return Out(reg, spec, type_.dtype, info.tier)

    def _order(self, node: fx.Node) -> tuple[int, ...] | None:
        """The dims of the tensor that a random operator takes its layout from, outermost first; None: row-major."""
        source = next((n for n in node.all_input_nodes if self.program.is_tensor(n)), None)
        stride = self.program.type(source).stride if source is not None else ()
        return tuple(sorted(range(len(stride)), key=lambda d: -stride[d])) if stride else None

    def _single(self, node: fx.Node, info: Info) -> Out:
        type_ = info.type
        if isinstance(type_, tuple):
            raise PlanError(
                f"%{node.name} ({op_name(node.target)}) has several results where one is expected", where=info.where
            )
        out = self._register(node, type_, info.spec, info)
        self.out.reg[node] = out.reg
        return out

    def _placeholder(self, node: fx.Node) -> None:
        info = self.program.info[node]
        common: dict[str, Any] = {"name": node.name, "phase": str(info.phase), "module": info.module, "line": info.line}
        if node in self.slot_of:
            self.out.instructions.append(Read(**common, slot=self.slot_of[node], out=self._single(node, info)))
        elif node in self.input_of:
            self.out.instructions.append(Input(**common, path=self.input_of[node], out=self._single(node, info)))
        else:
            raise PlanError(f"placeholder %{node.name} is neither a slot, an input nor a number", where=info.where)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._getitem(node)
            return
        info = self.program.info[node]
        common: dict[str, Any] = {"name": node.name, "phase": str(info.phase), "module": info.module, "line": info.line}
        if node.target in _STEPS:
            x, step = node.args
            assert isinstance(x, fx.Node) and isinstance(step, Step), f"malformed step node %{node.name}"
            src = self.out.reg[x]
            self.out.instructions.append(Collective(**common, step=step, src=src, out=self._single(node, info)))
            return
        if node.target in MOVES or node.target is arrive:
            self.out.instructions.append(self._move(node, info, common))
            return
        args = tuple(self._arg(a, node) for a in node.args)
        kwargs = tuple((k, self._arg(v, node)) for k, v in node.kwargs.items())
        outs: tuple[Out | None, ...]
        if isinstance(info.type, tuple):
            specs = info.spec if isinstance(info.spec, tuple) else (None,) * len(info.type)
            outs = tuple(None if t is None else self._register(node, t, s, info) for t, s in zip(info.type, specs, strict=True))
            self.results[node] = tuple(None if o is None else o.reg for o in outs)
        else:
            outs = (self._single(node, info),)
        draw = self.program.draws.get(node)
        if draw is None and isinstance(node.target, torch._ops.OpOverload) and is_random(node.target):
            raise PlanError(f"%{node.name} ({op_name(node.target)}) draws random numbers, but from no stream", where=info.where)
        op = target_name(node.target)
        compute = Compute(**common, op=op, args=args, kwargs=kwargs, outs=outs)
        if draw is not None:
            compute = replace(compute, draw=draw.index, order=self._order(node))
        self.out.instructions.append(compute)

    def _move(self, node: fx.Node, info: Info, common: dict[str, Any]) -> Instruction:
        x, *more = node.args
        assert isinstance(x, fx.Node) and isinstance(info.type, TensorType), f"malformed move %{node.name}"
        src, out = self.out.reg[x], self._single(node, info)
        if node.target is arrive:
            (source,) = more
            assert isinstance(source, fx.Node), f"malformed move %{node.name}"
            return Arrive(**common, moved=src, src=self.out.reg[source], out=out)
        _, into, wait = more
        stride = info.type.stride if info.type.stride != self.program.type(x).stride else ()
        reg = self.out.reg[into] if isinstance(into, fx.Node) else -1
        return Transfer(**common, src=src, out=out, into=reg, wait=bool(wait), stride=stride)

    def _getitem(self, node: fx.Node) -> None:
        source, index = node.args
        info = self.program.info.get(node)
        where = info.where if info else ""
        results = self.results.get(source) if isinstance(source, fx.Node) else None
        if results is None or not isinstance(index, int) or not 0 <= index < len(results):
            raise PlanError(f"%{node.name} takes item {index!r} of %{source}, which has no such result", where=where)
        reg = results[index]
        if reg is None:
            raise PlanError(f"%{node.name} takes result {index} of %{source}, which is absent", where=where)
        self.out.reg[node] = reg

    def _arg(self, arg: Any, node: fx.Node) -> Any:
        if isinstance(arg, fx.Node):
            if arg in self.results:
                return [None if r is None else Ref(r) for r in self.results[arg]]
            return Ref(self.out.reg[arg])
        if isinstance(arg, tuple):
            return tuple(self._arg(a, node) for a in arg)
        if isinstance(arg, list):
            return [self._arg(a, node) for a in arg]
        if isinstance(arg, dict):
            return {k: self._arg(v, node) for k, v in arg.items()}
        if isinstance(arg, slice):
            return slice(*(self._arg(a, node) for a in (arg.start, arg.stop, arg.step)))
        plain = (
            bool,
            int,
            float,
            complex,
            str,
            Local,
            LocalDim,
            LocalStart,
            torch.dtype,
            torch.device,
            torch.layout,
            torch.memory_format,
        )
        if arg is None or isinstance(arg, plain):
            return arg
        raise PlanError(
            f"argument {arg!r} ({type(arg).__name__}) of %{node.name} ({op_name(node.target)}) cannot stand in a plan",
            where=self.program.info[node].where, hint="tensors are values of the program, sizes are Local or LocalDim",
        )  # fmt: skip
