"""Executors, communicators and accounting of memory, on instruction lists written by hand."""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.errors import InputError, RuntimeFailure, StateError
from shardc.instructions import (
    Collective,
    Compute,
    Delete,
    Input,
    Instruction,
    Local,
    LocalDim,
    Out,
    Read,
    Ref,
    Return,
    Write,
)  # fmt: skip
from shardc.mesh import Mesh
from shardc.reshard import Step, reshard
from shardc.runtime import Executor, NullCommunicator, Outcome, drive, dry_run, execution, simulate
from shardc.runtime.comm import Move, Start
from shardc.runtime.process import ProcessGroupCommunicator
from shardc.spec import Factor, ShardSpec
from shardc.testing.processes import run_outcomes, run_ranks
from shardc.testing.reference import part_of, run_steps, shards

F64, F32 = torch.float64, torch.float32
spec = ShardSpec.parse


def out(reg: int, text: str, dtype: torch.dtype | None = F64) -> Out:
    return Out(reg, spec(text), dtype)


def number(reg: int) -> Out:
    return Out(reg, None, None)


def run_all(
    program: list[Instruction], mesh: Mesh, slots: list[dict[str, torch.Tensor]], inputs: list[dict[str, Any]] | None = None
) -> list[Outcome]:
    executors = [Executor(program, mesh, c, "cpu") for c in mesh.coords()]
    return simulate(executors, slots, inputs or [{} for _ in executors])


def run_one(program: list[Instruction], slots: dict[str, torch.Tensor], inputs: dict[str, Any] | None = None) -> Outcome:
    return run_all(program, Mesh(dp=1), [slots], [inputs or {}])[0]


def collectives(steps: list[Step], dtype: torch.dtype = F64) -> list[Instruction]:
    """A program that takes slot x through the steps and returns it; each register dies where it is used."""
    program: list[Instruction] = [Read("x", slot="x", out=Out(0, steps[0].src, dtype))]
    for k, step in enumerate(steps):
        program.append(Collective(f"s{k}", frees=(k,), step=step, src=k, out=Out(k + 1, step.dst, dtype)))
    return [*program, Return("return", results=(len(steps),), specs=(steps[-1].dst,))]


