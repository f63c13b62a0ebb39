"""Rows that data selects: their number is known when the tensor is there (see `shardc.capture.sizes`).

In a plan the size of such a dim is a prime that stands for it. Each rank has its own number of rows, and nothing ever moves
between dims or ranks along them; ranks that hold the same rows may exchange other dims, or add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardc.instructions import Compute, Instruction, outs_of
from shardc.mesh import Coord, Mesh
from shardc.reshard import Step
from shardc.rows import rows_in
from shardc.runtime.comm import Move
from shardc.spec import Factor, ShardSpec, dim_size

NONZERO = "shardc.nonzero_part.default"
SIZE = "aten.sym_size.int"


class Ragged:
    """The sizes of a plan that stand for numbers of rows."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        found = (outs_of(i)[0].spec for i in instructions if isinstance(i, Compute) and i.op == NONZERO)
        self.primes = frozenset(dim_size(spec.dims[0]) for spec in found if spec is not None)

    def dims(self, spec: ShardSpec | None) -> tuple[int, ...]:
        """The dims of a tensor that have such a size."""
        if not self.primes or spec is None:
            return ()
        return tuple(k for k, n in enumerate(spec.shape) if rows_in(n, self.primes))

    def fits(self, shape: Sequence[int], planned: Sequence[int], spec: ShardSpec) -> bool:
        """Whether a shape is the planned one, but for such dims."""
        free = self.dims(spec)
        return len(shape) == len(planned) and all(
            k in free or n == m for k, (n, m) in enumerate(zip(shape, planned, strict=True))
        )

    def move(self, step: Step, dtype: torch.dtype, mesh: Mesh, coord: Coord, x: Tensor) -> Move:
        """The move of a step whose operand has such dims: they count as they are, the same on all ranks that take part."""
        free = self.dims(step.src)

        def held(spec: ShardSpec) -> ShardSpec:
            return ShardSpec(tuple((Factor(x.shape[k]),) if k in free else d for k, d in enumerate(spec.dims)), spec.partial)

        return Move(Step(step.kind, step.axis, held(step.src), held(step.dst), step.op), dtype, mesh, coord)
