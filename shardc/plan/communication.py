"""Predicted communication of a plan: how often, over which axes, how many bytes each rank sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from shardc.instructions import Collective, Instruction
from shardc.mesh import Mesh
from shardc.plan.roles import Roles
from shardc.reshard import Step

GROUPS = ("parameters", "gradients", "activations", "statistics")


@dataclass(frozen=True)
class CommunicationRow:
    """Collectives of one kind over one axis in one phase.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all.
        axis: the mesh axis.
        phase: forward, backward, update.
        count: number of collectives in a step.
        bytes: bytes that each rank sends in a step, in the ring convention (the worst rank).
        group: what is moved: parameters, gradients, activations, or statistics (scalars and sums over the batch).
        seconds: predicted time of the collectives, of which `overlap` (0 to 1) runs beside compute.
    """

    kind: str
    axis: str
    phase: str
    count: int
    bytes: int
    group: str
    seconds: float = 0.0
    overlap: float = 0.0


class Communication(Sequence[CommunicationRow]):
    """The rows, parameters and gradients first, statistics last."""

    def __init__(self, rows: Sequence[CommunicationRow]) -> None:
        self.rows = tuple(rows)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that each rank sends per step: the worst rank, ring convention, statistics included."""
        return sum(r.bytes for r in self.rows)

    @property
    def collectives(self) -> int:
        """Number of collectives in a step."""
        return sum(r.count for r in self.rows)

    def bytes_of(self, *groups: str) -> int:
        return sum(r.bytes for r in self.rows if r.group in groups)

    @overload
    def __getitem__(self, index: int) -> CommunicationRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CommunicationRow]: ...
    def __getitem__(self, index: int | slice) -> CommunicationRow | Sequence[CommunicationRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[CommunicationRow]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Communication) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:
        return f"Communication({list(self.rows)!r})"


def tally(
    instructions: Sequence[Instruction],
    mesh: Mesh,
    roles: Roles,
    seconds: dict[str, float],
) -> Communication:
    """Rows of an instruction list.

    Args:
        seconds: instruction name -> predicted time.
    """
    table: dict[tuple[str, str, str, str], list[float]] = {}
    memo: dict[tuple[Step, object], int] = {}
    for i in instructions:
        if not isinstance(i, Collective) or i.step.kind == "slice":
            continue
        assert i.out.dtype is not None, "collectives move tensors"
        key = (i.step, i.out.dtype)
        if key not in memo:
            memo[key] = i.step.nbytes(i.out.dtype, mesh)
        row = table.setdefault((roles.traffic(i), i.step.kind, i.step.axis, i.phase), [0, 0, 0.0])
        row[0] += 1
        row[1] += memo[key]
        row[2] += seconds.get(i.name, 0.0)
    order = sorted(table.items(), key=lambda item: GROUPS.index(item[0][0]))
    return Communication(
        [CommunicationRow(kind, axis, phase, int(n), int(b), group, s) for (group, kind, axis, phase), (n, b, s) in order]
    )
