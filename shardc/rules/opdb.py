"""The rule book on torch's op_db: every rule that its samples (and their gradients) need is proved, and what holds over
one axis in truth is counted against what the rules know.

Entries run in worker processes, since some operators end the process on shapes that they do not expect: an entry whose process
ends is named and counts as not covered.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardc import _torch
from shardc.errors import RuleError
from shardc.rules.call import map_operands, tensor_operands
from shardc.rules.layouts import is_tensor
from shardc.rules.opdb_entries import EXCLUDED, REACHABLE
from shardc.rules.proof import prove, rule_of
from shardc.rules.record import Recorder
from shardc.rules.registry import has_rule
from shardc.rules.sample import Sample
from shardc.rules.truth import known_layouts, true_layouts

SAMPLES, CALLS, LAYOUTS, SECONDS = 6, 4, 250, 40
"""Samples of an entry, different calls of one operator in it, layouts tried of one call, seconds for an entry."""
LARGEST = 20_000
"""Elements of the largest operand of a call that is tried."""
KNOWN, COVERED = 0.95, 0.90
"""The bounds: of true layouts that the rules know, of reachable entries whose operators all have rules that hold."""


@dataclass
class Found:
    """What was found on one entry.

    Args:
        name: of the entry, ``nn.functional.linear`` or ``var.unbiased`` (with its variant).
        ops: operators that its samples call.
        false: claims of rules that do not hold.
        unruled: operators without a rule, or calls that theirs does not cover.
        true, known: layouts that hold, and those of them that the rules know.
        missing: call -> layouts that hold and are not known.
        error: why the entry could not be tried to its end.
    """

    name: str
    ops: list[str] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    unruled: list[str] = field(default_factory=list)
    true: int = 0
    known: int = 0
    missing: dict[str, list[str]] = field(default_factory=dict)
    error: str = ""

    @property
    def covered(self) -> bool:
        return bool(self.ops) and not (self.false or self.unruled or self.error)


@dataclass(frozen=True)
class Report:
    """What was found on all entries."""

    entries: tuple[Found, ...]
    own: Mapping[str, str] = field(default_factory=dict)
    selected: bool = False  # some entries only: bounds do not apply

    @property
    def summary(self) -> dict[str, int]:
        return {
            "ops": len({op for e in self.entries for op in e.ops}),
            "false": len(self.own) + sum(len(e.false) for e in self.entries),
            "true": sum(e.true for e in self.entries),
            "known": sum(e.known for e in self.entries),
            "entries": sum(e.covered for e in self.entries),
            "reachable": len(self.entries),
        }

    @property
    def holds(self) -> bool:
        """No rule is false, and the bounds are met."""
        s = self.summary
        return (
            not s["false"] and s["known"] >= KNOWN * s["true"] and (self.selected or s["entries"] >= COVERED * s["reachable"])
        )

    def to_json(self) -> str:
        """All findings; the summary comes last."""
        return json.dumps(
            {"own": dict(self.own), "entries": [asdict(e) for e in self.entries], "summary": self.summary}, indent=1
        )

    def __str__(self) -> str:
        lines = [f"false    {name}: {text}" for name, text in self.own.items()]
        for e in self.entries:
            lines += [f"false    {e.name}: {text}" for text in e.false]
        for e in self.entries:
            lines += [f"no rule  {e.name}: {text}" for text in e.unruled]
            lines += [f"error    {e.name}: {e.error}"] if e.error else []
        for e in self.entries:
            lines += [f"missing  {e.name}: {call}: {'; '.join(found)}" for call, found in e.missing.items()]
        s = self.summary
        share = s["known"] / s["true"] if s["true"] else 1.0
        lines.append(
            f"{s['ops']} operators, {s['false']} false rules; {s['known']} of {s['true']} true layouts known ({share:.1%}); "
            f"{s['entries']} of {s['reachable']} entries covered ({s['entries'] / max(s['reachable'], 1):.1%})"
        )
        return "\n".join(lines)


# -- one entry -------------------------------------------------------------------------------------------------------------


def full_name(entry: Any) -> str:
    return str(entry.name) + (f".{entry.variant_test_name}" if entry.variant_test_name else "")


def reachable(entry: Any) -> bool:
    """Whether training can reach an entry: it takes floating point numbers and has a gradient."""
    return bool(entry.supports_autograd) and torch.float64 in entry.dtypes


def calls(entry: Any) -> Iterator[Sample]:
    """The operator calls of an entry's samples and of their gradients."""
    for sample in itertools.islice(entry.sample_inputs("cpu", torch.float64, requires_grad=True), SAMPLES):
        recorder = Recorder()
        with recorder:
            _forward_backward(entry.op, sample)
        yield from recorder.calls


def _forward_backward(function: Callable[..., Any], sample: Any) -> None:
    out = function(sample.input, *sample.args, **sample.kwargs)
    results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    inputs = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if results and leaves:
        generator = torch.Generator().manual_seed(0)
        real = [torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in results]
        torch.autograd.grad(results, leaves, [g.to(r.dtype) for g, r in zip(real, results, strict=True)], allow_unused=True)


