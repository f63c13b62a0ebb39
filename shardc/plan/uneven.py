"""State and inputs whose split leaves ranks with parts of different sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardc.instructions import Input, Instruction
from shardc.mesh import Mesh
from shardc.program import Slot
from shardc.spec import ShardSpec


@dataclass(frozen=True)
class Uneven:
    """A tensor that is not split into equal parts.

    Args:
        name: slot or input path.
        spec: its layout.
        largest, smallest: elements of the largest and the smallest part.
        bytes: of the largest part beyond an even split.
    """

    name: str
    spec: ShardSpec
    largest: int
    smallest: int
    bytes: int


def find_uneven(slots: Mapping[str, Slot], code: Iterable[Instruction], mesh: Mesh) -> tuple[Uneven, ...]:
    """The uneven ones among storage and inputs, in order."""
    held = [(s.path, s.storage, s.type.dtype) for s in slots.values()]
    held += [(i.path, i.out.spec, i.out.dtype) for i in code if isinstance(i, Input) and i.out.dtype is not None]
    out = []
    memo: dict[ShardSpec, tuple[int, int]] = {}
    for name, spec, dtype in held:
        if spec is None or dtype is None or not spec.axes:
            continue
        if spec not in memo:
            first, last = (0,) * len(mesh.axes), tuple(n - 1 for n in mesh.shape)
            memo[spec] = math.prod(spec.local_shape(mesh, first)), math.prod(spec.local_shape(mesh, last))
        largest, smallest = memo[spec]
        if largest != smallest:
            even = math.prod(spec.shape) / math.prod(mesh.axes[a] for a in spec.axes)
            out.append(Uneven(name, spec, largest, smallest, math.ceil((largest - even) * dtype.itemsize)))
    return tuple(out)
