"""Runs one operator call split over a mesh as its rule says, and puts the parts together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.dtypes import identity
from shardc.instructions import Local, LocalDim, LocalStart
from shardc.mesh import Coord, Mesh
from shardc.rules.call import map_operands, tensor_operands
from shardc.rules.localise import localise
from shardc.rules.rule import PASS, Factors, Rule
from shardc.spec import Dim, Factor, ShardSpec, dim_local, dim_start

Op = torch._ops.OpOverload
Layout = Mapping[str, tuple[str, ...]]
"""Factor -> the axes it is split over; others are whole."""


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def flat(value: Any) -> list[Tensor | None]:
    """The results of a call; numbers do not count."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [v if isinstance(v, Tensor) else None for v in items]


def spec_of(factors: Factors, rule: Rule, layout: Layout) -> ShardSpec:
    """The spec of a tensor, but for what is partial."""

    def dim(names: tuple[str, ...]) -> Dim:
        return tuple(Factor(rule.sizes[f], layout.get(f, ())) for f in names) or (Factor(1),)

    return ShardSpec(tuple(dim(names) for names in factors))


def part(x: Tensor, spec: ShardSpec, mesh: Mesh, coord: Coord) -> Tensor:
    """What a rank holds of a whole value."""
    for k, indices in enumerate(spec.indices(mesh, coord)):
        x = x.index_select(k, torch.tensor(indices, dtype=torch.int64))
    return x


def fed(parts: Sequence[Tensor]) -> Callable[[Any], Tensor]:
    """Puts these tensors, in order, in the places of the operands."""
    rest = iter(parts)
    return lambda _: next(rest)


def _evaluated(tree: Any, mesh: Mesh, coord: Coord) -> Any:
    if isinstance(tree, Local):
        return list(tree.spec.local_shape(mesh, coord))
    if isinstance(tree, LocalDim):
        return dim_local(tree.dim, mesh, coord)
    if isinstance(tree, LocalStart):
        return dim_start(tree.dim, mesh, coord)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_evaluated(a, mesh, coord) for a in tree)
    return tree


def run_split(
    op: Op,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: Rule,
    results: Sequence[Tensor | None],
    layout: Layout,
    mesh: Mesh,
) -> str:
    """What goes wrong when a call is split like this; empty if nothing does.

    Args:
        results: those of the whole call.
        layout: factors that the rule lets be split, over axes of the mesh.
    """
    ins = [spec_of(f, rule, layout) for f in rule.operands]
    outs = [None if f is None else spec_of(f, rule, layout) for f in rule.results]
    operands = tensor_operands(args, kwargs, is_tensor)
    ranks: list[list[Tensor | None]] = []
    for coord in mesh.coords():
        own = [part(x, s, mesh, coord) for x, s in zip(operands, ins, strict=True)]
        local = localise(op, rule, *map_operands(args, kwargs, fed(own), is_tensor), outs, ins)
        positional, named = _evaluated(local[0], mesh, coord), {k: _evaluated(v, mesh, coord) for k, v in local[1].items()}
        made = _unread(rule, results, outs, layout, mesh, coord)
        try:
            ranks.append(made if made is not None else flat(op(*positional, **named)))
        except (RuntimeError, IndexError, ValueError) as e:
            return f"part {coord} fails: {e}"
    for k, (whole, spec, factors) in enumerate(zip(results, outs, rule.results, strict=True)):
        if whole is None or spec is None or factors is None:
            continue
        pieces = [p[k] for p in ranks]
        tensors = [p for p in pieces if p is not None]
        found = "is absent on some parts"
        if len(tensors) == len(pieces):
            found = _recombined(whole, spec, tensors, _pending(rule, factors, layout), mesh)
        if found:
            return f"result {k} {found}"
    return ""


def _pending(rule: Rule, factors: Factors, layout: Layout) -> dict[str, str]:
    """Axis -> reduction that a result is still partial over."""
    here = {f for d in factors for f in d}
    return {a: rule.kind(f) for f, axes in layout.items() if f not in here and rule.kind(f) != PASS for a in axes}


def _unread(
    rule: Rule, results: Sequence[Tensor | None], outs: Sequence[ShardSpec | None], layout: Layout, mesh: Mesh, coord: Coord
) -> list[Tensor | None] | None:
    """The results of a rank with an empty part, where it makes them without the operator: as the runtime does."""
    empty = set()
    for f, axes in layout.items():
        lo, hi = Factor(rule.sizes[f], axes).interval(mesh, coord)
        empty |= {f} if lo == hi else set()
    made: list[Tensor | None] = []
    for whole, spec, factors in zip(results, outs, rule.results, strict=True):
        if whole is None or spec is None or factors is None:
            made.append(None)
            continue
        here = {f for d in factors for f in d}
        shape = spec.local_shape(mesh, coord)
        kinds = {rule.kind(f) for f in empty - here} - {PASS}
        if 0 in shape:
            made.append(torch.full(shape, 0, dtype=whole.dtype))
        elif kinds:
            made.append(torch.full(shape, identity(kinds.pop(), whole.dtype), dtype=whole.dtype))
        else:
            return None
    return made if empty else None


def _recombined(whole: Tensor, spec: ShardSpec, pieces: Sequence[Tensor], pending: Mapping[str, str], mesh: Mesh) -> str:
    """Every set of ranks that differ in nothing but split and pending axes holds the whole value together."""
    kinds = set(pending.values())
    if len(kinds) > 1:
        return f"is partial in two ways: {dict(pending)}"
    kind = next(iter(kinds), "max" if whole.dtype == torch.bool else "sum")
    together = {*spec.axes, *pending}
    copies: dict[Coord, Tensor] = {}
    for piece, coord in zip(pieces, mesh.coords(), strict=True):
        if tuple(piece.shape) != spec.local_shape(mesh, coord):
            return f"has part {coord} of shape {list(piece.shape)}, not {list(spec.local_shape(mesh, coord))}"
        key = tuple(i for i, axis in zip(coord, mesh.names, strict=True) if axis not in together)
        out = copies.setdefault(key, torch.full_like(whole, identity(kind, whole.dtype)))
        if piece.dtype != whole.dtype:
            return f"has part {coord} of {piece.dtype}, not {whole.dtype}"
        if piece.numel():
            indices = [torch.tensor(i, dtype=torch.int64) for i in spec.indices(mesh, coord)]
            at = torch.meshgrid(*indices, indexing="ij") if indices else ()
            out[at] = reduce([out[at], piece], kind)
    return next((f"{d} on ranks {key}" if key else d for key, out in copies.items() if (d := differs(out, whole))), "")


def reduce(tensors: Sequence[Tensor], kind: str) -> Tensor:
    """The sum, maximum or minimum of the parts of a partial value."""
    function: Callable[[Tensor, Tensor], Tensor] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[kind]  # type: ignore[assignment]
    out = tensors[0]
    for t in tensors[1:]:
        out = function(out, t)
    return out


def differs(a: Tensor, b: Tensor) -> str:
    """How two values differ; empty where they are equal (to rounding, for operators that are not exact)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return "" if torch.equal(a, b) else f"differs in {int((a != b).sum())} of {a.numel()} elements"
    close = torch.isclose(a, b, rtol=1e-9 if a.dtype == torch.float64 else 1e-4, atol=1e-9, equal_nan=True)
    if bool(close.all()):
        return ""
    return f"differs in {int((~close).sum())} of {a.numel()} elements, by up to {float((a - b).abs().nan_to_num().max()):.3g}"
