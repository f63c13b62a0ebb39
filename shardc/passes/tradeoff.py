"""What it costs in time, and saves in memory, to compute values of the forward again: the problem and the judge of answers.

A `Problem` is the list of instructions of a plan without recomputation: what each reads and makes, its seconds, the bytes of
the storages, and the exact bytes alive while it runs. A choice is a set of *dropped* instructions of the forward: the backward
computes each of them once more, just before it first needs it, from what is kept and from others that are dropped.
`Problem.judge` says what such a choice costs and where its peak lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from shardc.instructions import Reg

Choice = frozenset[int]
"""Positions of the instructions that the backward repeats."""


@dataclass(frozen=True)
class Step:
    """An instruction: the registers that it reads and makes, and its predicted seconds.

    Args:
        forward, late: whether it is of the forward, or of the backward, which takes repeated values where there are any.
        movable: whether it may be repeated.
        activation: whether it depends on an input of the step.
    """

    reads: tuple[Reg, ...]
    makes: tuple[Reg, ...]
    seconds: float
    forward: bool = True
    late: bool = False
    movable: bool = False
    activation: bool = True


@dataclass(frozen=True)
class Point:
    """A choice and what it comes to: predicted peak in bytes, seconds of the step."""

    choice: Choice
    peak: int
    seconds: float


@dataclass
class Problem:
    """See the module docstring.

    Args:
        steps: the instructions, in order.
        source: register -> the register that it is a view of.
        nbytes: register that owns a storage -> its bytes; those of state and inputs are absent.
        exact: bytes alive while each instruction runs, in the plan without recomputation.
        start: bytes alive when the step starts.
        twin: position of a forward instruction -> of a backward one that makes the same (a second gather of a parameter).
    """

    steps: Sequence[Step]
    source: Mapping[Reg, Reg]
    nbytes: Mapping[Reg, int]
    exact: Sequence[int] = ()
    start: int = 0
    twin: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.maker = {r: k for k, s in enumerate(self.steps) for r in s.makes}
        self.root: dict[Reg, Reg] = {}
        for s in self.steps:
            for r in (*s.reads, *s.makes):
                if r not in self.root:
                    self.root[r] = self.root[self.source[r]] if r in self.source else r
        self.seconds = sum(s.seconds for s in self.steps)
        own = self._levels([(k, False) for k in range(len(self.steps))], {})
        self.extra = np.zeros(len(self.steps), dtype=np.int64)
        if len(self.exact):
            self.extra = np.asarray(self.exact, dtype=np.int64) - own
        self.inside = np.maximum(self.extra - self.start, 0)  # what a kernel or a collective holds beyond its results
        self.level = own + self.extra

    # -- the order that a choice leads to ------------------------------------------------------------------------------

    def order(self, choice: Set[int]) -> list[tuple[int, bool]]:
        """(position, whether it is the repetition) in the order of execution; twins that are needed early come early."""
        out: list[tuple[int, bool]] = []
        done: set[int] = set()  # twins that came early
        again: set[int] = set()

        def waits(k: int, repeated: bool) -> list[tuple[int, bool]]:
            todo = []
            for r in self.steps[k].reads:
                m = self.maker.get(r)
                if m is None:
                    continue
                if repeated and m in choice:
                    if m not in again:
                        todo.append((m, True))
                elif not repeated and self.steps[m].late and m not in done and m > now:
                    todo.append((m, False))
            return todo

        for now, step in enumerate(self.steps):
            if step.late:
                for r in step.reads:
                    m = self.maker.get(r)
                    if m is None or m not in choice or m in again:
                        continue
                    stack = [(m, True)]
                    while stack:
                        k, repeated = stack[-1]
                        if (k in again) if repeated else (k in done):
                            stack.pop()
                            continue
                        twin = self.twin.get(k) if repeated else None
                        if twin is not None and (twin < now or twin in done):
                            again.add(k)
                            stack.pop()
                            continue
                        todo = [(twin, False)] if twin is not None else waits(k, repeated)
                        if todo:
                            stack.extend(todo)
                            continue
                        (again if repeated else done).add(k)
                        out.append((k, repeated))
                        stack.pop()
            if now not in done:
                out.append((now, False))
        return out

    def _levels(self, order: Sequence[tuple[int, bool]], choice: Mapping[int, int | None]) -> np.ndarray:
        """Bytes of storages alive while each instruction of `order` runs.

        Args:
            choice: position of what is repeated -> its twin, if it has one.
        """
        first: dict[tuple[Reg, bool], int] = {}
        last: dict[tuple[Reg, bool], int] = {}
        known: dict[Reg, tuple[Reg, bool]] = {}

        def repeated(r: Reg) -> tuple[Reg, bool]:
            """The storage that a read of `r` by the backward touches."""
            if r in known:
                return known[r]
            m = self.maker.get(r)
            if m is not None and self.steps[m].late and r in self.source:
                key = repeated(self.source[r])
            elif m is None or m not in choice:
                key = (self.root[r], False)
            elif (twin := choice[m]) is not None:
                key = (self.root[self.steps[twin].makes[self.steps[m].makes.index(r)]], False)
            elif r in self.source:
                key = repeated(self.source[r])
            else:
                key = (r, True)
            known[r] = key
            return key

        for at, (k, again) in enumerate(order):
            step = self.steps[k]
            follow = again or step.late
            for r in step.reads:
                last[repeated(r) if follow else (self.root[r], False)] = at
            for r in step.makes:
                key = repeated(r) if follow else (self.root[r], False)
                if self.root[r] == r and key not in first:
                    first[key] = at
                last[key] = at
        change = np.zeros(len(order) + 1, dtype=np.int64)
        for key, at in first.items():
            n = self.nbytes.get(key[0], 0)
            change[at] += n
            change[last[key] + 1] -= n
        return np.cumsum(change)[:-1]

    def judge(self, choice: Choice) -> Point:
        """Peak and time of a choice."""
        order = self.order(choice)
        levels = self._levels(order, {k: self.twin.get(k) for k in choice})
        at = np.fromiter((k for k, _ in order), dtype=np.int64, count=len(order))
        again = np.fromiter((a for _, a in order), dtype=bool, count=len(order))
        levels = levels + np.where(again, self.start + self.inside[at], self.extra[at])
        seconds = self.seconds + sum(self.steps[k].seconds for k, repeated in order if repeated)
        used = frozenset(k for k, repeated in order if repeated) | frozenset(k for k in choice if k in self.twin)
        return Point(used & choice, int(levels.max()) if len(levels) else self.start, seconds)
