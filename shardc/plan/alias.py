"""Which registers may share storage, known from the instruction list alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardc.instructions import Arrive, Collective, Compute, Input, Instruction, Out, Read, Ref, Reg, Transfer, outs_of, uses_of

_VIEWS_BY_KERNEL = {"aten._unsafe_view.default"}
"""Operators whose schema does not say that the result is a view."""
_SAME = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"}
"""Views that are the operand itself: same elements, same strides."""


def operator_of(op: str) -> torch._ops.OpOverload | None:
    """``"aten.mm.default"`` -> the operator; None for functions on numbers and for operators that are not registered here."""
    parts = op.split(".")
    if len(parts) != 3:
        return None
    space = getattr(torch.ops, parts[0])
    packet = getattr(space, parts[1], None)
    overload = getattr(packet, parts[2], None)
    return overload if isinstance(overload, torch._ops.OpOverload) else None


def viewed_argument(op: str) -> int | None:
    """The position of the argument that the results of an operator are views of; None if they are fresh."""
    if op in _VIEWS_BY_KERNEL:
        return 0
    overload = operator_of(op)
    if overload is None or all(r.alias_info is None for r in overload._schema.returns):
        return None
    return next((k for k, a in enumerate(overload._schema.arguments) if a.alias_info is not None), None)


class Aliases:
    """Storage groups of the registers of an instruction list.

    Args:
        instructions: in order.

    A group is named by its *root*: the register that owns the storage (a slot, an input, or a fresh result).
    """

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self.root: dict[Reg, Reg] = {}
        self.source: dict[Reg, Reg] = {}  # direct operand that a register is a view of
        self.same: set[Reg] = set()  # registers that are their root itself, element for element
        self.slot: dict[Reg, str] = {}  # root -> slot that owns the storage
        self.input: dict[Reg, str] = {}  # root -> input that owns the storage
        self.out: dict[Reg, Out] = {}
        self.updated: set[Reg] = set()  # results that took over the storage of an operand
        self._views: dict[str, int | None] = {}
        for i in instructions:
            self.add(i)

    def add(self, i: Instruction) -> None:
        """Take in one more instruction."""
        for o in outs_of(i):
            self.out[o.reg] = o
            self.root[o.reg] = o.reg
            self.same.add(o.reg)
        if isinstance(i, Read):
            self.slot[i.out.reg] = i.slot
        elif isinstance(i, Input):
            self.input[i.out.reg] = i.path
        elif isinstance(i, Transfer):
            if i.into >= 0:
                self._view(i.out.reg, i.into, True)
                self.updated.add(i.out.reg)
        elif isinstance(i, Arrive):
            self._view(i.out.reg, i.moved, True)
        elif isinstance(i, Collective):
            if i.step.kind == "slice":
                self._view(i.out.reg, i.src, False)
        elif isinstance(i, Compute):
            for result, position in i.inplace:
                taken, operand = i.outs[result], i.args[position]
                if taken is not None and isinstance(operand, Ref):
                    self._view(taken.reg, operand.reg, True)
                    self.updated.add(taken.reg)
            if i.op not in self._views:
                self._views[i.op] = viewed_argument(i.op)
            at = self._views[i.op]
            if at is not None and at < len(i.args) and isinstance(i.args[at], Ref):
                for o in outs_of(i):
                    self._view(o.reg, i.args[at].reg, i.op in _SAME)

    def _view(self, reg: Reg, of: Reg, same: bool) -> None:
        if reg not in self.root or of not in self.root:
            return
        self.root[reg] = self.root[of]
        self.source[reg] = of
        if of in self.updated:
            self.updated.add(reg)
        if not (same and of in self.same):
            self.same.discard(reg)

    def owner(self, reg: Reg) -> str | None:
        """The slot whose storage a register lies in."""
        return self.slot.get(self.root[reg])


def last_uses(instructions: Iterable[Instruction]) -> dict[Reg, int]:
    """Register -> position of the last instruction that reads it; where it is made, if nothing does."""
    out: dict[Reg, int] = {}
    for k, i in enumerate(instructions):
        for reg in uses_of(i):
            out[reg] = k
        for o in outs_of(i):
            out[o.reg] = k
    return out
