"""What is held or computed whole on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardc.instructions import Compute, Input, Instruction, Out, Read, Reg
from shardc.plan.alias import outs, uses
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
    """State that `zero` would have split but could not, parameters that it leaves whole, and values that every rank computes
    although they depend on split data."""
    assert program.mesh is not None
    if program.mesh.size == 1:
        return ()
    zero = int(options.get("zero", 0) or 0)
    wants = {SlotKind.PARAMETER: 3, SlotKind.OPTIMIZER: 1, SlotKind.GRADIENT: 1}
    out = []
    for path, slot in program.slots.items():
        if slot.storage is None or not slot.storage.is_replicated or slot.type.numel <= 1:
            continue
        stage = wants.get(slot.kind)
        if stage is not None and zero >= stage:
            reason = f"no dim of {list(slot.type.shape)} can be split"
        elif stage is not None:
            reason = f"zero={zero}"
        else:
            reason = "never split unless pinned"
        out.append(Replicated(path, slot.type.nbytes, reason))
    return (*out, *_computed(code, program))


def _computed(code: Sequence[Instruction], program: Program) -> list[Replicated]:
    split: set[Reg] = set()  # registers that are split or partial, or depend on one that is
    spec_of: dict[Reg, Out] = {}
    out = []
    why = {n.name: info.why for n, info in program.info.items()}
    for i in code:
        made = outs(i)
        spec_of.update({o.reg: o for o in made})
        depends = any(r in split for r in uses(i))
        for o in made:
            if o.spec is not None and (depends or not o.spec.is_replicated) and not isinstance(i, (Read, Input)):
                split.add(o.reg)
            if isinstance(i, Input) and o.spec is not None and not o.spec.is_replicated:
                split.add(o.reg)
        if not isinstance(i, Compute) or i.phase == "update" or not depends:
            continue
        for o in made:
            if o.spec is not None and o.dtype is not None and o.spec.is_replicated and _numel(o.spec) > 1:
                name = f"{i.module or i.name}: {i.op.removesuffix('.default')}"
                reason = why.get(i.name) or "computed by every rank"
                out.append(Replicated(name, _numel(o.spec) * o.dtype.itemsize, reason, i.line))
    return out


def _numel(spec: ShardSpec) -> int:
    n = 1
    for s in spec.shape:
        n *= s
    return n
