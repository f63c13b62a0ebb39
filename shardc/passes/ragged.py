"""Sizes that depend on data, in a local program: they are read off a tensor that has them (part of partition).

In a program such a size is a prime (see `shardc.capture.sizes`): a dim that is made of it is told by division. In the local
program a size argument with one is the number of rows of an earlier value that is split in the same way.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardc.errors import PlanError
from shardc.instructions import Local, LocalDim
from shardc.passes.graphs import Rewriter, operands
from shardc.passes.selection import NONZERO_PART
from shardc.program import Info, TensorType
from shardc.rows import rows_in
from shardc.rules.rule import Rule
from shardc.spec import Dim, Factor, ShardSpec, dim_axes, dim_size

SIZE = torch.ops.aten.sym_size.int
INDEX_PUT_PART = torch.ops.shardc.index_put_part.default


class RaggedSizes:
    """The sizes of one program that depend on data.

    Args:
        build: of partition; counts of rows are written into its graph.
    """

    def __init__(self, build: Rewriter) -> None:
        self.build = build
        self.primes = {build.old.type(n).shape[0]: n for n in build.old.nodes if n.target is NONZERO_PART}
        self.holders: dict[tuple[int, tuple[str, ...]], tuple[fx.Node, int]] = {}  # (size, axes) -> a value and its dim
        self.rows: dict[tuple[int, tuple[str, ...]], fx.Node] = {}

    def __bool__(self) -> bool:
        return bool(self.primes)

    def prime(self, size: int) -> int | None:
        return rows_in(size, self.primes)

    def notes(self) -> list[str]:
        """What the sizes stand for."""
        old, out = self.build.old, []
        for prime, node in self.primes.items():
            mask = old.type(node.all_input_nodes[0])
            out.append(f"by data: {prime} is the rows selected at {old.info[node].line}, planned for all {mask.numel:,}")
        return out

    def see(self, node: fx.Node) -> None:
        """Remember a value that has such a size."""
        if not self.primes or not self.build.old.is_tensor(node):
            return
        for k, dim in enumerate(self.build.old.spec(node).dims):
            if len(dim) == 1 and dim[0].size in self.primes:
                self.holders.setdefault((dim[0].size, dim[0].axes), (self.build.env[node], k))

    def counted(self, node: fx.Node, rule: Rule, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Local arguments (see `localise`) with such sizes as numbers of the local program."""
        new, named = list(args), dict(kwargs)
        for key in rule.sized:
            if isinstance(key, int):
                new[key] = self._size(new[key], node)
            else:
                named[key] = self._size(named[key], node)
        return tuple(new), named

    def refuse_draw(self, node: fx.Node) -> None:
        """Random numbers for rows that data selects would depend on how many each rank has.

        Raises:
            PlanError: the node draws such.
        """
        old = self.build.old
        if node in old.draws and old.is_tensor(node) and any(self.prime(n) for n in old.type(node).shape):
            raise self._error(node, "draws random numbers for rows that data selects")

    def _size(self, arg: Any, node: fx.Node) -> Any:
        if isinstance(arg, Local):
            whole = any(self.prime(dim_size(d)) for d in arg.spec.dims)
            return [self._size(LocalDim(d), node) for d in arg.spec.dims] if whole else arg
        if isinstance(arg, (list, tuple)):
            return [self._size(a, node) for a in arg]
        if isinstance(arg, int) and self.prime(arg):
            return self._size(LocalDim((Factor(arg),)), node)
        if isinstance(arg, LocalDim) and (p := self.prime(dim_size(arg.dim))) is not None:
            return self._rows(arg.dim, p, node)
        return arg

    def _rows(self, dim: Dim, prime: int, node: fx.Node) -> Any:
        """The number of elements of a dim on this rank."""
        (held,) = (f for f in dim if f.size % prime == 0)
        info = self.build.old.info[node]
        key = (prime, held.axes)
        if key not in self.holders or dim_size(dim) // prime % prime == 0:
            raise self._error(node, f"needs to know a size of {LocalDim(dim)} that no value of its rank has")
        if key not in self.rows:
            value, k = self.holders[key]
            self.rows[key] = self.build.call(SIZE, (value, k), {}, Info(None, info.phase, info.module, info.line))
        rest = tuple(f if f is not held else Factor(f.size // prime) for f in dim)
        if dim_size(rest) == 1:
            return self.rows[key]
        number = Info(None, info.phase, info.module, info.line)
        return self.build.call(operator.mul, (self.rows[key], LocalDim(rest)), {}, number)

    def refuse_scattered(self, node: fx.Node) -> None:
        """A write at positions is complete only where its result is split as its rows are.

        Raises:
            PlanError: the rows are split over an axis that the result is not.
        """
        if node.target is not INDEX_PUT_PART:
            return
        old = self.build.old
        rows = {a for n in operands(old, node)[1:] for d in old.spec(n).dims if self.prime(dim_size(d)) for a in dim_axes(d)}
        if not rows <= {*old.spec(node).axes}:
            raise self._error(node, f"writes rows that are split over {', '.join(sorted(rows))} to {old.spec(node)}")

    def refuse_moves(self, node: fx.Node) -> None:
        """Rows that data selects stay where they are.

        Raises:
            PlanError: a reshard that would have to move them.
        """
        if not self.primes:
            return
        (source,) = node.all_input_nodes
        before, after = self.build.old.spec(source), self.build.old.spec(node)
        for a, b in zip(before.dims, after.dims, strict=True):
            if self.prime(dim_size(a)) and a != b:
                kind = self.build.old.type(node)
                assert isinstance(kind, TensorType)
                raise self._error(node, f"needs rows that data selects together: {ShardSpec((a,))} as {ShardSpec((b,))}")

    def _error(self, node: fx.Node, what: str) -> PlanError:
        info = self.build.old.info[node]
        return PlanError(
            f"{node.name} {what} ({info.why or 'no reason known'})", where=info.where,
            hint="reduce a selection by sums, means and index_add; or keep the shape (torch.where, x * mask)",
        )  # fmt: skip
