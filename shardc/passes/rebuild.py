"""rebuild: what the backward needs of a gathered parameter is rebuilt from its second gather.

Before: a backward node may use a forward view or cast of a parameter. After: where a slot's compute spec differs from its
storage, each phase has its own chain of views and casts from the slot, so that the gathered parameter is free between them.

Example: ``t(w)`` in the forward, used by ``mm(dy, t(w))`` in the backward, gets a second ``t(w)`` of phase backward.
"""

from __future__ import annotations

from torch import fx

from shardc.passes.graphs import Rewriter, is_cast, is_op, is_view, kept, operands
from shardc.program import Phase, Program, SlotKind


def rebuild(program: Program) -> Program:
    build = Rewriter(program)
    keep = kept(program)
    chain: set[fx.Node] = set()  # versions of sharded slots, and views and casts made of one alone
    again: dict[fx.Node, fx.Node] = {}  # forward link of a chain -> its backward copy, in the new graph

    def backward(node: fx.Node) -> fx.Node:
        if program.info[node].phase != Phase.FORWARD or node.op == "placeholder" or node in program.versions:
            return build.env[node]
        if node not in again:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), backward)
            info = program.info[node].but(phase=Phase.BACKWARD)
            again[node] = build.call(node.target, args, kwargs, info)  # type: ignore[arg-type]
        return again[node]

    for node in program.nodes:
        if node.op == "output":
            break
        slot = program.slots.get(program.versions.get(node, ""))
        if node in program.versions:
            if slot is not None and slot.kind == SlotKind.PARAMETER and slot.storage != slot.compute:
                chain.add(node)
        elif node not in keep and program.is_tensor(node) and _is_link(program, node, chain):
            chain.add(node)
        if (
            node.op == "call_function"
            and program.info[node].phase == Phase.BACKWARD
            and any(n in chain for n in node.all_input_nodes)
        ):
            args, kwargs = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda n: backward(n) if n in chain else build.env[n]
            )
            build.env[node] = build.call(node.target, args, kwargs, program.info[node], node.name)  # type: ignore[arg-type]
        else:
            build.copy(node)
    return build.finish()


def _is_link(program: Program, node: fx.Node, chain: set[fx.Node]) -> bool:
    """Whether a node is a view or cast of a link of the chain, and of nothing else."""
    return is_op(node) and (is_view(node) or is_cast(node)) and all(n in chain for n in operands(program, node))
