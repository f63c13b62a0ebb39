"""ladder: complete plans of one step, from the fastest to the one that needs least memory; a budget picks one of them.

Before: a local program. After: the same program with the repetitions of the chosen rung (see `shardc.passes.frontier`).

The rungs do not depend on the budget. `memory_budget` picks the fastest rung whose predicted peak fits, ties to the lower peak:
so a bigger budget is never slower. Without a budget, ``recompute="auto"`` picks the rung with the smallest product of peak and
time. The peak of a rung is that of its whole plan, scheduled and lowered; it is made when a budget asks for it.

Example: ``gelu`` of a block costs little time and holds many bytes: the second rung of a GPT repeats it in some blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from shardc.errors import PlanError
from shardc.instructions import Collective, Compute, Return, outs_of, uses_of
from shardc.ops import INPLACE
from shardc.options import Options
from shardc.passes.frontier import frontier
from shardc.passes.graphs import STEPS, is_getitem, is_op, kept
from shardc.passes.offload import offload
from shardc.passes.recompute import repeat
from shardc.passes.schedule import schedule
from shardc.passes.tradeoff import Choice, Point, Problem, Step
from shardc.plan import Plan, build
from shardc.plan.text import size
from shardc.program import Phase, Program
from shardc.tiers import Offload

NOWHERE = Offload()
"""Nothing is moved."""


def planned(program: Program, moves: Offload = NOWHERE) -> Plan:
    """The plan of a local program, scheduled."""
    return build(offload(schedule(program), moves), options={}, stages={})


@dataclass
class Rung:
    """A complete plan of the step.

    Args:
        point: what is repeated, the estimated peak, the predicted seconds; both without offload.
        make: the program with its repetitions.
        offload: what rests elsewhere.
        made: its whole plan, where there is one already.
    """

    point: Point
    make: Callable[[], Program]
    offload: Offload = NOWHERE
    made: Plan | None = None

    @property
    def seconds(self) -> float:
        return self.point.seconds

    @cached_property
    def program(self) -> Program:
        return self.make()

    @cached_property
    def plan(self) -> Plan:
        """The whole plan, scheduled and lowered."""
        return self.made or planned(self.program, self.offload)

    @property
    def peak(self) -> int:
        """The predicted peak, in bytes."""
        return self.plan.memory.peak_bytes


def problem_of(plan: Plan, program: Program) -> tuple[Problem, list[str]]:
    """The problem of a plan without repetitions, and the names of its instructions."""
    nodes = {n.name: n for n in program.nodes}
    leaves = kept(program) | set(program.versions)
    names, steps = [], []
    depends: set[int] = set()
    inputs = {n.name for n in program.inputs.values()}
    for i in plan.instructions:
        reads, makes = tuple(uses_of(i)), tuple(o.reg for o in outs_of(i))
        activation = i.name in inputs or any(r in depends for r in reads)
        if activation:
            depends.update(makes)
        node = nodes.get(i.name)
        work = isinstance(i, (Compute, Collective))
        movable = node is not None and _movable(program, node, leaves)
        steps.append(
            Step(
                reads, makes, plan.seconds.get(i.name, 0.0), i.phase == "forward" and not isinstance(i, Return),
                work and i.phase == "backward", movable and i.phase == "forward", activation,
            )  # fmt: skip
        )
        names.append(i.name)
    a = plan.aliases
    owned = {r: plan.sizes.nbytes(o) for r, o in a.out.items() if a.root[r] == r and r not in a.slot and r not in a.input}
    source = {r: s for r, s in a.source.items() if a.root[r] != r}
    levels: dict[str, int] = {}
    for m in plan.memory.timeline:
        levels[m.name] = max(levels.get(m.name, 0), m.bytes)
    exact, now = [], plan.memory.start_bytes
    for name in names:
        now = levels.get(name, now)
        exact.append(now)
    place = {n: k for k, n in enumerate(names)}
    twin = {place[f.name]: place[b.name] for f, b in twins(program).items() if f.name in place and b.name in place}
    return Problem(steps, source, owned, exact, plan.memory.start_bytes, twin), names


def _movable(program: Program, node: fx.Node, leaves: set[fx.Node]) -> bool:
    """Whether the backward may compute a node again: an operator or step on tensors that changes no state."""
    if node.op != "call_function" or node in leaves or f"{node.target}" in INPLACE:
        return False
    return (is_op(node) or node.target in STEPS) and program.info[node].type is not None


def twins(program: Program) -> dict[fx.Node, fx.Node]:
    """Nodes of the forward -> nodes of the backward that make the same from state alone."""
    number: dict[fx.Node, int] = {}
    table: dict[str, int] = {}
    later: dict[int, fx.Node] = {}
    out: dict[fx.Node, fx.Node] = {}
    inputs = {*program.inputs.values()}
    for node in program.nodes:
        if node.op == "placeholder" and node not in inputs:
            number[node] = len(number)
        elif node.op == "call_function" and node not in program.draws and all(n in number for n in node.all_input_nodes):
            if not (is_op(node) or node.target in STEPS) or node in program.versions:
                continue
            args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: number[n])
            numbered = [n for n in node.all_input_nodes]
            key = f"{node.target} {args} {[number[n] for n in numbered]} {program.info[node].spec}"
            number[node] = table.setdefault(key, len(number) + len(table))
            if program.info[node].phase == Phase.BACKWARD:
                later.setdefault(number[node], node)
    for node, n in number.items():
        if node.op == "call_function" and program.info[node].phase == Phase.FORWARD and n in later:
            out[node] = later[n]
    return out


@dataclass
class Ladder:
    """The rungs of a local program, by rising seconds.

    Args:
        program: local, not scheduled.
        base: its plan without any repetition.
        rungs: by rising seconds and falling estimated peak.
    """

    program: Program
    base: Plan
    rungs: list[Rung] = field(default_factory=list)

    @staticmethod
    def of(program: Program, auto: bool, moves: Offload = NOWHERE) -> Ladder:
        """The ladder of a program; without `auto` it has one rung."""
        base = planned(program)
        none = Point(frozenset(), base.memory.peak_bytes, base.time.predicted_s)
        first = Rung(none, lambda: program, moves, base if moves == NOWHERE else None)
        if not auto:
            return Ladder(program, base, [first])
        problem, names = problem_of(base, program)
        rest = [Rung(p, _maker(program, p.choice, names), moves) for p in frontier(problem) if p.choice]
        return Ladder(program, base, [first, *rest])

    def fit(self, budget: int) -> Rung | None:
        """The fastest rung that fits, ties to the lower peak.

        A rung whose estimated peak is above the budget is not planned, unless it is the lowest.
        """
        best: Rung | None = None
        for rung in self.rungs:
            if best is not None and rung.seconds > best.seconds:
                break
            tried = rung.point.peak <= budget or rung.offload != NOWHERE or rung is self.rungs[-1]
            if tried and rung.peak <= budget and (best is None or rung.peak < best.peak):
                best = rung
        return best

    def notes(self, rung: Rung) -> list[str]:
        """What was picked, and between what."""
        if len(self.rungs) == 1:
            return []
        first, last = self.rungs[0], self.rungs[-1]
        more = rung.seconds / first.seconds - 1
        return [
            f"recomputed: {len(rung.point.choice)} operators, {size(rung.peak)} instead of {size(first.point.peak)},"
            f" {more:+.1%} time (plan {self.rungs.index(rung) + 1} of {len(self.rungs)}, down to {size(last.point.peak)})"
        ]

    def balanced(self) -> Rung:
        """The rung with the smallest product of peak and seconds."""
        return min(self.rungs, key=lambda r: (r.point.peak * r.seconds, r.seconds))


def _maker(program: Program, choice: Choice, names: Sequence[str]) -> Callable[[], Program]:
    def make() -> Program:
        places = {n.name: place for place, n in enumerate(program.nodes)}
        since = {names[k]: next(places[n] for n in names[s:] if n in places) if s else 0 for k, s in choice}
        dropped = {n: since[n.name] for n in program.nodes if n.name in since}
        leaves = kept(program) | set(program.versions)
        dropped |= {u: s for n, s in dropped.items() for u in n.users if is_getitem(u) and u not in leaves}
        return repeat(program, dropped, twins(program))

    return make


class OverBudget(PlanError):
    """No rung fits."""

    def __init__(self, ladder: Ladder, budget: int) -> None:
        self.ladder, self.budget = ladder, budget
        super().__init__(f"no plan fits memory_budget={budget:,}")


def ladder(program: Program, options: Options) -> Program:
    budget, auto = options.memory_budget, options.recompute == "auto"
    if not auto and budget is None:
        return program
    found = Ladder.of(program, auto, Offload.of(options.offload))
    rung = found.balanced() if budget is None else found.fit(budget)
    if rung is None:
        assert budget is not None
        raise OverBudget(found, budget)
    out = rung.program
    return replace(out, notes=[*out.notes, *found.notes(rung)])
