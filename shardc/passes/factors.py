"""From a rule and the layout of operands to the layout of an operator call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.mesh import Mesh
from shardc.passes.graphs import typed
from shardc.program import Program
from shardc.reshard import reshard
from shardc.rules import rule_for
from shardc.rules.rule import WHOLE, Factors, Rule, Start
from shardc.spec import Dim, Factor, ShardSpec, canonical_dim, dim_axes, join_dims, split_dim


def rule_of(program: Program, node: fx.Node) -> Rule:
    """The factor rule of a node.

    Raises:
        RuleError: naming the operator, the owner module and the user's line.
    """
    args, kwargs = typed(program.info, node.args), typed(program.info, dict(node.kwargs))
    info = program.info[node]
    try:
        return rule_for(node.target, args, kwargs, info.type)  # type: ignore[arg-type]
    except ShardcError as e:
        raise type(e)(e.what, where=info.where or e.where, hint=e.hint) from e


def choose(
    rule: Rule,
    specs: Sequence[ShardSpec],
    busy: set[str],
    mesh: Mesh,
    first: Mapping[str, Dim] | None = None,
    pinned: Collection[int] = (),
    split_unevenly: bool = True,
) -> tuple[dict[str, Dim], str]:
    """How each factor is split, given how the operands lie; and why, in words.

    Args:
        busy: axes over which a reduction stays pending; they cannot split a factor.
        first: factors whose split is decided: operands are moved to fit.
        pinned: positions of operands that lie as the user pinned them: the others are moved, whatever their size.
        split_unevenly: whether a dim that is cut inside its elements may move its borders; else it is gathered.
    """
    weight: dict[tuple[str, Dim], tuple[bool, int]] = {}
    runs = in_runs(rule)
    for k, (spec, factors) in enumerate(zip(specs, rule.operands, strict=True)):
        if not spec.axes:
            continue
        size = math.prod(spec.shape)
        for dim, names in zip(spec.dims, factors, strict=True):
            if not names or not dim_axes(dim):
                continue
            parts = (dim,) if len(names) == 1 else split_dim(dim, [rule.sizes[f] for f in names], mesh)
            if parts is None and split_unevenly:
                parts = uneven(dim, names, rule, mesh)
            for name, part in zip(names, parts or (), strict=False):
                if name in runs and any(f.axes for f in part[1:]):
                    continue
                if dim_axes(part) and rule.kind(name) != WHOLE:
                    key = (name, canonical_dim(part, mesh))
                    by_user, sum_ = weight.get(key, (False, 0))
                    weight[key] = (by_user or k in pinned, sum_ + max(size, 1))
    split = dict(first or {})
    used = busy.union(*map(dim_axes, split.values()))
    for name, dim in sorted(weight, key=lambda key: weight[key], reverse=True):
        mine = split.get(name, ())
        shared = {a for other, d in split.items() if (name, other) in rule.tied for a in dim_axes(d)}
        taken = frozenset(used - shared - set(dim_axes(mine)))
        left = canonical_dim(tuple(replace(f, axes=_before(f.axes, taken)) for f in dim), mesh)
        if dim_axes(left) and (not mine or is_free(ShardSpec((mine,)), ShardSpec((left,)), mesh)):  # what is cut finer stays so
            split[name] = left
            used |= set(dim_axes(left))
    return split, ", ".join(f"factor {name} over {','.join(dim_axes(dim))}" for name, dim in split.items())


def in_runs(rule: Rule) -> set[str]:
    """The factors of dims of which an operator is told where a rank's part begins: it has to be one run of elements."""
    out: set[str] = set()
    for how in rule.sized.values():
        for start in how if isinstance(how, tuple) else (how,):
            if isinstance(start, Start):
                tensors = rule.results if start.of_result else rule.operands
                out.update((tensors[start.tensor] or ())[start.dim])
    return out


