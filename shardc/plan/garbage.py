"""Planning makes millions of small objects that all live: looking among them for garbage would cost more with each layer."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Python's collector of cycles runs seldom in here; its thresholds are restored afterwards."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], 100_000), max(before[1], 50), max(before[2], 100))
    try:
        yield
    finally:
        gc.set_threshold(*before)
