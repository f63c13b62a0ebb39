"""All rules as one table to read, and their proof by name: what ``shardc rules`` prints and checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from shardc.rules import proof
from shardc.rules.registry import BUILT_IN
from shardc.rules.sample import Sample
from shardc.rules.samples import samples


def by_name(only: str | None = None) -> dict[str, list[Sample]]:
    """Operator -> its sample calls, in the order of the tables; of all operators or of one."""
    out: dict[str, list[Sample]] = {name: [] for name in BUILT_IN}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are odd on purpose: a variance of one number
        for sample in samples(only):
            out.setdefault(str(sample.op), []).append(sample)
    return {name: found for name, found in out.items() if found}


def table() -> dict[str, str]:
    """Operator -> the printed rule of its first sample call, by name."""
    return {name: str(proof.rule_of(s[0].op, s[0].args, s[0].kwargs)[0]) for name, s in sorted(by_name().items())}


def failures(name: str | None = None) -> Iterator[proof.Violation]:
    """Claims that do not hold on the sample calls of one operator, or of all."""
    for found in by_name(name).values():
        for sample in found:
            yield from proof.prove(sample.op, sample.args, sample.kwargs)


def prove(name: str) -> str:
    """What does not hold of the rule of an operator, in words; empty if all does."""
    return "\n".join(map(str, failures(name)))
