"""Time of operators (roofline) and collectives (alpha-beta)."""

from __future__ import annotations

import torch

from shardc.cost.devices import DeviceProfile
from shardc.mesh import Mesh
from shardc.reshard import Step


def compute_seconds(device: DeviceProfile, flops: int, nbytes: int, dtype: torch.dtype, matmul: bool) -> float:
    """Roofline: the slower of arithmetic and memory traffic, and never less than a launch.

    Args:
        flops: operations.
        nbytes: bytes read and written.
        dtype: of the result.
        matmul: a matrix product (runs at the dtype's peak); other arithmetic runs at the float32 rate.
    """
    rate = device.peak(dtype) * device.matmul_efficiency if matmul else device.peak(torch.float32)
    return max(device.launch, flops / rate, nbytes / (device.memory_bandwidth * device.memory_efficiency))


def collective_seconds(device: DeviceProfile, step: Step, nbytes: int, mesh: Mesh) -> float:
    """Ring: (N - 1) hops of latency (twice that for an all-reduce) and `nbytes` over the slowest link of the ring.

    Args:
        nbytes: what each rank sends (`Step.nbytes`).
    """
    n = mesh.axes[step.axis]
    if step.kind == "slice" or n == 1:
        return 0.0
    far = crosses_nodes(mesh, step.axis, device.node)
    bandwidth, latency = (device.far_link, device.far_latency) if far else (device.link, device.latency)
    hops = (2 if step.kind == "all_reduce" else 1) * (n - 1)
    return hops * latency + nbytes / (bandwidth * device.link_efficiency)


def crosses_nodes(mesh: Mesh, axis: str, node: int) -> bool:
    """Whether the ranks of one line of `axis` lie on several nodes of `node` devices; later axes are neighbours."""
    stride = 1
    for name, size in reversed(mesh.axes.items()):
        if name == axis:
            return stride * size > node
        stride *= size
    raise AssertionError(f"mesh {mesh} has no axis {axis}")  # pragma: no cover
