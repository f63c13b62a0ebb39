"""Where a reduction may wait: through joint sums and single linear uses, where it grows neither larger nor more frequent."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from shardc.passes.graphs import is_cast, is_view, operands
from shardc.program import Phase, Program
from shardc.spec import ShardSpec

aten = torch.ops.aten
PLACED = (aten.select_backward.default, aten.slice_backward.default)
"""Operators that put a value into zeros of a larger shape: gradients of parts of a tensor."""


def may_wait(program: Program, node: fx.Node, held: Sequence[fx.Node], kept: Collection[fx.Node]) -> bool:
    """Whether the reductions that the operands `held` wait for may wait until after `node`.

    Args:
        program: with sizes; specs are those that are pinned.
        kept: nodes that are results, versions of state or the like.
    """
    if any(len(n.users) != 1 or n in kept for n in held):
        return False
    if any(isinstance(program.info[n].spec, ShardSpec) for n in held):  # pinned: it is reduced where it stands
        return False
    if is_cast(node) and program.info[node].phase == Phase.BACKWARD:
        return True  # a gradient is reduced in the wider type
    return _nbytes(program, node) <= sum(_nbytes(program, n) for n in held) or _placed_together(program, node)


def _placed_together(program: Program, node: fx.Node) -> bool:
    """Whether `node` puts one of several parts into a joint sum that costs no more to reduce than the parts do one by one.

    A sum that goes into shards is scattered, which sends half of what reducing the parts for every rank would.
    """
    if node.target not in PLACED:
        return False
    total = node
    while len(total.users) == 1 and (user := next(iter(total.users))).target is aten.add.Tensor:
        total = user
    parts, todo = set(), [total]
    while todo:
        at = todo.pop()
        if at.target is aten.add.Tensor:
            todo += operands(program, at)
        elif at.target is node.target and operands(program, at)[0].target is operands(program, node)[0].target:
            parts.add(operands(program, at)[0])
        else:
            return False
    end = total
    while not isinstance(program.info[end].spec, ShardSpec) and len(end.users) == 1 and is_view(next(iter(end.users))):
        end = next(iter(end.users))
    pin = program.info[end].spec
    halved = isinstance(pin, ShardSpec) and bool(pin.axes)
    return _nbytes(program, total) <= sum(_nbytes(program, n) for n in parts) * (2 if halved else 1)


def _nbytes(program: Program, node: fx.Node) -> int:
    kinds = program.info[node].type
    return sum(t.nbytes for t in (kinds if isinstance(kinds, tuple) else (kinds,)) if t is not None)
