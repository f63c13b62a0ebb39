"""Plans of small partitioned programs: instruction lists, what is predicted of them, how they print, and JSON."""

from __future__ import annotations

import json
import math
import operator
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from shardc.dtypes import from_short
from shardc.errors import PlanError
from shardc.instructions import Collective, Compute, Delete, Input, Local, LocalDim, Out, Read, Ref, Write
from shardc.mesh import Mesh
from shardc.plan import Plan, build
from shardc.plan.alias import last_uses, outs, uses
from shardc.plan.fold import fold, numbers
from shardc.plan.serialize import Decoder, Encoder
from shardc.plan.text import amount, size
from shardc.program import Info, Phase, Program, Slot, SlotKind, TensorType
from shardc.reshard import STEP_OPS, Step, reshard
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
        made = ", ".join(f"r{o.reg}" for o in outs(i))
        what = type(i).__name__.lower()
        if isinstance(i, (Read, Write, Delete, Input)):
            what += f" {i.path if isinstance(i, Input) else i.slot}"
        elif isinstance(i, Collective):
            what = f"{i.step.kind}@{i.step.axis}"
        elif isinstance(i, Compute):
            what = i.op.removesuffix(".default")
        used = " ".join(f"r{r}" for r in uses(i))
        free = f" free {' '.join(f'r{r}' for r in i.frees)}" if i.frees else ""
        place = " in place" if isinstance(i, Compute) and i.inplace else ""
        lines.append(f"{made + ' = ' if made else ''}{what}{' ' + used if used else ''}{place}{free}")
    return "\n".join(lines)


# -- instructions ----------------------------------------------------------------------------------------------------------


def test_layer_code() -> None:
    assert_expected_inline(code(plan_of(layers(1))), """\
r0 = read model.h.0.w
r1 = read optimizer.state[0].exp_avg
r2 = read optimizer.state[0].exp_avg_sq
r3 = read optimizer.state[0].step
r4 = input tokens
r5 = input optimizer.param_groups[0].lr
r6 = all_gather@dp r0
r7 = aten.mm r4 r6 free r6
r8 = aten.sum r7 free r7
r9 = all_reduce@dp r8 free r8
r10 = aten.ones_like r9
r11 = aten.expand r10 free r10
r12 = aten.t r4 free r4
r13 = aten.mm r12 r11 free r11 r12
r14 = reduce_scatter@dp r13 free r13
r15, r16, r17, r18 = shardc.adam r0 r14 r1 r2 r3 r5 in place free r0 r1 r2 r3 r5 r14
write model.h.0.w r15 free r15
write optimizer.state[0].exp_avg r16 free r16
write optimizer.state[0].exp_avg_sq r17 free r17
write optimizer.state[0].step r18 free r18
return r9""")


def test_written_only_after_the_old_value_was_read_last() -> None:
    d = Draft(dp=2)
    w, x = d.slot("w", "f32[4@dp]"), d.input("x", "f32[4@dp]")
    view = d.op(aten.view.default, w, Local(ShardSpec.parse("[4@dp]")), to="f32[4@dp]")
    new = d.op(aten.add.Tensor, w, x, to="f32[4@dp]")
    late = d.op(aten.mul.Tensor, view, x, to="f32[4@dp]")
    done = d.op(aten.neg.default, late, to="f32[4@dp]")
    assert_expected_inline(code(plan_of(d.done({"w": new}, (done,)))), """\
r0 = read w
r1 = input x
r2 = aten.view r0
r3 = aten.add.Tensor r0 r1 free r0
r4 = aten.mul.Tensor r2 r1 free r1 r2
write w r3 free r3
r5 = aten.neg r4 free r4
return r5""")


def test_swapped_state_is_copied_once() -> None:
    d = Draft(dp=2)
    a, b = d.slot("a", "f32[4@dp]"), d.slot("b", "f32[4@dp]")
    assert_expected_inline(code(plan_of(d.done({"a": b, "b": a}))), """\
r0 = read a
r1 = read b
r2 = aten.clone r1 free r1
write b r0 free r0
write a r2 free r2
return""")
    assert run(plan_of(d.program), {"a": torch.arange(4.0), "b": -torch.arange(4.0)})["a"].tolist() == [0, -1, -2, -3]


