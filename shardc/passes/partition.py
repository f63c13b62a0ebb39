"""partition: from the global program to the local one.

Before: specs are complete, `reshard` nodes mark changes. After: every `reshard` is a chain of steps (`all_gather`,
`reduce_scatter`, `all_reduce`, `all_to_all`, `slice`), each over one mesh axis, and size arguments are this rank's.

Example (dp=2): ``reshard(g: [4, 4] +sum@dp) -> [4@dp, 4]`` becomes ``reduce_scatter@dp``; ``view(x, [8, 12])`` with result
``[8@dp, 12]`` becomes ``view(x, local [8@dp, 12])``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.passes.factors import rule_of
from shardc.passes.graphs import Rewriter, is_op, operands, reshard, typed
from shardc.passes.ragged import RaggedSizes
from shardc.program import Info, Program, TensorType
from shardc.reshard import STEP_OPS
from shardc.reshard import reshard as steps_between
from shardc.rules import localise

NARROW = (torch.float16, torch.bfloat16)


def partition(program: Program) -> Program:
    build = Rewriter(program)
    assert program.mesh is not None
    sizes = RaggedSizes(build)
    for node in program.nodes:
        if node.op == "output":
            break
        if node.target is reshard:
            sizes.refuse_moves(node)
            build.env[node] = _steps(build, node)
        elif node.target in (torch.ops.shardc.constrain.default, torch.ops.shardc.save_name.default):
            build.env[node] = build.env[node.all_input_nodes[0]]  # it has done its work
        elif is_op(node) and program.info[node].type is not None:
            build.env[node] = _local_call(build, node, sizes)
        else:
            build.copy(node)
        sizes.see(node)
    return build.finish(notes=[*program.notes, *sizes.notes()])


def _steps(build: Rewriter, node: fx.Node) -> fx.Node:
    program, mesh = build.old, build.old.mesh
    assert mesh is not None and isinstance(node.args[0], fx.Node)
    value, info = build.env[node.args[0]], program.info[node]
    steps = steps_between(program.spec(node.args[0]), program.spec(node), mesh)
    kind = program.type(node)
    wide = kind.dtype in NARROW and any(s.kind in ("reduce_scatter", "all_reduce") and s.op == "sum" for s in steps)
    if wide:  # sums over ranks are made in float32
        value = _cast(build, value, torch.float32, info)
    for step in steps:
        kind_now = TensorType(kind.shape, torch.float32 if wide else kind.dtype, kind.stride)
        value = build.call(STEP_OPS[step.kind], (value, step), {}, info.but(type=kind_now, spec=step.dst))
    return _cast(build, value, kind.dtype, info) if wide else value


def _cast(build: Rewriter, value: fx.Node, dtype: torch.dtype, info: Info) -> fx.Node:
    old = build.info[value]
    assert isinstance(old.type, TensorType)
    kind = TensorType(old.type.shape, dtype, old.type.stride)
    return build.call(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype}, info.but(type=kind, spec=old.spec))


def _local_call(build: Rewriter, node: fx.Node, sizes: RaggedSizes) -> fx.Node:
    program = build.old
    rule = rule_of(program, node)
    info = program.info[node]
    results = info.spec if isinstance(info.spec, tuple) else (info.spec,)
    specs = [program.spec(n) for n in operands(program, node)]
    args, kwargs = typed(program.info, node.args), typed(program.info, dict(node.kwargs))
    local = localise(node.target, rule, args, kwargs, results, specs)  # type: ignore[arg-type]
    if sizes:
        sizes.refuse_draw(node)
        sizes.refuse_scattered(node)
        local = sizes.counted(node, rule, *local)
    feed = iter(operands(program, node))

    def back(arg: Any) -> Any:
        if isinstance(arg, TensorType):
            return build.env[next(feed)]
        return build.env.get(arg, arg) if isinstance(arg, fx.Node) else arg  # counts of rows are of the new graph already

    args, kwargs = fx.node.map_aggregate(local, back)
    return build.call(node.target, tuple(args), dict(kwargs), info, node.name)  # type: ignore[arg-type]