# -- collectives ---------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, ShardSpec, ShardSpec]:
    """A mesh and two specs of one shape: several axes, factor products, uneven and empty parts, pending reductions."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: np.prod(s) <= 12))
    mesh = Mesh(dict(zip("abc", sizes, strict=False)))
    shape = [draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)) for _ in range(draw(st.integers(0, 3)))]

    def one(partial: bool) -> ShardSpec:
        axes = {(k, j): [] for k, d in enumerate(shape) for j in range(len(d))}
        pending = []
        for axis in draw(st.permutations(list(mesh.axes))):
            choice = draw(st.sampled_from([*axes, None, *(["sum", "max", "min"] if partial else [])]))
            if isinstance(choice, str):
                pending.append((axis, choice))
            elif choice is not None:
                axes[choice].append(axis)
        ops = {op for _, op in pending}
        dims = tuple(tuple(Factor(n, tuple(axes[k, j])) for j, n in enumerate(d)) for k, d in enumerate(shape))
        return ShardSpec(dims, tuple((a, min(ops)) for a, _ in pending)).canonical(mesh)

    return mesh, one(True), one(False)


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from([F64, torch.float16, torch.int64, torch.complex64]), st.booleans())
def test_steps_agree_with_the_reference(case: tuple[Mesh, ShardSpec, ShardSpec], dtype: torch.dtype, strided: bool) -> None:
    mesh, src, dst = case
    steps = reshard(src, dst, mesh)
    if not steps or (dtype.is_complex and src.partial and src.partial[0][1] != "sum"):
        return
    whole = np.arange(np.prod(src.shape, dtype=int), dtype=np.float64).reshape(src.shape) % 31
    parts = shards(whole, src, mesh)
    want = run_steps(parts, steps, mesh)
    slots = []
    for c in mesh.coords():
        x = torch.tensor(parts[c]).to(dtype)
        slots.append({"x": torch.stack([x, x], -1)[..., 1] if strided else x})
    kept = [s["x"].clone() for s in slots]
    for c, got in zip(mesh.coords(), run_all(collectives(steps, dtype), mesh, slots), strict=True):
        assert got.results[0].dtype == dtype
        np.testing.assert_array_equal(got.results[0].to(torch.complex128).real.numpy(), want[c], err_msg=f"{src} -> {dst}")
    for a, b in zip(kept, slots, strict=True):
        assert torch.equal(a, b["x"]), "state was overwritten"


def test_positions_without_structure_are_moved_by_index() -> None:
    mesh = Mesh(a=3, b=2)
    src, dst = spec("[5@a·3@b]"), spec("[5·3@b]")  # parts of 2, 2 and 1 rows of 2 or 1 columns
    step = Step("all_gather", "a", src, dst)
    whole = np.arange(15.0)
    slots = [{"x": torch.tensor(part_of(whole, src, mesh, c))} for c in mesh.coords()]
    for c, got in zip(mesh.coords(), run_all(collectives([step]), mesh, slots), strict=True):
        np.testing.assert_array_equal(got.results[0].numpy(), part_of(whole, dst, mesh, c))


@pytest.mark.parametrize(
    ("src", "dst", "kind", "straight"),
    [
        ("[8@a, 6]", "[8, 6]", "all_gather", (True, True)),
        ("[7@a, 6]", "[7, 6]", "all_gather", (True, True)),  # the last part is shorter: padded at the end only
        ("[8, 6@a]", "[8, 6]", "all_gather", (True, False)),
        ("[8, 6] +sum@a", "[8@a, 6]", "reduce_scatter", (True, True)),
        ("[8, 6] +sum@a", "[8, 6@a]", "reduce_scatter", (False, True)),
        ("[8@a, 6]", "[8, 6@a]", "all_to_all", (False, True)),
        ("[8, 6@a]", "[8@a, 6]", "all_to_all", (True, False)),
    ],
)
def test_what_is_packed(src: str, dst: str, kind: str, straight: tuple[bool, bool]) -> None:
    move = Move(Step(kind, "a", spec(src), spec(dst)), F64, Mesh(a=2), (0,))
    assert (move.straight_in, move.straight_out) == straight


def test_bool_and_small_integers() -> None:
    mesh = Mesh(a=2)
    for dtype, src, op, values, want in (
        (torch.bool, "[2] +max@a", "max", ([True, False], [False, False]), [True, False]),
        (torch.bool, "[2] +min@a", "min", ([True, False], [True, True]), [True, False]),
        (torch.int16, "[2] +sum@a", "sum", ([1, 2], [300, 4]), [301, 6]),
    ):
        program = collectives([Step("all_reduce", "a", spec(src), spec("[2]"), op)], dtype)
        got = run_all(program, mesh, [{"x": torch.tensor(v, dtype=dtype)} for v in values])
        assert [g.results[0].tolist() for g in got] == [want, want]


def test_conjugate_views_are_sent_resolved() -> None:
    mesh = Mesh(a=2)
    program = collectives([Step("all_gather", "a", spec("[4@a]"), spec("[4]"))], torch.complex128)
    x = torch.complex(torch.arange(4.0, dtype=F64), torch.ones(4, dtype=F64))
    got = run_all(program, mesh, [{"x": x[:2].conj()}, {"x": x[2:].conj()}])
    assert torch.equal(got[1].results[0], x.conj().resolve_conj())


def test_a_step_that_its_group_cannot_do() -> None:
    step = Step("all_gather", "a", spec("[8@(a,b)]"), spec("[8@b]"))
    with pytest.raises(RuntimeFailure, match="hold 2 of 4 elements"):
        Executor(collectives([step]), Mesh(a=2, b=2), (0, 0), "cpu")


def test_mismatch_and_deadlock_are_named() -> None:
    mesh = Mesh(a=2)
    one = collectives([Step("all_reduce", "a", spec("[4] +sum@a"), spec("[4]"))])
    other = collectives([Step("reduce_scatter", "a", spec("[4] +sum@a"), spec("[4@a]"))])
    slots = [{"x": torch.ones(4, dtype=F64)} for _ in range(2)]
    with pytest.raises(RuntimeFailure, match="rank 1 calls s0 = reduce_scatter@a .*rank 0 calls s0 = all_reduce@a"):
        simulate([Executor(one, mesh, (0,), "cpu"), Executor(other, mesh, (1,), "cpu")], slots, [{}, {}])
    nothing: list[Instruction] = [Return("return")]
    with pytest.raises(RuntimeFailure, match=r"deadlock: rank 0 waits in s0 for ranks \[1\]"):
        simulate([Executor(one, mesh, (0,), "cpu"), Executor(nothing, mesh, (1,), "cpu")], slots, [{}, {}])


# -- instructions --------------------------------------------------------------------------------------------------------


def test_a_training_step_with_split_batch() -> None:
    """y = x w, w's gradient of sum(y²)/2 over rows split over dp, summed, w updated: sizes, numbers, state, results."""
    mesh = Mesh(dp=3)
    program: list[Instruction] = [
        Read("w", slot="w", out=out(0, "[4, 2]")),
        Input("x", path="x", out=out(1, "[7@dp, 4]")),
        Input("lr", path="lr", out=number(2)),
        Compute("y", op="aten.mm.default", args=(Ref(1), Ref(0)), outs=(out(3, "[7@dp, 2]"),)),
        Compute("xt", op="aten.t.default", args=(Ref(1),), outs=(out(4, "[4, 7@dp]"),)),
        Compute("g", op="aten.mm.default", args=(Ref(4), Ref(3)), outs=(out(5, "[4, 2] +sum@dp"),), frees=(4, 1)),
        Collective("g_sum", step=Step("all_reduce", "dp", spec("[4, 2] +sum@dp"), spec("[4, 2]")), src=5, out=out(6, "[4, 2]"),
                   frees=(5,)),
        Compute("half", op="operator.mul", args=(Ref(2), 0.5), outs=(number(7),)),
        Compute("step", op="aten.mul.Tensor", args=(Ref(6), Ref(7)), outs=(out(8, "[4, 2]"),), frees=(6,)),
        Compute("new", op="aten.sub.Tensor", args=(Ref(0), Ref(8)), outs=(out(9, "[4, 2]"),), frees=(8,)),
        Write("write", slot="w", src=9, frees=(9,)),
        Compute("flat", op="aten.view.default", args=(Ref(3), Local(spec("[7@dp·2]"))), outs=(out(10, "[7@dp·2]"),),
                frees=(3,)),
        Compute("ones", op="aten.full.default", args=([LocalDim(spec("[7@dp]").dims[0])], 1.0),
                kwargs=(("dtype", F64), ("device", torch.device("cuda"))), outs=(out(11, "[7@dp]"),)),
        Return("return", results=(10, 0, 11), specs=(spec("[7@dp·2]"), spec("[4, 2]"), spec("[7@dp]")), numbers=(("lr", 7),)),
    ]  # fmt: skip
    x, w = torch.randn(7, 4, dtype=F64), torch.randn(4, 2, dtype=F64)
    slots = [{"w": w.clone()} for _ in range(3)]
    storages = [s["w"] for s in slots]
    got = run_all(program, mesh, slots, [{"x": p, "lr": 0.3} for p in (x[:3], x[3:6], x[6:])])
    assert torch.allclose(torch.cat([g.results[0] for g in got]).view(7, 2), x @ w, atol=1e-13, rtol=0)
    for g, storage in zip(got, storages, strict=True):
        assert g.written["w"] is storage and g.numbers == {"lr": 0.15}
        assert torch.allclose(storage, w - 0.15 * x.t() @ (x @ w), atol=1e-12, rtol=0)
        assert torch.equal(g.results[1], w), "a result that held the old value was overwritten"
        assert (g.stats.collectives, g.stats.comm_bytes) == (1, 2 * 64 * 2 // 3)
    assert [len(g.results[2]) for g in got] == [3, 3, 1]


def test_empty_parts() -> None:
    """Four ranks, five rows: the last rank has none. Sums and maxima get identities, other results are empty."""
    mesh = Mesh(dp=4)
    program: list[Instruction] = [
        Input("x", path="x", out=out(0, "[5@dp, 3]")),
        Compute("big", op="aten.amax.default", args=(Ref(0), [0]), outs=(out(1, "[3] +max@dp"),)),
        Compute("small", op="aten.amin.default", args=(Ref(0), [0]), outs=(out(2, "[3] +min@dp"),)),
        Compute("sum", op="aten.sum.dim_IntList", args=(Ref(0), [0]), outs=(out(3, "[3] +sum@dp"),)),
        Compute("row", op="aten.amax.default", args=(Ref(0), [1]), outs=(out(4, "[5@dp]"),)),
        Return("return", results=(1, 2, 3, 4), specs=()),
    ]
    x = torch.randn(5, 3, dtype=F64)
    got = run_all(program, mesh, [{}] * 4, [{"x": p} for p in (x[:2], x[2:4], x[4:], x[5:])])
    inf = float("inf")
    assert [r.tolist() for r in got[3].results] == [[-inf] * 3, [inf] * 3, [0.0] * 3, []]
    assert torch.equal(torch.stack([g.results[0] for g in got]).amax(0), x.amax(0))


def test_a_view_of_a_part_that_has_other_strides() -> None:
    program: list[Instruction] = [
        Input("x", path="x", out=out(0, "[4, 6@tp]")),
        Compute("flat", op="aten.view.default", args=(Ref(0), Local(spec("[4·6@tp]"))), outs=(out(1, "[4·6@tp]"),)),
        Return("return", results=(1,), specs=()),
    ]
    x = torch.arange(24, dtype=F64).view(4, 6)
    got = run_all(program, Mesh(tp=2), [{}, {}], [{"x": x[:, :3]}, {"x": x[:, 3:]}])
    assert torch.equal(got[1].results[0], x[:, 3:].reshape(-1))


def test_state_is_created_deleted_and_never_shared() -> None:
    program: list[Instruction] = [
        Input("x", path="x", out=out(0, "[4]")),
        Compute("two", op="aten.mul.Tensor", args=(Ref(0), 2.0), outs=(out(1, "[4]"),)),
        Write("a", slot="a", src=1),
        Write("b", slot="b", src=1),
        Write("c", slot="c", src=0),
        Delete("d", slot="d"),
        Return("return", results=(1, 0), specs=()),
    ]
    x = torch.ones(4, dtype=F64)
    got = run_one(program, {"d": x.clone()}, {"x": x})
    assert got.deleted == ("d",) and list(got.written) == ["a", "b", "c"]
    tensors = [*got.written.values(), *got.results, x]
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


def test_swapped_state() -> None:
    """Both slots are overwritten with the other's old value, in place."""
    program: list[Instruction] = [
        Read("a", slot="a", out=out(0, "[3]")),
        Read("b", slot="b", out=out(1, "[3]")),
        Write("wa", slot="a", src=1),
        Write("wb", slot="b", src=0),
        Return("return"),
    ]
    slots = {"a": torch.zeros(3, dtype=F64), "b": torch.ones(3, dtype=F64)}
    run_one(program, slots)
    assert slots["a"].tolist() == [1] * 3 and slots["b"].tolist() == [0] * 3


def test_writes_respect_the_layout_of_state() -> None:
    program: list[Instruction] = [
        Input("x", path="x", out=out(0, "[2, 3, 4, 5]")),
        Write("w", slot="w", src=0, frees=(0,)),
        Return("return"),
    ]
    w = torch.zeros(2, 3, 4, 5, dtype=F64).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 5, dtype=F64)
    got = run_one(program, {"w": w}, {"x": x})
    assert got.written["w"] is w and torch.equal(w, x) and w.is_contiguous(memory_format=torch.channels_last)


