"""Prove a compiled step equal to the plain function on one device.

    report = check(train_step, make_state, batches, mesh={"dp": 3}, zero=3)

Both run in float64 from the same state on the same batches, torch seeded alike before each call. After every call the returned
values, parameters, buffers, gradients, optimizer state and Python numbers must agree: integers exactly, floating-point tensors
within ``max(1e-10 max|ref|, 10 d)``, where d is how far the oracle is from itself when its sums are re-associated or its
parameters and inputs moved by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import shardc.api
from shardc.errors import MeshError, ShardcError
from shardc.mesh import Mesh
from shardc.runtime.whole import whole
from shardc.testing.compare import RTOL, Difference, Rounded, Tally
from shardc.testing.oracle import Batch, MakeState, Oracle, Run, Step
from shardc.testing.processes import run_ranks


class Mismatch(ShardcError):
    """The compiled step is not the plain one; `differences` lists every tensor of the first step that differs."""

    def __init__(self, differences: list[Difference], explanation: str = "", *, where: str = "", hint: str = "") -> None:
        first, more = differences[0], differences[1:]
        text = [str(first), *(f"and {d}" for d in more[:4])]
        if len(more) > 4:
            text.append(f"and {len(more) - 4} more")
        if explanation:
            text.append(explanation)
        super().__init__("\n  ".join(text), where=where, hint=hint)
        self.differences = differences


@dataclass(frozen=True)
class Report:
    """A comparison that held.

    Args:
        options: of the compiled step.
        steps: calls compared.
        compared: leaves compared, over all calls.
        worst: largest relative difference of a floating-point tensor that is not in `rounded`, and `worst_path` its path.
        rounded: tensors that needed the second term of the tolerance.
        plan: of the last call; None for runs in other processes.
        stats: measured, of the last call.
    """

    options: Mapping[str, Any]
    steps: int
    compared: int
    worst: float
    worst_path: str
    rounded: tuple[Rounded, ...]
    plan: Any = field(default=None, repr=False, compare=False)
    stats: Any = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        options = " ".join(f"{k}={v}" for k, v in self.options.items())
        worst = f"largest relative difference {self.worst:.1e}{f' ({self.worst_path})' if self.worst_path else ''}"
        lines = [f"equal: {options}: {self.steps} steps, {self.compared} values, {worst}"]
        if self.rounded:
            lines.append(f"within their own rounding only: {len({r.path for r in self.rounded})} tensors")
            lines += [f"  {r}" for r in {r.path: r for r in self.rounded}.values()]
        return "\n".join(lines)


def check(
    train_step: Callable[..., Any],
    make_state: MakeState,
    batches: Sequence[Batch],
    *,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = RTOL,
    **options: Any,
) -> Report:
    """Compare the compiled step on a simulated mesh with the plain function.

    Args:
        train_step: the plain function (not decorated).
        make_state: returns its leading arguments as a tuple, with the same values at each call; torch is seeded before.
        batches: for each call the remaining arguments: a tuple, or a dict of keyword arguments. At least one.
        dtype: floating-point state and inputs are cast to it before both runs; None leaves them.
        rtol: first term of the tolerance; give another one with another dtype. 0 asks for equality in every bit.
        **options: of `shardc.compile`. A mesh given as a dict is simulated; `rng` is "torch" unless given, since only that
            draws the numbers of one device.

    Raises:
        Mismatch: names the first tensor that differs, with the numbers and the user's line.
        ShardcError: whatever compiling raises.
    """
    return check_all(train_step, make_state, batches, [options], dtype=dtype, rtol=rtol)[0]


def check_all(
    train_step: Callable[..., Any],
    make_state: MakeState,
    batches: Sequence[Batch],
    options_list: Sequence[Mapping[str, Any]],
    *,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = RTOL,
) -> list[Report]:
    """`check` for many option sets; the oracle runs once."""
    oracle = Oracle(train_step, make_state, batches, dtype)
    return [_check(oracle, _simulated(options), rtol) for options in options_list]


def _simulated(options: Mapping[str, Any]) -> dict[str, Any]:
    out = {"mesh": {"dp": 1}, "rng": "torch", **options}
    mesh = out["mesh"] if isinstance(out["mesh"], Mesh) else Mesh(out["mesh"])
    if -1 in mesh.shape:
        raise MeshError(f"mesh {mesh} has no fixed size", hint="give every axis its size: the ranks are simulated")
    out["mesh"] = mesh if mesh.simulated else Mesh(mesh.axes, simulated=True, device=mesh.device, profile=mesh.profile)
    return out


def _check(oracle: Oracle, options: Mapping[str, Any], rtol: float) -> Report:
    plain = oracle.plain
    compiled = shardc.api.compile(oracle.fn, **options)
    tally = Tally(oracle, rtol)
    rounded: list[Rounded] = []

    def each(index: int, step: Step) -> None:
        bad, near = tally.step(index, step)
        rounded.extend(near)
        if bad:
            raise Mismatch(bad, _explain(compiled, bad[0].path), where=f"options {_shown(options)}")

    run = oracle.run(compiled, each=each)
    _same_start(plain, run)
    return Report(
        _shown(options),
        len(run.steps),
        tally.compared,
        tally.worst,
        tally.worst_path,
        tuple(rounded),
        compiled.plan,
        compiled.stats,
    )


def _same_start(plain: Run, run: Run) -> None:
    """A comparison means nothing if the runs did not start alike."""
    for path, value in plain.start.items():
        same = torch.equal(value, run.start[path]) if isinstance(value, torch.Tensor) else value == run.start[path]
        if not same:
            raise Mismatch(
                [Difference(-1, path, "make_state gave other values the second time")], hint="seed it inside make_state"
            )


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Mesh) else v for k, v in options.items()}


def _explain(compiled: Any, path: str) -> str:
    """The plan's own words on a tensor: its spec, why, and the user's line."""
    try:
        return str(compiled.plan.explain(path))
    except (ShardcError, KeyError):
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Real processes
# ---------------------------------------------------------------------------------------------------------------------


def check_processes(
    ranks: int,
    train_step: Callable[..., Any],
    make_state: MakeState,
    batches: Sequence[Batch],
    *,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = RTOL,
    timeout: float = 300.0,
    **options: Any,
) -> Report:
    """The same comparison with the compiled step on real gloo processes.

    `train_step` and `make_state` must be module-level functions. Every tensor of a batch is dealt to the ranks by rows, in rank
    order, unless ``inputs_are="global"`` is given.

    Raises:
        Mismatch: as `check`; also when two ranks return different scalars.
        RankFailure: a rank raised, died or was too slow.
    """
    return check_all_processes(ranks, train_step, make_state, batches, [options], dtype=dtype, rtol=rtol, timeout=timeout)[0]


def check_all_processes(
    ranks: int,
    train_step: Callable[..., Any],
    make_state: MakeState,
    batches: Sequence[Batch],
    options_list: Sequence[Mapping[str, Any]],
    *,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = RTOL,
    timeout: float = 180.0,
) -> list[Report]:
    """`check_processes` for many option sets; the processes start and the oracle runs once. `timeout` is for all together."""
    given = [{"mesh": {"dp": ranks}, "rng": "torch", **options} for options in options_list]
    oracle = Oracle(train_step, make_state, batches, dtype)
    per_rank = run_ranks(ranks, _rank_runs, oracle, given, timeout=timeout)
    return [_joined(oracle, rtol, options, [runs[k] for runs in per_rank]) for k, options in enumerate(given)]


def _joined(oracle: Oracle, rtol: float, options: Mapping[str, Any], per_rank: list[list[Step]]) -> Report:
    """Compare what the ranks' runs, taken together, did."""
    tally, rounded = Tally(oracle, rtol), []
    for index in range(len(oracle.batches)):
        parts = [steps[index] for steps in per_rank]
        got = Step(_whole_results(oracle.plain.steps[index].results, [p.results for p in parts]), parts[0].state)
        bad, near = tally.step(index, got)
        rounded.extend(near)
        if bad:
            raise Mismatch(bad, where=f"{len(per_rank)} processes, options {_shown(options)}")
    return Report(_shown(options), len(oracle.batches), tally.compared, tally.worst, tally.worst_path, tuple(rounded))


