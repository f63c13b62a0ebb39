"""A cheap number for the bytes of a tensor: to compare replicas on different ranks, and to see whether a value changed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_ROW = 1021
"""Words in a row: prime, so that equal elements that trade places seldom fall into the same column."""


def fingerprint(t: Tensor) -> int:
    """An int64 that depends on every bit and (but for multiples of 1021 words) on its position; NaNs count by their bits.

    One pass over the memory; non-contiguous tensors are copied first.
    """
    with torch.no_grad():
        flat = t.detach().contiguous().resolve_conj().resolve_neg().view(-1)
        if flat.numel() == 0:
            return 0
        raw = flat.view(torch.uint8)
        words = raw.view(torch.int32) if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw
        rows = words.numel() // _ROW
        columns = words[: rows * _ROW].view(rows, _ROW).sum(0, dtype=torch.int64)
        mix = hashlib.blake2b(columns.cpu().numpy().tobytes(), digest_size=8)
        mix.update(words[rows * _ROW :].cpu().numpy().tobytes())
        return int.from_bytes(mix.digest(), "little", signed=True)
