"""How plans print, what they explain, and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from plan_drafts import Draft, aten, layers, plan_of, run

from shardc.errors import PlanError
from shardc.instructions import Collective, Local, LocalDim, Out, Ref
from shardc.mesh import Mesh
from shardc.plan import Plan
from shardc.plan.fold import fold, numbers
from shardc.plan.serialize import Decoder, Encoder
from shardc.plan.text import amount, size
from shardc.program import TensorType
from shardc.reshard import Step
from shardc.spec import ShardSpec

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

memory per rank at the peak   parameters 384 B | gradients 32 B | optimizer 816 B | activations 536 B | gathered 64 B | other 96 B
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

memory per rank at the peak   parameters 128 B | gradients 64 B | optimizer 264 B | activations 104 B | gathered 0 | other 192 B
peak 752 B at aten.mm (model.h.1, train.py:1)
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
moved by 3 steps: 96 B sent per rank, 180 us (predicted)
  %all_gather_1    all_gather@dp      f32[4, 4]     32 B  60 us  forward, model.h.1, train.py:1
  %reduce_scatter  reduce_scatter@dp  f32[4@dp, 4]  32 B  60 us  backward, model.h.1, train.py:1
  %all_gather_2    all_gather@dp      f32[4, 4]     32 B  60 us  backward, model.h.1, train.py:1
read by
  %mm_default_1  aten.mm      f32[6@dp, 4]                                    4 us  forward, model.h.1, train.py:1
  %mm_default_3  aten.mm      f32[6@dp, 4]                                    4 us  backward, model.h.1, train.py:1
  %adam_default  shardc.adam  f32[4@dp, 4] f32[4@dp, 4] f32[4@dp, 4] f32[]    4 us  update, optimizer, train.py:1
written in place by
  %adam_default  shardc.adam  f32[4@dp, 4] f32[4@dp, 4] f32[4@dp, 4] f32[]    4 us  update, optimizer, train.py:1""")


def test_explain_nodes_and_names() -> None:
    plan = plan_of(layers(2), zero=3)
    gather = next(i for i in plan.instructions if isinstance(i, Collective))
    assert_expected_inline(plan.explain(gather.name), """\
%all_gather  all_gather@dp  f32[4, 4]  32 B  60 us  forward, model.h.0, train.py:1
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
memory  peak        660 B  ->  596 B
memory  parameters  192 B  ->   96 B
memory  gradients    64 B  ->   32 B
memory  gathered        0  ->   64 B
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
    script = "import sys; sys.path.insert(0, 'tests'); import plan_drafts as t; print(t.plan_of(t.layers(3), zero=3).hash)"
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


def test_notes_on_replicated_values_and_uneven_splits() -> None:
    d = Draft(dp=4)
    d.slot("model.a", "f32[6@dp, 2]")
    d.slot("optimizer.state[0].exp_avg", "f32[6@dp, 2]", "o", "model.a")
    d.slot("model.scale", "f32[3]")
    d.slot("model.seen", "f32[5]", "b")
    x = d.input("x", "f32[8@dp, 3]")
    y = d.op(aten.relu.default, x, to="f32[8@dp, 3]")
    whole = d.move(y, "[8, 3]")
    s = d.op(aten.cumsum.default, whole, 0, to="f32[8, 3]", module="model.h.0", line="train.py:5")
    s = d.op(aten.neg.default, s, to="f32[8, 3]", module="model.h.0", line="train.py:5")
    mean = d.move(d.op(aten.sum.dim_IntList, x, [0], to="f32[3] +sum@dp"), "[3]")
    mean = d.op(aten.neg.default, mean, to="f32[3]")  # whole, but by a reduction
    plan = plan_of(d.done({p: n for p, n in d.program.entry.items()}, (s, mean)), zero=3)
    notes = page(plan).partition("notes")[2]
    assert_expected_inline(notes, """\
    replicated: 1 parameter, 12 B (no dim of [3] can be split)
         replicated: 1 buffer, 20 B (never split unless pinned)
         replicated: model.h.0: aten.cumsum, aten.neg, 192 B (its operand is gathered, train.py:5)
         uneven: model.a [6@dp, 2], 0 to 4 elements a rank, costs 8 B
         not captured: none
         recomputed: none""")
    assert [(r.name, r.bytes) for r in plan.replicated] == [
        ("model.scale", 12), ("model.seen", 20), ("model.h.0: aten.cumsum", 96), ("model.h.0: aten.neg", 96),
    ]  # fmt: skip
    alone = Draft(dp=1, tp=2)
    alone.slot("model.scale", "f32[3]")
    found = plan_of(alone.done({p: n for p, n in alone.program.entry.items()}, ()), zero=3).replicated
    assert [r.reason for r in found] == ["zero=3 splits over dp, of one rank"]
    assert [(u.name, u.largest, u.smallest, u.bytes) for u in plan.uneven] == [
        ("model.a", 4, 0, 4), ("optimizer.state[0].exp_avg", 4, 0, 4),
    ]  # fmt: skip
