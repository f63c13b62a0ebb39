"""The variants of a step: its captured and compiled forms, by what they were captured under and by the course they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardc.capture import Captured, World, why
from shardc.plan import Plan
from shardc.program import TensorType
from shardc.runtime.accounting import Stats
from shardc.runtime.executor import Executor


@dataclass
class StepStats(Stats):
    """Measured in the last step: the worst rank, and each rank that this process runs.

    Args:
        ranks: stats of each (all on a simulated mesh, else this process's alone).
    """

    ranks: tuple[Stats, ...] = ()


@dataclass
class Variant:
    """One captured and compiled form of a step.

    Args:
        name: ``train_step#0``.
        reason: why it was captured, in words.
        plan: what it does.
        calls: how often it ran.
    """

    name: str
    reason: str
    plan: Plan
    captured: Captured = field(repr=False)
    world: World = field(repr=False)
    types: dict[str, TensorType] = field(repr=False)
    executors: list[Executor] = field(default_factory=list, repr=False)
    calls: int = 0


class Variants(list[Variant]):
    """In the order in which they were captured."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: list[Variant] = []  # last used first

    def append(self, variant: Variant) -> None:
        super().append(variant)
        self._recent.insert(0, variant)

    def ran(self, variant: Variant) -> None:
        """A step was committed by this variant: it is the first guess for the next."""
        variant.calls += 1
        self._recent.remove(variant)
        self._recent.insert(0, variant)

    def find(self, world: World, types: Mapping[str, TensorType], known: Sequence[Any]) -> Variant | None:
        """The variant of a call whose decisions on values begin with `known`; where there are several, the last used."""
        for v in self._recent:
            if v.captured.agrees(known) and v.types == types and same_key(v.world, world) and v.captured.admits(world.numbers):
                return v
        return None

    def reason(self, world: World, types: Mapping[str, TensorType]) -> str:
        """Why a call needs a variant of its own."""
        if not self:
            return "first call"
        last = self[-1]
        for path, t in types.items():
            if path in last.types and last.types[path] != t:
                return f"{path}: {last.types[path]} became {t}"
        return why(last.world, world) or "a decision on a number came out differently"


def same_key(a: World, b: World) -> bool:
    """Whether two worlds are alike, but for the shapes of the inputs (which are compared as global ones)."""
    return a.signature.keys() == b.signature.keys() and all(
        v == b.signature[p] for p, v in a.signature.items() if p not in a.inputs
    )
