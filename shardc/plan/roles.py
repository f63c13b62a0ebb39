"""What the values of a plan are: parameters gathered for use, gradients, optimizer state, activations.

Memory and communication are reported by these roles. They follow from the slots and from how values flow between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardc.instructions import Arrive, Collective, Compute, Instruction, Read, Ref, Reg, Transfer, Write, outs_of, uses_of
from shardc.plan.alias import Aliases
from shardc.program import Slot, SlotKind
from shardc.reshard import Step
from shardc.spec import dim_axes

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "gathered", "staging", "other")
"""What memory is for; staging: copies of offloaded state while they are used or under way."""
SLOT_CATEGORY = {
    SlotKind.PARAMETER: "parameters",
    SlotKind.GRADIENT: "gradients",
    SlotKind.OPTIMIZER: "optimizer",
    SlotKind.BUFFER: "other",
    SlotKind.TENSOR: "other",
}
_CAST = "aten._to_copy.default"
_JOINT = ("aten.add.Tensor", _CAST, "aten.clone.default")


class Roles:
    """Roles of registers.

    Args:
        instructions: the instruction list.
        slots: path -> slot.
        aliases: of the same list.
        batch: the axes over which the batch is split.
    """

    def __init__(
        self, instructions: Sequence[Instruction], slots: Mapping[str, Slot], aliases: Aliases, batch: Sequence[str]
    ) -> None:
        self.aliases, self.slots, self.batch = aliases, slots, batch
        self.parameter: dict[Reg, str] = {}  # register -> the parameter whose value it holds, in any layout or dtype
        self.gathered: set[Reg] = set()  # those that came out of a collective
        self.staged: set[Reg] = set()  # copies of slots
        self.phase: dict[Reg, str] = {}
        self.new_parameter: set[Reg] = self._new_parameters(instructions)  # values on their way into a parameter slot
        self.gradient: set[Reg] = self._gradients(instructions)
        for i in instructions:
            self._forward(i)
            for o in outs_of(i):
                self.phase[o.reg] = i.phase

    def _forward(self, i: Instruction) -> None:
        if isinstance(i, Read):
            slot = self.slots.get(i.slot)
            if slot is not None and slot.kind == SlotKind.PARAMETER:
                self.parameter[i.out.reg] = i.slot
        elif isinstance(i, (Transfer, Arrive)):
            of = i.src if isinstance(i, Transfer) else i.moved
            if of in self.parameter:
                self.parameter[i.out.reg] = self.parameter[of]
            if self.aliases.root[of] in self.aliases.slot or self.aliases.root[of] in self.staged:
                self.staged.add(i.out.reg)
        elif isinstance(i, Collective):
            if i.src in self.parameter:
                self.parameter[i.out.reg] = self.parameter[i.src]
                if i.step.kind != "slice" or i.src in self.gathered:
                    self.gathered.add(i.out.reg)
        elif isinstance(i, Compute) and len(outs_of(i)) == 1:
            (o,) = outs_of(i)
            src = self.aliases.source.get(o.reg)
            if src is None and i.op == _CAST and isinstance(i.args[0], Ref):
                src = i.args[0].reg
            if src is not None and src in self.parameter and o.reg not in self.aliases.updated:
                self.parameter[o.reg] = self.parameter[src]
                if src in self.gathered or i.op == _CAST:
                    self.gathered.add(o.reg)

    def _new_parameters(self, instructions: Sequence[Instruction]) -> set[Reg]:
        out: set[Reg] = set()
        for i in reversed(instructions):
            if isinstance(i, Write):
                slot = self.slots.get(i.slot)
                if slot is not None and slot.kind == SlotKind.PARAMETER:
                    out.add(i.src)
            elif isinstance(i, (Collective, Transfer, Arrive)) and i.out.reg in out:
                out.add(i.src)
            elif isinstance(i, Compute) and i.op == _CAST and i.outs[0] is not None and i.outs[0].reg in out:
                out.update(uses_of(i))
        return out

    @staticmethod
    def _owned(slots: Mapping[str, Slot], path: str) -> bool:
        return path in slots and slots[path].kind == SlotKind.GRADIENT

    def _gradients(self, instructions: Sequence[Instruction]) -> set[Reg]:
        """Registers that hold a parameter's gradient or a summand of one, found from where gradients are consumed.

        A value is a gradient if a gradient slot takes it, or if the backward makes it and the update reads it; and so are
        the values it is made of by casts, copies, joint adds, views and collectives.
        """
        made = {o.reg: i for i in instructions for o in outs_of(i)}
        out: set[Reg] = set()
        for i in instructions:
            if isinstance(i, Write) and self._owned(self.slots, i.slot):
                out.add(i.src)
            elif isinstance(i, Read) and self._owned(self.slots, i.slot):
                out.add(i.out.reg)
            elif i.phase == "update":
                for reg in uses_of(i):
                    maker = made.get(reg)
                    o = self.aliases.out.get(reg)
                    if maker is not None and maker.phase == "backward" and o is not None and o.dtype is not None:
                        out.add(reg)
        reduced = self._reduced(instructions)
        for i in reversed(instructions):
            if i.phase == "forward":
                continue
            mine = [o.reg for o in outs_of(i) if o.reg in out]
            if not mine:
                continue
            if isinstance(i, (Collective, Transfer, Arrive)):
                out.add(i.src)
            elif isinstance(i, Compute) and (i.op in _JOINT or any(r in self.aliases.source for r in mine)):
                out.update(r for r in uses_of(i) if self.aliases.out[r].dtype is not None and made[r].phase != "forward")
            out.update(r for r in uses_of(i) if r in reduced)
        return out

    def _reduced(self, instructions: Sequence[Instruction]) -> set[Reg]:
        """Whole values of the backward that follow from an all-reduce over the batch: a gradient that was reduced before its
        last operators (those of a position table, say)."""
        out: set[Reg] = set()
        for i in instructions:
            if i.phase != "backward":
                continue
            if isinstance(i, Collective) and i.step.kind == "all_reduce" and i.step.axis in self.batch and numel(i.step) > 1:
                out.add(i.out.reg)
            elif isinstance(i, Compute) and any(r in out for r in uses_of(i)):
                out.update(o.reg for o in outs_of(i) if o.spec is not None and o.spec.is_replicated)
        return out

    def category(self, root: Reg) -> str:
        """Memory category of the storage that a root register owns."""
        slot = self.slots.get(self.aliases.slot.get(root, ""))
        if slot is not None:
            return SLOT_CATEGORY[slot.kind]
        if root in self.aliases.input:
            return "other"
        if root in self.staged:
            return "staging"
        if root in self.gathered:
            return "gathered"
        if root in self.gradient:
            return "gradients"
        return "other" if self.phase.get(root) == "update" else "activations"

    def traffic(self, i: Collective) -> str:
        """What a collective moves: parameters, gradients, statistics (scalars, and sums over the batch), activations."""
        if i.src in self.parameter or i.out.reg in self.new_parameter:
            return "parameters"
        if numel(i.step) <= 1:
            return "statistics"
        if i.out.reg in self.gradient or i.src in self.gradient:
            return "gradients"
        kind, axis = i.step.kind, i.step.axis
        into_rows = kind == "reduce_scatter" and axis in dim_axes(i.step.dst.dims[0])  # of the batch: each rank gets its own
        if axis in self.batch and (kind == "all_reduce" or kind == "reduce_scatter" and not into_rows):
            return "statistics"
        return "activations"


def numel(step: Step) -> int:
    """Global number of elements of the value that a step moves."""
    out = 1
    for n in step.src.shape:
        out *= n
    return out
