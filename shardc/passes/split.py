"""split: operators that are fused while a dim is whole, written out where the plan splits it (part of propagate).

Before: a node whose rule calls a dim whole, with an operand that is split there. After: the nodes of its split form, to be
propagated in its place: nothing is gathered but numbers of one for each row.

Example (tp=2): ``_log_softmax(x: [8, 6@tp], 1)`` becomes ``amax``, ``sub``, ``exp``, ``sum``, ``log``, ``sub``, with the
maximum and the sum reduced over tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.errors import PlanError
from shardc.mesh import Mesh
from shardc.passes.factors import choose, is_free, required
from shardc.passes.graphs import is_getitem, typed
from shardc.passes.inline import SIZES, Tracer, types_of
from shardc.program import Program, op_name
from shardc.rules.rule import WHOLE, Rule
from shardc.spec import ShardSpec

aten = torch.ops.aten
SCALES = (aten.add.Tensor, aten.add.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
"""What a gradient passes between the operator that makes it and the place where it rests: sums and factors."""


def aligned(rule: Rule, specs: Sequence[ShardSpec], mesh: Mesh) -> list[ShardSpec] | None:
    """How the operands of a split form shall lie; None where no dim that the rule calls whole is split.

    An operand that is whole there, but could be sliced for nothing, is; all others stay as they are.
    """
    if not any(rule.kind(f) == WHOLE for f in rule.sizes) or not any(s.axes for s in specs):
        return None
    free = replace(rule, kinds={f: k for f, k in rule.kinds.items() if k != WHOLE})
    busy = {axis for s in specs for axis, _ in s.partial}
    split, _ = choose(free, specs, busy, mesh)
    if all(rule.kind(f) != WHOLE for f in split):
        return None
    wanted = [required(factors, free, split, mesh) for factors in rule.operands]
    return [w if not s.partial and is_free(s, w, mesh) else s for s, w in zip(specs, wanted, strict=True)]


def write_out(program: Program, node: fx.Node, tracer: Tracer) -> list[fx.Node]:
    """Replace a node of a program by those of its split form, in place; returns the new ones, in order."""
    args, kwargs = node.args, dict(node.kwargs)
    graph = tracer.trace(node.target, typed(program.info, (args, kwargs)))
    values: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), values.append)
    feed, env, made = iter(values), {}, []
    results: Any = None
    with program.graph.inserting_before(node):
        for inner in graph.nodes:
            if inner.target in SIZES:
                raise PlanError(f"{op_name(node.target)}, whose dim is split, divides by a number of rows that depends on data",
                                where=program.info[node].where, hint="keep the dim whole")  # fmt: skip
            if inner.op == "placeholder":
                env[inner] = next(feed)
            elif inner.op == "output":
                results = fx.node.map_aggregate(inner.args[0], lambda n: env[n] if isinstance(n, fx.Node) else n)
            else:
                new = program.graph.node_copy(inner, lambda n: env[n])
                new.meta = {}
                env[inner] = new
                program.info[new] = program.info[node].but(type=types_of(inner.meta["val"]), spec=None)
                made.append(new)
    if isinstance(results, (tuple, list)):
        for user in list(node.users):
            assert is_getitem(user)
            _stand_in(program, user, results[user.args[1]])  # type: ignore[index]
    else:
        _stand_in(program, node, results)
    if node in program.info:
        _forget(program, node)
    return made


def _stand_in(program: Program, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    program.info[new] = program.info[new].but(spec=program.info[old].spec, why=program.info[old].why)
    for table in (program.exit, program.number_exit):
        for key, value in table.items():
            if value is old:
                table[key] = new
    if old in program.versions:
        program.versions[new] = program.versions.pop(old)
    program.results[:] = [new if n is old else n for n in program.results]
    _forget(program, old)


def _forget(program: Program, node: fx.Node) -> None:
    program.info.pop(node)
    program.versions.pop(node, None)
    program.graph.erase_node(node)
