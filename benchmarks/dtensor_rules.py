"""How many one-axis layouts of sixty common operators the rules of DTensor and of shardc know, on the same calls.

    python benchmarks/dtensor_rules.py [--samples 1] [--combinations 2500] [--seconds 60] [--jobs 2] [--only 'nn.functional.*']

The calls are those that samples of each entry of torch's op_db make (float64, even sizes, two ranks): of its first ten, those
with the most dims. DTensor is judged by torch's own `strategy_validation`, which counts layouts of operands and results
together, shardc by `shardc.rules.truth`, which counts layouts of operands: the shares compare, the counts do not.

torch's tool runs a call once for every combination of placements of its operands (whole, each dim, four pending reductions)
and of its results: with five operands these are 10^5 and more, hours for one call. Calls with more than `--combinations` of
them, and those that take longer than `--seconds` of CPU time, are left out for both, by name. A call for which DTensor has no
strategy counts for shardc alone; torch's tool does not count calls for which DTensor's strategies come out empty.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import math
import multiprocessing
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.common_methods_invocations as common_ops
from torch.distributed.tensor._ops import strategy_validation as validation
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.opinfo import core as opinfo_core

from shardc import _torch
from shardc.errors import RuleError
from shardc.rules.call import tensor_operands
from shardc.rules.layouts import is_tensor
from shardc.rules.opdb import LAYOUTS, full_name
from shardc.rules.opdb_entries import COMMON
from shardc.rules.proof import prove, rule_of
from shardc.rules.sample import Sample
from shardc.rules.truth import known_layouts, true_layouts

RANKS, FIRST = 2, 10


class Late(BaseException):
    """A call takes too long. No `Exception`: torch's tool takes those for a layout that does not hold."""


@dataclass
class Tally:
    """Layouts that hold and are known, that hold and are not, claims that do not hold; calls, and why some do not count."""

    known: int = 0
    missing: int = 0
    false: int = 0
    calls: int = 0
    lacking: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.known, self.missing, self.false = self.known + other.known, self.missing + other.missing, self.false + other.false
        self.calls += other.calls
        self.lacking.update(other.lacking)

    def __str__(self) -> str:
        true = self.known + self.missing
        return f"{self.known} of {true} ({self.known / max(true, 1):.1%}), {self.false} false, {self.calls} calls"


def combinations(call: Sample, result: Any) -> int:
    """How many torch's tool would try."""
    operands = [t for _, t in validation.extract_tensors_from_args(call.args, call.kwargs)]
    first = result[0] if isinstance(result, list) else result
    tried = [len(validation.get_1d_input_placements_for_tensor(t, include_partial=True)) for t in operands]
    return math.prod(tried) * len(validation.get_1d_output_placements_for_tensor(first))


def of_dtensor(call: Sample, result: Any) -> Tally:
    if not validation._has_dtensor_support(call.op):
        return Tally(lacking=Counter([f"{call.op}: no strategy"]))
    stats = validation.ComparisonStats()
    validation._validate_aten_op_for_sample(call.op, call.args, call.kwargs, result, RANKS, False, False, 0, "", stats)
    found = Tally(stats.true_positives, len(stats.false_negatives), len(stats.false_positives), 1)
    if not found.known + found.missing + found.false:
        return Tally(lacking=Counter([f"{call.op}: strategies come out empty"]))
    return found


def of_shardc(call: Sample) -> Tally:
    try:
        rule = rule_of(call.op, call.args, call.kwargs)[0]
    except RuleError as error:
        return Tally(lacking=Counter([f"{call.op}: {error.what}"]))
    known = known_layouts(rule, tensor_operands(call.args, call.kwargs, is_tensor))
    missing = [x for x in true_layouts(call.op, call.args, call.kwargs, LAYOUTS) if x.operands not in known]
    false = prove(call.op, call.args, call.kwargs)
    return Tally(len(known), len(missing), len(false), 1)


