"""selection: rows that data selects stay where they are (part of propagate).

Before: ``nonzero`` of a mask that is split, and reads and writes at the positions that it gives. After: each rank lists the
true elements of its own part, and reads and writes its own part of tensors that lie like the mask; the rows of a selection are
split over the axes that split the mask. Nothing is moved.

Example (dp=2): ``idx = nonzero(mask: [12@dp])``, ``index(x: [12@dp, 16], [idx])`` becomes ``nonzero_part(mask) -> [u@dp, 1]``,
``index_part(x, [idx]) -> [u@dp, 16]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardc.mesh import Mesh
from shardc.passes.graphs import is_getitem, is_op, is_view, operands
from shardc.program import Program
from shardc.spec import Dim, Factor, ShardSpec, dim_axes

if TYPE_CHECKING:
    from shardc.passes.propagate import _Propagation

aten = torch.ops.aten
NONZERO = aten.nonzero.default
NONZERO_PART = torch.ops.shardc.nonzero_part.default
READS = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default)
WRITES = (aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default)
COPIES = (aten.clone.default, aten._to_copy.default, aten.alias.default)

Places = tuple[Dim, ...]
"""For each column of positions the dim that they are in; the positions that a rank has lie in its part of it."""


def mask_spec(spec: ShardSpec) -> ShardSpec:
    """How a mask has to lie: nothing pending, parts that are one run of elements."""
    dims = [d if not any(f.axes for f in d[1:]) else (Factor(ShardSpec((d,)).shape[0]),) for d in spec.dims]
    return ShardSpec(tuple(dims))


def rows_spec(mask: ShardSpec, rows: int) -> ShardSpec:
    """How the positions lie: split over all axes that split the mask."""
    return ShardSpec(((Factor(rows, mask.axes),), (Factor(len(mask.dims)),)))


def places_after(program: Program, node: fx.Node, places: Places) -> Places | None:
    """The places of what `node` makes of positions, where it takes them or some columns of them as they are."""
    if is_getitem(node):
        return (places[int(node.args[1])],)  # type: ignore[arg-type]
    if not is_op(node) or not program.is_tensor(node):
        return None
    source = program.type(node.all_input_nodes[0])
    if node.target is aten.select.int and len(source.shape) == 2 and int(node.args[1]) % 2 == 1:  # type: ignore[arg-type]
        return (places[int(node.args[2])],)  # type: ignore[arg-type]
    kept = is_view(node) or node.target in COPIES
    if kept and program.type(node).numel == source.numel and (len(places) == 1 or program.type(node).shape == source.shape):
        return places
    return None


def positions_of(node: fx.Node) -> list[fx.Node]:
    """The operands of a node that may be positions; for an item of an ``unbind`` into columns, what was unbound."""
    if is_getitem(node):
        (parent,) = node.all_input_nodes
        columns = parent.target is aten.unbind.int and parent.args[1:] in ((1,), (-1,))
        return parent.all_input_nodes if columns else []
    return node.all_input_nodes


def indices_of(node: fx.Node) -> list[fx.Node | None]:
    """The index tensors of a read or write, by dim of what is indexed."""
    if node.target in (aten.index_select.default, aten.index_add.default):
        _, dim, index = node.args[:3]
        assert isinstance(index, fx.Node) and isinstance(dim, int)
        return [None] * dim + [index]
    return list(node.args[1])  # type: ignore[arg-type]


def with_parts(node: fx.Node, indices: Sequence[fx.Node | None], rank: int) -> tuple[Any, tuple[Any, ...]] | None:
    """The form of a read or write on parts: operator and arguments. None where it has none."""
    start = [0] * rank
    if node.target in READS:
        return torch.ops.shardc.index_part.default, (node.args[0], list(indices), start)
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if node.target is aten.index_add.default:
        if given.get("alpha", 1) != 1 or given["dim"] != 0:
            return None
        values, adds = given["source"], True
    else:
        values, adds = given["values"], given.get("accumulate", False)
    return torch.ops.shardc.index_put_part.default, (given["self"], list(indices), values, adds, start)


def indexed_spec(spec: ShardSpec, places: Sequence[Dim | None], rows: Sequence[str], mesh: Mesh) -> ShardSpec:
    """How a tensor has to lie that is read or written at positions: dims that have places as these, other indexed dims whole,
    the rest as it is.

    Args:
        places: for each indexed dim its place; None for a dim that is not indexed.
        rows: the axes that split the rows.
    """
    dims: list[Dim] = []
    for k, dim in enumerate(spec.dims):
        place = places[k] if k < len(places) else None
        if place is not None:
            dims.append(place)
        else:
            dims.append(tuple(Factor(f.size, tuple(a for a in f.axes if a not in rows)) for f in dim))
    return ShardSpec(tuple(dims), tuple(p for p in spec.partial if p[0] not in rows)).canonical(mesh)


def axes_of(places: Sequence[Dim | None]) -> set[str]:
    return {a for d in places if d is not None for a in dim_axes(d)}


class Selections:
    """The selections of one program, as propagate meets them.

    Args:
        build: of propagate; it is given parts to compute with.
    """

    def __init__(self, build: _Propagation) -> None:
        self.build = build
        self.places: dict[fx.Node, Places] = {}  # positions that a selection gave -> the dims that they are in

    def nonzero(self, node: fx.Node) -> None:
        """Each rank lists its own part of the mask."""
        build = self.build
        (mask,) = operands(build.old, node)
        value = build.read(mask, node)
        value = build.move(value, mask_spec(build.spec(value)), node, "nonzero needs parts that are one run")
        spec, info = build.spec(value), build.old.info[node]
        rows = rows_spec(spec, build.old.type(node).shape[0]).canonical(build.mesh)
        new = build.call(NONZERO_PART, (value, [0] * len(spec.dims)), {}, info.but(spec=rows, why="as its mask"), node.name)
        build.env[node] = new
        if spec.axes:
            self.places[new] = spec.dims

    def follow(self, node: fx.Node) -> None:
        """Remember the places of what a node makes of positions."""
        build = self.build
        sources = [self.places[v] for v in (build.env[n] for n in positions_of(node)) if v in self.places]
        if len(sources) == 1 and (found := places_after(build.old, node, sources[0])) is not None:
            self.places[build.env[node]] = found

    def select(self, node: fx.Node) -> None:
        """Turn a read or write at positions into one of parts, where all rows of a rank lie in its part."""
        build = self.build
        indices = indices_of(node)
        found = [None if i is None else self.places.get(build.env[i]) for i in indices]
        places = [None if p is None or len(p) != 1 else p[0] for p in found]
        held = [i for i, p in zip(indices, places, strict=True) if i is not None and p is not None]
        rows = {a for i in held for a in build.spec(build.env[i]).axes}
        if not rows or axes_of(places) != rows:
            return
        (base, *_) = operands(build.old, node)
        form = with_parts(node, indices, len(build.old.type(base).shape))
        if form is None:
            return
        value = build.read(base, node)
        whole = [None if i is None else (Factor(n),) for i, n in zip(indices, build.old.type(base).shape, strict=False)]
        here = [w if p is None else p for w, p in zip(whole, places, strict=True)]
        wanted = indexed_spec(build.spec(value), here, sorted(rows), build.mesh)
        with build.old.graph.inserting_before(node):
            source = build.old.graph.call_function(aten.alias.default, (base,))
        build.old.info[source] = build.old.info[base].but(spec=None)
        build.env[source] = build.move(value, wanted, node, "its rows are selected where they lie")
        node.target, (_, *rest), node.kwargs = form[0], form[1], {}
        node.args = (source, *rest)
