"""`plan.explain(name)`: all that a plan knows about one slot or one node."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardc.dtypes import short
from shardc.errors import PlanError
from shardc.instructions import (
    Collective,
    Compute,
    Delete,
    Input,
    Instruction,
    Read,
    Ref,
    Reg,
    Transfer,
    Write,
    outs_of,
    uses_of,
)
from shardc.plan.reasons import reasons, slot_reason
from shardc.plan.text import seconds, size, table
from shardc.program import Slot
from shardc.tiers import DEVICE

if TYPE_CHECKING:
    from shardc.plan.plan import Plan


def explain(plan: Plan, name: str) -> str:
    """See `Plan.explain`."""
    if name in plan.slots:
        return _slot(plan, plan.slots[name])
    for slot in plan.slots.values():
        if name in slot.aliases:
            return f"{name} is {slot.path}\n{_slot(plan, slot)}"
    ends = [s for s in plan.slots.values() if s.path.endswith(f".{name}")]
    if len(ends) == 1:
        return _slot(plan, ends[0])
    key = name.removeprefix("%")
    if key in plan.by_name:
        return _node(plan, plan.by_name[key])
    inside = [i for i in plan.instructions if i.module == name and isinstance(i, (Compute, Collective))]
    if inside:
        return _module(plan, name, inside)
    known = [
        *plan.slots,
        *(a for s in plan.slots.values() for a in s.aliases),
        *plan.by_name,
        *{i.module for i in plan.instructions},
    ]
    near = difflib.get_close_matches(name, known, 3)
    if len(ends) > 1:
        near = [s.path for s in ends[:3]]
    raise PlanError(
        f"the plan has no slot, node or module {name!r}",
        hint=f"did you mean {', '.join(near)}?"
        if near
        else f"slots are named like {', '.join(list(plan.slots)[:3]) or 'none'}",
    )


def _module(plan: Plan, name: str, inside: Sequence[Instruction]) -> str:
    """The nodes of a module, what they cost, and where the layout of its forward's last value comes from."""
    moves = [i for i in inside if isinstance(i, Collective) and i.step.kind != "slice"]
    cost = f"{_cost(plan, moves, 'collectives')}; {seconds(sum(plan.seconds.get(i.name, 0.0) for i in inside))} in all"
    lines = [f"{name}: {len(inside)} nodes; {cost}"]
    last = next((i for i in reversed(inside) if i.phase == "forward" and outs_of(i)), None)
    if last is not None:
        lines += [f"split    %{last.name} {line}" for line in reasons(plan, outs_of(last)[0])]
    return "\n".join([*lines, *table([_line(plan, i) for i in inside], right=(3, 4))])


def _slot(plan: Plan, slot: Slot) -> str:
    n = plan.sizes.slot_bytes(slot)
    frozen = ", frozen" if slot.kind == "parameter" and not slot.trainable else ""
    lines = [
        f"{slot.path}: {slot.kind}{frozen} {slot.type}, {size(slot.type.nbytes)}",
        f"storage  {slot.storage}, {size(n)} per rank",
        f"compute  {slot.compute}",
    ]
    if slot.tier != DEVICE:
        lines.append(f"tier     {slot.tier}")
    if slot.of:
        lines.append(f"of       {slot.of}")
    if slot.aliases:
        lines.append(f"tied to  {', '.join(slot.aliases)}")
    others = [s.path for s in plan.slots.values() if s.of == slot.path]
    if others:
        lines.append(f"owns     {', '.join(others)}")
    lines.append(f"why      {slot_reason(plan, slot)}")
    lines.append(f"life     {_life(plan, slot)}")
    moves = _moves(plan, slot)
    if moves:
        lines.append(f"moved by {_cost(plan, moves, 'steps')}")
        lines += ["  " + row for row in table([[*_line(plan, i), plan.why.get(i.name, "")] for i in moves], right=(3, 4))]
    values = _values(plan, slot)
    readers = [
        i for i in plan.instructions
        if isinstance(i, Compute) and any(r in values for r in uses_of(i)) and not any(o.reg in values for o in outs_of(i))
    ]  # fmt: skip
    if readers:
        lines += ["read by", *("  " + row for row in table([_line(plan, i) for i in readers], right=(3, 4)))]
    writes = [i for i in plan.instructions if isinstance(i, (Write, Delete)) and i.slot == slot.path]
    for i in writes:
        if isinstance(i, Delete):
            lines.append("deleted")
            continue
        maker = plan.by_name[plan.makers[i.src]]
        how = " in place" if plan.aliases.owner(i.src) == slot.path else ""
        lines += [f"written{how} by", *("  " + row for row in table([_line(plan, maker)], right=(3, 4)))]
    return "\n".join(lines)


def _life(plan: Plan, slot: Slot) -> str:
    before, after = slot.path in plan.entry, slot.path in plan.kept
    return {
        (True, True): "there before and after the step",
        (True, False): "deleted by the step",
        (False, True): "created by the step",
        (False, False): "not part of this variant",
    }[before, after]


