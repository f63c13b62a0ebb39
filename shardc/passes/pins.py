"""pins: a parameter that the user pinned is used as pinned (part of propagate).

Where an operator's operands want one mesh axis for different dims, the larger one stays and the others move; but a parameter
with axes given by `params` stays whatever its size, and so does the gradient that is made for it: activations move.

Example (tp=2): in ``mm(x: [54@tp, 8], w: [8, 6@tp])`` with ``w`` pinned, ``x`` is gathered although it is larger.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from shardc.passes.factors import required, rule_of, split_of_result
from shardc.passes.graphs import is_cast, is_op, is_view, operands
from shardc.passes.split import SCALES
from shardc.program import Program, SlotKind
from shardc.rules.rule import WHOLE, Rule
from shardc.spec import Dim, ShardSpec, dim_axes, split_dim

REACH = 6
"""How many operators away from where it is made a gradient may come to rest."""


def wanted_result(program: Program, node: fx.Node) -> tuple[ShardSpec, tuple[str, ...]] | None:
    """How a gradient will rest, and which of the axes are those that the user gave its parameter.

    That of the first pinned value along its only use, through sums, casts and views, as it has to be of `node` itself.
    """
    return _wanted(program, node, REACH)


def _wanted(program: Program, node: fx.Node, reach: int) -> tuple[ShardSpec, tuple[str, ...]] | None:
    spec = program.info[node].spec
    if isinstance(spec, ShardSpec):
        return spec, pinned_axes(program, node)
    if len(node.users) != 1 or not reach or not program.is_tensor(node):
        return None
    (user,) = node.users
    if not program.is_tensor(user) or not is_op(user):
        return None
    found = _wanted(program, user, reach - 1) if is_cast(user) or user.target in SCALES or is_view(user) else None
    if found is None or is_cast(user):
        return found
    if user.target in SCALES:
        return found if program.type(user).shape == program.type(node).shape else None
    assert program.mesh is not None
    rule = rule_of(program, user)
    split = split_of_result(rule, found[0], program.mesh) if len(operands(program, user)) == 1 else None
    return None if split is None else (required(rule.operands[0], rule, split, program.mesh), found[1])


def pinned_axes(program: Program, node: fx.Node) -> tuple[str, ...]:
    """The axes that the user gave the parameter of which a node is the value or the gradient."""
    path = program.versions.get(node, "")
    slot = program.slots.get(path) or program.slots.get(path.removesuffix(".grad"))
    owner = program.slots.get(slot.of) if slot is not None and slot.kind == SlotKind.GRADIENT else slot
    return owner.compute.axes if owner is not None and owner.compute is not None and owner.kind == SlotKind.PARAMETER else ()


def decided(program: Program, node: fx.Node, rule: Rule, busy: set[str]) -> dict[str, Dim]:
    """The factors of a gradient that are split as its parameter is pinned, over axes that are not busy."""
    found = wanted_result(program, node)
    factors = rule.results[0]
    if found is None or not found[1] or factors is None or len(rule.results) != 1:
        return {}
    assert program.mesh is not None
    spec, axes = found
    keep = set(axes) - busy
    out: dict[str, Dim] = {}
    for dim, names in zip(spec.dims, factors, strict=True):
        pinned = tuple(replace(f, axes=tuple(a for a in f.axes if a in keep)) for f in dim)
        if names and dim_axes(pinned):
            parts = split_dim(pinned, [rule.sizes[f] for f in names], program.mesh) or ()
            out |= {f: d for f, d in zip(names, parts, strict=False) if dim_axes(d) and rule.kind(f) != WHOLE}
    return out
