"""Public tools to test training steps: `check` against a single device, `run_ranks` for real processes.

`shardc.testing.strategies` (Hypothesis strategies for meshes, options and programs) is imported by its own name, so that the
rest works without Hypothesis.
"""

from shardc.testing.check import Mismatch, Report, check, check_all, check_all_processes, check_processes
from shardc.testing.compare import Difference, Rounded
from shardc.testing.processes import Outcome, RankFailure, run_outcomes, run_ranks

__all__ = [
    "Difference",
    "Mismatch",
    "Outcome",
    "RankFailure",
    "Report",
    "Rounded",
    "check",
    "check_all",
    "check_all_processes",
    "check_processes",
    "run_outcomes",
    "run_ranks",
]
