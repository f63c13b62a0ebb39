"""schedule: the order in which each rank works.

Before: a local program in the order of the trace. After: the same nodes in an order that keeps the trace's for forward and
backward, but updates each slot as soon as its last input is final (so that its gradient can die), and makes what only an update
needs just before it. An update that may overwrite its slot in place comes after all reads of the old value.

Guards are barriers: what they depend on comes first, and no update that they do not depend on before the last of them, since
state may only be overwritten once all hold. Random draws keep their order.

Example: ``dw1; dw2; w1' = sgd(w1, dw1); w2' = sgd(w2, dw2)`` becomes ``dw1; w1' = ...; dw2; w2' = ...``.
"""

from __future__ import annotations

import math

from torch import fx

from shardc.ops import INPLACE
from shardc.passes.graphs import Rewriter, is_cast, is_view
from shardc.program import Phase, Program


def schedule(program: Program) -> Program:
    nodes = [n for n in program.nodes if n.op != "output"]
    place = {n: k for k, n in enumerate(nodes)}
    deps = {n: list(n.all_input_nodes) for n in nodes}
    asked = _asked(program, deps)
    for node, readers in _overwrites(program).items():
        if node not in asked:  # those are not in place
            deps[node] += [r for r in readers if place[r] < place[node]]
    late = {n for n in nodes if n.op == "call_function" and program.info[n].phase == Phase.UPDATE and n not in program.draws}
    late -= asked
    ready: dict[fx.Node, int] = {}  # update node -> position of the last forward or backward node that it waits for
    for n in nodes:
        _ready(n, deps, late, place, ready)
    due: dict[int, list[fx.Node]] = {}
    for n in nodes:
        if n in late and (n in program.versions or n in set(program.exit.values())):
            due.setdefault(ready[n], []).append(n)
    order: dict[fx.Node, None] = {}

    def emit(node: fx.Node) -> None:
        stack = [(node, iter(deps[node]))]
        while stack:
            top, rest = stack[-1]
            nxt = next((d for d in rest if d not in order), None)
            if nxt is not None:
                stack.append((nxt, iter(deps[nxt])))
                continue
            order[top] = None
            stack.pop()

    for n in nodes:
        if n.op == "placeholder":
            order[n] = None
    for n in nodes:
        if n in asked and n not in order:
            emit(n)
    for n in due.get(-1, ()):
        emit(n)
    for n in nodes:
        if n not in late and not _waits(n):
            if n not in order:
                emit(n)
            for update in due.get(place[n], ()):
                if update not in order:
                    emit(update)
    for n in nodes:
        if n not in order:
            emit(n)
    build = Rewriter(program)
    for n in order:
        build.copy(n)
    return build.finish(notes=[*program.notes, *_doubled(program, asked)])


def _asked(program: Program, deps: dict[fx.Node, list[fx.Node]]) -> set[fx.Node]:
    """The guards' numbers and all that they depend on, with the draws before them."""
    out: set[fx.Node] = set()
    if not program.guards:
        return out
    draws = sorted(program.draws, key=lambda n: program.draws[n].index)
    for before, draw in zip(draws, draws[1:], strict=False):
        deps[draw].append(before)
    todo = [g.node for g in program.guards]
    while todo:
        node = todo.pop()
        if node not in out:
            out.add(node)
            todo.extend(deps[node])
    return {n for n in out if n.op == "call_function"}


def _doubled(program: Program, asked: set[fx.Node]) -> list[str]:
    """What it costs that guards depend on new values of state: old and new are both alive until the last guard."""
    updates = [n for n in program.nodes if n in asked and f"{n.target}" in INPLACE]
    if not updates:
        return []
    assert program.mesh is not None
    first = (0,) * len(program.mesh.axes)
    total = 0
    for node in updates:
        info = program.info[node]
        kinds = info.type if isinstance(info.type, tuple) else (info.type,)
        specs = info.spec if isinstance(info.spec, tuple) else (info.spec,)
        for kind, spec in zip(kinds, specs, strict=True):
            if kind is not None and spec is not None:
                total += math.prod(spec.local_shape(program.mesh, first)) * kind.dtype.itemsize
    last = program.guards[-1].line
    return [f"double-buffered: {len(updates)} updates, {total:,} bytes a rank: guards up to {last} depend on new values"]


def _waits(node: fx.Node) -> bool:
    """Whether a node is made just before its first use: a cast of a slot, which costs memory and needs nothing else."""
    return is_cast(node) and bool(node.users) and all(n.op == "placeholder" for n in node.all_input_nodes)


def _ready(
    node: fx.Node, deps: dict[fx.Node, list[fx.Node]], late: set[fx.Node], place: dict[fx.Node, int], ready: dict[fx.Node, int]
) -> None:
    """Fill in `ready` for `node` (iteratively: chains are long, and extra edges may point ahead)."""
    stack = [node]
    while stack:
        top = stack[-1]
        if top in ready:
            stack.pop()
            continue
        if top not in late:
            ready[top] = place[top] if top.op == "call_function" else -1
            stack.pop()
            continue
        todo = [d for d in deps[top] if d not in ready]
        if todo:
            stack.extend(todo)
            continue
        ready[top] = max((ready[d] for d in deps[top]), default=-1)
        stack.pop()


def _overwrites(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Update nodes with an in-place form -> the readers of the slots that they overwrite."""
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if f"{node.target}" not in INPLACE:
            continue
        readers: dict[fx.Node, None] = {}
        for slot in (n for n in node.all_input_nodes if n.op == "placeholder" and n in program.versions):
            alias = [slot]
            while alias:
                for user in alias.pop().users:
                    if user is not node and user.op == "call_function" and user not in readers:
                        readers[user] = None
                        if is_view(user):
                            alias.append(user)
        out[node] = list(readers)
    return out
