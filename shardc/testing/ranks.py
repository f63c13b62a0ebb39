"""What `check_processes` does on each rank: deal the batch by rows."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor
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
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