def test_rotated_state() -> None:
    d = Draft(dp=1)
    names = ["a", "b", "c"]
    nodes = {n: d.slot(n, "f32[3]") for n in names}
    program = d.done({"a": nodes["b"], "b": nodes["c"], "c": nodes["a"]})
    after = run(plan_of(program), {n: torch.full((3,), float(k)) for k, n in enumerate(names)})
    assert {n: t[0].item() for n, t in after.items()} == {"a": 1, "b": 2, "c": 0}


def test_results_do_not_share_storage_with_state() -> None:
    d = Draft(dp=1)
    w = d.slot("w", "f32[3]", "b")
    new = d.op(aten.add.Tensor, w, 1, to="f32[3]")
    old = d.op(aten.view.default, w, [3], to="f32[3]")
    program = d.done({"w": new}, (w, old, new))
    state = {"w": torch.zeros(3)}
    plan = plan_of(program)
    (outcome,) = simulate([Executor(plan.instructions, plan.mesh, (0,), "cpu")], [state], [{}])
    state["w"].fill_(7)
    assert [r.tolist() for r in outcome.results] == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]


def test_state_moved_onto_itself() -> None:
    d = Draft(dp=1)
    w = d.slot("w", "f32[3, 3]")
    program = d.done({"w": d.op(aten.t.default, w, to="f32[3, 3]")})
    before = torch.arange(9.0).view(3, 3)
    assert torch.equal(run(plan_of(program), {"w": before.clone()})["w"], before.t())


@pytest.mark.parametrize("how", ["input", "slot", "twice", "result", "view", "transposed"])
def test_created_state_owns_its_storage(how: str) -> None:
    d = Draft(dp=1)
    w, x = d.slot("w", "f32[2, 2]"), d.input("x", "f32[2, 2]")
    d.slot("g", "f32[2, 2]", "g", "w", exists=False)
    d.slot("e", "f32[2, 2]", "t", exists=False)
    fresh = d.op(aten.mm.default, x, x, to="f32[2, 2]")
    part = d.op(aten.slice.Tensor, d.op(aten.mm.default, d.input("y", "f32[4, 2]"), x, to="f32[4, 2]"), 0, 1, 3, to="f32[2, 2]")
    turned = d.op(aten.t.default, fresh, to="f32[2, 2]")
    d.program.info[turned] = replace(d.program.info[turned], type=TensorType((2, 2), torch.float32, (1, 2)))
    value = {"input": x, "slot": w, "twice": fresh, "result": fresh, "view": part, "transposed": turned}[how]
    exits = {"w": w, "g": value} | ({"e": value} if how == "twice" else {})
    program = d.done(exits, (value,) if how == "result" else ())
    inputs = {"x": torch.tensor([[1.0, 2], [3, 4]]), "y": torch.arange(8.0).view(4, 2)}
    state = {"w": torch.eye(2)}
    plan = plan_of(program)
    (outcome,) = simulate([Executor(plan.instructions, plan.mesh, (0,), "cpu")], [state], [inputs])
    got = outcome.written["g"]
    others = [state["w"], *inputs.values(), *outcome.results, *(t for k, t in outcome.written.items() if k != "g")]
    assert got.is_contiguous() and all(t.untyped_storage().data_ptr() != got.untyped_storage().data_ptr() for t in others)
    assert got.untyped_storage().nbytes() == 16


def test_frees_are_exact() -> None:
    plan = plan_of(layers(3))
    freed = [r for i in plan.instructions for r in i.frees]
    assert len(freed) == len(set(freed))
    last = last_uses(plan.instructions)
    for k, i in enumerate(plan.instructions[:-1]):
        assert all(last[r] == k for r in i.frees)
    returned = set(uses(plan.instructions[-1]))
    assert set(freed) == {o.reg for i in plan.instructions for o in outs(i)} - returned


def test_in_place_where_the_operand_dies() -> None:
    plan = plan_of(layers(2))
    updates = [i for i in plan.instructions if isinstance(i, Compute) and i.op == "shardc.adam.default"]
    assert [u.inplace for u in updates] == [((0, 0), (1, 2), (2, 3), (3, 4))] * 2
    for u in updates:  # nothing is copied, and the slots' own storage has the new values
        assert [plan.aliases.owner(o.reg) for o in outs(u)] == [
            *(i.slot for i in plan.instructions if isinstance(i, Read) and i.out.reg in {u.args[a].reg for _, a in u.inplace})
        ]
    assert not [i for i in plan.instructions if isinstance(i, Compute) and i.op == "aten.clone.default"]


