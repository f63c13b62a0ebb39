"""Random training steps, compiled and compared with one device: counts by outcome; any failure is printed as a script.

    python benchmarks/campaign.py --draws 3000 --seed 1 --jobs 2
    python benchmarks/campaign.py --draws 6000 --seed 1 --jobs 2 --pins     # operators of the rule book under random pins

The draws depend on the seed and on the version of Hypothesis alone; about one in five repeats another and is not counted.
`--shrink` stops at the first failure and makes it small.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings

from shardc.testing.campaign import Case, cases
from shardc.testing.pinned import pinned_cases

PIECE = 100
"""Draws of one Hypothesis run; pieces are dealt to the jobs."""


@dataclass(frozen=True)
class Drawn:
    """What became of a draw: its text, how it ended ("equal" or the type of the error), and the error in words."""

    piece: int
    kind: str
    script: str
    outcome: str
    message: str
    seconds: float


def draw(piece: int, number: int, campaign: int, shrink: bool, pins: bool) -> list[Drawn]:
    """The draws of one piece."""
    out: list[Drawn] = []
    seen: set[str] = set()

    @seed(campaign * 1_000_003 + piece)
    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(pinned_cases() if pins else cases())
    def run(case: Case) -> None:
        start, outcome, message, script = time.perf_counter(), "equal", "", case.script()
        if script in seen and not shrink:
            return
        seen.add(script)
        try:
            case.check()
        except Exception as error:
            if shrink:
                raise
            outcome, message = type(error).__name__, "".join(traceback.format_exception(error))
        out.append(Drawn(piece, case.kind, script, outcome, message, time.perf_counter() - start))

    run()
    return out


def work(task: tuple[int, int, int, bool, bool]) -> list[Drawn]:
    torch.set_num_threads(1)
    return draw(*task)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shrink", action="store_true", help="stop at the first failure and shrink it")
    parser.add_argument("--pins", action="store_true", help="draw operators under random pins, not training steps")
    parser.add_argument("--first", type=int, default=0, help=f"leave out so many pieces of {PIECE} draws")
    parser.add_argument("--pieces", type=int, help="do so many pieces only")
    parser.add_argument("--verify", action="store_true", help="also run the verifier after each pass")
    parser.add_argument("--out", type=Path, help="folder for the scripts of failures")
    args = parser.parse_args()
    if args.verify:
        os.environ["SHARDC_VERIFY"] = "1"
    pieces = range(-(-args.draws // PIECE))
    tasks = [(k, min(PIECE, args.draws - k * PIECE), args.seed, args.shrink, args.pins) for k in pieces]
    tasks = tasks[args.first :][: args.pieces]
    counts: collections.Counter[str] = collections.Counter()
    drawn_before: set[str] = set()
    slowest, failures, start = 0.0, 0, time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=8) as pool:
        for piece in pool.imap_unordered(work, tasks):
            for drawn in piece:
                if drawn.script in drawn_before:
                    continue
                drawn_before.add(drawn.script)
                counts[f"{drawn.kind}: {drawn.outcome}"] += 1
                slowest = max(slowest, drawn.seconds)
                if drawn.outcome != "equal":
                    failures += 1
                    report(drawn, failures, args.out)
            line = f"{counts.total()} different draws, {failures} failures, {time.perf_counter() - start:.0f} s"
            print(f"{line}, slowest {slowest:.1f} s", flush=True)
    for name, n in sorted(counts.items()):
        print(f"  {n:6d}  {name}")
    return 1 if failures else 0


def report(drawn: Drawn, number: int, out: Path | None) -> None:
    print(f"--- failure {number}, piece {drawn.piece}, {drawn.kind}\n{drawn.message[-2000:]}", flush=True)
    if out is None:
        print(f"--- reproduce with\n{drawn.script}", flush=True)
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{number:03d}_{drawn.outcome}.py"
    path.write_text(drawn.script + "\n" + "".join(f"# {line}\n" for line in drawn.message.splitlines()))
    print(f"--- reproduce with: python {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
