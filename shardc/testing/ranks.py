"""What `check_processes` does on each rank: deal the batch by rows, and make whole tensors of distributed ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from shardc.testing.oracle import rows_of


def deal(tree: Any) -> Any:
    """This rank's rows of every tensor of the batch's size, in rank order; other tensors and values as they are."""
    rows = rows_of(tree)
    rank, world = dist_rank()
    return pytree.tree_map(
        lambda x: x.tensor_split(world)[rank] if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x, tree
    )


def dist_rank() -> tuple[int, int]:
    """Rank and world size; also before the process group is there (the compiled step makes it), from torchrun's variables."""
    import os

    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@torch.no_grad()
def whole(t: Tensor) -> Tensor:
    """The whole tensor, plain, on every rank. Collective.

    Parts are gathered by their offsets, not by DTensor's own redistribution, which is wrong for unevenly nested shards.
    """
    if not isinstance(t, DTensor):
        return t
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = t.to_local()
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    assert tuple(shape) == tuple(local.shape), f"local part {tuple(local.shape)}, placements say {tuple(shape)}"
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (tuple(offset), local.detach().cpu()))
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    for start, part in parts:
        if part.numel():
            out[tuple(slice(s, s + n) for s, n in zip(start, part.shape, strict=True))] = part
    return out