def _values(plan: Plan, slot: Slot) -> set[Reg]:
    """Registers that hold the slot's value (parameters: in any layout)."""
    if slot.kind == "parameter":
        return {r for r, path in plan.roles.parameter.items() if path == slot.path}
    roots = {r for r, path in plan.aliases.slot.items() if path == slot.path}
    return {r for r, root in plan.aliases.root.items() if root in roots and r not in plan.aliases.updated}


def _cost(plan: Plan, moves: Sequence[Collective], what: str) -> str:
    sent, time = sum(_sent(plan, i) for i in moves), sum(plan.seconds.get(i.name, 0.0) for i in moves)
    noun = what if len(moves) != 1 else what.removesuffix("s")
    return f"{len(moves)} {noun}: {size(sent)} sent per rank, {seconds(time)} (predicted)"


def _moves(plan: Plan, slot: Slot) -> list[Collective]:
    """Collectives on the slot's value, and on the value that replaces it (its gradient's reductions, for gradient slots)."""
    values = _values(plan, slot)
    out = [i for i in plan.instructions if isinstance(i, Collective) and i.src in values]
    for w in plan.instructions:
        if isinstance(w, Write) and w.slot == slot.path:
            out += [c for c in _behind(plan, slot, w.src) if c not in out]
    order = {i.name: k for k, i in enumerate(plan.instructions)}
    return sorted(out, key=lambda i: order[i.name])


def _behind(plan: Plan, slot: Slot, reg: Reg) -> list[Collective]:
    """Collectives on the way to a slot's new value: of the value itself and, through the update, of the gradient."""
    out: list[Collective] = []
    todo, seen = [reg], {reg}
    while todo:
        maker = plan.by_name[plan.makers[todo.pop()]]
        if isinstance(maker, Collective):
            out.append(maker)
        for r in uses_of(maker) if isinstance(maker, (Collective, Compute)) and maker.phase != "forward" else []:
            spec = plan.aliases.out[r].spec
            other = plan.aliases.slot.get(r) is not None or r in plan.roles.parameter
            follow = plan.roles.phase[r] == "update" or r in plan.roles.gradient
            alike = spec is not None and sorted(spec.shape) == sorted(slot.type.shape)  # a gradient may come transposed
            if r not in seen and alike and follow and not other:
                seen.add(r)
                todo.append(r)
    return out


def _node(plan: Plan, i: Instruction) -> str:
    head, *_ = table([_line(plan, i)])
    lines = [head]
    for o in outs_of(i):
        if o.spec is not None and o.dtype is not None:
            local = ", ".join(map(str, plan.sizes.shape(o.spec)))
            root = plan.aliases.root[o.reg]
            kind = plan.roles.category(root)
            view = "" if root == o.reg else f", shares the storage of %{plan.makers[root]}"
            lines.append(f"result   {short(o.dtype)}{o.spec}, per rank [{local}], {size(plan.sizes.nbytes(o))}, {kind}{view}")
            lines += [f"split    {line}" for line in reasons(plan, o)]
    if i.name in plan.why:
        lines.append(f"why      {plan.why[i.name]}")
    if isinstance(i, Collective):
        lines.append(f"step     {i.step}")
        lines.append(f"sends    {size(_sent(plan, i))} per rank, {plan.roles.traffic(i)}")
    if isinstance(i, Transfer):
        lines.append(f"moves    {size(plan.sizes.nbytes(i.out))} per rank to {i.out.tier}")
    if isinstance(i, Compute):
        for result, a in i.inplace:
            operand = i.args[a]
            if isinstance(operand, Ref):
                lines.append(f"in place result {result} takes over %{plan.makers[operand.reg]}")
    if i.name in plan.seconds:
        lines.append(f"time     {seconds(plan.seconds[i.name])} (predicted)")
    made = [plan.makers[r] for r in uses_of(i)]
    if made:
        lines.append(f"from     {', '.join(f'%{n}' for n in dict.fromkeys(made))}")
    mine = {o.reg for o in outs_of(i)}
    users = [u.name for u in plan.instructions if any(r in mine for r in uses_of(u))]
    if users:
        lines.append(f"used by  {', '.join(f'%{n}' for n in users)}")
    return "\n".join(lines)


def _line(plan: Plan, i: Instruction) -> list[str]:
    """One row: name, operator, result, bytes sent, predicted time, phase and source."""
    sent = ""
    if isinstance(i, Collective):
        sent = size(_sent(plan, i))
        op = f"{i.step.kind}@{i.step.axis}"
    elif isinstance(i, Compute):
        op = i.op.removesuffix(".default")
    elif isinstance(i, Transfer):
        op = f"move to {i.out.tier}"
    else:
        what = i.slot if isinstance(i, (Read, Write, Delete)) else i.path if isinstance(i, Input) else ""
        op = f"{type(i).__name__.lower()} {what}"
    made = [f"{short(o.dtype)}{o.spec}" if o.dtype is not None else "number" for o in outs_of(i)]
    where = ", ".join(x for x in (i.phase, i.module, i.line) if x)
    time = seconds(plan.seconds[i.name]) if i.name in plan.seconds else ""
    return [f"%{i.name}", op, " ".join(made), sent, time, where]


def _sent(plan: Plan, i: Collective) -> int:
    """Bytes that a rank sends."""
    assert i.out.dtype is not None
    return i.step.nbytes(i.out.dtype, plan.mesh)