def adam(inplace: bool) -> list[Instruction]:
    regs = {"p": 0, "g": 1, "m": 2, "v": 3, "t": 4}
    program: list[Instruction] = [
        Read(k, slot=k, out=out(r, "[]" if k == "t" else "[5, 3]", F32 if k == "t" else F64)) for k, r in regs.items()
    ]
    numbers = (0.1, 0.9, 0.99, 1e-8, 0.01, False, True)
    outs = (out(5, "[5, 3]"), out(6, "[5, 3]"), out(7, "[5, 3]"), out(8, "[]", F32))
    pairs = ((0, 0), (1, 2), (2, 3), (3, 4)) if inplace else ()
    program.append(
        Compute(
            "adam",
            op="shardc.adam.default",
            args=(*map(Ref, range(5)), *numbers),
            outs=outs,
            inplace=pairs,
            frees=tuple(range(5)),
        )
    )
    program += [Write(f"w{k}", slot=k, src=r, frees=(r,)) for k, r in (("p", 5), ("m", 6), ("v", 7), ("t", 8))]
    return [*program, Return("return")]


def test_updates_in_place_take_no_memory() -> None:
    torch.manual_seed(0)
    first = {k: torch.rand(5, 3, dtype=F64) for k in "pgmv"} | {"t": torch.tensor(2.0)}
    second = {k: t.clone() for k, t in first.items()}
    one, two = run_one(adam(True), first), run_one(adam(False), second)
    for k in first:
        assert torch.allclose(first[k], second[k], atol=1e-14, rtol=0), k
    assert one.stats.peak_bytes == 4 * 120 + 4
    assert two.stats.peak_bytes == one.stats.peak_bytes + 3 * 120 + 4


