"""What it costs in time, and saves in memory, to compute values of the forward again: the problem and the judge of answers.

A `Problem` is the list of instructions of a plan without recomputation: what each reads and makes, its seconds, the bytes of
the storages, and the exact bytes alive while it runs. A choice is a set of *dropped* instructions of the forward: the backward
computes each of them once more, just before it first needs it, from what is kept and from others that are dropped; one may be
dropped late, so that the backward uses what is kept of it up to some instruction, and what is made again from there on.
`Problem.judge` says what such a choice costs and where its peak lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardc.instructions import Reg

Choice = frozenset[tuple[int, int]]
"""Positions of the instructions that the backward repeats, each with that of the first instruction that sees the repetition."""

END = 2**62
"""A position after all instructions."""


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
        own = self._levels([(k, False, k) for k in range(len(self.steps))], frozenset())
        self.extra = np.zeros(len(self.steps), dtype=np.int64)
        if len(self.exact):
            self.extra = np.asarray(self.exact, dtype=np.int64) - own
        self.inside = np.maximum(self.extra - self.start, 0)  # what a kernel or a collective holds beyond its results
        self.level = own + self.extra

    # -- the order that a choice leads to ------------------------------------------------------------------------------

    def order(self, choice: Choice) -> list[tuple[int, bool, int]]:
        """(position, whether it is the repetition, position of the instruction for which it runs) in the order of execution;
        twins that are needed early come early."""
        out: list[tuple[int, bool, int]] = []
        since = dict(choice)
        done: set[int] = set()  # twins that came early
        again: set[int] = set()

        def gone(m: int) -> bool:
            return since.get(m, END) <= now

        def waits(k: int, repeated: bool) -> list[tuple[int, bool]]:
            todo = []
            for r in self.steps[k].reads:
                m = self.maker.get(r)
                if m is None:
                    continue
                if repeated and gone(m):
                    if m not in again:
                        todo.append((m, True))
                elif not repeated and self.steps[m].late and m not in done and m > now:
                    todo.append((m, False))
            return todo

        for now, step in enumerate(self.steps):
            if step.late:
                for r in step.reads:
                    m = self.maker.get(r)
                    if m is None or not gone(m) or m in again:
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
                        out.append((k, repeated, now))
                        stack.pop()
            if now not in done:
                out.append((now, False, now))
        return out

    def _levels(self, order: Sequence[tuple[int, bool, int]], choice: Choice) -> np.ndarray:
        """Bytes of storages alive while each instruction of `order` runs."""
        since = dict(choice)
        first: dict[tuple[Reg, bool], int] = {}
        last: dict[tuple[Reg, bool], int] = {}
        views: dict[Reg, tuple[Reg, bool]] = {}  # register of a view that the backward makes -> the storage
        again: dict[Reg, tuple[Reg, bool]] = {}  # register that is made again -> the storage
        for at, (k, repeated, now) in enumerate(order):
            step = self.steps[k]
            follow = repeated or step.late

            def touched(r: Reg, follow: bool = follow, now: int = now) -> tuple[Reg, bool]:
                """The storage that a read of `r` touches."""
                if not follow or (m := self.maker.get(r)) is None:
                    return self.root[r], False
                if r in views:
                    return views[r]
                if since.get(m, END) > now:
                    return self.root[r], False
                twin = self.twin.get(m)
                if twin is not None:
                    return self.root[self.steps[twin].makes[self.steps[m].makes.index(r)]], False
                return again[r]

            for r in step.reads:
                last[touched(r)] = at
            for r in step.makes:
                key = (self.root[r], False)
                if repeated:
                    key = again[r] = touched(self.source[r]) if r in self.source else (r, True)
                elif step.late and r in self.source:
                    key = views[r] = touched(self.source[r])
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
        levels = self._levels(order, choice)
        at = np.fromiter((k for k, _, _ in order), dtype=np.int64, count=len(order))
        again = np.fromiter((a for _, a, _ in order), dtype=bool, count=len(order))
        levels = levels + np.where(again, self.start + self.inside[at], self.extra[at])
        seconds = self.seconds + sum(self.steps[k].seconds for k, repeated, _ in order if repeated)
        used = {k for k, repeated, _ in order if repeated} | {*self.twin}
        kept = frozenset((k, since) for k, since in choice if k in used)
        return Point(kept, int(levels.max(initial=self.start)), seconds)

    def uses(self, choice: Choice) -> dict[int, list[int]]:
        """Instruction of the forward -> for which instructions of the backward its results are read, in order."""
        out: dict[int, dict[int, None]] = {}
        for k, repeated, now in self.order(choice):
            if repeated or self.steps[k].late:
                for m in {self.maker[r] for r in self.steps[k].reads if r in self.maker}:
                    out.setdefault(m, {})[now] = None
        return {m: [*nows] for m, nows in out.items()}
