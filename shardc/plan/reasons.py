"""Where the layout of a value comes from: which annotation, through which operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardc.instructions import Collective, Compute, Input, Instruction, Out, Read, outs_of, uses_of
from shardc.program import Slot
from shardc.spec import ShardSpec

if TYPE_CHECKING:
    from shardc.plan.plan import Plan


def reasons(plan: Plan, out: Out) -> list[str]:
    """One line for each mesh axis that splits a value, or over which it is partial.

    Example: ``tp from %reduce_scatter, activations['*.mlp'], through aten.add.Tensor, aten.mul.Tensor``
    """
    if out.spec is None:
        return []
    made = {o.reg: i for i in plan.instructions for o in outs_of(i)}
    return [_reason(plan, made, out, axis) for axis in plan.mesh.axes if axis in _axes(out.spec)]


def slot_reason(plan: Plan, slot: Slot) -> str:
    """Why a slot rests and is used as it is."""
    zero = plan.options.get("zero", 0)
    if slot.storage is None or slot.compute is None:
        return "no layout was chosen"
    pinned = f"pinned to {slot.compute} by {_pattern(plan, slot)}" if slot.compute.axes else ""
    if not slot.storage.same(slot.compute, plan.mesh):
        added = [a for a in slot.storage.axes if a not in slot.compute.axes]
        split = f"zero={zero} splits it over {', '.join(added)} while it rests"
        return f"{pinned}; {split}" if pinned else split
    if pinned:
        return pinned
    return next((r.reason for r in plan.replicated if r.name == slot.path), "whole: nothing asks for a split")


def _pattern(plan: Plan, slot: Slot) -> str:
    """The entry of `params` that pins a slot, or its parameter."""
    given = plan.options.get("params")
    path = slot.of or slot.path
    names = [path, path.partition(".")[2], *(plan.slots[path].aliases if path in plan.slots else ())]
    for pattern in given if isinstance(given, Mapping) else ():
        if any(fnmatchcase(name, pattern) for name in names):
            return f"params[{pattern!r}]"
    return "params"


def _axes(spec: ShardSpec) -> tuple[str, ...]:
    return (*spec.axes, *spec.partial_axes)


def _reason(plan: Plan, made: Mapping[int, Instruction], out: Out, axis: str) -> str:
    """Follows one axis back to where it enters."""
    assert out.spec is not None
    state = "pending over" if axis in out.spec.partial_axes else "over"
    through: list[str] = []
    i, at = made[out.reg], out
    while True:
        source = _source(plan, made, i, axis)
        if source is None:
            break
        if isinstance(i, Compute):
            through.append(i.op.removesuffix(".default"))
        elif isinstance(i, Collective) and i.step.kind != "slice":
            through.append(f"{i.step.kind}@{i.step.axis}")
        at = source
        i = made[at.reg]
    path = f", through {_counted(list(reversed(through)))}" if through else ""
    return f"{state} {axis} from {_origin(plan, i)}{path}"


def _source(plan: Plan, made: Mapping[int, Instruction], i: Instruction, axis: str) -> Out | None:
    """The operand that has the axis already: one that is not merely cut to fit the others, and of these the largest; None
    where the axis enters here, or in a leaf."""
    if isinstance(i, Collective) and i.step.axis == axis:
        return None
    outs = [plan.aliases.out[r] for r in uses_of(i)] if isinstance(i, (Compute, Collective)) else []
    held = [o for o in outs if o.spec is not None and o.dtype is not None and axis in _axes(o.spec)]

    def rank(o: Out) -> tuple[bool, int]:
        maker = made[o.reg]
        fitted = isinstance(maker, Collective) and maker.step.kind == "slice"
        return not fitted, plan.sizes.numel(o.spec) if o.spec else 0

    return max(held, key=rank, default=None)


def _origin(plan: Plan, i: Instruction) -> str:
    why = plan.why.get(i.name, "")
    if isinstance(i, Read) and i.slot in plan.slots:
        return f"{i.slot}: {slot_reason(plan, plan.slots[i.slot])}"
    if isinstance(i, Input):
        return f"the input {i.path}: {why}" if why else f"the input {i.path}"
    what = i.step.kind if isinstance(i, Collective) else i.op.removesuffix(".default") if isinstance(i, Compute) else ""
    return f"%{i.name} ({what}): {why}" if why else f"%{i.name} ({what})"


def _counted(names: Sequence[str]) -> str:
    """``aten.t, aten.mm, aten.mul.Tensor (3 times)``, in order of first appearance."""
    return ", ".join(f"{n} ({names.count(n)} times)" if names.count(n) > 1 else n for n in dict.fromkeys(names))
