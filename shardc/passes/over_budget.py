"""What to say where no plan fits the memory budget: the floor, what it is made of, and the changes that would fit.

Each change that is named was planned: its peak fits, and its predicted time stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardc.errors import PlanError, ShardcError
from shardc.mesh import Mesh
from shardc.options import Options
from shardc.passes.ladder import Ladder, OverBudget
from shardc.plan.text import seconds, size, table
from shardc.program import Program
from shardc.tiers import Offload

SHOWN = 8
"""So many of the largest tensors at the floor's peak are listed."""

DOUBLINGS = 4
"""How often microbatches or ranks are doubled in search of a plan that fits."""

OFFLOADS = (
    {"optimizer": "host"},
    {"optimizer": "host", "params": "host"},
    {"optimizer": "host", "params": "host", "gradients": "host", "activations": "host"},
)
"""What is tried to be kept in host memory."""

Run = Callable[[Options, Mesh], Mapping[str, Program]]
"""The pipeline on the captured program, with other options and another mesh."""


def explained(e: OverBudget, run: Run, captured: Program, options: Options) -> PlanError:
    """The error for the user.

    Args:
        captured: the program before all passes, with the mesh asked for.
    """
    lowest = min(e.ladder.rungs, key=lambda r: (r.point.peak, r.seconds))
    memory = lowest.plan.memory
    shown = memory.live[:SHOWN]
    rows = [[size(a.bytes), a.name, a.type, a.category, ", ".join(x for x in (a.module, a.line) if x)] for a in shown]
    rest = memory.live[SHOWN:]
    if rest:
        rows.append([size(sum(a.bytes for a in rest)), f"{len(rest)} more", "", "", ""])
    plans = f" of {len(e.ladder.rungs)} plans" if len(e.ladder.rungs) > 1 else ""
    what = [
        f"no plan fits memory_budget={e.budget:,} ({size(e.budget)}): the lowest peak{plans} is {memory.peak_bytes:,} bytes"
        f" ({size(memory.peak_bytes)}, {seconds(lowest.seconds)} a step), made of",
        *("  " + line for line in table(rows, right=(0,))),
    ]
    found = [*_changes(e, run, captured, options), f"memory_budget={memory.peak_bytes}"]
    return PlanError("\n  ".join(what), where=str(memory.peak_at), hint="\n       or ".join(found))


def _changes(e: OverBudget, run: Run, captured: Program, options: Options) -> Iterator[str]:
    """Changes that make a plan fit, smallest of each kind first."""
    assert captured.mesh is not None
    open_ = replace(options, memory_budget=None, recompute=None if options.recompute == "auto" else options.recompute)

    def fits(mesh: Mesh, auto: bool, **changes: Any) -> str | None:
        """What the fastest plan that fits comes to."""
        given = replace(open_, **changes)
        if auto:
            given = replace(given, recompute=None)
        try:
            stages = run(given, mesh)
            rung = Ladder.of(stages["accumulate"], auto, Offload.of(given.offload)).fit(e.budget)
        except ShardcError:  # these options do not go together with this step
            return None
        return None if rung is None else f"(peak {size(rung.peak)}, {seconds(rung.plan.time.predicted_s)} a step)"

    auto = options.recompute == "auto"
    mesh = captured.mesh
    if not auto and (said := fits(mesh, True)):
        yield f'recompute="auto" {said}'
    ranks = math.prod(mesh.axes[a] for a in options.batch)
    for zero in range(options.zero + 1, 4):
        if ranks > 1 and (said := fits(mesh, auto, zero=zero)):
            yield f"zero={zero} {said}"
            break
    for tiers in OFFLOADS if options.offload is None else ():
        if said := fits(mesh, auto, offload=tiers):
            yield f"offload={tiers} {said}"
            break
    count = options.microbatches
    for _ in range(DOUBLINGS):
        count *= 2
        if said := fits(mesh, True, microbatches=count):
            with_ = "" if auto else ', recompute="auto"'
            yield f"microbatches={count}{with_} {said}"
            break
    for axis in options.batch[:1]:
        for n in range(1, DOUBLINGS + 1):
            more = mesh.like({**mesh.axes, axis: mesh.axes[axis] * 2**n})
            if said := fits(more, auto):
                yield f"mesh {more}, the same batch {said}"
                break
