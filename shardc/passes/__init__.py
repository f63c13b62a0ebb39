"""The pipeline: each pass is a pure function Program -> Program, verified after it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from shardc.options import Options
from shardc.passes.accumulate import accumulate
from shardc.passes.annotate import annotate
from shardc.passes.ladder import OverBudget, ladder
from shardc.passes.normalize import normalize
from shardc.passes.offload import offload
from shardc.passes.over_budget import explained
from shardc.passes.partition import partition
from shardc.passes.propagate import propagate
from shardc.passes.rebuild import rebuild
from shardc.passes.recompute import recompute
from shardc.passes.schedule import schedule
from shardc.passes.verify import verify
from shardc.program import Program
from shardc.tiers import Offload

PIPELINE: list[tuple[str, Callable[[Program, Options], Program]]] = [
    ("normalize", normalize),
    ("recompute", recompute),
    ("annotate", annotate),
    ("rebuild", lambda program, options: rebuild(program)),
    ("propagate", propagate),
    ("partition", lambda program, options: partition(program)),
    ("accumulate", accumulate),
    ("ladder", ladder),
    ("schedule", lambda program, options: schedule(program)),
    ("offload", lambda program, options: offload(program, Offload.of(options.offload))),
]
"""Name and function of each pass, in order."""


def run(program: Program, options: Options, *, check: bool | None = None) -> dict[str, Program]:
    """Run all passes over a captured program whose mesh is set.

    Args:
        check: run the verifier after each pass; by default if the environment has SHARDC_VERIFY=1.

    Returns:
        Name of the stage -> the program after it; the first is "capture", the last the one to build a plan from.

    Raises:
        PlanError: among others, no plan fits the memory budget.
    """
    check = os.environ.get("SHARDC_VERIFY") == "1" if check is None else check
    stages = {"capture": replace(program)}
    captured = program
    for name, one in PIPELINE:
        try:
            program = one(program, options)
        except OverBudget as e:
            raise explained(e, lambda changed, mesh: run(replace(captured, mesh=mesh), changed), captured, options) from None
        if check:
            verify(program, name)
        stages[name] = program
    return stages
