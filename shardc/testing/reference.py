"""A reference executor for reshard steps that is short enough to trust by reading: numpy, one array for each rank.

Every step is executed from the index sets of its two specs alone. What a rank needs and no rank of its group has, or what
two ranks hold differently where they should be equal, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from shardc.errors import SpecError
from shardc.mesh import Coord, Mesh
from shardc.reshard import Step
from shardc.spec import ShardSpec

Array = npt.NDArray[np.float64]
Parts = dict[Coord, Array]
"""The part that each rank holds: float64 of the rank's local shape."""

_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def part_of(whole: Array, spec: ShardSpec, mesh: Mesh, coord: Coord) -> Array:
    """The rank's elements of a whole value of `spec`'s global shape."""
    return np.array(whole[np.ix_(*spec.indices(mesh, coord))], dtype=np.float64)


def shards(whole: Array, spec: ShardSpec, mesh: Mesh, seed: int = 0) -> Parts:
    """The parts of a value. Where `spec` is partial, ranks hold different contributions whose reduction is `whole`."""
    rng = np.random.default_rng(seed)
    values: dict[tuple[int, ...], Array] = {(): whole}  # contributions, by coordinate along the partial axes
    for axis, op in spec.partial:
        values = {(*c, i): v for c, old in values.items() for i, v in enumerate(_contributions(old, op, mesh.axes[axis], rng))}
    where = [mesh.index(axis) for axis in spec.partial_axes]
    return {c: part_of(values[tuple(c[k] for k in where)], spec, mesh, c) for c in mesh.coords()}


def _contributions(whole: Array, op: str, n: int, rng: np.random.Generator) -> list[Array]:
    """`n` integer-valued arrays whose reduction is `whole`, none of them equal to it in general."""
    noise = [np.asarray(rng.integers(1, 50, whole.shape), dtype=np.float64) for _ in range(n)]
    if op == "sum":
        return [*noise[1:], whole - sum(noise[1:])] if n > 1 else [whole]
    winner = np.asarray(rng.integers(0, n, whole.shape))
    return [np.where(winner == i, whole, whole - x if op == "max" else whole + x) for i, x in enumerate(noise)]


def run_steps(parts: Mapping[Coord, Array], steps: Iterable[Step], mesh: Mesh) -> Parts:
    """The parts after all steps.

    Raises:
        SpecError: a part that does not have the shape its spec says, or a step that its index sets do not allow.
    """
    now = dict(parts)
    for step in steps:
        now = run_step(now, step, mesh)
    return now


def run_step(parts: Mapping[Coord, Array], step: Step, mesh: Mesh) -> Parts:
    """One step. Raises as `run_steps`."""
    for c, x in parts.items():
        shape = step.src.local_shape(mesh, c)
        if x.shape != shape:
            raise SpecError(f"rank {c} holds {list(x.shape)}, {step.src} has {list(shape)}", where=str(step))
    return {c: _received(parts, step, mesh, c) for c in mesh.coords()}


def _received(parts: Mapping[Coord, Array], step: Step, mesh: Mesh, coord: Coord) -> Array:
    group = [coord] if step.kind == "slice" else mesh.group(coord, step.axis)
    reducing = step.kind in ("all_reduce", "reduce_scatter")
    whole = np.full(step.src.shape, np.nan)
    for c in group:
        at = np.ix_(*step.src.indices(mesh, c))
        if reducing:
            if step.src.indices(mesh, c) != step.src.indices(mesh, coord):
                raise SpecError(f"{step.kind} between ranks that hold different elements: {coord} and {c}", where=str(step))
            whole[at] = parts[c] if c == group[0] else _REDUCE[step.op](whole[at], parts[c])
        else:
            if not np.all(np.isnan(whole[at]) | (whole[at] == parts[c])):
                raise SpecError(f"ranks of the group of {coord} hold different values of one element", where=str(step))
            whole[at] = parts[c]
    out = part_of(whole, step.dst, mesh, coord)
    if np.isnan(out).any():
        raise SpecError(f"rank {coord} needs elements that no rank of its group holds", where=str(step))
    return out
