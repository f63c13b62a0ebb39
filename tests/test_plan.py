"""Plans of small partitioned programs: instruction lists, and what is predicted of them."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from plan_drafts import Draft, aten, code, layers, plan_of, run

from shardc.errors import PlanError
from shardc.instructions import Compute, Local, Read, outs_of, uses_of
from shardc.mesh import Mesh
from shardc.plan.alias import last_uses
from shardc.program import TensorType
from shardc.runtime import Executor, simulate
from shardc.spec import ShardSpec

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
    returned = set(uses_of(plan.instructions[-1]))
    assert set(freed) == {o.reg for i in plan.instructions for o in outs_of(i)} - returned


def test_in_place_where_the_operand_dies() -> None:
    plan = plan_of(layers(2))
    updates = [i for i in plan.instructions if isinstance(i, Compute) and i.op == "shardc.adam.default"]
    assert [u.inplace for u in updates] == [((0, 0), (1, 2), (2, 3), (3, 4))] * 2
    for u in updates:  # nothing is copied, and the slots' own storage has the new values
        assert [plan.aliases.owner(o.reg) for o in outs_of(u)] == [
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
