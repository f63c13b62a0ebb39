"""Sharded checkpoints: `save` and `load` of a compiled step's state, on torch.distributed.checkpoint."""

from shardc.checkpoint.restore import Loading
from shardc.checkpoint.steps import load, save
from shardc.checkpoint.write import Saving

__all__ = ["Loading", "Saving", "load", "save"]
