"""Optimal choices of small problems: a mixed-integer program in the manner of Checkmate (Jain et al., MLSys 2020), for HiGHS.

The backward is a row of stages, one for each of its instructions. For a value k of the forward, ``R[t, k]`` says that stage t
computes it again, at most once in all, and ``S[t, k]`` that it is held when stage t begins. The moments of a stage are the
values in order, then its own instruction; at a moment lives what is read later in the stage or held into the next one. The
memory of everything else is taken from the plan without repetition.

Views count as the value that they are of. What the program proposes is a choice like any other: `Problem.judge` has the last
word on its peak and seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from shardc.passes.tradeoff import Choice, Point, Problem

SIZE = 1_000
"""Values times stages of the largest problem that is solved."""

NODES = 2_000
"""HiGHS looks at so many nodes of its search tree: a limit that, unlike one in seconds, is the same on every rank."""

GAP = 0.01
"""It stops at answers whose added seconds are this close to the optimum, and looks only for answers better by as much."""

PATIENCE = 3
"""So many points in a row that cannot be improved end the search."""

Row = dict[int, float]


class Exact:
    """The program of one problem.

    Attributes:
        values: positions of the instructions whose results are counted, in order.
        stages: positions of the instructions of the backward, in order.
    """

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        own = {r for r, root in p.root.items() if r == root}
        ends = {p.root[r] for s in p.steps if not s.forward and not s.late for r in s.reads}  # alive to the end in any case
        self.stages = [k for k, s in enumerate(p.steps) if s.late]
        self.values = [
            k
            for k, s in enumerate(p.steps)
            if s.forward and k not in p.twin and own.intersection(s.makes) and not ends.intersection(s.makes)
            and any(p.nbytes.get(r) for r in s.makes)
        ]  # fmt: skip
        self.column = {k: i for i, k in enumerate(self.values)}
        self.nbytes = {k: sum(p.nbytes.get(r, 0) for r in p.steps[k].makes) for k in self.values}
        makers = {r: p.maker[root] for r, root in p.root.items() if root in p.maker}  # of the storage
        self.views = {k: {makers[r] for r in s.makes if r in makers} - {k} for k, s in enumerate(p.steps)}
        fixed = {k for k, s in enumerate(p.steps) if self.views[k] and s.forward and not s.movable}
        self.movable = {k for k in self.values if p.steps[k].movable} - {m for k in fixed for m in self.views[k]}
        self.reads = [sorted({makers[r] for r in s.reads if r in makers}.intersection(self.values)) for s in p.steps]
        self.users = {k: [u for u in self.values if k in self.reads[u]] for k in self.values}
        last = {k: k for k in self.values}
        for k in range(len(p.steps)):
            last.update((j, k) for j in self.reads[k])
        self.solved: set[int] = set()  # budgets
        self.columns = 0
        self.rest = p.level.copy()  # bytes at each instruction of all that is no value
        for k in self.values:
            self.rest[k : last[k] + 1] -= self.nbytes[k]

    def R(self, t: int, k: int) -> int:
        return t * len(self.values) + self.column[k]

    def S(self, t: int, k: int) -> int:
        return (len(self.stages) + t) * len(self.values) + self.column[k]

    def solve(self, budget: int, below: float) -> Choice | None:
        """A choice that keeps the budget (bytes) with less than `below` added seconds; None where none was found."""
        p, n = self.problem, 2 * len(self.stages) * len(self.values)
        self.columns = n
        cost = np.zeros(n)
        for t, k in itertools.product(range(len(self.stages)), self.values):
            cost[self.R(t, k)] = p.steps[k].seconds
        rows: list[tuple[Row, float]] = [({i: c for i, c in enumerate(cost.tolist()) if c}, below)]
        rows += self._flow()
        rows += self._forward(budget)
        for t in range(len(self.stages)):
            rows += self._stage(t, budget)
        lives = self.columns - n
        high = np.ones(n + lives)
        for t, k in itertools.product(range(len(self.stages)), self.values):
            if k not in self.movable:
                high[self.R(t, k)] = 0
        at, column, weight = zip(*((i, c, w) for i, (row, _) in enumerate(rows) for c, w in row.items()), strict=True)
        matrix = coo_array((weight, (at, column)), (len(rows), n + lives)).tocsr()
        found = milp(
            np.concatenate([cost, np.zeros(lives)]),
            constraints=LinearConstraint(matrix, ub=np.array([bound for _, bound in rows])),
            integrality=np.concatenate([np.ones(n), np.zeros(lives)]),
            bounds=Bounds(0, high),
            options={"mip_rel_gap": GAP, "node_limit": NODES},
        )  # fmt: skip
        return None if found.x is None else self._choice(found.x > 0.5)

    def _flow(self) -> Iterable[tuple[Row, float]]:
        """What is held was held or made before; what is read is there; each value is made again at most once."""
        for t, late in enumerate(self.stages):
            for k in self.values:
                if t + 1 < len(self.stages):
                    yield {self.S(t + 1, k): 1, self.S(t, k): -1, self.R(t, k): -1}, 0
                for j in self.reads[k]:
                    yield {self.R(t, k): 1, self.R(t, j): -1, self.S(t, j): -1}, 0
                if k not in self.reads[late]:  # as `Problem.order` has it: made again when it is first needed
                    yield {self.R(t, k): 1, **{self.R(t, u): -1 for u in self.users[k]}}, 0
            for j in self.reads[late]:
                yield {self.R(t, j): -1, self.S(t, j): -1}, -1
        for k in self.values:
            yield {self.R(t, k): 1 for t in range(len(self.stages))}, 1

    def _forward(self, budget: int) -> Iterable[tuple[Row, float]]:
        """While the forward runs: what it still reads, and what is held after it."""
        last = {k: max((u for u in range(self.stages[0]) if k in self.reads[u]), default=k) for k in self.values}
        for at in range(self.stages[0]):
            row: Row = {}
            there = int(self.rest[at])
            for k in self.values:
                if k > at:
                    break
                if last[k] >= at:
                    there += self.nbytes[k]
                else:
                    row[self.S(0, k)] = self.nbytes[k]
            if row:
                yield row, budget - there

    def _stage(self, t: int, budget: int) -> Iterable[tuple[Row, float]]:
        """While stage t runs."""
        p, late = self.problem, self.stages[t]
        made = sum(p.nbytes.get(r, 0) for r in p.steps[late].makes)
        between = int(self.rest[late]) - made - int(p.inside[late])
        life: dict[int, int] = {}  # value -> column: whether it lives at the moment; another one after each read
        for at, now in enumerate([*self.values, None]):
            for k in self.values[:at]:
                if k in life and self.values[at - 1] not in (k, *self.users[k]):
                    continue
                life[k], self.columns = self.columns, self.columns + 1
                later = [self.R(t, u) for u in self.users[k] if now is not None and u >= now]
                later += [self.S(t + 1, k)] if t + 1 < len(self.stages) else []
                later += [self.R(t, k), self.S(t, k)] if k in self.reads[late] else []
                yield from (({c: 1.0, life[k]: -1.0}, 0.0) for c in later)
            row: Row = {self.S(t, k): self.nbytes[k] for k in self.values[at:]}
            if now is not None:
                row[self.R(t, now)] = self.nbytes[now] + int(p.inside[now])
            row |= {life[k]: self.nbytes[k] for k in self.values[:at]}
            yield row, budget - (between if now is not None else int(self.rest[late]))

    def _choice(self, chosen: np.ndarray) -> Choice:
        """What the answer repeats, and from where on; the views of what is repeated are repeated too."""
        p, since = self.problem, {k: 0 for k in self.problem.twin}
        for t, k in itertools.product(range(len(self.stages)), self.values):
            if chosen[self.R(t, k)]:
                before = any(k in self.reads[late] for late in self.stages[:t])
                before |= any(chosen[self.R(u, j)] for u in range(t) for j in self.values if k in self.reads[j])
                since[k] = self.stages[t] if before else 0
        for k, s in enumerate(p.steps):
            of = [since[m] for m in self.views[k] if m in since]
            if s.forward and s.movable and of and k not in since:
                since[k] = max(of)
        return frozenset(since.items())

    def better(self, points: Sequence[Point]) -> list[Point]:
        """Faster choices for the lowest peaks of a frontier (rising seconds, falling peaks), from the lowest up."""
        p, out, vain = self.problem, list[Point](), 0
        if not self.values or not 0 < len(self.stages) * len(self.values) <= SIZE:
            return []
        for point in reversed(points):
            known = min([q.seconds for q in out if q.peak <= point.peak], default=point.seconds)
            below = (1 - GAP) * (min(known, point.seconds) - p.seconds)
            choice = self.solve(point.peak, below) if below > 0 and point.peak not in self.solved else None
            self.solved.add(point.peak)
            new = p.judge(choice) if choice is not None else None
            if new is not None and new.peak <= point.peak and new.seconds < known:
                out.append(new)
                vain = 0
            elif (vain := vain + 1) == PATIENCE:
                break
        return out
