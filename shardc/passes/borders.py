"""borders: dims that are cut inside an element of what they are viewed as (part of propagate).

Example (tp=2): ``view(x: [8, 18@tp], [8, 3, 6])`` cuts the second of three heads. Either the borders move to whole heads,
``[8, 3@tp·6]``, which leaves ranks with two and one, or ``x`` is gathered. Propagate tries both where there is such a dim, and
keeps the program that sends less; the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardc.options import TIME
from shardc.passes.factors import uneven
from shardc.passes.graphs import reshard
from shardc.plan.fold import fold
from shardc.plan.text import size
from shardc.program import Program
from shardc.reshard import reshard as steps_between
from shardc.rules.rule import WHOLE, Rule
from shardc.spec import Dim, ShardSpec, dim_axes, split_dim


@dataclass(frozen=True)
class Crossing:
    """A dim with borders inside elements of its major factor.

    Args:
        module: owner of the view.
        dim: how it lies.
        sizes: what it is viewed as.
        major: its major factor, split unevenly.
        parts: elements of it on each rank of a line.
    """

    module: str
    dim: Dim
    sizes: tuple[int, ...]
    major: Dim
    parts: tuple[int, ...]


def crossings(program: Program, module: str, rule: Rule, specs: Sequence[ShardSpec]) -> list[Crossing]:
    """The dims of an operator's operands that can be split unevenly where they cross."""
    mesh = program.mesh
    assert mesh is not None
    out = []
    for spec, factors in zip(specs, rule.operands, strict=True):
        for dim, names in zip(spec.dims, factors, strict=True) if spec.axes else ():
            sizes = [rule.sizes[f] for f in names]
            if len(names) < 2 or not dim_axes(dim) or split_dim(dim, sizes, mesh) is not None:
                continue
            parts = zip(names, uneven(dim, names, rule, mesh), strict=True)
            major = next((part for name, part in parts if dim_axes(part) and rule.kind(name) != WHOLE), None)
            if major is not None:
                line = mesh.group((0,) * len(mesh.axes), dim_axes(dim)[-1])
                held = tuple(hi - lo for lo, hi in (major[0].interval(mesh, c) for c in line))
                out.append(Crossing(module, dim, tuple(sizes), major, held))
    return out


def sent(program: Program) -> int:
    """Bytes that a rank sends in a step, by the reshards of a propagated program."""
    mesh = program.mesh
    assert mesh is not None
    total = 0
    for node in program.graph.nodes:
        if node.target is reshard:
            (source,) = node.all_input_nodes
            moves = steps_between(program.spec(source), program.spec(node), mesh)
            total += sum(s.nbytes(program.type(node).dtype, mesh) for s in moves if s.axis != TIME)
    return total


def notes(found: Iterable[Crossing], split: bool, chosen: int, other: int) -> list[str]:
    """Lines for the plan, equal layers folded.

    Args:
        split: whether the borders were moved.
        chosen, other: bytes sent in a step so, and the other way.
    """
    kinds = {(c.module, (c.dim, c.sizes)): c for c in found}
    each = list(kinds.values())
    lines = []
    for row in fold((c.module, (c.dim, c.sizes)) for c in each):
        c = each[row.members[0]]
        what = f"{'·'.join(map(str, c.dim))} seen as {list(c.sizes)} in {row.path or 'the step'}"
        parts = f"{'·'.join(map(str, c.major))}, parts of {', '.join(map(str, c.parts))}"
        if split:
            lines.append(f"uneven: {what}: {parts}; {size(chosen)} sent in a step, {size(other)} if it were gathered")
        else:
            lines.append(f"gathered: {what}; {size(chosen)} sent in a step, {size(other)} if split as {parts}")
    return lines