def width(sample: Any) -> int:
    """The most dims of a tensor of a sample."""
    return max((t.dim() for _, t in validation.extract_tensors_from_sample(sample)), default=-1)


def entry_tallies(entry: Any, args: argparse.Namespace) -> tuple[Tally, Tally]:
    """DTensor's and shardc's, of the calls of one entry."""
    theirs, ours, seen = Tally(), Tally(), set()
    samples = itertools.islice(entry.sample_inputs("cpu", torch.float64), FIRST)
    full = [s for s in samples if all(t.numel() for _, t in validation.extract_tensors_from_sample(s))]
    for sample in sorted(full, key=width, reverse=True)[: args.samples]:
        for op, values, named, made in validation.get_aten_op_for_sample(entry.op, sample, entry.name).all_ops:
            call, result = Sample(op, tuple(values), dict(named)), validation._check_ground_truth(made)
            if str(call) in seen or not tensor_operands(call.args, call.kwargs, is_tensor):
                continue
            seen.add(str(call))
            if op._schema.is_mutable:
                theirs.lacking[f"{call}: left out, it writes its argument"] += 1
                continue
            if "empty" in op.name():
                theirs.lacking[f"{call}: left out, the values of its result are not defined"] += 1
                continue
            if result is None:
                theirs.lacking[f"{call}: left out, its result is no tensor, empty or zero, and tells nothing"] += 1
                continue
            count = combinations(call, result)
            if count > args.combinations:
                theirs.lacking[f"{call}: left out, {count:,} combinations"] += 1
                continue
            try:
                signal.setitimer(signal.ITIMER_PROF, args.seconds)
                both = of_dtensor(call, result), of_shardc(call)
                signal.setitimer(signal.ITIMER_PROF, 0)
            except Late:
                theirs.lacking[f"{call}: left out, takes longer than {args.seconds} s"] += 1
                continue
            except Exception as error:  # either tool's: named, and the call counts for neither
                theirs.lacking[f"{call}: {type(error).__name__}: {error}".splitlines()[0][:200]] += 1
                continue
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            theirs.add(both[0])
            ours.add(both[1])
    return theirs, ours


def late(*_: object) -> None:
    raise Late


def prepare() -> None:
    """What each process needs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, late)
    for owner in (opinfo_core, common_ops):  # even sizes, as the tool's own command line does: DTensor's rules are for those
        owner.L, owner.M, owner.S, owner.XS = 24, 12, 4, 2
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())


def work(task: tuple[str, argparse.Namespace]) -> tuple[str, Tally, Tally, float]:
    name, args = task
    start = time.process_time()
    torch.manual_seed(0)
    entry = next(e for e in _torch.operator_database() if full_name(e) == name)
    return name, *entry_tallies(entry, args), time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1, help="of each entry")
    parser.add_argument("--combinations", type=int, default=2500, help="of a call, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time for a call, at most")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*", help="pattern of entries")
    args = parser.parse_args()
    names = [name for name in COMMON if fnmatch.fnmatch(name, args.only)]
    theirs, ours, counted = Tally(), Tally(), 0
    with multiprocessing.get_context("spawn").Pool(args.jobs, prepare) as pool:
        for k, (name, a, b, seconds) in enumerate(pool.imap_unordered(work, [(name, args) for name in names]), 1):
            print(f"[{k}/{len(names)}] {name}: DTensor {a}; shardc {b}; {seconds:.0f} s of CPU time", flush=True)
            for who, found in (("DTensor", a), ("shardc", b)):
                for text, times in found.lacking.items():
                    print(f"    {who}: {text}{f' ({times} times)' if times > 1 else ''}", flush=True)
            theirs.add(a)
            ours.add(b)
            counted += a.calls > 0
    print(f"DTensor, torch {torch.__version__}: {theirs}, {counted} of {len(names)} entries\nshardc: {ours}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
