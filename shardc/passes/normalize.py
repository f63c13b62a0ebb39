"""normalize: one way to say each thing.

Before: the program as captured. After: operators that divide by a count of their own input are decomposed (so that counts are
those of the global batch); `detach`, `alias`, `lift_fresh_copy`, functional `copy`, and views and casts that change nothing
are gone; equal pure nodes of one phase are one node; nothing is dead but random draws, which advance the stream.

Example: ``mean(x: [8, 4])`` becomes ``div(sum(x), 32)``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardc.errors import PlanError
from shardc.options import Options
from shardc.passes.graphs import Rewriter, is_getitem, is_op, is_random, kept, operands, typed, without_dead
from shardc.passes.inline import SIZES, Tracer, types_of
from shardc.passes.lookups import join_lookups
from shardc.passes.norms import join_norms
from shardc.program import Info, Program, TensorType, Types
from shardc.rows import rows_in
from shardc.rules import decompositions, masked_writes, writes_one_value

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)
SHAPING = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor)
STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)
FRESH = ("clone", "empty", "zeros", "ones", "full", "new_", "scalar_tensor")  # equal calls must stay different tensors


def normalize(program: Program, options: Options) -> Program:
    out = without_dead(_Normalization(without_dead(join_lookups(join_norms(program))), _table(program, options)).run())
    return without_dead(_merge_equal(out))


def _table(program: Program, options: Options) -> dict[Any, Any]:
    """Operators to decompose -> how. Where weights are split, a product may be partial before its bias is added."""
    pinned = any(n.target is torch.ops.shardc.constrain.default for n in program.graph.nodes)
    return dict(decompositions(split_products=bool(options.params or options.activations) or pinned))


class _Normalization(Rewriter):
    def __init__(self, program: Program, table: dict[Any, Any]) -> None:
        super().__init__(program)
        self.table = table
        masks = {program.type(n).shape[0]: n.all_input_nodes[0] for n in program.nodes if n.target is aten.nonzero.default}
        self.masks: dict[int, fx.Node] = masks  # size that stands for a number of rows -> the mask that has them
        self.tracer = Tracer(table, masks)
        self.masked = Tracer(masked_writes(), masks)

    def run(self) -> Program:
        for node in self.old.nodes:
            if node.op == "output":
                break
            if node.target in SAME:
                (source,) = operands(self.old, node)
                self.env[node] = self.env[source]
            elif node.target is aten.copy.default:
                self.env[node] = self.copied(node)
            elif node.target in STRIDED and _row_major(self.old, node):
                self.env[node] = self.viewed(node)
            elif node.target in self.table and not self.has_numbers(node) and not self.stays(node):
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.env[n])
                self.env[node] = self.inline(node.target, args, kwargs, self.old.info[node])  # type: ignore[arg-type]
            elif node.target in self.masked and writes_one_value(*typed(self.old.info, node.args)):
                self.env[node] = self.inline(node.target, self.args(node.args), {}, self.old.info[node], self.masked)  # type: ignore[arg-type]
            elif is_getitem(node) and isinstance(self.env[node.args[0]], (tuple, list)):  # type: ignore[index]
                self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                self.copy(node)
        return self.finish_folded()

    def finish_folded(self) -> Program:
        env = {old: new for old, new in self.env.items() if isinstance(new, fx.Node)}
        versions = {env[n]: p for n, p in self.old.versions.items() if n in env}
        draws = {env[n]: d for n, d in self.old.draws.items()}
        out = self.old.rebuilt(self.graph, env, versions=versions, draws=draws)
        out.info = self.info
        out.set_output()
        return out

    def stays(self, node: fx.Node) -> bool:
        """Norms in half precision are written out where they are split only: torch's own kernel rounds in its own way."""
        half = (torch.bfloat16, torch.float16)
        return node.target is aten.linalg_vector_norm.default and self.old.type(operands(self.old, node)[0]).dtype in half

    def has_numbers(self, node: fx.Node) -> bool:
        return any(self.old.info[n].type is None for n in node.all_input_nodes)

    def copied(self, node: fx.Node) -> fx.Node:
        """copy(dst, src) is src in the dtype and shape of dst."""
        dst, src = node.args[:2]
        assert isinstance(dst, fx.Node) and isinstance(src, fx.Node)
        info, value = self.old.info[node], self.env[src]
        want, have = self.old.type(node), self.old.type(src)
        if have.dtype != want.dtype:
            kind = TensorType(have.shape, want.dtype, have.stride)
            value = self.call(aten._to_copy.default, (value,), {"dtype": want.dtype}, info.but(type=kind))
        if have.shape != want.shape:
            value = self.call(aten.expand.default, (value, list(want.shape)), {}, info.but(type=want))
        return value

    def viewed(self, node: fx.Node) -> fx.Node:
        """as_strided over all of a row-major tensor is a view of it; its scatter is a view of what it writes."""
        source = operands(self.old, node)[-1]
        kind = self.old.type(node)
        return self.call(aten.view.default, (self.env[source], list(kind.shape)), {}, self.old.info[node])

    def inline(self, target: Callable[..., Any], args: Any, kwargs: Any, info: Info, tracer: Tracer | None = None) -> Any:
        """Replace a call by the graph of its decomposition; returns a node, or a tuple of nodes."""
        graph = (tracer or self.tracer).trace(target, typed(self.info, (args, kwargs)))
        values: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), values.append)
        feed, env = iter(values), {}
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(feed)
            elif node.op == "output":
                return fx.node.map_aggregate(node.args[0], lambda n: env[n] if isinstance(n, fx.Node) else n)
            else:
                sub_args, sub_kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
                if is_getitem(node) and isinstance(sub_args[0], tuple):
                    env[node] = sub_args[0][sub_args[1]]
                    continue
                sub = info.but(type=types_of(node.meta["val"]))
                if node.target in SIZES:
                    env[node] = self.count(node.meta["val"].node.hint, sub)
                    continue
                nested = node.target in self.table
                env[node] = (
                    self.inline(node.target, sub_args, sub_kwargs, sub)
                    if nested
                    else self.call(node.target, sub_args, sub_kwargs, sub)
                )
        raise AssertionError("a graph without output")


    def count(self, size: int, at: Info) -> fx.Node:
        """A size or number of elements that data decides, over all ranks, as a number.

        Raises:
            PlanError: it is no multiple of one number of rows.
        """
        prime = rows_in(size, self.masks)
        if prime is None or rows_in(size // prime, self.masks):
            raise PlanError("a dim of rows times rows that data selects", where=at.where, hint="select once")
        kind = TensorType((), torch.int64, ())
        rows = self.call(aten.count_nonzero.default, (self.env[self.masks[prime]],), {}, at.but(type=kind))
        number = self.call(aten._local_scalar_dense.default, (rows,), {}, at.but(type=None))
        return number if size == prime else self.call(operator.mul, (number, size // prime), {}, at.but(type=None))


def _merge_equal(program: Program) -> Program:
    """Common subexpressions, within one phase (a checkpoint's second forward in the backward stays)."""
    build = Rewriter(program)
    seen: dict[Any, fx.Node] = {}
    slots = set(program.versions) | kept(program)
    for node in program.nodes:
        if node.op == "output":
            break
        fresh = is_op(node) and node.target._schema.name.split("::")[1].startswith(FRESH)  # type: ignore[union-attr]
        if node.op == "placeholder" or fresh or node in slots or node in program.draws or is_random(node):
            build.copy(node)
            continue
        args, kwargs = build.args(node.args), build.args(dict(node.kwargs))
        same = _source(build, node, args)
        if same is not None:
            build.env[node] = same
            continue
        key = (node.target, _hashable(args), _hashable(kwargs), program.info[node].phase)
        if key in seen:
            build.env[node] = seen[key]
        else:
            seen[key] = build.copy(node)
    return build.finish()


def _source(build: Rewriter, node: fx.Node, args: Any) -> fx.Node | None:
    """The value that a node merely repeats: a view or cast that changes nothing, or a transposition undone."""
    if not args or not isinstance(args[0], fx.Node) or not isinstance(kind := build.old.info[node].type, TensorType):
        return None
    source: fx.Node = args[0]
    if node.target in SHAPING and build.info[source].type == kind:
        return source
    if node.target is aten.as_strided.default and _same_elements(build.info[source].type, kind, args[3:]):
        return source  # a view that only renames the strides of dims of size one
    if node.target is aten._to_copy.default and build.info[source].type == kind and set(node.kwargs) <= {"dtype"}:
        return source
    undone = source.target is node.target and (
        node.target is aten.t.default or (node.target is aten.transpose.int and set(source.args[1:]) == set(args[1:]))
    )
    if undone:
        (base,) = source.all_input_nodes
        return base if build.info[base].type == kind and build.info[base].phase == build.info[source].phase else None
    return None


def _row_major(program: Program, node: fx.Node) -> bool:
    """Whether an as_strided (or its scatter) runs over all elements of its first operand in row-major order, as they lie."""
    base = program.type(operands(program, node)[0])
    given = list(node.args[1 if node.target is aten.as_strided.default else 2 :])
    size, stride = given[0], given[1]
    offset = given[2] if len(given) > 2 else node.kwargs.get("storage_offset")
    assert isinstance(size, (list, tuple)) and isinstance(stride, (list, tuple))
    dense = [*zip(base.shape, base.stride, strict=True)], [*zip(size, stride, strict=True)]
    return not offset and math.prod(size) == base.numel and all(map(_is_dense, dense))


def _is_dense(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether (size, stride) pairs are those of a contiguous tensor, but for dims of size one."""
    step = 1
    for n, stride in reversed(dims):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def _same_elements(source: Types, view: TensorType, offset: tuple[Any, ...]) -> bool:
    """Whether two layouts of one storage hold the same elements in the same places."""
    if not isinstance(source, TensorType) or source.shape != view.shape or any(offset):
        return False
    return all(a == b for n, a, b in zip(view.shape, source.stride, view.stride, strict=True) if n > 1)


def _hashable(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return (type(arg).__name__, *map(_hashable, arg))
    if isinstance(arg, dict):
        return tuple((k, _hashable(v)) for k, v in sorted(arg.items()))
    return (type(arg), repr(arg) if isinstance(arg, float) else arg)
