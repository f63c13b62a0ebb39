"""`plan.diff(other)`: what changes from one plan to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.plan.fold import fold
from shardc.plan.text import seconds, size, table
from shardc.program import Slot
from shardc.tiers import DEVICE

if TYPE_CHECKING:
    from shardc.plan.plan import Plan


def difference(a: Plan, b: Plan) -> str:
    """See `Plan.diff`. Sections that agree are left out."""
    if a.hash == b.hash:
        return f"plans {a.hash[:6]} and {b.hash[:6]} do the same"
    lines = [f"plan {a.hash[:6]} -> {b.hash[:6]}"]
    if a.mesh != b.mesh:
        lines.append(f"mesh      {a.mesh} -> {b.mesh}")
    for name in dict.fromkeys([*a.options, *b.options]):
        old, new = a.options.get(name), b.options.get(name)
        if old != new and name != "mesh":
            lines.append(f"option    {name}: {old!r} -> {new!r}")
    lines += _state(a, b)
    lines += _communication(a, b)
    rows = (
        [["memory", "peak", size(a.memory.peak_bytes), "->", size(b.memory.peak_bytes)]]
        if a.memory.peak_bytes != b.memory.peak_bytes
        else []
    )
    for name in dict.fromkeys([*a.memory.by_category, *b.memory.by_category]):
        old_n, new_n = a.memory.by_category.get(name, 0), b.memory.by_category.get(name, 0)
        if old_n != new_n:
            rows.append(["memory", name, size(old_n), "->", size(new_n)])
    lines += table(rows, right=(2, 4))
    if a.time.predicted_s != b.time.predicted_s:
        lines.append(f"time      {seconds(a.time.predicted_s)} -> {seconds(b.time.predicted_s)}")
    if len(a.instructions) != len(b.instructions):
        lines.append(f"nodes     {len(a.instructions):,} -> {len(b.instructions):,}")
    return "\n".join(lines)


def _state(a: Plan, b: Plan) -> list[str]:
    changed = []
    for path in dict.fromkeys([*a.slots, *b.slots]):
        old, new = a.slots.get(path), b.slots.get(path)
        if old is None or new is None or (
            (old.type, old.storage, old.compute, old.tier) != (new.type, new.storage, new.compute, new.tier)
        ):
            before = "absent" if old is None else _rests(old)
            after = "absent" if new is None else _rests(new)
            if before == after and old is not None and new is not None:
                before, after = f"{before} used as {old.compute}", f"{after} used as {new.compute}"
            changed.append((path, (before, after)))
    rows = [["state", f.path, changed[f.members[0]][1][0], "->", changed[f.members[0]][1][1]] for f in fold(changed)]
    return table(rows)


def _rests(slot: Slot) -> str:
    return f"{slot.storage}" if slot.tier == DEVICE else f"{slot.storage} on {slot.tier}"


def _communication(a: Plan, b: Plan) -> list[str]:
    def keyed(p: Plan) -> dict[tuple[str, str, str, str], tuple[int, int]]:
        return {(r.kind, r.axis, r.group, r.phase): (r.count, r.bytes) for r in p.communication}

    old, new = keyed(a), keyed(b)
    rows = []
    for key in dict.fromkeys([*old, *new]):
        x, y = old.get(key, (0, 0)), new.get(key, (0, 0))
        if x != y:
            kind, axis, group, phase = key
            rows.append([f"{kind}@{axis}", group, phase, f"{x[0]:,} x, {size(x[1])}", "->", f"{y[0]:,} x, {size(y[1])}"])
    if a.communication.bytes_per_rank != b.communication.bytes_per_rank:
        total = (size(a.communication.bytes_per_rank), size(b.communication.bytes_per_rank))
        rows.append(["communication", "", "total", total[0], "->", total[1]])
    return table(rows, right=(3, 5))
