"""Where the forward is cut into regions that are repeated each by itself, and what a region best keeps.

A border between regions is a point of the forward that few bytes of activations cross (the residual stream between two halves
of a block); they are kept, so that the backward of a region repeats no more than the region. Inside, what to keep is a minimum
cut: a value costs its bytes if it is kept and its seconds if it is computed again, and what a repetition reads has to be there.
One price of a byte gives one cut; `trades` finds all cuts that some price leads to. Equal regions have equal cuts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

from shardc.instructions import Reg
from shardc.passes.tradeoff import Problem

WORTH = 4
"""A border keeps at most this part (one in WORTH) of what either side of it would keep."""

LONG = 0.5
"""Values that live through more than this share of the forward are kept."""

THOROUGH = 1000
"""The highest price: one part in so many of a region's bytes is worth all its seconds."""

SCALE = 2**30
"""Costs of a cut are integers that sum to this."""


@dataclass(frozen=True)
class Trade:
    """A region's values to drop (positions of instructions), and what that does: bytes freed, seconds added."""

    drop: frozenset[int]
    freed: int
    seconds: float


@dataclass
class Forward:
    """The forward of a problem: its instructions, and when it and the backward read each storage.

    Args:
        steps: positions of the forward's instructions, in order.
        last: storage of an activation -> index in `steps` of the last one that reads it.
        made: the same of the one that makes it.
        wanted: registers that the backward reads.
    """

    problem: Problem
    steps: list[int] = field(default_factory=list)
    last: dict[Reg, int] = field(default_factory=dict)
    made: dict[Reg, int] = field(default_factory=dict)
    wanted: set[Reg] = field(default_factory=set)

    def __post_init__(self) -> None:
        p = self.problem
        self.steps = [k for k, s in enumerate(p.steps) if s.forward]
        for at, k in enumerate(self.steps):
            for r in p.steps[k].makes:
                if r in p.nbytes and p.root[r] == r and p.steps[k].activation:
                    self.made[r] = self.last[r] = at
            for r in p.steps[k].reads:
                if p.root[r] in self.made:
                    self.last[p.root[r]] = at
        self.wanted = {r for s in p.steps if s.late for r in s.reads}
        self.kept = {p.root[r] for r in self.wanted}
        n = len(self.steps)
        self.long = {r for r, at in self.made.items() if self.last[r] - at > LONG * n}
        self.long |= {p.root[r] for s in p.steps if not s.forward and not s.late for r in s.reads}  # there anyway

    def borders(self, worth: int = WORTH) -> list[int]:
        """Indices in `steps` before which a region begins; the first is 0."""
        anchors = set(self.long)
        out = [0]
        todo = [(0, len(self.steps))]
        nbytes = self.problem.nbytes
        by_place = sorted(self.made, key=lambda r: self.made[r])
        places = np.array([self.made[r] for r in by_place], dtype=np.int64)
        while todo:
            lo, hi = todo.pop()
            mine = by_place[int(np.searchsorted(places, lo)) : int(np.searchsorted(places, hi))]
            mine = [r for r in mine if r not in anchors]
            cross = np.zeros(hi - lo + 1, dtype=np.int64)
            held = np.zeros(hi - lo + 1, dtype=np.int64)  # bytes kept of what is made before
            for r in mine:
                at = self.made[r] - lo + 1
                end = min(self.last[r], hi) - lo
                if end >= at:
                    cross[at] += nbytes[r]
                    cross[end + 1 if end + 1 <= hi - lo else hi - lo] -= nbytes[r] if end < hi - lo else 0
                if r in self.kept:
                    held[at] += nbytes[r]
            cross, held = np.cumsum(cross), np.cumsum(held)
            if hi - lo < 3 or not held[-1]:
                continue
            side = np.minimum(held, held[-1] - held)
            good = np.flatnonzero((cross[1:-1] * worth <= side[1:-1]) & (side[1:-1] > 0)) + 1
            if not len(good):
                continue
            low = good[cross[good] == cross[good].min()]
            p = int(low[np.argmin(np.abs(low - (hi - lo) / 2))])
            border = lo + p
            anchors |= {r for r in mine if self.made[r] < border <= self.last[r]}
            out.append(border)
            todo += [(lo, border), (border, hi)]
        return sorted(out)

    def even(self, count: int) -> list[int]:
        """Borders of `count` regions of about equal kept bytes, each where the fewest bytes cross nearby."""
        n = len(self.steps)
        cross, held = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
        for r, at in self.made.items():
            size = self.problem.nbytes[r]
            if r not in self.long:
                cross[at + 1] += size
                cross[min(self.last[r] + 1, n)] -= size
            if r in self.kept:
                held[at + 1] += size
        cross, held = np.cumsum(cross), np.cumsum(held)
        out = [0]
        for k in range(1, count):
            lo, hi = np.searchsorted(held, [held[-1] * (k - 0.4) / count, held[-1] * (k + 0.4) / count])
            if hi > lo:
                out.append(int(lo + np.argmin(cross[lo:hi])))
        return sorted(set(out))

    def anchors(self, borders: Sequence[int]) -> set[Reg]:
        """Storages that cross a border, and long-lived ones."""
        out = set(self.long)
        for r, at in self.made.items():
            k = int(np.searchsorted(borders, at, side="right"))
            if k < len(borders) and borders[k] <= self.last[r]:
                out.add(r)
        return out


