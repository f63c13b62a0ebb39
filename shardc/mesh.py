"""Device meshes: ordered, named axes with sizes. Logical; needs no process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardc.errors import MeshError

Coord = tuple[int, ...]
"""Position of a rank in a mesh: one index for each axis, in the order of the axes."""


class Mesh:
    """Named device axes, the first one the slowest to vary with the rank.

    Args:
        axes: axis name -> size; one size may be -1 ("as many as there are ranks").
        simulated: run all ranks inside this process.
        device: "cpu" or "cuda"; by default that of the process.
        profile: name of a hardware profile ("H100") used for predictions.
        **named: axes as keywords: ``Mesh(dp=4, tp=2)``.

    Raises:
        MeshError: no axis, a size that is not a positive int, or more than one -1.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        *,
        simulated: bool = False,
        device: str | None = None,
        profile: str | None = None,
        **named: int,
    ) -> None:
        both = {**(axes or {}), **named}
        if not both:
            raise MeshError("a mesh needs at least one axis", hint='Mesh(dp=2) or mesh={"dp": 2}')
        for name, size in both.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"axis name {name!r} is not an identifier")
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise MeshError(f"axis {name!r} has size {size!r}", hint="a positive int, or -1 for one axis")
        if sum(size == -1 for size in both.values()) > 1:
            raise MeshError(f"more than one axis of size -1 in {both}", hint="at most one axis may be -1")
        self.axes: dict[str, int] = both
        self.simulated, self.device, self.profile = simulated, device, profile
        self.memo: dict[Any, Any] = {}

    @property
    def kind(self) -> str:
        """Kind of the devices: "cpu" or "cuda"."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu")).type

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def resolve(self, world: int) -> Mesh:
        """The same mesh with its -1 replaced so that it holds `world` ranks.

        Raises:
            MeshError: `world` is not a multiple of the other axes, or not the mesh's size.
        """
        known = math.prod(size for size in self.shape if size != -1)
        fits = world % known == 0 if -1 in self.shape else world == known
        if not fits:
            raise MeshError(
                f"mesh {self} holds {known}{' x n' if -1 in self.shape else ''} ranks, the world has {world}",
                hint=f"torchrun --nproc-per-node {known}, or a mesh whose sizes multiply to {world}",
            )
        return self.like({name: world // known if size == -1 else size for name, size in self.axes.items()})

    def like(self, axes: Mapping[str, int]) -> Mesh:
        """A mesh of other axes, on the same kind of device."""
        return Mesh(axes, simulated=self.simulated, device=self.device, profile=self.profile)

    def coords(self) -> Iterator[Coord]:
        """Coordinates of all ranks, in rank order."""
        return itertools.product(*(range(size) for size in self.shape))

    def coord(self, rank: int) -> Coord:
        out = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            out.append(index)
        return tuple(reversed(out))

    def rank(self, coord: Coord) -> int:
        out = 0
        for index, size in zip(coord, self.shape, strict=True):
            out = out * size + index
        return out

    def index(self, axis: str) -> int:
        """Position of an axis in a coordinate.

        Raises:
            MeshError: the mesh has no such axis.
        """
        if axis not in self.axes:
            raise MeshError(f"unknown mesh axis {axis!r}", hint=f"the axes of this mesh are {', '.join(self.axes)}")
        return list(self.axes).index(axis)

    def group(self, coord: Coord, axis: str) -> list[Coord]:
        """The coordinates that differ from `coord` in `axis` alone, in order."""
        k = self.index(axis)
        return [(*coord[:k], i, *coord[k + 1 :]) for i in range(self.axes[axis])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self.axes.items()) == list(other.axes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes.items())

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in self.axes.items())}{', simulated=True' * self.simulated})"
