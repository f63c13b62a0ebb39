"""Sizes that depend on data, as programs hold them: each is a prime that stands for a number of rows (`shardc.capture.sizes`).

The primes are larger than every size that is known, so that a size is made of such rows iff one of them divides it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def rows_in(size: int, primes: Collection[int]) -> int | None:
    """The prime that a size is a multiple of, if there is one."""
    return next((p for p in primes if size and size % p == 0), None) if primes else None


def with_rows(size: int, found: Mapping[int, Any]) -> Any:
    """A size with each of its primes replaced by what was found for it."""
    prime = rows_in(size, found)
    return size if prime is None else with_rows(size // prime, found) * found[prime]