def uneven(dim: Dim, names: Sequence[str], rule: Rule, mesh: Mesh) -> tuple[Dim, ...]:
    """How a dim is split whose parts end inside elements of its major factor (9 numbers of heads of 6): by whole elements of
    that, unevenly, if moving there and back sends less than gathering the dim; else not at all."""
    sizes = [rule.sizes[f] for f in names]
    parts = [(Factor(n),) for n in sizes]
    major = next(k for k, n in enumerate(sizes) if n > 1 or k == len(sizes) - 1)
    parts[major] = (Factor(sizes[major], dim_axes(dim)),)
    here, there = ShardSpec((dim,)), ShardSpec((join_dims(parts),)).canonical(mesh)
    gathered = _elements(here, ShardSpec.replicated(here.shape), mesh)
    if major == len(sizes) - 1 or _elements(here, there, mesh) + _elements(there, here, mesh) >= gathered:
        parts[major] = (Factor(sizes[major]),)
    return tuple(parts)


def _elements(src: ShardSpec, dst: ShardSpec, mesh: Mesh) -> int:
    """What a rank sends from one layout to another, in elements."""
    return sum(step.nbytes(torch.uint8, mesh) for step in reshard(src, dst, mesh))


def required(factors: Factors, rule: Rule, split: dict[str, Dim], mesh: Mesh) -> ShardSpec:
    """The spec of a tensor whose dims are made of `factors`."""
    dims = [join_dims(split.get(f, (Factor(rule.sizes[f]),)) for f in names) for names in factors]
    return ShardSpec(tuple(dims)).canonical(mesh)


def result_specs(rule: Rule, split: dict[str, Dim], partial: set[tuple[str, str]], mesh: Mesh) -> list[ShardSpec | None]:
    """Specs of the results: split as the factors are, partial over what was summed, and over what came in partial."""
    out: list[ShardSpec | None] = []
    for factors in rule.results:
        if factors is None:
            out.append(None)
            continue
        here = {f for names in factors for f in names}
        gone = {(a, rule.kind(f)) for f, dim in split.items() if f not in here for a in dim_axes(dim)}
        pending = {(a, "sum" if kind not in ("max", "min") else kind) for a, kind in gone if kind != "pass"} | partial
        out.append(required(factors, rule, split, mesh).with_partial(pending).canonical(mesh))
    return out


def split_of_result(rule: Rule, spec: ShardSpec, mesh: Mesh) -> dict[str, Dim] | None:
    """How the factors are split where the one result lies as `spec`; None where it cannot."""
    factors = rule.results[0]
    assert factors is not None
    split: dict[str, Dim] = {}
    runs = in_runs(rule)
    for dim, names in zip(spec.dims, factors, strict=True):
        if not dim_axes(dim):
            continue
        parts = split_dim(dim, [rule.sizes[f] for f in names], mesh) if names else None
        if parts is None:
            return None
        for name, part in zip(names, parts, strict=True):
            if dim_axes(part):
                if rule.kind(name) == WHOLE or name in runs and any(f.axes for f in part[1:]):
                    return None
                split[name] = part
    return split


def made_factors(
    rule: Rule, results: Sequence[ShardSpec | None], mesh: Mesh, taken: frozenset[str] = frozenset()
) -> dict[str, Dim]:
    """How the factors that no operand has (of constants, of expanded dims, of the rows of a table) are split, given how the
    results lie or will rest; over axes that are not `taken`."""
    given = {f for factors in rule.operands for names in factors for f in names}
    out: dict[str, Dim] = {}
    for spec, factors in zip(results, rule.results, strict=True):
        for dim, names in zip(spec.dims, factors, strict=True) if spec is not None and factors is not None else ():
            if not dim_axes(dim) or given.issuperset(names):
                continue
            for name, part in zip(names, split_dim(dim, [rule.sizes[f] for f in names], mesh) or (), strict=False):
                if name in given or name in out or rule.kind(name) == WHOLE:
                    continue
                kept = tuple(replace(f, axes=_before(f.axes, taken)) for f in part)
                if dim_axes(kept):
                    out[name] = kept
                    taken |= set(dim_axes(kept))
    return out


def _before(axes: tuple[str, ...], taken: frozenset[str]) -> tuple[str, ...]:
    """The major axes up to the first one that is taken."""
    stop = next((k for k, a in enumerate(axes) if a in taken), len(axes))
    return axes[:stop]


def is_free(src: ShardSpec, dst: ShardSpec, mesh: Mesh) -> bool:
    """Whether `dst` is had from `src` by slicing alone."""
    return all(step.kind == "slice" for step in reshard(src, dst, mesh))
