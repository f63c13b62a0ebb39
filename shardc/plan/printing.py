"""The one-page printout of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.dtypes import short
from shardc.plan.fold import fold
from shardc.plan.replicated import Replicated
from shardc.plan.text import amount, seconds, size, table
from shardc.plan.uneven import Uneven
from shardc.program import Slot, SlotKind
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE

if TYPE_CHECKING:
    from shardc.plan.plan import Plan

NOUN = {
    SlotKind.PARAMETER: ("parameter", "parameters"),
    SlotKind.BUFFER: ("buffer", "buffers"),
    SlotKind.OPTIMIZER: ("tensor of optimizer state", "tensors of optimizer state"),
    SlotKind.GRADIENT: ("gradient", "gradients"),
    SlotKind.TENSOR: ("other tensor", "other tensors"),
}


def render(plan: Plan) -> str:
    """The printout of `str(plan)`: state, communication, memory, time, notes; repeated layers folded."""
    return "\n".join([headline(plan), *state(plan), *communication(plan), *memory(plan), time_line(plan), *notes(plan)])


def headline(plan: Plan) -> str:
    unique = sum(s.type.numel for s in plan.slots.values() if s.kind == SlotKind.PARAMETER)
    zero = f" · zero {plan.options['zero']}" if "zero" in plan.options else ""
    return f"plan {plan.hash[:6]}{zero} · mesh {plan.mesh} · {amount(unique)} parameters · {len(plan.instructions):,} nodes"


def state(plan: Plan) -> list[str]:
    """One row for each tensor of state; optimizer state and gradients laid out like their parameter stand below it."""
    if not plan.slots:
        return ["state   none"]
    owned: dict[str, list[Slot]] = {}
    alone: list[Slot] = []
    for slot in plan.slots.values():
        parent = plan.slots.get(slot.of)
        if parent is not None and slot.type.shape == parent.type.shape:
            owned.setdefault(parent.path, []).append(slot)
        else:
            alone.append(slot)
    folded = fold((s.path, (_signature(s), tuple((leaf(x), _signature(x)) for x in owned.get(s.path, [])))) for s in alone)
    rows = [["state", "global", "per rank", "spec", "bytes/rank"]]
    for row in folded:
        first = alone[row.members[0]]
        rows.append(_state_row(plan, row.path, first, len(row.members)))
        attached: dict[object, list[Slot]] = {}
        for x in owned.get(first.path, []):
            attached.setdefault(_signature(x), []).append(x)
        for same in attached.values():
            name = f"  + {', '.join(leaf(x) for x in same)}"
            rows.append(_state_row(plan, name, same[0], len(row.members) * len(same)))
    return table(rows, right=(4,))


def leaf(slot: Slot) -> str:
    """``exp_avg`` of ``optimizer.state[3].exp_avg``."""
    return slot.path.rpartition(".")[2]


def _signature(slot: Slot) -> tuple[object, ...]:
    layout = slot.type.shape, slot.type.dtype, slot.storage, slot.compute, slot.tier
    return slot.kind, layout, slot.trainable, bool(slot.aliases)


def _state_row(plan: Plan, name: str, slot: Slot, count: int) -> list[str]:
    spec = slot.storage or ShardSpec.replicated(slot.type.shape)
    local = f"{short(slot.type.dtype)}[{', '.join(map(str, plan.sizes.shape(spec)))}]"
    layout = str(spec) if slot.tier == DEVICE else f"{spec} on {slot.tier}"
    if slot.kind == SlotKind.PARAMETER and slot.compute is not None and slot.compute.axes and slot.compute != slot.storage:
        layout += f" used as {slot.compute}"
    tied = f" (also {', '.join(slot.aliases)})" if slot.aliases else ""
    frozen = " (frozen)" if slot.kind == SlotKind.PARAMETER and not slot.trainable else ""
    return [name + tied + frozen, str(slot.type), local, layout, size(count * plan.sizes.slot_bytes(slot))]


def communication(plan: Plan) -> list[str]:
    rows = plan.communication
    if not len(rows):
        return ["", "communication per step   none"]
    out = [["communication per step", "", "of", "phase", "count", "bytes/rank", "time", "overlap"]]
    for r in rows:
        share = f"{r.overlap * 100:.0f} %"
        out.append([r.kind, f"@{r.axis}", r.group, r.phase, f"{r.count:,}", size(r.bytes), seconds(r.seconds), share])
    if len(rows) > 1:
        total = sum(r.seconds for r in rows)
        out.append(["total", "", "", "", f"{rows.collectives:,}", size(rows.bytes_per_rank), seconds(total), ""])
    return ["", *table(out, right=(4, 5, 6, 7))]


def memory(plan: Plan) -> list[str]:
    m = plan.memory
    parts = " · ".join(f"{name} {size(n)}" for name, n in m.by_category.items() if n or name != "other")
    line = f"peak {size(m.peak_bytes)} at {m.peak_at}"
    budget = plan.options.get("memory_budget")
    if isinstance(budget, int):
        line += f" · budget {size(budget)} · headroom {size(budget - m.peak_bytes)}"
    elif budget is not None:
        line += f" · budget {budget}"
    line += "".join(f" · {tier} {size(n)}" for tier, n in m.tiers.items())
    return ["", f"memory per rank at the peak   {parts}", line]


def time_line(plan: Plan) -> str:
    t = plan.time
    parts = " · ".join(f"{k} {seconds(v)}" for k, v in t.by_category.items())
    return f"time per step {seconds(t.predicted_s)} on {t.device} (predicted)   {parts}"


def notes(plan: Plan) -> list[str]:
    lines = []
    lines += _replicated(plan)
    lines += _uneven(plan)
    if not any(note.startswith("not captured") for note in plan.notes):
        lines.append("not captured: none")
    again = plan.gathers_in_backward
    lines.append(f"recomputed: {again} gathers" if again else "recomputed: none")
    grads = [s for s in plan.slots.values() if s.kind == SlotKind.GRADIENT and s.path in plan.kept]
    if grads:
        total = sum(plan.sizes.slot_bytes(s) for s in grads)
        lines.append(
            f"gradients stay after the step: {len(grads)} tensors, {size(total)}; zero_grad() at the end would free them"
        )
    lines += plan.notes
    lines += [f"{g} is {g.expected!r}" for g in plan.guards]
    return ["", *[("notes    " if k == 0 else " " * 9) + line for k, line in enumerate(dict.fromkeys(lines))]]


def _replicated(plan: Plan) -> list[str]:
    """What is whole on every rank: state by kind and reason (each tensor's spec stands above), values one by one."""
    groups: dict[tuple[SlotKind, str], list[int]] = {}
    values = []
    for r in plan.replicated:
        slot = plan.slots.get(r.name)
        if slot is None:
            values.append(r)
        else:
            groups.setdefault((slot.kind, r.reason), []).append(r.bytes)
    lines = [f"{len(n)} {NOUN[kind][len(n) > 1]}, {size(sum(n))} ({reason})" for (kind, reason), n in groups.items()]
    owners: dict[tuple[str, str], list[Replicated]] = {}
    for r in values:
        owners.setdefault((r.name.partition(": ")[0], r.where), []).append(r)
    listed = list(owners.items())
    for row in fold(
        (module, (where, tuple((r.name.partition(": ")[2], r.bytes) for r in rs))) for (module, where), rs in listed
    ):
        (_, where), first = listed[row.members[0]]
        total = sum(r.bytes for m in row.members for r in listed[m][1])
        ops = ", ".join(dict.fromkeys(r.name.partition(": ")[2] for r in first))
        lines.append(f"{row.path}: {ops}, {size(total)} ({', '.join(x for x in (first[0].reason, where) if x)})")
    return [f"replicated: {line}" for line in lines] or ["replicated: none"]


def _uneven(plan: Plan) -> list[str]:
    """Uneven splits; optimizer state and gradients that lie like their parameter are counted with it."""
    first: dict[str, Uneven] = {}
    cost: dict[str, int] = {}
    for u in plan.uneven:
        slot = plan.slots.get(u.name)
        owner = first.get(slot.of) if slot is not None else None
        name = owner.name if owner is not None and owner.spec == u.spec else u.name
        first.setdefault(name, u)
        cost[name] = cost.get(name, 0) + u.bytes
    lines = []
    rows = list(first.values())
    for row in fold((u.name, (u.spec, cost[u.name])) for u in rows):
        u = rows[row.members[0]]
        total = size(cost[u.name] * len(row.members))
        lines.append(f"uneven: {row.path} {u.spec}, {u.smallest:,} to {u.largest:,} elements a rank, costs {total}")
    return lines
