"""norms: the norm of a stack of norms is one sum of squares.

Before: ``vector_norm(stack([vector_norm(a), vector_norm(b)]))``, as gradient clipping computes it. After:
``sqrt(sum(stack([sum(a * a), sum(b * b)])))``, which stays a partial sum up to the square root: one reduction of one number,
where each inner norm would need its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.passes.graphs import Rewriter, kept, operands
from shardc.program import Info, Program, TensorType

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)


def join_norms(program: Program) -> Program:
    keep = kept(program)
    build = Rewriter(program)
    for node in program.nodes:
        if node.op == "output":
            break
        parts = _parts(program, node, keep)
        build.env[node] = _sum_of_squares(build, node, parts) if parts else build.copy(node)
    return build.finish()


def _parts(program: Program, node: fx.Node, keep: set[fx.Node]) -> list[fx.Node]:
    """The inner norms of a norm of norms of real float32 or float64 tensors; else nothing."""
    if not _is_norm(program, node):
        return []
    (stack,) = operands(program, node)
    if stack.target not in (aten.stack.default, aten.cat.default) or stack in keep or len(stack.users) != 1:
        return []
    inner = operands(program, stack)
    return inner if len(inner) > 1 and all(_is_norm(program, n) and n not in keep for n in inner) else []


def _is_norm(program: Program, node: fx.Node) -> bool:
    """Whether a node is the Euclidean norm of a whole tensor."""
    if node.target is not aten.linalg_vector_norm.default or not program.is_tensor(node):
        return False
    given: dict[str, Any] = {"ord": 2, "dim": None, "keepdim": False, "dtype": None}
    given |= dict(zip(given, node.args[1:], strict=False)) | dict(node.kwargs)
    (x,) = operands(program, node)
    return (
        program.type(node).shape == ()
        and given["ord"] == 2
        and given["dtype"] is None
        and program.type(x).dtype in WIDE
        and program.type(x).dtype == program.type(node).dtype
    )


def _sum_of_squares(build: Rewriter, node: fx.Node, inner: list[fx.Node]) -> fx.Node:
    def call(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], info: Info) -> fx.Node:
        stride = TensorType.of(torch.empty(shape, device="meta")).stride
        return build.call(target, args, {}, info.but(type=TensorType(shape, dtype, stride)))

    program = build.old
    dtype = program.type(node).dtype
    squares = []
    for n in inner:
        (x,) = operands(program, n)
        value, info = build.env[x], program.info[n]
        square = build.call(aten.mul.Tensor, (value, value), {}, info.but(type=program.type(x)))
        squares.append(call(aten.sum.default, (square,), (), info))
    info = program.info[node]
    stack = call(aten.stack.default, (squares,), (len(squares),), info)
    return call(aten.sqrt.default, (call(aten.sum.default, (stack,), (), info),), (), info)
