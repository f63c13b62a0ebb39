"""Hardware profiles: what a device and its links can do. Rates are the vendors' dense peaks; efficiencies turn them into what
large kernels and collectives reach.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardc.errors import PlanError
from shardc.mesh import Mesh

_F64, _F32, _BF16, _F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device and the links between devices.

    Args:
        name: as in ``Mesh(profile="H100")``.
        flops: dtype -> peak multiply-add operations per second, counted as two (dense; tensor cores where torch uses them).
        memory_bytes: capacity.
        memory_bandwidth: bytes per second.
        launch: seconds that an operator costs however small it is.
        node: devices that share the fast link.
        link, latency: bytes per second (one direction) and seconds per hop inside a node.
        far_link, far_latency: between nodes, for each device.
        host_link: bytes per second between device and host memory (one direction).
        host_bandwidth: bytes per second of the host's memory, for this device's share of its cores.
        disk: bytes per second from or to this device's share of the local disks.
        matmul_efficiency, memory_efficiency, link_efficiency: reached share of the peaks.
    """

    name: str
    flops: dict[torch.dtype, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    launch: float
    node: int
    link: float
    latency: float
    far_link: float
    far_latency: float
    host_link: float
    host_bandwidth: float
    disk: float
    matmul_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8

    def peak(self, dtype: torch.dtype) -> float:
        """Operations per second for a dtype; integers and unknown types count as float32."""
        return self.flops.get(dtype, self.flops[_F32])


PROFILES: dict[str, DeviceProfile] = {
    # One core of a server CPU, gloo over shared memory; `shardc calibrate` measures the machine at hand.
    "cpu": DeviceProfile(
        "cpu", {_F64: 2.5e10, _F32: 5e10, _BF16: 2.5e10, _F16: 1e10}, 16 * 2**30, 8e9, 4e-6, 64, 1.5e9, 6e-5, 1e9, 2e-4,
        4e9, 8e9, 1e9,
    ),
    # NVIDIA A100 SXM4 80 GB: NVLink 3 300 GB/s each way, 200 Gb/s a device between nodes. float32 without TF32.
    "A100": DeviceProfile(
        "A100", {_F64: 19.5e12, _F32: 19.5e12, _BF16: 312e12, _F16: 312e12},
        80 * 10**9, 2.04e12, 5e-6, 8, 300e9, 3e-6, 25e9, 1.2e-5, 25e9, 5e10, 2e9,
    ),
    # NVIDIA H100 SXM5: NVLink 4 450 GB/s each way, 400 Gb/s a device between nodes.
    "H100": DeviceProfile(
        "H100", {_F64: 67e12, _F32: 67e12, _BF16: 989e12, _F16: 989e12},
        80 * 10**9, 3.35e12, 5e-6, 8, 450e9, 3e-6, 50e9, 1e-5, 50e9, 7e10, 3e9,
    ),
    # NVIDIA H200 SXM: an H100 with more and faster memory.
    "H200": DeviceProfile(
        "H200", {_F64: 67e12, _F32: 67e12, _BF16: 989e12, _F16: 989e12},
        141 * 10**9, 4.8e12, 5e-6, 8, 450e9, 3e-6, 50e9, 1e-5, 50e9, 7e10, 3e9,
    ),
}  # fmt: skip


def profile_of(mesh: Mesh) -> DeviceProfile:
    """The profile that a mesh asks for; "H100" for cuda and "cpu" else, where it names none.

    Raises:
        PlanError: an unknown profile.
    """
    name = mesh.profile or ("H100" if mesh.device is not None and mesh.device.startswith("cuda") else "cpu")
    for known, out in PROFILES.items():
        if known.lower() == name.lower():
            return out
    raise PlanError(f"unknown hardware profile {name!r}", hint=f"one of {', '.join(PROFILES)}")
