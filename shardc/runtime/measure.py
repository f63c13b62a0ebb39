"""What the generated function calls in a measured run: results are what the plan says, and their storages are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.dtypes import short
from shardc.errors import RuntimeFailure
from shardc.instructions import Collective, Input, Instruction, Out, Read, Write, outs_of
from shardc.runtime.accounting import Tracker
from shardc.runtime.comm import Start
from shardc.runtime.ragged import Ragged
from shardc.runtime.workspace import Workspace, collective_workspace
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE

SENT, RECEIVED = -1, -2
"""The buffers of a collective, as registers."""


def describe(value: Any) -> str:
    """``f32[8, 64]``, or the type and value of something else."""
    if isinstance(value, Tensor):
        return f"{short(value.dtype)}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}"


class Measure:
    """One measured run. Methods take the position of the instruction in the list, and count its frees.

    Args:
        shape: the rank's local shape of a spec.
        ragged: the sizes that depend on data.
        categories: slot, input path or instruction name -> category.
        axes: of the mesh.
        device: kind of the device that the plan is for.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        shape: Callable[[ShardSpec], tuple[int, ...]],
        ragged: Ragged,
        categories: Mapping[str, str],
        rank: int,
        timeline: bool,
        axes: Mapping[str, int],
        device: str,
    ) -> None:
        self.instructions, self.shape, self.categories, self.rank = instructions, shape, categories, rank
        self.ragged, self.axes, self.device = ragged, axes, device
        self.tracker = Tracker(timeline)
        self.tiers = {o.reg: o.tier for i in instructions for o in outs_of(i) if o.tier != DEVICE}  # register -> tier
        self.resting = {i.slot: i.out.tier for i in instructions if isinstance(i, Read)}
        self.held = 0  # by the kernel of the instruction at hand

    def begin(self, *tables: Mapping[str, Any]) -> None:
        """State and inputs are there before the step."""
        for path, value in [item for table in tables for item in table.items()]:
            if isinstance(value, Tensor):
                self.tracker.pin(value, self.categories.get(path, "other"), self.resting.get(path, DEVICE))
        self.tracker.begin()

    def inside(self, workspace: Workspace, args: Sequence[Any], *results: Any) -> None:
        """A kernel ran that holds more than its results; its operands still live."""
        self.held = workspace(args, results)

    def results(self, k: int, *values: Any) -> None:
        """The registers that an instruction defines.

        Raises:
            RuntimeFailure: one of them has another shape or dtype than the plan says.
        """
        i = self.instructions[k]
        for out, value in zip(outs_of(i), values, strict=True):
            self._take(i, out, value)
        if values:
            self.tracker.mark(i.name, self.held)
        self.held = 0
        self.tracker.drop(i.frees)

    def opened(self, k: int, request: Start, early: Sequence[int]) -> None:
        """A collective has its buffers; the registers `early` die before it starts."""
        i = self.instructions[k]
        for register, buffer in ((SENT, request.inp), (RECEIVED, request.out)):
            if buffer is not None:
                self.tracker.add(register, buffer, self.categories.get(i.name, "other"))
        self.tracker.mark(i.name)
        self.tracker.drop(early)
        if isinstance(i, Collective) and request.out is not None:
            inside = collective_workspace(i.step.kind, request.out, self.axes[i.step.axis], self.device)
            if inside:
                self.tracker.mark(i.name, inside)

    def sent(self) -> None:
        """What a collective sent is not needed any more."""
        self.tracker.drop((SENT,))

    def received(self, k: int, value: Tensor) -> None:
        """A collective has its result."""
        i = self.instructions[k]
        self._take(i, outs_of(i)[0], value)
        self.tracker.mark(i.name)
        self.tracker.drop((RECEIVED, *i.frees))

    def moved(self, register: int, value: Tensor) -> None:
        """A register's tensor was replaced by a copy."""
        self.tracker.drop((register,))
        self.tracker.add(register, value, tier=self.tiers.get(register, DEVICE))

    def wrote(self, k: int, written: Mapping[str, Tensor]) -> None:
        """A slot has its new value; what it took over lives to the end of the step."""
        i = self.instructions[k]
        assert isinstance(i, Write)
        self.tracker.pin(written[i.slot], self.categories.get(i.slot, "other"), self.tiers.get(i.src, DEVICE))
        self.tracker.mark(i.name)
        self.tracker.drop(i.frees)

    def end(self, k: int) -> None:
        self.tracker.mark(self.instructions[k].name)

    def _fits(self, value: Tensor, shape: tuple[int, ...], spec: ShardSpec) -> bool:
        return value.shape == torch.Size(shape) or self.ragged.fits(value.shape, shape, spec)

    def _take(self, i: Instruction, out: Out, value: Any) -> None:
        if out.dtype is None or out.spec is None:
            return
        shape = self.shape(out.spec)
        if not isinstance(value, Tensor) or not self._fits(value, shape, out.spec) or value.dtype != out.dtype:
            raise RuntimeFailure(
                f"rank {self.rank}: {i.name} is {describe(value)}, not {short(out.dtype)}{list(shape)} of {out.spec}",
                where=", ".join(w for w in (i.line, i.module, i.phase) if w),
                hint="a factor rule that does not fit its operator, or state or inputs of another shape",
            )
        key = i.slot if isinstance(i, Read) else i.path if isinstance(i, Input) else i.name
        self.tracker.add(out.reg, value, self.categories.get(key, "other"), out.tier)
