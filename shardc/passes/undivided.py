"""undivided: which operators of the update compute whole matrices, on every rank (part of propagate).

A matrix product in half precision keeps 8 bits of its result. Split, its parts would be rounded each by itself, and an
iteration of products (Newton-Schulz in Muon) makes the difference grow: the update would depend on the mesh. So in the update
such products are computed whole, and so is what leads up to them, back to the value that is cheapest to gather: the narrow cast
of a gradient or a momentum. That is one gather for each matrix, where splitting takes a reduction for each product.

Example (dp=2): ``x = _to_copy(g: [8@dp, 4], bfloat16); n = norm(x); y = div(x, n); mm(y, t(y))`` gathers x, once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from shardc.passes.factors import rule_of
from shardc.passes.graphs import is_cast, is_op, operands
from shardc.program import Phase, Program
from shardc.rules.rule import PASS, WHOLE, Rule

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
HALF = (torch.bfloat16, torch.float16)


def undivided(program: Program) -> set[fx.Node]:
    """The nodes whose last two dims are whole, in operands and results."""
    own = _of_state_alone(program)
    found = {n for n in own if n.target in PRODUCTS and program.type(n).dtype in HALF}
    todo = [m for n in found for m in operands(program, n)]
    seen: set[fx.Node] = set()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        for user in value.users:  # what is summed over a value that is gathered anyway
            if user in own and any(kind != PASS for kind in rule_of(program, user).kinds.values()):
                found.add(user)
        source = _source(program, value) if value in own else None
        if source is not None:
            found.add(value)
            todo.append(source)
    return found


def whole_matrices(rule: Rule) -> Rule:
    """`rule` where no factor of the last two dims of any tensor may be split."""
    kept = {f for t in (*rule.operands, *rule.results) if t is not None for d in t[-2:] for f in d}
    return replace(rule, kinds={**rule.kinds, **dict.fromkeys(kept, WHOLE)})


def _of_state_alone(program: Program) -> set[fx.Node]:
    """Operators of the update that read rows of the batch only by way of gradients."""
    rows = {program.inputs[path] for path in program.batched}
    out: set[fx.Node] = set()
    for node in program.nodes:
        if node in program.versions:
            rows.discard(node)
        elif any(n in rows for n in node.all_input_nodes):
            rows.add(node)
        if is_op(node) and program.is_tensor(node) and program.info[node].phase == Phase.UPDATE and node not in rows:
            out.add(node)
    return out


def _source(program: Program, value: fx.Node) -> fx.Node | None:
    """The one large operand of an elementwise operator or a transposition, where it is as cheap to gather as the result."""
    if value in program.versions or program.info[value].spec is not None or rule_of(program, value).kinds:
        return None
    size = program.type(value).numel
    large = {n for n in operands(program, value) if program.type(n).numel == size}
    if len(large) != 1 or (size > 1 and any(program.type(n).numel != 1 for n in operands(program, value) if n not in large)):
        return None
    (source,) = large
    if is_cast(value) and program.type(source).dtype.itemsize > program.type(value).dtype.itemsize:
        return None
    return source if program.type(source).shape[:-2] == program.type(value).shape[:-2] else None
