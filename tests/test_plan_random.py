"""Random functional programs over state: the instruction list, which works in place and writes early, means the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_drafts import Draft, aten, plan_of
from torch import fx

from shardc.instructions import outs_of, uses_of
from shardc.plan import Plan
from shardc.program import Program
from shardc.runtime import Executor, execution, simulate

SLOTS, INPUTS = ["a", "b", "c"], ["x", "y"]
VIEWS = [(aten.t.default, ()), (aten.detach.default, ()), (aten.view.default, ([3, 3],)), (aten.alias.default, ())]
UPDATE = torch.ops.shardc.sgd_momentum.default
FLAGS = (0.5, 0.9, 0.0, 0.0, False, False)
TEXT = "f32[3, 3]"


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[str]]:
    """A program over state a, b, c of 3 x 3, and the slots that exist when it starts."""
    d = Draft(dp=1)
    there = draw(st.lists(st.sampled_from(SLOTS), unique=True, min_size=1))
    values: list[fx.Node] = []
    for name in SLOTS:
        node = d.slot(name, TEXT, exists=name in there)
        values += [node] if node is not None else []
    values += [d.input(name, TEXT) for name in INPUTS]
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["view", "view", "binary", "update", "update", "slice"]))
        pick = [draw(st.sampled_from(values)) for _ in range(3)]
        if kind == "view":
            target, extra = draw(st.sampled_from(VIEWS))
            values.append(d.op(target, pick[0], *extra, to=TEXT))
        elif kind == "binary":
            values.append(d.op(draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor])), *pick[:2], to=TEXT))
        elif kind == "slice":
            both = d.op(aten.cat.default, pick[:2], to="f32[6, 3]")
            values.append(d.op(aten.slice.Tensor, both, 0, 1, 4, to=TEXT))
        else:
            new = d.op(UPDATE, *pick, *FLAGS, to=(TEXT, TEXT))
            values += [d.op(operator.getitem, new, k, to=TEXT) for k in range(2)]
    kept = draw(st.lists(st.sampled_from(SLOTS), unique=True))
    exits = {name: draw(st.sampled_from(values)) for name in kept}
    results = draw(st.lists(st.sampled_from(values), max_size=3))
    return d.done(exits, tuple(results)), there


Tensors = dict[str, torch.Tensor]


def reference(program: Program, state: Tensors, inputs: Tensors) -> tuple[Tensors, list[torch.Tensor]]:
    """The program's meaning: every value is a tensor of its own, nothing is ever overwritten."""
    env: dict[fx.Node, Any] = {n: state[p] for p, n in program.entry.items()}
    env |= {n: inputs[p] for p, n in program.inputs.items()}
    for node in program.graph.nodes:
        if node.op == "call_function":
            args = fx.node.map_arg(node.args, lambda n: env[n])
            out = node.target(*args)  # type: ignore[operator]
            env[node] = tuple(t.clone() for t in out) if isinstance(out, tuple) else out.clone()
    return {p: env[n] for p, n in program.exit.items()}, [env[n] for n in program.results]


def run(plan: Plan, state: Tensors, inputs: Tensors) -> Any:
    with execution(torch.device("cpu")):
        (outcome,) = simulate([Executor(plan.instructions, plan.mesh, (0,), "cpu")], [state], [inputs])
    return outcome


@settings(max_examples=1000, deadline=None)
@given(programs(), st.integers(0, 3))
def test_instructions_mean_what_the_program_means(drawn: tuple[Program, list[str]], seed: int) -> None:
    means_the_same(*drawn, seed)


def test_a_view_of_a_value_that_took_over_storage_keeps_it() -> None:
    """Two updates in a row in one storage: the view of the first result leaves the step, so the second one copies."""
    d = Draft(dp=1)
    a = d.slot("a", TEXT)
    x = d.input("x", TEXT)
    first = d.op(operator.getitem, d.op(UPDATE, x, x, d.op(aten.neg.default, x, to=TEXT), *FLAGS, to=(TEXT, TEXT)), 1, to=TEXT)
    view = d.op(aten.t.default, first, to=TEXT)
    d.op(operator.getitem, d.op(UPDATE, x, x, first, *FLAGS, to=(TEXT, TEXT)), 1, to=TEXT)
    d.input("y", TEXT)
    means_the_same(d.done({"a": a}, (view,)), ["a"], 0)


def means_the_same(program: Program, there: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = {n: torch.randint(-3, 4, (3, 3), generator=generator).float() for n in there}
    inputs = {n: torch.randint(-3, 4, (3, 3), generator=generator).float() for n in INPUTS}
    given_inputs = {n: t.clone() for n, t in inputs.items()}
    want, returned = reference(program, {n: t.clone() for n, t in state.items()}, inputs)
    plan = plan_of(program)
    mine = dict(state)
    outcome = run(plan, mine, inputs)
    after = {**{n: t for n, t in state.items() if n in program.exit}, **outcome.written}
    assert set(after) == set(want) and set(outcome.deleted) == set(there) - set(want)
    for name, value in want.items():
        assert torch.equal(after[name], value), name
        assert name not in state or after[name] is state[name], f"{name} lost its own storage"
    for got, value in zip(outcome.results, returned, strict=True):
        assert torch.equal(got, value)
    assert all(torch.equal(inputs[n], given_inputs[n]) for n in INPUTS), "an input was overwritten"
    owned = [t.untyped_storage().data_ptr() for t in after.values()]
    assert len(set(owned)) == len(owned) and not set(owned) & {t.untyped_storage().data_ptr() for t in outcome.results}
    assert outcome.stats.peak_bytes == plan.memory.peak_bytes
    live: set[int] = set()
    for i in plan.instructions:  # nothing is read that was freed
        assert set(uses_of(i)) <= live
        live |= {o.reg for o in outs_of(i)}
        assert set(i.frees) <= live
        live -= set(i.frees)