# -- failures ------------------------------------------------------------------------------------------------------------


def test_a_failure_names_instruction_line_and_operands() -> None:
    program: list[Instruction] = [
        Input("x", path="x", out=out(0, "[4, 3]")),
        Compute(
            "bad",
            line="train.py:41",
            module="model.h.3.mlp",
            op="aten.mm.default",
            args=(Ref(0), Ref(0)),
            outs=(out(1, "[4, 3]"),),
        ),
        Return("return", results=(1,), specs=()),
    ]
    with pytest.raises(RuntimeFailure) as info:
        run_one(program, {}, {"x": torch.ones(4, 3, dtype=F64)})
    text = str(info.value)
    for word in ("rank 0", "aten.mm.default (bad)", "train.py:41", "model.h.3.mlp", "r0: f64[4, 3]", "cannot be multiplied"):
        assert word in text, text


def test_what_a_rule_got_wrong_is_found_in_the_first_run() -> None:
    program: list[Instruction] = [
        Input("x", path="x", out=out(0, "[4, 3]")),
        Compute("y", op="aten.t.default", args=(Ref(0),), outs=(out(1, "[4, 3]"),)),
        Return("return", results=(1,), specs=()),
    ]
    with pytest.raises(RuntimeFailure, match=r"y is f64\[3, 4\], not f64\[4, 3\]"):
        run_one(program, {}, {"x": torch.ones(4, 3, dtype=F64)})


