"""The frontier of recomputation against exact optima: a mixed-integer program in the manner of Checkmate (Jain et al., 2020).

The backward is a row of stages, one for each of its instructions. ``R[t, k]``: stage t computes value k again, at most once in
all; ``S[t, k]``: value k is held when stage t begins. The moments within a stage are the values in order, then the instruction
of the backward; what lives at a moment is what is read later in the stage or held into the next one.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from test_budget import small

import shardc
from shardc.passes import exact as ours
from shardc.passes.frontier import frontier
from shardc.passes.ladder import planned, problem_of
from shardc.passes.tradeoff import Problem


class Exact:
    """The least seconds of a step within a budget.

    Args:
        problem: without views, twins and effects; the forward, then the backward, then what ends the step.
    """

    def __init__(self, problem: Problem, gap: float = 0.0) -> None:
        p = self.problem = problem
        self.gap = gap
        self.values = [k for k, s in enumerate(p.steps) if s.movable]
        self.stages = [k for k, s in enumerate(p.steps) if s.late]
        self.column = {k: i for i, k in enumerate(self.values)}
        self.nbytes = {k: p.nbytes[p.steps[k].makes[0]] for k in self.values}
        self.reads = {k: sorted({p.maker[r] for r in p.steps[k].reads} & {*self.values}) for k in (*self.values, *self.stages)}
        self.rows: list[tuple[dict[int, float], float]] = []  # sum of coefficients times variables <= bound
        self.n = 2 * len(self.stages) * len(self.values)  # R and S; the rest are lives, continuous

    def R(self, t: int, k: int) -> int:
        return t * len(self.values) + self.column[k]

    def S(self, t: int, k: int) -> int:
        return (len(self.stages) + t) * len(self.values) + self.column[k]

    def seconds(self, budget: int) -> float | None:
        """Seconds of the step; None where nothing fits."""
        p, stages, values = self.problem, self.stages, self.values
        fixed = self._fixed()
        self.rows, self.n = [], 2 * len(stages) * len(values)
        for t, late in enumerate(stages):
            for k in values:
                if t + 1 < len(stages):
                    self.rows.append(({self.S(t + 1, k): 1, self.S(t, k): -1, self.R(t, k): -1}, 0))
                for j in self.reads[k]:
                    self.rows.append(({self.R(t, k): 1, self.R(t, j): -1, self.S(t, j): -1}, 0))
            for j in self.reads[late]:
                self.rows.append(({self.R(t, j): -1, self.S(t, j): -1}, -1))
            self._memory(t, budget - fixed[late])
        for k in values:
            self.rows.append(({self.R(t, k): 1 for t in range(len(stages))}, 1))
        self._forward(budget, fixed)
        cost = np.zeros(self.n)
        for t in range(len(stages)):
            for k in values:
                cost[self.R(t, k)] = p.steps[k].seconds
        integral = np.zeros(self.n)
        integral[: 2 * len(stages) * len(values)] = 1
        at, column, weight = zip(*((i, c, w) for i, (row, _) in enumerate(self.rows) for c, w in row.items()), strict=True)
        matrix = coo_array((weight, (at, column)), (len(self.rows), self.n)).tocsr()
        bounds = LinearConstraint(matrix, ub=np.array([b for _, b in self.rows]))
        options = {"mip_rel_gap": self.gap, "time_limit": 600}
        found = milp(cost, constraints=bounds, integrality=integral, bounds=Bounds(0, 1), options=options)
        assert found.status in (0, 2), found.message
        return None if found.x is None else p.seconds + float(found.fun)

    def _fixed(self) -> list[int]:
        """Bytes at each instruction of what is no value: gradients."""
        p = self.problem
        last = {r: k for k, s in enumerate(p.steps) for r in (*s.reads, *s.makes)}
        out = [0] * len(p.steps)
        for k, s in enumerate(p.steps):
            for r in s.makes:
                if k not in self.column:
                    for at in range(k, last[r] + 1):
                        out[at] += p.nbytes.get(r, 0)
        return out

    def _memory(self, t: int, budget: int) -> None:
        stages, values = self.stages, self.values
        for at, k in enumerate([*values, None]):
            row: dict[int, float] = {}
            for i in values[at:]:
                row[self.S(t, i)] = self.nbytes[i]
            if k is not None:  # gradients that this stage does not read yet live on: the stage's own result does not
                row[self.R(t, k)] = self.nbytes[k]
            for i in values[:at]:
                later = [self.R(t, u) for u in values[at:] if i in self.reads[u]]
                if t + 1 < len(stages):
                    later.append(self.S(t + 1, i))
                if i in self.reads[stages[t]]:
                    later += [self.R(t, i), self.S(t, i)]
                if not later:
                    continue
                life, self.n = self.n, self.n + 1
                row[life] = self.nbytes[i]
                for c in later:
                    self.rows.append(({c: 1, life: -1}, 0))
            own = 0 if k is None else self.nbytes_of_stage(t)
            self.rows.append((row, budget + own))

    def nbytes_of_stage(self, t: int) -> int:
        return sum(self.problem.nbytes.get(r, 0) for r in self.problem.steps[self.stages[t]].makes)

    def _forward(self, budget: int, fixed: list[int]) -> None:
        """While the forward runs: what it still reads, and what is held after it."""
        for at in self.values:
            row: dict[int, float] = {}
            there = 0
            for i in self.values:
                if i > at:
                    break
                if i == at or any(i in self.reads[u] for u in self.values if u >= at):
                    there += self.nbytes[i]
                else:
                    row[self.S(0, i)] = self.nbytes[i]
            self.rows.append((row, budget - fixed[at] - there))


@pytest.mark.parametrize("seed", range(3))
def test_the_program_agrees_with_all_choices(seed: int) -> None:

    problem = small(seed, 8)
    exact = Exact(problem)
    movable = exact.values
    every = [
        problem.judge(frozenset((k, 0) for k in c)) for n in range(len(movable) + 1) for c in itertools.combinations(movable, n)
    ]
    for peak in sorted({p.peak for p in every})[::3]:
        best = min(p.seconds for p in every if p.peak <= peak)
        found = exact.seconds(peak)
        assert found is not None and found <= best + 1e-6, (peak, best)


@pytest.mark.parametrize("seed", range(3))
def test_small_problems_are_solved_by_highs(seed: int) -> None:
    problem = small(seed, 8)
    solver = ours.Exact(problem)
    movable = Exact(problem).values
    every = [
        problem.judge(frozenset((k, 0) for k in c)) for n in range(len(movable) + 1) for c in itertools.combinations(movable, n)
    ]
    for peak in sorted({p.peak for p in every})[::3]:
        best = min(p.seconds for p in every if p.peak <= peak)
        choice = solver.solve(peak, 2 * problem.seconds)
        assert choice is not None
        found = problem.judge(choice)
        assert found.peak <= peak and found.seconds - problem.seconds <= (1 + ours.GAP) * (best - problem.seconds) + 1e-6


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * x
        return x


@pytest.mark.parametrize("zero", [0, 3])
def test_the_frontier_of_a_small_step_is_that_of_all_choices(zero: int) -> None:
    """Views of weights, and at zero 3 gathers that the backward makes anyway."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = Gated()
    program = (
        shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True), zero=zero)
        .lower(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, 16))
        .stages["accumulate"]
    )
    assert not isinstance(program, str)
    problem, _ = problem_of(planned(program), program)
    twins = frozenset((k, 0) for k in problem.twin)
    assert bool(twins) == (zero == 3)
    movable = [k for k, s in enumerate(problem.steps) if s.movable and k not in problem.twin]
    every = [
        problem.judge(twins | {(k, 0) for k in c}) for n in range(len(movable) + 1) for c in itertools.combinations(movable, n)
    ]
    points = frontier(problem)
    assert len(points) >= 3
    for point in points:
        best = min(p.seconds for p in every if p.peak <= point.peak)
        assert point.seconds - problem.seconds <= 1.02 * (best - problem.seconds) + 1e-12


def _budgets(problem: Problem, shares: tuple[float, ...]) -> list[tuple[int, float]]:
    """(budget, the frontier's seconds for it)."""
    points = frontier(problem)
    out = []
    for share in shares:
        budget = int(points[-1].peak + share * (points[0].peak - points[-1].peak))
        out.append((budget, next(p.seconds for p in points if p.peak <= budget)))
    return out


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_sixty_nodes_are_within_two_percent_of_the_optimum(seed: int) -> None:
    problem = small(seed, 29)
    exact = Exact(problem)
    for budget, seconds in _budgets(problem, (0.0, 0.25, 0.5, 0.75)):
        best = exact.seconds(budget)
        assert best is not None, budget
        assert seconds - problem.seconds <= 1.02 * (best - problem.seconds) + 1e-6, (budget, seconds, best)