def test_an_operand_that_lives_on_is_copied_before_an_update_in_place() -> None:
    d = Draft(dp=1)
    w, m, x, lr = d.slot("w", "f32[3]"), d.slot("m", "f32[3]", "o", "w"), d.input("x", "f32[3]"), d.input("lr", None)
    op = torch.ops.shardc.sgd_momentum.default
    new = d.op(op, w, x, m, lr, 0.9, 0.0, 0.0, False, False, to=("f32[3]", "f32[3]"))
    p, buffer = (d.op(operator.getitem, new, k, to="f32[3]") for k in range(2))
    delta = d.op(aten.sub.Tensor, p, w, to="f32[3]")  # reads the old value after the update
    program = d.done({"w": p, "m": buffer}, (delta,))
    plan = plan_of(program)
    assert_expected_inline(code(plan), """\
r0 = read w
r1 = read m
r2 = input x
r3 = input lr
r7 = aten.clone r0
r4, r5 = shardc.sgd_momentum r7 r2 r1 r3 in place free r1 r2 r3 r7
write m r5 free r5
r6 = aten.sub.Tensor r4 r0 free r0
write w r4 free r4
return r6""")
    state = {"w": torch.ones(3), "m": torch.zeros(3)}
    (outcome,) = simulate(
        [Executor(plan.instructions, plan.mesh, (0,), "cpu")], [state], [{"x": torch.full((3,), 2.0), "lr": 0.5}]
    )
    assert state["w"].tolist() == [0.0] * 3 and outcome.results[0].tolist() == [-1.0] * 3 and state["m"].tolist() == [2.0] * 3


def test_inputs_are_never_overwritten() -> None:
    d = Draft(dp=1)
    x, g, lr = d.input("x", "f32[3]"), d.input("g", "f32[3]"), d.input("lr", None)
    new = d.op(torch.ops.shardc.sgd.default, x, g, lr, 0.0, False, to=("f32[3]",))
    plan = plan_of(d.done({}, (d.op(operator.getitem, new, 0, to="f32[3]"),)))
    assert all(not i.inplace for i in plan.instructions if isinstance(i, Compute))


def test_deleted_and_unused() -> None:
    d = Draft(dp=2)
    d.slot("g", "f32[4@dp]", "g")
    x = d.input("x", "f32[4@dp]")
    d.input("unused", "f32[4@dp]")
    pair = d.op(aten.max.dim, x, 0, to=("f32[]", "i64[]"))
    first = d.op(operator.getitem, pair, 0, to="f32[]")
    assert_expected_inline(code(plan_of(d.done({}, (first,)))), """\
r0 = read g free r0
delete g
r1 = input x
r2 = input unused free r2
r3, r4 = aten.max.dim r1 free r1 r4
return r3""")


def test_values_that_do_not_rest_in_their_slot() -> None:
    d = Draft(dp=2)
    w = d.slot("model.w", "f32[4@dp]")
    bad = d.op(aten.add.Tensor, d.move(w, "[4]"), 1, to="f32[4]")
    with pytest.raises(PlanError, match=r"new value of model.w is \[4\], its storage is \[4@dp\]"):
        plan_of(d.done({"model.w": bad}))


def test_numbers_and_lists() -> None:
    d = Draft(dp=1)
    x, lr = d.input("x", "f32[4]"), d.input("lr", None)
    half = d.op(operator.mul, d.op(math.sqrt, lr), 0.5)
    parts = d.op(aten.split.Tensor, x, 2, to=("f32[2]", "f32[2]"))
    both = d.op(aten.cat.default, parts, to="f32[4]")
    out = d.op(aten.mul.Tensor, both, half, to="f32[4]")
    program = d.done({}, (out,))
    program.number_exit = {"lr": half}
    program.set_output()
    plan = plan_of(program)
    names = [i.op for i in plan.instructions if isinstance(i, Compute)]
    assert names == ["math.sqrt", "operator.mul", "aten.split.Tensor", "aten.cat.default", "aten.mul.Tensor"]
    outcome = simulate([Executor(plan.instructions, plan.mesh, (0,), "cpu")], [{}], [{"x": torch.arange(4.0), "lr": 16.0}])[0]
    assert outcome.results[0].tolist() == [0, 2, 4, 6] and outcome.numbers == {"lr": 2.0}


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


