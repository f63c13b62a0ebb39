"""A compiled step at other sizes of its inputs and its mesh: what `Plan.largest_batch` and `Plan.peak_formula` ask for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from shardc.hosts import row_axes
from shardc.mesh import Mesh
from shardc.passes.ladder import Ladder
from shardc.plan import Plan
from shardc.program import Program, TensorType

if TYPE_CHECKING:
    from shardc.api import CompiledStep
    from shardc.capture import World


class Sizes:
    """The step of a plan, at other sizes; see `shardc.plan.sizing.Again`."""

    def __init__(
        self, step: CompiledStep, plan: Plan, world: World, types: dict[str, TensorType], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        self.step, self.mesh, self.args, self.kwargs = step, plan.mesh, args, kwargs
        split = {path: row_axes(path, t, step.options) for path, t in world.inputs.items()}
        self.batched = {id(world.inputs[path]) for path, axes in split.items() if axes}
        self.rows = max((types[path].shape[0] for path, axes in split.items() if axes), default=1)
        self.length = next((t.shape[1] for t in world.inputs.values() if id(t) in self.batched and t.dim() > 1), None)
        self.local = step.options.inputs_are == "local" or (step.options.inputs_are is None and not plan.mesh.simulated)

    def plan(
        self, rows: int | None = None, length: int | None = None, mesh: Mesh | None = None, **options: Any
    ) -> Plan:
        """The plan at other sizes, with other options."""
        mesh = self.mesh if mesh is None else mesh
        mine = self.rows if rows is None else rows
        if self.local:
            mine //= math.prod(mesh.axes[a] for a in self.step.options.batch)

        def resized(t: torch.Tensor) -> torch.Tensor:
            if id(t) not in self.batched:
                return t
            out = t[torch.arange(mine, device=t.device) % t.shape[0]] if t.shape[0] != mine else t
            if length is not None and t.dim() > 1 and t.shape[1] == self.length:
                out = out[:, torch.arange(length, device=t.device) % t.shape[1]]
            return out

        args, kwargs = pytree.tree_map_only(torch.Tensor, resized, (self.args, self.kwargs))
        return self.step.replan(mesh=mesh, **options).lower(*args, **kwargs)

    def lowest(self, rows: int) -> int:
        """The lowest predicted peak with so many rows in the global batch."""
        if self.step.options.recompute != "auto":
            return self.plan(rows, memory_budget=None).memory.peak_bytes
        program = self.plan(rows, memory_budget=None, recompute=None).stages["accumulate"]
        assert isinstance(program, Program)
        return min(rung.point.peak for rung in Ladder.of(program, True).rungs)
