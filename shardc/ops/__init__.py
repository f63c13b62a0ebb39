"""Operators of shardc: attention, and the updates of torch.optim, as one node each."""

from shardc.ops import accumulate as accumulate  # declares the operator
from shardc.ops import indexing, lookup
from shardc.ops import save_name as save_name
from shardc.ops import selection as selection
from shardc.ops.attention import sdpa, sdpa_mode
from shardc.ops.optim import INPLACE, InplaceForm, optimizer_kernels

__all__ = ["INPLACE", "InplaceForm", "indexing", "lookup", "optimizer_kernels", "sdpa", "sdpa_mode"]