def test_missing_state_inputs_and_operators() -> None:
    read: list[Instruction] = [Read("w", slot="w", out=out(0, "[2]")), Return("return")]
    with pytest.raises(StateError, match="no state 'w'"):
        run_one(read, {})
    take: list[Instruction] = [Input("x", path="x", out=out(0, "[2]")), Return("return")]
    with pytest.raises(InputError, match="given no 'x'"):
        run_one(take, {})
    with pytest.raises(RuntimeFailure, match="unknown operator 'aten.nonesuch.default'"):
        run_one([Compute("z", op="aten.nonesuch.default", outs=(out(0, "[2]"),)), Return("return")], {})
    write: list[Instruction] = [*take[:1], Write("w", slot="w", src=0), Return("return")]
    with pytest.raises(StateError, match=r"w rests as f32\[2\], the step gives f64\[2\]"):
        run_one(write, {"w": torch.ones(2)}, {"x": torch.ones(2, dtype=F64)})


# -- memory --------------------------------------------------------------------------------------------------------------


def mlp(rows: int, width: int) -> list[Instruction]:
    """Gathers w (split over its rows, or columns), two layers forward, weight gradient reduced to the shard, update."""
    n = f"{width}"
    return [
        Read("w", slot="w", out=out(0, f"[{n}@dp, {n}]", F32)),
        Read("u", slot="u", out=out(1, f"[{n}, {n}@dp]", F32)),
        Input("x", path="x", out=out(2, f"[{rows}@dp, {n}]", F32)),
        Collective("gw", src=0, step=Step("all_gather", "dp", spec(f"[{n}@dp, {n}]"), spec(f"[{n}, {n}]")),
                   out=out(3, f"[{n}, {n}]", F32)),
        Compute("h", op="aten.mm.default", args=(Ref(2), Ref(3)), outs=(out(4, f"[{rows}@dp, {n}]", F32),), frees=(3,)),
        Compute("a", op="aten.relu.default", args=(Ref(4),), outs=(out(5, f"[{rows}@dp, {n}]", F32),), frees=(4,)),
        Collective("gu", src=1, step=Step("all_gather", "dp", spec(f"[{n}, {n}@dp]"), spec(f"[{n}, {n}]")),
                   out=out(6, f"[{n}, {n}]", F32)),
        Compute("y", op="aten.mm.default", args=(Ref(5), Ref(6)), outs=(out(7, f"[{rows}@dp, {n}]", F32),), frees=(6,)),
        Compute("at", op="aten.t.default", args=(Ref(5),), outs=(out(8, f"[{n}, {rows}@dp]", F32),), frees=(5,)),
        Compute("g", op="aten.mm.default", args=(Ref(8), Ref(7)), outs=(out(9, f"[{n}, {n}] +sum@dp", F32),), frees=(8, 7)),
        Collective("rs", src=9, step=Step("reduce_scatter", "dp", spec(f"[{n}, {n}] +sum@dp"), spec(f"[{n}, {n}@dp]")),
                   out=out(10, f"[{n}, {n}@dp]", F32), frees=(9,)),
        Compute("new", op="aten.sub.Tensor", args=(Ref(1), Ref(10)), outs=(out(11, f"[{n}, {n}@dp]", F32),), frees=(10,)),
        Write("wu", slot="u", src=11, frees=(11,)),
        Return("return"),
    ]  # fmt: skip


