"""What is held or computed whole on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardc._torch import may_alias
from shardc.instructions import Arrive, Collective, Compute, Instruction, Read, Reg, Transfer, outs_of, uses_of
from shardc.program import Program, SlotKind
from shardc.spec import ShardSpec


@dataclass(frozen=True)
class Replicated:
    """One tensor that every rank holds or computes whole.

    Args:
        name: slot path, or owner module and operator of a computed value.
        bytes: of the whole tensor, on every rank.
        reason: by choice, or for want of what.
        where: the user's source line.
    """

    name: str
    bytes: int
    reason: str
    where: str = ""


def find_replicated(program: Program, code: Sequence[Instruction], options: Mapping[str, Any]) -> tuple[Replicated, ...]:
    """State that `zero` would have split but could not, state that it leaves whole, and values that every rank computes because
    an activation was gathered."""
    assert program.mesh is not None
    if program.mesh.size == 1:
        return ()
    zero = int(options.get("zero", 0) or 0)
    given = options.get("batch", ("dp",))
    batch = (given,) if isinstance(given, str) else tuple(given or ())
    ranks = math.prod(program.mesh.axes.get(a, 1) for a in batch)
    wants = {SlotKind.PARAMETER: 3, SlotKind.OPTIMIZER: 1, SlotKind.GRADIENT: 1}
    out = []
    for path, slot in program.slots.items():
        if slot.storage is None or not slot.storage.is_replicated or slot.type.numel <= 1:
            continue
        stage = wants.get(slot.kind)
        if stage is not None and zero >= stage and ranks == 1:
            reason = f"zero={zero} splits over {', '.join(batch) or 'no axis'}, of one rank"
        elif stage is not None and zero >= stage:
            reason = f"no dim of {list(slot.type.shape)} can be split"
        elif stage is not None:
            reason = f"zero={zero}"
        else:
            reason = "never split unless pinned"
        out.append(Replicated(path, slot.type.nbytes, reason))
    return (*out, *_computed(code, program))


def _computed(code: Sequence[Instruction], program: Program) -> list[Replicated]:
    """Values that follow from a gathered activation and are not split again: each rank does the same work.

    What follows from a finished reduction (statistics, the loss) is whole by nature and not listed.
    """
    why = {n.name: info.why for n, info in program.info.items()}
    views = {n.name for n in program.info if isinstance(n.target, torch._ops.OpOverload) and may_alias(n.target)}
    kept = {slot.path for slot in program.slots.values() if slot.kind == SlotKind.PARAMETER}
    state: set[Reg] = set()  # registers that hold state, in any layout
    again: set[Reg] = set()  # whole values that follow from a gathered activation
    out = []
    for i in code:
        if isinstance(i, Read) and i.slot in kept:
            state.add(i.out.reg)
        elif isinstance(i, (Transfer, Arrive)):
            src = i.src if isinstance(i, Transfer) else i.moved
            for held in (state, again):
                held.update({i.out.reg} if src in held else ())
        elif isinstance(i, Collective):
            if i.src in state:
                state.add(i.out.reg)
            elif i.step.kind == "all_gather" and i.phase != "update" or i.src in again:
                again.add(i.out.reg)
        elif isinstance(i, Compute) and uses_of(i):
            operands = uses_of(i)
            if all(r in state for r in operands):
                state.update(o.reg for o in outs_of(i))
            if i.phase == "update" or not any(r in again for r in operands):
                continue
            for o in outs_of(i):
                if o.spec is None or o.dtype is None or not o.spec.is_replicated or _numel(o.spec) <= 1:
                    continue
                again.add(o.reg)
                if i.name in views:  # no work
                    continue
                name = f"{i.module or i.name}: {i.op.removesuffix('.default')}"
                out.append(
                    Replicated(name, _numel(o.spec) * o.dtype.itemsize, why.get(i.name) or "its operand is gathered", i.line)
                )
    return out


def _numel(spec: ShardSpec) -> int:
    n = 1
    for s in spec.shape:
        n *= s
    return n
