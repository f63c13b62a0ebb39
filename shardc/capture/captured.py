"""A captured step: the program, what a run writes back, and the conditions it was captured under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from shardc.capture.effects import Effects
from shardc.capture.results import rebuild
from shardc.program import Program, alike


@dataclass
class Captured:
    """A step as a program.

    Args:
        program: functional, at global shapes, without specs.
        effects: what a run changes in the user's objects beyond the slots written in place.
        constants: tensors that the code made from Python data, or that it reaches in places that are not walked; inputs of the
            program under the same names (``const[0]``).
        carried: paths of plain numbers that the step changes; a later call's world matches only after `World.carry(carried)`.
        guards: conditions on the numbers that this program was captured under, see `admits`.
        guard_numbers: placeholders of the numbers, by path.
    """

    program: Program
    effects: Effects
    constants: dict[str, Tensor] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    guards: list[tuple[fx.Node, Any]] = field(default_factory=list)
    guard_numbers: dict[str, fx.Node] = field(default_factory=dict)

    def admits(self, numbers: dict[str, float]) -> bool:
        """Whether the decisions Python took on numbers (``if weight_decay != 0``) come out the same for these numbers."""
        env: dict[fx.Node, Any] = {}
        by_node = {node: path for path, node in self.guard_numbers.items()}

        def value(node: Any) -> Any:
            if not isinstance(node, fx.Node):
                return node
            if node not in env:
                if node in by_node:
                    env[node] = numbers[by_node[node]]
                else:
                    env[node] = node.target(*map(value, node.args))  # type: ignore[operator]
            return env[node]

        return all(alike(value(node), expected) for node, expected in self.guards)

    def agrees(self, outcomes: Sequence[Any]) -> bool:
        """Whether the step takes this program's course if its decisions on values begin with `outcomes`."""
        guards = self.program.guards
        return len(guards) >= len(outcomes) and all(g.holds(v) for g, v in zip(guards, outcomes, strict=False))

    def rebuild(self, values: list[Any]) -> Any:
        """The step's result from the values of `program.results`."""
        assert self.program.returns is not None
        return rebuild(self.program.returns, values)
