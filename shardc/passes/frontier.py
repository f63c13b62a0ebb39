"""The frontier of memory and time: choices of what to repeat, from nothing to as much as lowers the peak, whatever the budget.

For a row of targets between the peak without repetition and the lowest that can be reached, each moment above the target has to
lose bytes; the regions whose values are dormant at that moment can give them up, each in steps of rising seconds a byte.
Moments are served from the innermost out (fewest regions to choose from), the cheapest step first, which is optimal for nested
moments up to one step; what turns out superfluous is taken back. Longer regions (several neighbours as one, fewer kept borders)
compete with short ones. For each target `Problem.judge` looks at candidates from the fastest on, up to the first that meets it;
those that no other beats in both are the frontier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardc.passes.exact import Exact
from shardc.passes.regions import Forward, Region, Trade
from shardc.passes.tradeoff import Choice, Point, Problem

TARGETS = 32
"""Targets between the highest and the lowest peak."""

MERGED = (1, 2, 3, 4, 6, 8)
"""How many neighbouring regions are taken as one."""

FEW = 6
"""Where there are fewer regions, wider borders are tried too."""

EVEN = (3, 5, 8, 12)
"""Also so many regions of equal size, wherever their borders are."""

SMALL = 64
"""Problems with at most so many instructions to choose from are improved by changing a few of them."""

EFFORT = 600_000
"""Choices of a small problem are looked at, until the instructions of all of them are so many."""


@dataclass(frozen=True)
class _Offer:
    """A region, its trades, and the moments (a slice of the instructions) in which what it drops is dormant."""

    trades: list[Trade]
    begin: int
    end: int


def frontier(problem: Problem) -> list[Point]:
    """Points by rising seconds and falling peak; the first repeats nothing."""
    none = problem.judge(frozenset())
    forward = Forward(problem)
    if not forward.steps:
        return [none]
    borders = forward.borders()
    points = [none]
    known: dict[object, tuple[Region, list[Trade]]] = {}
    cuts = [borders[::g] for g in MERGED if g == 1 or g < 2 * len(borders)]
    if len(borders) < FEW:  # no narrow borders: try wide ones
        cuts += [forward.borders(1), [0], *(forward.even(k) for k in EVEN)]
    ways = [_Way(problem, offers) for some in cuts if (offers := _offers(problem, forward, some, known))]
    lowest = min((way.lowest for way in ways), default=none.peak)
    judged: dict[Choice, Point] = {}
    for target in np.linspace(none.peak, lowest, TARGETS + 1)[1:]:
        met = {c: s for c, s in (way.meet(int(target)) or (frozenset(), 0.0) for way in ways) if c}
        for choice in sorted(met, key=lambda c: (met[c], len(c))):
            if choice not in judged:
                judged[choice] = problem.judge(choice)
            if judged[choice].peak <= target:
                break  # the others take more time
    points += judged.values()
    points = pareto(points)
    movable = [k for k, s in enumerate(problem.steps) if s.movable and any(problem.nbytes.get(r) for r in s.makes)]
    return _improved(problem, points, movable) if len(movable) <= SMALL else points


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats: seconds rise strictly, peaks fall strictly."""
    out: list[Point] = []
    for p in sorted(points, key=lambda p: (p.seconds, p.peak, len(p.choice))):
        if not out or p.peak < out[-1].peak:
            out.append(p)
    return out


def _offers(
    problem: Problem, forward: Forward, borders: Sequence[int], known: dict[object, tuple[Region, list[Trade]]]
) -> list[_Offer]:
    anchors = forward.anchors(borders)
    readers: dict[int, int] = {}  # storage -> first late instruction that reads it
    for k, s in enumerate(problem.steps):
        if s.late:
            for r in s.reads:
                readers.setdefault(problem.root[r], k)
    out = []
    for lo, hi in zip(borders, [*borders[1:], len(forward.steps)], strict=True):
        region = Region(forward, lo, hi, anchors)
        if not region.steps:
            continue
        key = region.key()
        if key not in known:
            known[key] = region, region.trades()
        first, trades = known[key]
        if len(trades) < 2:
            continue
        mine = [region.same(first, t) for t in trades]
        dropped = {r for t in mine for k in t.drop for r in problem.steps[k].makes}
        until = min((readers[problem.root[r]] for r in dropped if problem.root[r] in readers), default=0)
        out.append(_Offer(mine, forward.steps[hi - 1] + 1, until))
    return [o for o in out if o.begin < o.end]


