"""lookups: indexing whose rows a rank can do by itself.

Before: ``index(x, [arange(n), i])`` with n rows of x, as positions are picked and masks are read; ``index_put(zeros, ...)``
that accumulates, or ``index_add(zeros, ...)``, as the derivative of indexing. After: ``shardc.index_rows``, where row k of x
meets entry k of i, so that both are split alike; ``shardc.index_sum``, a partial sum where its values are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardc.ops import indexing
from shardc.passes.graphs import Rewriter
from shardc.program import Program, TensorType
from shardc.rows import rows_in

aten = torch.ops.aten
READS = (aten.index.Tensor, aten._unsafe_index.Tensor)
WRITES = (aten.index_put.default, aten._unsafe_index_put.default)
ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}  # which argument is the value
SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default, aten._to_copy.default)
VIEWS = (aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
Given = Sequence[Any]  # a node or None for each dim


def join_lookups(program: Program) -> Program:
    build = Rewriter(program)
    selected = {program.type(n).shape[0] for n in program.nodes if n.target is aten.nonzero.default}
    for node in program.nodes:
        if node.op == "output":
            break
        known = not (selected and _selects(program, node, selected))  # those stay where their rows are (`passes.selection`)
        build.env[node] = (known and (_read(build, node) or _written(build, node))) or build.copy(node)
    return build.finish()


def _selects(program: Program, node: fx.Node, selected: set[int]) -> bool:
    """Whether a node works on rows that data selects."""
    sizes = [n for a in node.all_input_nodes if program.is_tensor(a) for n in program.type(a).shape]
    return any(rows_in(n, selected) for n in sizes)


def _read(build: Rewriter, node: fx.Node) -> fx.Node | None:
    if node.target not in READS:
        return None
    x, given = node.args
    assert isinstance(x, fx.Node) and isinstance(given, (list, tuple))
    found = _along(build.old, given, build.old.type(x).shape)
    if found is None or max(found[1]) < 0:
        return None
    return build.call(indexing.index_rows, build.args((x, *found)), {}, build.old.info[node])


def _written(build: Rewriter, node: fx.Node) -> fx.Node | None:
    """A sum of values onto zeros; onto anything else it stays what it is."""
    program = build.old
    if node.target in WRITES and len(node.args) == 4 and node.args[3] is True:
        base, given, values = node.args[:3]
    elif node.target is aten.index_add.default and node.kwargs.get("alpha", 1) == 1:
        base, dim, index, values = node.args
        assert isinstance(base, fx.Node) and isinstance(dim, int)
        given = [None] * (dim % max(1, len(program.type(base).shape))) + [index]
    else:
        return None
    assert isinstance(base, fx.Node) and isinstance(given, (list, tuple)) and isinstance(values, fx.Node)
    shape = program.type(base).shape
    if not _is_zero(base) or not shape or program.type(values).dtype != program.type(base).dtype:
        return None
    found = _along(program, given, shape)
    if found is None:
        return None
    return build.call(indexing.index_sum, build.args((values, *found, list(shape))), {}, program.info[node])


def _is_zero(node: fx.Node) -> bool:
    return node.target in ZEROS or any(node.target is op and _number(node, at) == 0 for op, at in FILLED.items())


def _number(node: fx.Node, at: int) -> Any:
    """An argument that is a constant number; None where it is not."""
    value = node.args[at] if at < len(node.args) else None
    return value if isinstance(value, (int, float)) else None


def _along(program: Program, given: Given, shape: Sequence[int]) -> tuple[list[fx.Node | None], list[int], int] | None:
    """The indices without those that run along a dim, which dim of the result each dim runs along, and how many dims the
    indices have together; None where a mask is among them."""
    kinds = [program.type(i) for i in given if i is not None]
    if any(k.dtype in (torch.bool, torch.uint8) for k in kinds):
        return None
    rank = max(len(k.shape) for k in kinds)
    rest, along = list(given), [-1] * len(shape)
    for k, index in enumerate(given):
        dim = None if index is None else _run(program, index, shape[k])
        if dim is None:
            continue
        assert index is not None
        d = rank - len(program.type(index).shape) + dim
        if d not in along:
            rest[k], along[k] = None, d
    runs = [tuple(n if i == d else 1 for i in range(rank)) for n, d in zip(shape, along, strict=True) if d >= 0]
    left = [program.type(i).shape for i in rest if i is not None]
    if _broadcast(left + runs) != _broadcast([k.shape for k in kinds]):  # an index expands the others
        return list(given), [-1] * len(shape), rank
    return rest, along, rank


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _run(program: Program, node: fx.Node, n: int) -> int | None:
    """The dim along which an index counts 0, 1, ..., n - 1, being the same along all others; None: it does not, or n is 1."""
    if node.op != "call_function" or n < 2 or not program.is_tensor(node):
        return None
    kind = program.type(node)
    if kind.dtype.is_floating_point or kind.dtype.is_complex:
        return None
    if node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return 0 if kind.shape == (n,) and _counts(node) else None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not program.is_tensor(source):
        return None
    before, dim = program.type(source), _run(program, source, n)
    if dim is None:
        return None
    unchanged = node.target is aten.add.Tensor and _number(node, 1) == 0 or node.target is aten.slice.Tensor
    if node.target in SAME or unchanged and before.shape == kind.shape:
        return dim
    return _seen_through(node, before, kind, dim) if node.target in VIEWS else None


def _counts(node: fx.Node) -> bool:
    """Whether an arange begins at 0 and goes by 1."""
    if node.target is aten.arange.default:
        return True
    return _number(node, 0) == 0 and (node.target is aten.arange.start or _number(node, 2) in (None, 1))


def _seen_through(node: fx.Node, before: TensorType, kind: TensorType, dim: int) -> int | None:
    """Where a dim of the operand of a view is in its result."""
    if node.target is aten.unsqueeze.default:
        return dim + (int(_number(node, 1)) % len(kind.shape) <= dim)
    if node.target is aten.expand.default:
        return dim + len(kind.shape) - len(before.shape)
    long = [k for k, size in enumerate(kind.shape) if size != 1]
    return long[0] if len(long) == 1 and max(before.shape) == before.numel else None
