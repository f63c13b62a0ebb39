"""What a plan tells each rank to do: a flat list of instructions over numbered registers.

One list serves all ranks of an SPMD plan: sizes are spec expressions (`Local`, `LocalDim`, `LocalStart`) that each rank
evaluates at its own coordinate. All instructions are frozen, hold
plain data only (names of operators, not functions) and go to JSON and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardc.reshard import Step
from shardc.spec import Dim, ShardSpec
from shardc.tiers import DEVICE

Reg = int


@dataclass(frozen=True)
class Ref:
    """In an argument tree: the value of a register (a tensor or a number)."""

    reg: Reg


@dataclass(frozen=True)
class Local:
    """In an argument tree: the list of sizes of this rank's part of `spec`."""

    spec: ShardSpec

    def __str__(self) -> str:
        return f"local {self.spec}"


@dataclass(frozen=True)
class LocalDim:
    """In an argument tree: this rank's size of one dim."""

    dim: Dim

    def __str__(self) -> str:
        return "local " + "·".join(map(str, self.dim))


@dataclass(frozen=True)
class LocalStart:
    """In an argument tree: where this rank's part of one dim begins, in elements of the whole dim."""

    dim: Dim

    def __str__(self) -> str:
        return "start of " + "·".join(map(str, self.dim))


@dataclass(frozen=True)
class Out:
    """One result of an instruction: its register, what it looks like and where it lies. dtype None: a number (spec is then
    ignored)."""

    reg: Reg
    spec: ShardSpec | None
    dtype: torch.dtype | None
    tier: str = DEVICE


@dataclass(frozen=True)
class Instruction:
    """Common part: a name unique in the plan (the node's), where it comes from, and the registers dead after it."""

    name: str
    phase: str = "forward"
    module: str = ""
    line: str = ""
    frees: tuple[Reg, ...] = ()


@dataclass(frozen=True)
class Read(Instruction):
    """out = the storage tensor of a slot (this rank's part, no copy)."""

    slot: str = ""
    out: Out = field(default=Out(-1, None, None))


@dataclass(frozen=True)
class Input(Instruction):
    """out = this rank's part of a tensor argument (`path`), or a number ("optimizer.param_groups[0].lr")."""

    path: str = ""
    out: Out = field(default=Out(-1, None, None))


@dataclass(frozen=True)
class Compute(Instruction):
    """outs = op(*args, **kwargs) on this rank's parts.

    Args:
        op: ``aten.mm.default``, ``shardc.adamw.default``; ``math.sqrt``, ``operator.mul``, ``torch.sym_float`` for numbers.
        args, kwargs: trees of constants, `Ref`, `Local`, `LocalDim`, `LocalStart`; tuples and lists nest.
        outs: one for each result, None where the operator gives None. An operator with a single tensor result has one.
        inplace: (result, argument position) pairs: the result takes over the storage of that argument, whose register dies
            here. Only for operators that the runtime has an in-place form of.
        draw: position of a random operator among the draws of the step; None for the others.
        order: its dims as the whole tensor has them in memory, outermost first: torch fills in that order.
    """

    op: str = ""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    outs: tuple[Out | None, ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    draw: int | None = None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Collective(Instruction):
    """out = the step applied to `src` (over the ranks of `step.axis`); a slice is local."""

    step: Step = field(default=Step("slice", "", ShardSpec(()), ShardSpec(())))
    src: Reg = -1
    out: Out = field(default=Out(-1, None, None))


@dataclass(frozen=True)
class Transfer(Instruction):
    """out = a copy of `src` on the tier of `out`, which is next to that of `src`.

    Args:
        into: register of a slot's resting value, which the copy overwrites; -1: the copy is a new tensor.
        wait: finished when the next instruction runs; else by an `Arrive`.
        stride: strides of the whole tensor whose order of dims the copy takes; empty: those of `src`.
    """

    src: Reg = -1
    out: Out = field(default=Out(-1, None, None))
    into: Reg = -1
    wait: bool = True
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arrive(Instruction):
    """out = `moved`, now that its move is finished. `src`, which was moved, is not needed any more."""

    moved: Reg = -1
    src: Reg = -1
    out: Out = field(default=Out(-1, None, None))


@dataclass(frozen=True)
class Write(Instruction):
    """Slot := register, this rank's part in the slot's storage spec. Into the slot's own storage where it exists, else the
    slot takes the tensor (its creation). A register that already is the slot's storage (in-place update) costs nothing."""

    slot: str = ""
    src: Reg = -1


@dataclass(frozen=True)
class Guard(Instruction):
    """The number in `reg` is `expected`, or the run ends here, before anything was written: the plan is of another course of
    the step. Comes before every write and every update in place of a slot.

    Args:
        reg: a number, the same on all ranks.
        expected: a bool for a decision, else the exact number that Python went on with.
        index: position among the guards of the step.
        text: what the user's line says.
    """

    reg: Reg = -1
    expected: bool | int | float = True
    index: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"guard at {self.line or self.name}: {self.text or self.name}"


@dataclass(frozen=True)
class Delete(Instruction):
    """The slot is absent after the step (a gradient set to None)."""

    slot: str = ""


@dataclass(frozen=True)
class Return(Instruction):
    """The step's results, in order, and the numbers that the step changed. The last instruction."""

    results: tuple[Reg, ...] = ()
    specs: tuple[ShardSpec | None, ...] = ()
    numbers: tuple[tuple[str, Reg], ...] = ()


def refs(arg: Any) -> Iterator[Reg]:
    """The registers in an argument tree, in order, with repetitions."""
    if isinstance(arg, Ref):
        yield arg.reg
    elif isinstance(arg, (list, tuple)):
        for a in arg:
            yield from refs(a)
    elif isinstance(arg, dict):
        for a in arg.values():
            yield from refs(a)
    elif isinstance(arg, slice):
        yield from refs((arg.start, arg.stop, arg.step))


def uses_of(instruction: Instruction) -> list[Reg]:
    """The registers that an instruction reads."""
    if isinstance(instruction, Compute):
        return [*refs(instruction.args), *(r for _, v in instruction.kwargs for r in refs(v))]
    if isinstance(instruction, (Collective, Write)):
        return [instruction.src]
    if isinstance(instruction, Transfer):
        return [instruction.src, *([instruction.into] if instruction.into >= 0 else [])]
    if isinstance(instruction, Arrive):
        return [instruction.moved, instruction.src]
    if isinstance(instruction, Guard):
        return [instruction.reg]
    if isinstance(instruction, Return):
        return [*instruction.results, *(r for _, r in instruction.numbers)]
    return []


def outs_of(instruction: Instruction) -> tuple[Out, ...]:
    """The results of an instruction, absent ones left out."""
    if isinstance(instruction, Compute):
        return tuple(o for o in instruction.outs if o is not None)
    if isinstance(instruction, (Read, Input, Collective, Transfer, Arrive)):
        return (instruction.out,)
    return ()