# -- predictions -----------------------------------------------------------------------------------------------------------


def test_communication_rows() -> None:
    rows = plan_of(layers(3), zero=3).communication
    whole = 4 * 4 * 4  # bytes of a weight
    assert [(r.group, r.kind, r.axis, r.phase, r.count, r.bytes) for r in rows] == [
        ("parameters", "all_gather", "dp", "forward", 3, 3 * whole // 2),
        ("parameters", "all_gather", "dp", "backward", 2, 2 * whole // 2),
        ("gradients", "reduce_scatter", "dp", "backward", 3, 3 * whole // 2),
        ("statistics", "all_reduce", "dp", "forward", 1, 4),
    ]
    assert rows.bytes_per_rank == 8 * whole // 2 + 4
    assert rows.bytes_of("statistics") == 4


@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (1, 2), (3, 3)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parameter_traffic(zero: int, factor: int, ranks: int) -> None:
    n, width = 5, 8
    rows = plan_of(layers(n, zero, ranks, width), zero=zero).communication
    traffic = rows.bytes_of("parameters", "gradients")
    saved = 1 if zero == 3 else 0  # the first layer's weight is not read in the backward
    assert traffic == (factor * n - saved) * width * width * 4 * (ranks - 1) // ranks


def test_memory_by_hand() -> None:
    d = Draft(dp=2)
    w, x = d.slot("w", "f32[8@dp, 2]"), d.input("x", "f32[4@dp, 8]")
    whole = d.move(w, "[8, 2]")
    y = d.op(aten.mm.default, x, whole, to="f32[4@dp, 2]")
    z = d.op(aten.relu.default, y, to="f32[4@dp, 2]", module="model.act", line="train.py:7")
    m = plan_of(d.done({"w": w}, (z,))).memory
    assert m.start_bytes == 4 * 2 * 4 + 2 * 8 * 4
    assert m.peak_bytes == m.start_bytes + 8 * 2 * 4 + 2 * 2 * 4  # the gathered weight and the product
    assert m.by_category == {"parameters": 32, "gradients": 0, "optimizer": 0, "activations": 16, "gathered": 64, "other": 64}
    assert sum(m.by_category.values()) == m.peak_bytes
    assert m.peak_at.op == "aten.mm" and m.peak_at.line == "train.py:1"
    assert max(t.bytes for t in m.timeline) == m.peak_bytes


def test_memory_is_what_a_run_measures() -> None:
    plan = plan_of(layers(4, width=6))
    specs = {s.path: s.storage for s in plan.slots.values() if s.storage is not None}
    state = [{p: torch.zeros(s.local_shape(plan.mesh, c)) for p, s in specs.items()} for c in plan.mesh.coords()]
    inputs = {"tokens": torch.ones(3, 6), "optimizer.param_groups[0].lr": 0.1}
    outcomes = simulate([Executor(plan.instructions, plan.mesh, c, "cpu") for c in plan.mesh.coords()], state, [inputs] * 2)
    assert {o.stats.peak_bytes for o in outcomes} == {plan.memory.peak_bytes}
    assert {o.stats.comm_bytes for o in outcomes} == {plan.communication.bytes_per_rank}
    assert {o.stats.collectives for o in outcomes} == {plan.communication.collectives}


def test_zero_lowers_memory() -> None:
    peaks = [plan_of(layers(8, zero, 4, 32), zero=zero).memory.peak_bytes for zero in (0, 1, 3)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_time_depends_on_hardware() -> None:
    program = layers(2, mesh=4, width=64)
    times = []
    for profile in ("cpu", "A100", "H100", "H200"):
        program.mesh = Mesh(dp=4, simulated=True, profile=profile)
        t = plan_of(program).time
        assert t.predicted_s == pytest.approx(sum(t.by_category.values())) == pytest.approx(sum(t.by_phase.values()))
        times.append(t.predicted_s)
    assert times[0] > times[1] > times[2] >= times[3] > 0
    program.mesh = Mesh(dp=4, profile="H1000")
    with pytest.raises(PlanError, match="unknown hardware profile 'H1000'"):
        _ = plan_of(program).time


# -- printing --------------------------------------------------------------------------------------------------------------


def page(plan: Plan) -> str:
    """The printout, its hash and its dots (which golden texts cannot hold) replaced."""
    return str(plan).replace(plan.hash[:6], "HASHED").replace("·", "|")


def test_printout() -> None:
    assert_expected_inline(page(plan_of(layers(12), zero=3)), """\
plan HASHED | zero 3 | mesh dp=2 | 192 parameters | 208 nodes
state                          global     per rank   spec       bytes/rank
model.h.{0..11}.w              f32[4, 4]  f32[2, 4]  [4@dp, 4]       384 B
  + exp_avg, exp_avg_sq        f32[4, 4]  f32[2, 4]  [4@dp, 4]       768 B
optimizer.state[{0..11}].step  f32[]      f32[]      []               48 B

communication per step       of          phase     count  bytes/rank    time  overlap
all_gather              @dp  parameters  forward      12       384 B  720 us      0 %
all_gather              @dp  parameters  backward     11       352 B  660 us      0 %
reduce_scatter          @dp  gradients   backward     12       384 B  720 us      0 %
all_reduce              @dp  statistics  forward       1         4 B  120 us      0 %
total                                                 36      1.1 kB  2.2 ms

memory per rank at the peak   parameters 384 B | gradients 0 | optimizer 816 B | activations 576 B | gathered 64 B | other 48 B
peak 1.9 kB at aten.mm (model.h.11, train.py:1)
time per step 2.4 ms on cpu (predicted)   compute 196 us | communication 2.2 ms | host 24 us

notes    replicated: none
         not captured: none
         recomputed: 11 gathers""")


def test_printout_without_communication() -> None:
    assert_expected_inline(page(plan_of(layers(2, 0, 1), zero=0)), """\
plan HASHED | zero 0 | mesh dp=1 | 32 parameters | 32 nodes
state                        global     per rank   spec    bytes/rank
model.h.{0,1}.w              f32[4, 4]  f32[4, 4]  [4, 4]       128 B
  + exp_avg, exp_avg_sq      f32[4, 4]  f32[4, 4]  [4, 4]       256 B
optimizer.state[{0,1}].step  f32[]      f32[]      []             8 B

communication per step   none

memory per rank at the peak   parameters 128 B | gradients 0 | optimizer 264 B | activations 196 B | gathered 0 | other 96 B
peak 684 B at aten.sum (model, train.py:1)
time per step 40 us on cpu (predicted)   compute 36 us | communication 0 | host 4 us

notes    replicated: none
         not captured: none
         recomputed: none""")


def test_explain_a_parameter() -> None:
    assert_expected_inline(plan_of(layers(2), zero=3).explain("model.h.1.w"), """\
model.h.1.w: parameter f32[4, 4], 64 B
storage  [4@dp, 4], 32 B per rank
compute  [4, 4]
owns     optimizer.state[1].exp_avg, optimizer.state[1].exp_avg_sq, optimizer.state[1].step
why      zero=3 splits it over dp while it rests
life     there before and after the step
moved by
  %all_gather_1    all_gather@dp      f32[4, 4]     32 B  forward, model.h.1, train.py:1
  %reduce_scatter  reduce_scatter@dp  f32[4@dp, 4]  32 B  backward, model.h.1, train.py:1
  %all_gather_2    all_gather@dp      f32[4, 4]     32 B  backward, model.h.1, train.py:1
read by
  %mm_default_1  aten.mm      f32[6@dp, 4]                                    forward, model.h.1, train.py:1
  %mm_default_3  aten.mm      f32[6@dp, 4]                                    backward, model.h.1, train.py:1
  %adam_default  shardc.adam  f32[4@dp, 4] f32[4@dp, 4] f32[4@dp, 4] f32[]    update, optimizer, train.py:1
written in place by
  %adam_default  shardc.adam  f32[4@dp, 4] f32[4@dp, 4] f32[4@dp, 4] f32[]    update, optimizer, train.py:1""")


def test_explain_nodes_and_names() -> None:
    plan = plan_of(layers(2), zero=3)
    gather = next(i for i in plan.instructions if isinstance(i, Collective))
    assert_expected_inline(plan.explain(gather.name), """\
%all_gather  all_gather@dp  f32[4, 4]  32 B  forward, model.h.0, train.py:1
result   f32[4, 4], per rank [4, 4], 64 B, gathered
step     all_gather@dp [4@dp, 4] -> [4, 4]
sends    32 B per rank, parameters
time     60 us (predicted)
from     %model_h_0_w
used by  %mm_default""")
    assert plan.explain("h.1.w") == plan.explain("model.h.1.w")
    with pytest.raises(PlanError, match=r"no slot, node or module 'model.h.1.v'\n  try: did you mean model.h.1.w"):
        plan.explain("model.h.1.v")


def test_diff() -> None:
    a, b = plan_of(layers(3, 1), zero=1), plan_of(layers(3, 3), zero=3)
    assert_expected_inline(a.diff(b).replace(a.hash[:6], "AAAAAA").replace(b.hash[:6], "BBBBBB"), """\
plan AAAAAA -> BBBBBB
option    zero: 1 -> 3
state  model.h.{0..2}.w  [4, 4]  ->  [4@dp, 4]
all_gather@dp  parameters  update    3 x, 96 B  ->     0 x, 0
all_gather@dp  parameters  forward      0 x, 0  ->  3 x, 96 B
all_gather@dp  parameters  backward     0 x, 0  ->  2 x, 64 B
communication              total         196 B  ->      260 B
memory  peak         640 B  ->  556 B
memory  parameters   192 B  ->   96 B
memory  activations  100 B  ->  144 B
memory  gathered         0  ->   64 B
memory  other        144 B  ->   48 B
time      550 us -> 658 us
nodes     59 -> 55""")
    assert a.diff(a) == f"plans {a.hash[:6]} and {a.hash[:6]} do the same"


def test_folding() -> None:
    paths = [f"m.h.{k}.{j}.w" for k in range(3) for j in (0, 2, 3, 4)] + ["m.x", "m.h.3.0.w"]
    assert [f.path for f in fold((p, "same") for p in paths)] == ["m.h.{0..2}.{0,2..4}.w", "m.x", "m.h.3.0.w"]
    assert [f.path for f in fold([("a[0].b", 1), ("a[1].b", 2), ("a[2].b", 1)])] == ["a[{0,2}].b", "a[1].b"]
    assert sorted(k for f in fold((p, "s") for p in paths) for k in f.members) == list(range(len(paths)))
    assert numbers(["3"]) == "3"


def test_units() -> None:
    assert [size(n) for n in (0, 12, 999, 1000, 19_300_000, 435_600_000, 2.1e9)] == [
        "0", "12 B", "999 B", "1.0 kB", "19.3 MB", "436 MB", "2.1 GB",
    ]  # fmt: skip
    assert [amount(n) for n in (7, 2131, 124_439_808)] == ["7", "2,131", "124.4 M"]


# -- JSON ------------------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Any) -> None:
    plan = plan_of(layers(3), zero=3, memory_budget="1MiB", inputs={"x": 1})
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.instructions == plan.instructions and again == plan and again.hash == plan.hash
    assert str(again) == str(plan) and again.explain("model.h.1.w") == plan.explain("model.h.1.w")
    assert again.stages["schedule"] == str(plan.stages["schedule"])
    assert again.memory == plan.memory and again.communication == plan.communication
    state = {s.path: torch.rand(s.type.shape) for s in plan.slots.values()}
    inputs = {"tokens": torch.rand(3, 4), "optimizer.param_groups[0].lr": 0.1}
    one, two = (run(p, {k: v.clone() for k, v in state.items()}, inputs) for p in (plan, again))
    assert all(torch.equal(one[k], two[k]) for k in state)
    assert not torch.equal(one["model.h.0.w"], state["model.h.0.w"])


def test_values_round_trip() -> None:
    spec = ShardSpec.parse("[3·8@tp·64, 5@(dp,tp2)] +sum@pp")
    values = [
        None, True, 3, 0.1, float("inf"), float("-inf"), 1e-300, "x", (1, [2, (3.5,)]), {"a": (1,)}, Ref(4), Local(spec),
        LocalDim(spec.dims[0]), slice(None, Ref(1), 2), torch.float8_e4m3fn, torch.bfloat16, torch.device("cuda:1"),
        torch.strided,
        torch.channels_last, torch.contiguous_format, 1 + 2j, Out(3, spec, torch.int8), Out(4, None, None),
        Step("all_gather", "dp", ShardSpec.parse("[8@dp]"), ShardSpec.parse("[8]")), ShardSpec(()),
    ]  # fmt: skip
    for v in values:
        text = json.dumps(Encoder().value(v), allow_nan=False)
        back = Decoder().value(json.loads(text))
        assert back == v and type(back) is type(v), v
    nan = Decoder().value(json.loads(json.dumps(Encoder().value(float("nan")))))
    assert nan != nan
    with pytest.raises(PlanError, match="a plan cannot hold"):
        Encoder().value({1, 2})


def test_saved_plans_that_are_not_right(tmp_path: Any) -> None:
    plan = plan_of(layers(1))
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    for change, message in [
        ({"format": 99}, "format 99"),
        ({"entry": []}, "was changed"),
        ({"instructions": [{"kind": "Exec"}]}, "unknown instruction"),
        ({"slots": 3}, "not a saved plan"),
    ]:
        path.write_text(json.dumps(data | change))
        with pytest.raises(PlanError, match=message):
            Plan.load(path)
    path.write_text("{")
    with pytest.raises(PlanError, match="JSON"):
        Plan.load(path)
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "none.json")


def test_check_fits() -> None:
    plan = plan_of(layers(2))
    plan.check_fits(plan.slots, plan.inputs, Mesh(dp=2))
    with pytest.raises(PlanError, match="for mesh dp=2, the mesh here is dp=4"):
        plan.check_fits(plan.slots, plan.inputs, Mesh(dp=4))
    less = {k: v for k, v in plan.slots.items() if "h.1" not in k}
    with pytest.raises(PlanError, match=r"its state model.h.1.w \(f32\[4, 4\]\) is not here"):
        plan.check_fits(less, plan.inputs, plan.mesh)
    wider = plan.slots | {"model.h.0.w": replace(plan.slots["model.h.0.w"], type=TensorType((4, 8), torch.float32))}
    with pytest.raises(PlanError, match=r"model.h.0.w is f32\[4, 4\] there, f32\[4, 8\] here"):
        plan.check_fits(wider, plan.inputs, plan.mesh)
    with pytest.raises(PlanError, match="input more"):
        plan.check_fits(plan.slots, plan.inputs | {"more": TensorType((1,), torch.float32)}, plan.mesh)


def test_plans_of_other_variants_and_options() -> None:
    plan = plan_of(layers(2, 3), zero=3)
    assert plan.mismatch(layers(2, 3)) is None
    with pytest.raises(PlanError, match=r"model.h.0.w rests as \[4@dp, 4\] in this plan, as \[4, 4\]") as e:
        plan.check_fits(layers(2, 1).slots, plan.inputs, plan.mesh)
    assert "zero=3" in str(e.value)
    first = layers(2, 3)
    del first.entry["optimizer.state[1].step"]
    assert plan.mismatch(first) == "state on entry: optimizer.state[1].step is in the plan only (1 such)"
    other = layers(2, 3)
    other.results = []
    assert (plan.mismatch(other) or "").startswith("results: 1 and numbers [], the program has 0")


def test_hash_is_the_same_in_other_processes() -> None:
    script = "import sys; sys.path.insert(0, 'tests'); import test_plan as t; print(t.plan_of(t.layers(3), zero=3).hash)"
    mine = plan_of(layers(3), zero=3).hash
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == mine
    assert mine != plan_of(layers(3, 1), zero=1).hash and mine != plan_of(layers(3, mesh=4), zero=3).hash


def test_lines_do_not_change_the_hash() -> None:
    program = layers(2)
    before = plan_of(program).hash
    for node, info in list(program.info.items()):
        program.info[node] = replace(info, line="other.py:9")
    assert plan_of(program).hash == before
