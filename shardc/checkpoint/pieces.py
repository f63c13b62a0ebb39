"""Which rectangles of a tensor a rank holds: a checkpoint stores a tensor as such pieces, and reads any others from them.

DTensor's own view of a shard is one rectangle; a factor that is not the first of its dim (``3·8@tp``: a fused qkv split by
heads) gives several, and torch's checkpoint planner would store them in the wrong place.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc import _torch
from shardc.mesh import Coord, Mesh
from shardc.placements import from_placements
from shardc.runtime.world import Ranks
from shardc.spec import Dim, ShardSpec


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor.

    Args:
        offset, size: in the global tensor.
        at: where it starts in the rank's part.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    at: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The view of a rank's part on it."""
        for k, (at, n) in enumerate(zip(self.at, self.size, strict=True)):
            local = local.narrow(k, at, n)
        return local


def runs(dim: Dim, mesh: Mesh, coord: Coord) -> list[tuple[int, int]]:
    """The half-open ranges of global indices that `coord` holds of a dim, ascending, as few as there are."""
    out = [(0, 1)]
    for f in dim:
        lo, hi = f.interval(mesh, coord)
        if hi - lo == f.size:
            out = [(a * f.size, b * f.size) for a, b in out]
        else:
            out = [(i * f.size + lo, i * f.size + hi) for a, b in out for i in range(a, b) if hi > lo]
    return out


def pieces(spec: ShardSpec, mesh: Mesh, coord: Coord) -> tuple[Piece, ...]:
    """What `coord` holds of a tensor of `spec`; none where its part is empty."""
    dims = []
    for dim in spec.dims:
        at, row = 0, []
        for lo, hi in runs(dim, mesh, coord):
            if hi > lo:
                row.append((lo, hi - lo, at))
            at += hi - lo
        dims.append(row)
    out = []
    for combination in itertools.product(*dims):
        offset, size, start = zip(*combination, strict=True) if combination else ((), (), ())
        out.append(Piece(tuple(offset), tuple(size), tuple(start)))
    return tuple(out)


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor.

    Args:
        local: the memory itself, detached.
        shape: global.
        pieces: what of the tensor it is.
        replica, replicas: this is copy number `replica` of `replicas` with the same pieces.
    """

    local: Tensor
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replica: int = 0
    replicas: int = 1


@dataclass
class Parts:
    """Makes the `Part` of tensors; remembers the meshes that it met.

    Args:
        ranks: of the step; plain tensors are the same on all of them. None: one process.
    """

    ranks: Ranks | None
    _known: dict[int, tuple[DeviceMesh, Ranks]] = field(default_factory=dict)

    def of(self, t: Tensor) -> Part:
        """Raises `SpecError` or `MeshError` for a DTensor of a mesh or layout that is not shardc's."""
        if isinstance(t, DTensor):
            _, ranks = self._known.setdefault(id(t.device_mesh), (t.device_mesh, Ranks.of(t.device_mesh)))
            spec = from_placements(t.placements, t.shape, ranks.mesh)
            local = _torch.local_of(t).detach()
        else:
            ranks, spec, local = self.ranks, ShardSpec.replicated(t.shape), t.detach()  # type: ignore[assignment]
        if ranks is None or not ranks.distributed:
            mesh = Mesh(dp=1)
            return Part(local, tuple(t.shape), pieces(ShardSpec.replicated(t.shape), mesh, (0,)))
        replica, replicas = 0, 1
        for (axis, n), index in zip(ranks.mesh.axes.items(), ranks.coord, strict=True):
            if axis not in spec.axes:
                replica, replicas = replica * n + index, replicas * n
        return Part(local, tuple(t.shape), pieces(spec, ranks.mesh, ranks.coord), replica, replicas)
