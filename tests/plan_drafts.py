"""Partitioned programs written by hand, and plans of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import shardc.ops  # noqa: F401  (registers the operators)
from shardc.dtypes import from_short
from shardc.instructions import Collective, Compute, Delete, Input, Local, Read, Write, outs_of, uses_of
from shardc.mesh import Mesh
from shardc.plan import Plan, build
from shardc.program import Info, Phase, Program, Slot, SlotKind, TensorType
from shardc.reshard import STEP_OPS, reshard
from shardc.runtime import Executor, execution, simulate
from shardc.spec import ShardSpec

aten = torch.ops.aten
KINDS = {"p": SlotKind.PARAMETER, "b": SlotKind.BUFFER, "o": SlotKind.OPTIMIZER, "g": SlotKind.GRADIENT, "t": SlotKind.TENSOR}


class Draft:
    """Writes a partitioned program by hand; tensors are given as ``f32[8@dp, 4]``."""

    def __init__(self, **axes: int) -> None:
        self.mesh = Mesh(axes, simulated=True)
        self.program = Program(fx.Graph(), {}, mesh=self.mesh)
        self.graph = self.program.graph
        self.phase = Phase.FORWARD

    def _info(self, text: str | tuple[str | None, ...] | None, module: str, line: str = "train.py:1") -> Info:
        many = text if isinstance(text, tuple) else (text,)
        types = tuple(None if t is None else self.type(t) for t in many)
        specs = tuple(None if t is None else ShardSpec.parse(t).canonical(self.mesh) for t in many)
        if isinstance(text, tuple):
            return Info(types, self.phase, module, line, specs)
        return Info(types[0], self.phase, module, line, specs[0])

    @staticmethod
    def type(text: str) -> TensorType:
        shape = ShardSpec.parse(text).shape
        dtype = from_short(text[: text.index("[")])
        return TensorType(shape, dtype, tuple(torch.empty(shape, device="meta").stride()))

    def slot(self, path: str, text: str, kind: str = "p", of: str = "", exists: bool = True) -> Any:
        spec = ShardSpec.parse(text).canonical(self.mesh)
        whole = ShardSpec.replicated(spec.shape)
        self.program.slots[path] = Slot(path, KINDS[kind], self.type(text), of, (), kind == "p", spec, whole)
        if exists:
            node = self.graph.placeholder(path.replace(".", "_").replace("[", "_").replace("]", ""))
            self.program.info[node] = replace(self._info(text, path), why="storage of its slot")
            self.program.entry[path] = node
            return node
        return None

    def input(self, path: str, text: str | None) -> fx.Node:
        node = self.graph.placeholder(path.replace(".", "_").replace("[", "_").replace("]", ""))
        self.program.info[node] = self._info(text, path)
        (self.program.inputs if text is not None else self.program.numbers)[path] = node
        return node

    def op(self, target: Any, *args: Any, to: Any = None, module: str = "model", line: str = "train.py:1") -> fx.Node:
        node = self.graph.call_function(target, args)
        self.program.info[node] = self._info(to, module, line)
        return node

    def move(self, x: fx.Node, to: str, module: str = "model") -> fx.Node:
        """The steps from the spec of `x` to another."""
        src = self.program.spec(x)
        for step in reshard(src, ShardSpec.parse(to).canonical(self.mesh), self.mesh):
            kind = self.program.type(x)
            node = self.graph.call_function(STEP_OPS[step.kind], (x, step))
            self.program.info[node] = Info(kind, self.phase, module, "train.py:1", step.dst)
            x = node
        return x

    def done(self, exit: Mapping[str, fx.Node], results: tuple[fx.Node, ...] = ()) -> Program:
        self.program.exit = dict(exit)
        self.program.results = list(results)
        self.program.set_output()
        return self.program


def layers(n: int, zero: int = 3, mesh: int = 2, width: int = 4) -> Program:
    """n linear layers without bias, a sum as the loss, Adam: by hand what the passes make of it."""
    d = Draft(dp=mesh)
    at, whole = f"f32[{width}@dp, {width}]", f"f32[{width}, {width}]"
    rest = at if zero >= 3 else whole
    moment = at if zero >= 1 else whole
    state = []
    for k in range(n):
        p = f"model.h.{k}.w"
        state.append([d.slot(p, rest)])
    for k in range(n):
        p = f"model.h.{k}.w"
        state[k] += [d.slot(f"optimizer.state[{k}].{s}", moment, "o", p) for s in ("exp_avg", "exp_avg_sq")]
        state[k].append(d.slot(f"optimizer.state[{k}].step", "f32[]", "o", p))
    x = d.input("tokens", f"f32[6@dp, {width}]")
    lr = d.input("optimizer.param_groups[0].lr", None)
    saved = []
    for k, (p, *_) in enumerate(state):
        w = d.move(p, whole, f"model.h.{k}")
        saved.append(x)
        x = d.op(aten.mm.default, x, w, to=f"f32[6@dp, {width}]", module=f"model.h.{k}")
    loss = d.move(d.op(aten.sum.default, x, to="f32[] +sum@dp"), "f32[]")
    d.phase = Phase.BACKWARD
    one = d.op(aten.ones_like.default, loss, to="f32[]")
    g = d.op(aten.expand.default, one, Local(ShardSpec.parse(f"[6@dp, {width}]")), to=f"f32[6@dp, {width}]")
    exits: dict[str, fx.Node] = {}
    for k in reversed(range(n)):
        p, m, v, step = state[k]
        d.phase = Phase.BACKWARD
        t = d.op(aten.t.default, saved[k], to=f"f32[{width}, 6@dp]", module=f"model.h.{k}")
        grad = d.op(aten.mm.default, t, g, to=f"f32[{width}, {width}] +sum@dp", module=f"model.h.{k}")
        grad = d.move(grad, moment, f"model.h.{k}")
        if k:
            w = d.move(p, whole, f"model.h.{k}")
            wt = d.op(aten.t.default, w, to=whole, module=f"model.h.{k}")
            g = d.op(aten.mm.default, g, wt, to=f"f32[6@dp, {width}]", module=f"model.h.{k}")
        d.phase = Phase.UPDATE
        mine = d.move(p, moment, f"model.h.{k}")
        new = d.op(
            torch.ops.shardc.adam.default, mine, grad, m, v, step, lr, 0.9, 0.999, 1e-8, 0.0, False, True,
            to=(moment, moment, moment, "f32[]"), module="optimizer",
        )  # fmt: skip
        values = [d.op(operator.getitem, new, j, to=t) for j, t in enumerate((moment, moment, moment, "f32[]"))]
        values[0] = d.move(values[0], rest, f"model.h.{k}")
        names = [f"model.h.{k}.w", *(f"optimizer.state[{k}].{s}" for s in ("exp_avg", "exp_avg_sq", "step"))]
        exits |= dict(zip(names, values, strict=True))
    return d.done(exits, (loss,))


def plan_of(program: Program, **options: Any) -> Plan:
    return build(program, options=options, stages={"schedule": program})


def code(plan: Plan) -> str:
    """One line for each instruction."""
    lines = []
    for i in plan.instructions:
        made = ", ".join(f"r{o.reg}" for o in outs_of(i))
        what = type(i).__name__.lower()
        if isinstance(i, (Read, Write, Delete, Input)):
            what += f" {i.path if isinstance(i, Input) else i.slot}"
        elif isinstance(i, Collective):
            what = f"{i.step.kind}@{i.step.axis}"
        elif isinstance(i, Compute):
            what = i.op.removesuffix(".default")
        used = " ".join(f"r{r}" for r in uses_of(i))
        free = f" free {' '.join(f'r{r}' for r in i.frees)}" if i.frees else ""
        place = " in place" if isinstance(i, Compute) and i.inplace else ""
        lines.append(f"{made + ' = ' if made else ''}{what}{' ' + used if used else ''}{place}{free}")
    return "\n".join(lines)


def run(plan: Plan, state: dict[str, torch.Tensor], inputs: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Run a plan on whole state split over a simulated mesh; the state after, whole again (split over dim 0 alone)."""
    parts: list[dict[str, torch.Tensor]] = []
    for coord in plan.mesh.coords():
        mine = {}
        for path, t in state.items():
            spec = plan.slots[path].storage
            assert spec is not None
            for dim, index in enumerate(spec.indices(plan.mesh, coord)):
                t = t.index_select(dim, torch.tensor(index, dtype=torch.int64))
            mine[path] = t.clone()
        parts.append(mine)
    executors = [Executor(plan.instructions, plan.mesh, c, "cpu") for c in plan.mesh.coords()]
    with execution(torch.device("cpu")):
        simulate(executors, parts, [dict(inputs or {})] * len(parts))
    split = {p for p in state if plan.slots[p].storage.axes}  # type: ignore[union-attr]
    return {p: torch.cat([m[p] for m in parts]) if p in split else parts[0][p] for p in state}
