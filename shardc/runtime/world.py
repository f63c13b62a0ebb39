"""The ranks of a mesh as processes: who this one is, its device, and the process groups along the axes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardc.errors import MeshError
from shardc.mesh import Coord, Mesh


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process on a mesh.

    Args:
        mesh: resolved, without -1; rank r of the default group is rank r of the mesh.
        rank: of this process.
        device: where its state lives.
        device_mesh: torch's view of the mesh; None where there is no process group (one rank, or a simulated mesh).
    """

    mesh: Mesh
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None = None
    _joint: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict, repr=False)

    @property
    def coord(self) -> Coord:
        return self.mesh.coord(self.rank)

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.mesh.size if self.distributed else 1

    @property
    def distributed(self) -> bool:
        return self.device_mesh is not None

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in `axis` alone.

        Raises:
            MeshError: no such axis, or no process group at all.
        """
        self.mesh.index(axis)
        return self._torch_mesh().get_group(axis)

    def members(self, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from this one in `axes` alone, the first axis the slowest to vary."""
        coords = [self.coord]
        for axis in axes:
            coords = [c for coord in coords for c in self.mesh.group(coord, axis)]
        return [self.mesh.rank(c) for c in coords]

    def joint(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """The group of `members(axes)`. All ranks call it in the same order: a group is made on first use."""
        key = tuple(sorted((a for a in axes if self.mesh.axes[a] > 1), key=self.mesh.index))
        if len(key) == 1 or not key:
            return self.group(key[0] if key else axes[0])
        if key not in self._joint:
            lines = {tuple(sorted(self._line(rank, key))) for rank in range(self.mesh.size)}
            for line in sorted(lines):  # every rank takes part in making every group
                group = dist.new_group(list(line))
                if self.rank in line:
                    self._joint[key] = group
        return self._joint[key]

    def _line(self, rank: int, axes: Sequence[str]) -> list[int]:
        return Ranks(self.mesh, rank, self.device).members(axes)

    def _torch_mesh(self) -> DeviceMesh:
        if self.device_mesh is None:
            raise MeshError(f"mesh {self.mesh} has no process groups in this process", hint="start the script with torchrun")
        return self.device_mesh

    @property
    def host_device(self) -> torch.device:
        """Where small vectors that all ranks exchange live: the CPU if the default group can talk from there."""
        return torch.device("cpu") if "cpu" in backends() else self.device

    @staticmethod
    def of(device_mesh: DeviceMesh) -> Ranks:
        """The ranks behind the mesh of a DTensor.

        Raises:
            MeshError: a mesh without axis names, or that is not the whole world in rank order.
        """
        names = device_mesh.mesh_dim_names
        if not names:
            raise MeshError(f"a device mesh of shape {tuple(device_mesh.shape)} without axis names",
                            hint="init_device_mesh(..., mesh_dim_names=(...))")  # fmt: skip
        if device_mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            raise MeshError(f"device mesh {device_mesh} does not hold all {dist.get_world_size()} ranks in order",
                            hint="give shardc tensors of the mesh that its step runs on")  # fmt: skip
        mesh = Mesh(dict(zip(names, device_mesh.shape, strict=True)), device=device_mesh.device_type)
        return Ranks(mesh, dist.get_rank(), _local_device(device_mesh.device_type), device_mesh)


def backends() -> list[str]:
    """Device types that the default process group can talk from: ["cpu"], ["cuda"] or both."""
    return [part.split(":")[0] for part in dist.get_backend_config().split(",")]


def setup(mesh: Mesh, near: Iterable[torch.Tensor] = ()) -> Ranks:
    """Place this process on `mesh`.

    Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) the default process group is made if the user has not: nccl for
    cuda, gloo for cpu. Without torchrun, and on a simulated mesh, there is one process and no process group.

    Args:
        mesh: with sizes, one may be -1.
        near: tensors of the user's state; if one is a DTensor of such a mesh, its groups are used again.

    Raises:
        MeshError: the mesh does not hold as many ranks as the world; a device that is not here.
    """
    kind = mesh.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if mesh.simulated:
        if -1 in mesh.shape:
            raise MeshError(f"simulated mesh {mesh} has an axis of size -1", hint="give all sizes: there is no world to fill")
        return Ranks(mesh, 0, _local_device(kind))
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not dist.is_initialized() and not started:
        resolved = mesh.resolve(1)
        return Ranks(resolved, 0, _local_device(kind))
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    resolved = mesh.resolve(world)  # before anything is started
    if dist.is_initialized() and kind not in backends():
        if mesh.device is not None:
            raise MeshError(
                f"the mesh is on {kind}, the default process group talks from {', '.join(backends())} only",
                hint=f"init_process_group('{'nccl' if kind == 'cuda' else 'gloo'}'), or leave that to shardc",
            )
        kind = backends()[0]
    device = _local_device(kind)
    if not dist.is_initialized():
        if kind == "cuda":
            torch.cuda.set_device(device)
        _start_group(kind, device)
    for t in near:
        there = t.device_mesh if isinstance(t, DTensor) else None
        if there is not None and (there.mesh_dim_names, tuple(there.shape)) == (resolved.names, resolved.shape):
            return Ranks(resolved, dist.get_rank(), device, there)
    torch_mesh = init_device_mesh(kind, resolved.shape, mesh_dim_names=resolved.names)
    return Ranks(resolved, dist.get_rank(), device, torch_mesh)


def _start_group(kind: str, device: torch.device) -> None:
    """Make the default group. Restarted workers of one host meet under keys of their own: torchrun's store still has those of
    the attempt before, and a rank that reads the address of a dead one waits in vain."""
    backend, device_id = "nccl" if kind == "cuda" else "gloo", device if kind == "cuda" else None
    attempt, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ["WORLD_SIZE"]
    # On several hosts the agents count their restarts apart, so the number is no common key there.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("LOCAL_WORLD_SIZE") == world
    if attempt == "0" or not shared:
        dist.init_process_group(backend, device_id=device_id)
        return
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"attempt_{attempt}", agent)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=int(world), device_id=device_id)


def _local_device(kind: str) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise MeshError("the mesh is on cuda, this process sees no CUDA device", hint='Mesh(..., device="cpu")')
    index = int(os.environ.get("LOCAL_RANK", 0))
    if index >= torch.cuda.device_count():
        raise MeshError(
            f"rank wants cuda:{index}, this host has {torch.cuda.device_count()} CUDA devices",
            hint=f"torchrun --nproc-per-node {torch.cuda.device_count()}, or Mesh(..., device='cpu')",
        )
    return torch.device("cuda", index)