def mlp_state(rows: int, width: int, mesh: Mesh, device: str = "cpu") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    def part(text: str, c: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(spec(text).local_shape(mesh, c), device=device)

    slots = [{"w": part(f"[{width}@dp, {width}]", c), "u": part(f"[{width}, {width}@dp]", c)} for c in mesh.coords()]
    return slots, [{"x": part(f"[{rows}@dp, {width}]", c)} for c in mesh.coords()]


def profiled_peak(run: Any) -> int:
    """Largest running sum of allocations minus frees, from the profiler's memory events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


class HoldingCommunicator(NullCommunicator):
    """Moves nothing, but holds the buffer that processes need to reduce parts."""

    def start(self, request: Start) -> None:
        assert request.out is not None
        self.held = torch.empty_like(request.out) if request.move.step.kind == "reduce_scatter" else None

    def wait(self, handle: None) -> None:
        self.held = None


@pytest.mark.parametrize("width", [64, 65])
def test_prediction_equals_measurement_equals_profiler(width: int) -> None:
    """One rank of a mesh of two, driven alone over buffers that nobody fills: its allocations are those of a real run."""
    mesh, program = Mesh(dp=2), mlp(37, width)
    predicted = dry_run(program, mesh)
    executor = Executor(program, mesh, (0,), "cpu")
    slots, inputs = mlp_state(37, width, mesh)
    held = sum(t.untyped_storage().nbytes() for t in [*slots[0].values(), *inputs[0].values()])

    def run() -> Outcome:
        with execution(executor.device):
            outcome: Outcome = drive(executor.run(slots[0], inputs[0]), HoldingCommunicator())
        return outcome

    measured = run().stats.peak_bytes
    assert measured == predicted.peak_bytes
    assert predicted.base == held
    assert profiled_peak(run) + held == measured
    assert run().stats.peak_bytes == measured


def test_timeline_and_categories() -> None:
    mesh, program = Mesh(dp=2), mlp(8, 4)
    kinds = {
        "w": "parameters",
        "u": "parameters",
        "x": "other",
        "gw": "gathered",
        "gu": "gathered",
        "g": "gradients",
        "rs": "gradients",
    }
    profile = dry_run(program, mesh, categories=kinds)
    names = [name for name, _ in profile.timeline]
    assert names.index("gw") < names.index("h") and profile.peak_bytes == max(n for _, n in profile.timeline)
    assert sum(profile.by_category.values()) == profile.peak_bytes
    assert profile.by_category["parameters"] == 2 * 8 * 4
    assert dict(profile.timeline)["gw"] == 32 + 32 + 64 + 64  # w, u, x and the gathered w, straight into place


def test_state_that_is_not_read_counts() -> None:
    program: list[Instruction] = [Return("return")]
    assert dry_run(program, Mesh(dp=2), slots={"m": (spec("[10@dp]"), F32)}).peak_bytes == 20


def test_later_runs_are_the_same_and_free_everything() -> None:
    mesh, program = Mesh(dp=2), mlp(9, 5)
    executors = [Executor(program, mesh, c, "cpu") for c in mesh.coords()]
    slots, inputs = mlp_state(9, 5, mesh)
    first = simulate(executors, slots, inputs)
    after = [s["u"].clone() for s in slots]
    again, _ = mlp_state(9, 5, mesh)
    second = simulate(executors, again, inputs)
    assert all(torch.equal(a, b["u"]) for a, b in zip(after, again, strict=True))
    assert [o.stats.peak_bytes for o in first] == [o.stats.peak_bytes for o in second]
    refs = [weakref.ref(t) for s in [*slots, *again, *inputs] for t in s.values()]
    del slots, again, inputs, first, second  # the executors may stay
    assert not any(r() is not None for r in refs)


# -- processes -----------------------------------------------------------------------------------------------------------


def _groups(mesh: Mesh) -> tuple[int, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch_mesh = dist.device_mesh.init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    return rank, ProcessGroupCommunicator(mesh, mesh.coord(rank), torch_mesh.get_group)


def _cases(mesh: Mesh) -> list[tuple[list[Step], torch.dtype]]:
    texts = [
        ("[8@(a,b), 6]", "[8, 6]"), ("[7@a·3@b, 5]", "[7·3, 5]"), ("[5, 7@(b,a)]", "[5@a, 7@b]"), ("[3@a, 5@b]", "[3, 5]"),
        ("[9, 5] +sum@a +sum@b", "[9@a, 5@b]"), ("[9, 5] +sum@a", "[9, 5@(b,a)]"), ("[1@a, 3] +sum@b", "[1, 3]"),
        ("[9, 5@a] +max@b", "[9@a, 5]"), ("[] +min@a", "[]"), ("[0@a, 3] +sum@b", "[0, 3@b]"), ("[3·8@a·4, 5]", "[3·8·4, 5@a]"),
    ]  # fmt: skip
    few = ("[5, 7@(b,a)]", "[3@a, 5@b]", "[9, 5] +sum@a +sum@b")  # every kind of collective
    out = []
    for src, dst in texts:
        rare = [torch.bfloat16, torch.int64, torch.bool, torch.int16, torch.complex64] if src in few else []
        for dtype in (F64, *rare):
            out.append((reshard(spec(src), spec(dst), mesh), dtype))
    return out


def _real_against_simulated(axes: dict[str, int]) -> int:
    mesh = Mesh(axes)
    rank, communicator = _groups(mesh)
    count = 0
    for steps, dtype in _cases(mesh):
        if not steps:
            continue
        parts = shards(np.arange(np.prod(steps[0].src.shape, dtype=int)).reshape(steps[0].src.shape) % 7.0, steps[0].src, mesh)
        slots = [{"x": torch.tensor(parts[c]).to(dtype)} for c in mesh.coords()]
        program = collectives(steps, dtype)
        want = run_all(program, mesh, [{"x": s["x"].clone()} for s in slots])[rank]
        executor = Executor(program, mesh, mesh.coord(rank), "cpu")
        got = communicator.drive(executor, executor.run(slots[rank], {}))
        a, b = got.results[0], want.results[0]
        assert a.dtype == b.dtype and torch.equal(a, b), f"{steps[0].src} -> {steps[-1].dst} {dtype}: {a} {b}"
        assert got.stats.peak_bytes == want.stats.peak_bytes and got.stats.comm_bytes == want.stats.comm_bytes
        count += 1
    return count


@pytest.mark.processes
def test_processes_equal_the_simulation() -> None:
    counts = run_ranks(4, _real_against_simulated, {"a": 2, "b": 2})
    assert counts == [counts[0]] * 4 and counts[0] > 20


def _fail_on_one(how: str) -> str:
    """Rank 1 fails before its second collective; the others wait for it there."""
    mesh = Mesh(a=int(os.environ["WORLD_SIZE"]))
    rank, communicator = _groups(mesh)
    step = Step("all_reduce", "a", spec("[4] +sum@a"), spec("[4]"))
    program = collectives([step])[:-1]
    if rank == 1:
        if how == "raise":
            program.append(
                Compute("bad", line="train.py:7", op="aten.mm.default", args=(Ref(1), Ref(1)), outs=(out(2, "[4]"),))
            )
        else:
            program.append(Compute("bad", op="operator.call", args=(Dies(),), outs=(number(2),)))
    program.append(Collective("again", step=step, src=1, out=out(9, "[4]")))
    executor = Executor([*program, Return("return")], mesh, (rank,), "cpu")
    begun = time.monotonic()
    try:
        communicator.drive(executor, executor.run({"x": torch.ones(4, dtype=F64)}, {}))
    except RuntimeFailure as error:
        assert time.monotonic() - begun < 20
        with pytest.raises(RuntimeFailure, match="an earlier step failed|rank"):
            communicator.drive(executor, executor.run({"x": torch.ones(4, dtype=F64)}, {}))
        return str(error)
    return "no error"


class Dies:
    def __call__(self) -> None:
        os._exit(3)


@pytest.mark.processes
def test_a_failure_of_one_process_is_told_by_all() -> None:
    first, second, third = run_ranks(3, _fail_on_one, "raise", timeout=60)
    assert "rank 1: aten.mm.default (bad) failed" in second and "train.py:7" in second
    for text in (first, third):
        assert "another rank has failed" in text and "aten.mm.default (bad)" in text and "again" in text


@pytest.mark.processes
def test_a_process_that_dies_ends_the_others() -> None:
    outcomes = run_outcomes(3, _fail_on_one, "die", timeout=60)
    assert outcomes[1].exit_code == 3
    for o in (outcomes[0], outcomes[2]):
        assert o.ok and ("lost the other ranks" in o.value or "another rank has failed" in o.value), str(o)