def check_entry(entry: Any) -> Found:
    """Prove and count one entry of op_db."""
    out = Found(full_name(entry))
    tried: dict[str, set[str]] = {}

    def late(*_: Any) -> None:
        raise TimeoutError(f"takes longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        torch.manual_seed(0)
        for call in calls(entry):
            name, key = str(call.op), repr(_key(call))
            seen = tried.setdefault(name, set())
            if key in seen or len(seen) >= CALLS or _size(call) > LARGEST:
                continue
            seen.add(key)
            _check_call(call, out)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError, TimeoutError) as e:
        out.error = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out.ops = sorted(tried)
    return out


def _size(call: Sample) -> int:
    return max((x.numel() for x in tensor_operands(call.args, call.kwargs, is_tensor)), default=0)


def _key(call: Sample) -> Any:
    return map_operands(call.args, call.kwargs, lambda x: (tuple(x.shape), x.dtype, "tensor"), is_tensor)


def _check_call(call: Sample, out: Found) -> None:
    if not has_rule(call.op):
        if str(call.op) not in out.unruled:
            out.unruled.append(str(call.op))
        return
    if not _tensor_result(call):
        return
    try:
        rule = rule_of(call.op, call.args, call.kwargs)[0]
    except RuleError as e:
        out.unruled.append(f"{call}: {e.what}")
        return
    if not _exact(call):
        return  # rounding hides what is false: the same operators are tried in float64
    false = prove(call.op, call.args, call.kwargs)
    out.false += [f"{call}\n{v}" for v in false]
    known = known_layouts(rule, tensor_operands(call.args, call.kwargs, is_tensor))
    true = [] if _aborts(call) else list(true_layouts(call.op, call.args, call.kwargs, LAYOUTS))
    lacking = [layout for layout in true if layout.operands not in known]
    # What a rule knows holds by the proof above, also where it is not tried (sizes as arguments, many operands).
    here = 0 if false else len(known)
    out.known += here
    out.true += here + len(lacking)
    if lacking:
        out.missing[f"{call} {rule}"] = [str(layout) for layout in lacking]


def _exact(call: Sample) -> bool:
    kinds = {x.dtype for x in tensor_operands(call.args, call.kwargs, is_tensor)}
    said = {v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype)}
    return all(not (d.is_floating_point or d.is_complex) or d in (torch.float64, torch.complex128) for d in kinds | said)


def _tensor_result(call: Sample) -> bool:
    return any("Tensor" in str(r.type) for r in call.op._schema.returns)


def _aborts(call: Sample) -> bool:
    """Whether the operator ends the process on operands whose shapes do not fit, so that only its rule can be tried."""
    names = ("pool", "batch_norm", "group_norm", "embedding_bag", "segment_reduce")
    return any(n in call.op._schema.name for n in names) and len(tensor_operands(call.args, call.kwargs, is_tensor)) > 1


# -- all of them -----------------------------------------------------------------------------------------------------------


def check(
    pattern: str = "*", own: Mapping[str, str] | None = None, workers: int | None = None, among: Sequence[str] = REACHABLE
) -> Report:
    """Check the entries whose name matches a pattern.

    Args:
        own: what was found false on samples that are not of op_db, by operator: counts as false.
        among: entries to choose from.
        workers: how many processes; as many as there are processors, at most 8.
    """
    names = [name for name in among if fnmatch.fnmatch(name, pattern) and name not in EXCLUDED]
    if not names:
        return Report((), own or {}, selected=pattern != "*")
    count = max(1, min(workers or os.cpu_count() or 1, 8, math.ceil(len(names) / 4)))
    shares = [names[k::count] for k in range(count)]
    with ThreadPoolExecutor(count) as pool:
        found = {f.name: f for share in pool.map(_in_process, shares) for f in share}
    excluded = [Found(n, error=f"excluded: {why}") for n, why in EXCLUDED.items() if n in among and fnmatch.fnmatch(n, pattern)]
    return Report((*(found[name] for name in names), *excluded), own or {}, selected=pattern != "*" or among is not REACHABLE)


def _in_process(names: Sequence[str]) -> list[Found]:
    """Check entries in a process of their own, started again after an entry that ends it."""
    left, out = list(names), []
    while left:
        command = [sys.executable, "-W", "ignore", "-c", "from shardc.rules.opdb import work; work()"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, input="\n".join(left), capture_output=True, text=True, env=env)
        done = [Found(**json.loads(line)) for line in run.stdout.splitlines() if line.startswith('{"name"')]
        out += done
        left = left[len(done) :]
        if left:
            why = run.stderr.strip().splitlines()[-1:] if run.returncode > 0 else [f"signal {-run.returncode}"]
            out.append(Found(left.pop(0), error=f"its process ended: {' '.join(why)}"))
    return out


def work(names: Iterable[str] | None = None) -> None:
    """Check the entries named on standard input; one line of JSON for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    by_name = {full_name(entry): entry for entry in _torch.operator_database()}
    for name in list(names or sys.stdin.read().split("\n")):
        entry = by_name.get(name)
        found = check_entry(entry) if entry is not None else Found(name, error="this torch has no such entry")
        print(json.dumps(asdict(found)), flush=True)