class _Way:
    """One set of regions: what its offers can do for each moment.

    Attributes:
        level: the highest level of the moments in which the same offers are dormant; fewest offers first.
        active: (moment, offer) -> whether the offer can lower the moment.
    """

    def __init__(self, problem: Problem, offers: Sequence[_Offer]) -> None:
        self.offers = offers
        edges = sorted({0, len(problem.level), *(o.begin for o in offers), *(o.end for o in offers)})
        begins, ends = (np.array([getattr(o, side) for o in offers], dtype=np.int64) for side in ("begin", "end"))
        highest: dict[bytes, int] = {}
        rows: dict[bytes, np.ndarray] = {}
        for lo, hi in zip(edges, edges[1:], strict=False):
            row = (begins <= lo) & (hi <= ends)
            key = row.tobytes()
            rows[key], highest[key] = row, max(highest.get(key, 0), int(problem.level[lo:hi].max()))
        keys = sorted(rows, key=lambda k: int(rows[k].sum()))
        self.level = np.array([highest[k] for k in keys], dtype=np.int64)
        self.active = np.array([rows[k] for k in keys]).reshape(len(keys), len(offers))
        self.gains = [np.diff([t.freed for t in o.trades]) for o in offers]
        self.prices = [np.diff([t.seconds for t in o.trades]) / g for o, g in zip(offers, self.gains, strict=True)]

    @property
    def lowest(self) -> int:
        """The lowest peak that the offers can reach."""
        return int((self.level - self.active @ np.array([o.trades[-1].freed for o in self.offers], dtype=np.int64)).max())

    def meet(self, target: int) -> tuple[Choice, float] | None:
        """The cheapest choice found that brings every moment to the target, and its seconds; None where that cannot be.

        What the repetitions themselves hold is not counted: `Problem.judge` does.
        """
        taken = [0] * len(self.offers)
        missing = self.level - target
        price = np.array([p[0] for p in self.prices])  # of the next step of each offer
        for k in range(len(missing)):
            able = np.flatnonzero(self.active[k])
            while missing[k] > 0:
                i = int(able[np.argmin(price[able])]) if len(able) else -1
                if i < 0 or price[i] == np.inf:
                    return None
                missing -= self.active[:, i] * self.gains[i][taken[i]]
                taken[i] += 1
                price[i] = self.prices[i][taken[i]] if taken[i] < len(self.prices[i]) else np.inf
        for i in sorted(range(len(self.offers)), key=lambda i: -self.offers[i].trades[taken[i]].seconds):
            while taken[i]:
                more = missing + self.active[:, i] * self.gains[i][taken[i] - 1]
                if (more > 0).any():
                    break
                missing, taken[i] = more, taken[i] - 1
        chosen = [o.trades[t] for o, t in zip(self.offers, taken, strict=True)]
        return frozenset((k, 0) for t in chosen for k in t.drop), sum(t.seconds for t in chosen)


def _improved(problem: Problem, points: Sequence[Point], movable: Sequence[int]) -> list[Point]:
    """Points that differ in what is repeated of one instruction, as long as the frontier grows; and optimal ones, from the
    lowest peak up, as long as they are better."""
    left = itertools.count(EFFORT // max(1, len(problem.steps)), -1)
    front = _varied(problem, points, movable, left)
    exact = Exact(problem)
    while better := exact.better(front):
        front = _varied(problem, pareto([*front, *better]), movable, left)
    return front


def _varied(problem: Problem, points: Sequence[Point], movable: Sequence[int], left: Iterator[int]) -> list[Point]:
    """One instruction is repeated or not, or dropped at a later use of its result by the backward."""
    front, seen, tried = list(points), {p.choice for p in points}, set[Choice]()
    while (p := next((p for p in front if p.choice not in tried), None)) is not None:
        tried.add(p.choice)
        now, uses = dict(p.choice), problem.uses(p.choice)
        more = []
        for k in movable:
            for since in (None, 0, *uses.get(k, ())[1:]):
                choice = frozenset((j, s) for j, s in {**now, k: since}.items() if s is not None)
                if choice not in seen and next(left) > 0:
                    seen.add(choice)
                    more.append(problem.judge(choice))
        front = pareto([*front, *more])
    return front