class Region:
    """The instructions of the forward between two borders, as a graph to cut."""

    def __init__(self, forward: Forward, lo: int, hi: int, anchors: set[Reg]) -> None:
        self.p, self.forward = forward.problem, forward
        p = self.p
        mine = {k for k in forward.steps[lo:hi] if p.steps[k].activation}
        todo = list(mine)
        while todo:  # what of parameters alone they read: gathers, casts, views
            for r in p.steps[todo.pop()].reads:
                m = p.maker.get(r)
                if m is not None and m not in mine and p.steps[m].movable and not p.steps[m].activation:
                    mine.add(m)
                    todo.append(m)
        self.steps = sorted(mine)
        self.anchors = anchors
        self.wanted = {r for k in self.steps for r in p.steps[k].makes if r in forward.wanted}

    def key(self) -> Hashable:
        """Equal for regions with equal cuts."""
        p = self.p
        name = {r: i for i, r in enumerate(r for k in self.steps for r in p.steps[k].makes)}
        return tuple(
            (
                p.steps[k].seconds, p.steps[k].movable, k in p.twin,
                tuple(name.get(r, -1) for r in p.steps[k].reads),
                tuple(
                    (p.nbytes.get(r), name.get(p.source.get(r, -1)), p.root[r] in self.anchors, r in self.wanted,
                     p.root[r] in self.forward.kept)
                    for r in p.steps[k].makes
                ),
            )
            for k in self.steps
        )  # fmt: skip

    def _graph(self) -> None:
        """Edges of the cut: (from, to, bytes, seconds); bytes -1: never cut."""
        p = self.p
        self.edges: list[tuple[int, int, float, float]] = []
        self.node = {k: i + 2 for i, k in enumerate(self.steps)}
        place: dict[Reg, int] = {}
        n = len(self.steps) + 2
        for k in self.steps:
            step = p.steps[k]
            if not step.movable:
                self.edges.append((0, self.node[k], -1, 0))
            elif k not in p.twin:
                self.edges.append((0, self.node[k], 0, step.seconds))
            for r in step.makes:
                place[r], n = n, n + 1
                root = p.root[r]
                free = root not in p.nbytes or root in self.anchors
                if free:
                    continue  # there anyway: no one has to make it
                view = root != r
                self.edges.append((self.node[k], place[r], -1 if view and step.movable else p.nbytes[root], 0))
                if r in self.wanted:
                    self.edges.append((place[r], 1, -1, 0))
            for r in step.reads:
                if r in place and not (p.root[r] not in p.nbytes or p.root[r] in self.anchors):
                    self.edges.append((place[r], self.node[k], -1, 0))
        self.count = n

    def cut(self, price: float) -> frozenset[int]:
        """What to repeat where a kept byte costs `price` seconds."""
        tail, head, nbytes, seconds = (np.array(c) for c in zip(*self.edges, strict=True))
        cost = np.where(nbytes < 0, 0.0, nbytes * price + seconds)
        total = cost.sum() or 1.0
        capacity = np.where(nbytes < 0, 2**31 - 1, np.maximum(np.round(cost / total * SCALE), (cost > 0).astype(float)))
        graph = csr_array((capacity.astype(np.int32), (tail.astype(np.int32), head.astype(np.int32))), (self.count, self.count))
        flow = maximum_flow(graph, 0, 1).flow
        rest = graph - flow
        rest.data = np.maximum(rest.data, 0)
        rest.eliminate_zeros()
        near = set(breadth_first_order(rest, 0, return_predecessors=False).tolist())
        return frozenset(k for k in self.steps if self.p.steps[k].movable and self.node[k] not in near)

    def measure(self, drop: frozenset[int]) -> Trade:
        """What dropping them does: bytes that the backward does not keep any more, seconds."""
        p = self.p
        needed: set[int] = set()
        touched: set[Reg] = set()  # storages that live into the backward
        todo = list(self.wanted)
        seen: set[Reg] = set()
        while todo:
            r = todo.pop()
            if r in seen:
                continue
            seen.add(r)
            m = p.maker.get(r)
            if m is not None and m in drop:
                if m not in needed:
                    needed.add(m)
                    todo += p.steps[m].reads
            else:
                touched.add(p.root[r])
        before = {p.root[r] for r in self.wanted}
        freed = sum(p.nbytes.get(r, 0) for r in before - touched)
        freed -= sum(p.nbytes.get(r, 0) for r in touched - before - self.anchors)
        return Trade(frozenset(needed), freed, sum(p.steps[k].seconds for k in needed if k not in p.twin))

    def trades(self) -> list[Trade]:
        """All cuts that some price leads to, by falling bytes kept; the first drops nothing."""
        if not self.wanted:
            return [Trade(frozenset(), 0, 0.0)]
        self._graph()
        none = Trade(frozenset(), 0, 0.0)
        total = sum(max(e[2], 0) for e in self.edges)
        if not total:
            return [none]
        ceiling = THOROUGH * sum(self.p.steps[k].seconds for k in self.steps) / total
        top = self.measure(self.cut(ceiling))
        found = {none.freed: none}

        def between(a: Trade, b: Trade) -> Iterator[Trade]:
            stack = [(a, b)]
            while stack:
                low, high = stack.pop()
                if high.freed <= low.freed:
                    continue
                price = (high.seconds - low.seconds) / (high.freed - low.freed)
                if price <= 0:
                    continue
                mid = self.measure(self.cut(price))
                if low.freed < mid.freed < high.freed:
                    gain = (mid.seconds - low.seconds) - price * (mid.freed - low.freed)
                    if gain < -1e-7 * max(high.seconds, 1e-30):
                        yield mid
                        stack += [(low, mid), (mid, high)]

        if top.freed > 0:
            found[top.freed] = top
            for t in between(none, top):
                found[t.freed] = t
        return hull([found[f] for f in sorted(found)])

    def same(self, other: Region, trade: Trade) -> Trade:
        """A trade of an equal region, in this region's instructions."""
        back = dict(zip(other.steps, self.steps, strict=True))
        return Trade(frozenset(back[k] for k in trade.drop), trade.freed, trade.seconds)


def hull(trades: Sequence[Trade]) -> list[Trade]:
    """Those with rising seconds for each byte."""
    out: list[Trade] = []
    for t in trades:
        while out and t.seconds <= out[-1].seconds:
            out.pop()
        while len(out) > 1 and (out[-1].seconds - out[-2].seconds) * (t.freed - out[-1].freed) >= (
            t.seconds - out[-1].seconds
        ) * (out[-1].freed - out[-2].freed):
            out.pop()
        out.append(t)
    return out