def _rank_runs(oracle: Oracle, options_list: Sequence[Mapping[str, Any]]) -> list[list[Step]]:
    """One rank's run with each option set; rank 0 keeps the state, the others only what they returned."""
    return [_rank_run(oracle, options) for options in options_list]


def _rank_run(oracle: Oracle, options: Mapping[str, Any]) -> list[Step]:
    import torch.distributed as dist

    from shardc.testing.ranks import deal

    compiled = shardc.api.compile(oracle.fn, **options)
    as_is = options.get("inputs_are") == "global"
    run = oracle.run(compiled, batch=(lambda b: b) if as_is else deal, whole=whole)
    return [Step(s.results, s.state if dist.get_rank() == 0 else {}) for s in run.steps]


def _whole_results(want: Mapping[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of all ranks as one: tensors split by rows are joined, anything else must be equal on each rank."""
    out = dict(parts[0])
    for path, value in parts[0].items():
        others = [p.get(path) for p in parts]
        reference = want.get(path)
        if (
            isinstance(value, torch.Tensor)
            and isinstance(reference, torch.Tensor)
            and value.dim()
            and value.shape != reference.shape
        ):
            out[path] = torch.cat([t for t in others if isinstance(t, torch.Tensor)])
            continue
        for rank, other in enumerate(others):
            same = (
                torch.equal(other, value)
                if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
                else other == value
            )
            if not same:
                raise Mismatch([Difference(-1, path, f"is {other} on rank {rank} and {value} on rank 0")])
    return out
