"""Which Python objects are walked and copied attribute by attribute, and which are atoms."""

from __future__ import annotations

import enum
import sys
import zlib
from collections.abc import Hashable, Iterator
from typing import Any

import numpy
import torch

ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Immutable, and equal to what they are equal to: their value is part of what a program is captured under."""
STDLIB = frozenset(sys.stdlib_module_names) - {"__main__"} | {"numpy", "builtins", "shardc"}


def descends(cls: type) -> bool:
    """Whether objects of a class are walked and copied attribute by attribute: modules, and Python classes outside the standard
    library."""
    if issubclass(cls, torch.nn.Module):
        return True
    root = cls.__module__.split(".", 1)[0]
    if root == "torch":
        return cls.__module__.startswith(("torch.optim", "torch.nn", "torch.amp", "torch.cuda.amp"))
    return root not in STDLIB and bool(cls.__flags__ & (1 << 9))


def value_of(obj: Any) -> Hashable:
    """What tells an object that is not walked from others of its class: itself where it is compared by value or is called, a
    digest of an array; None where nothing does."""
    if isinstance(obj, numpy.ndarray) and obj.dtype != object:
        return obj.shape, str(obj.dtype), zlib.crc32(numpy.ascontiguousarray(obj).tobytes())
    if isinstance(obj, bytearray):
        return zlib.crc32(obj)
    if isinstance(obj, slice):
        return repr(obj)
    identity: Any = object.__hash__
    by_value = type(obj).__hash__ is not identity
    try:
        hash(obj)
    except TypeError:
        return None
    return obj if by_value or callable(obj) else None


def attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    """Instance attributes, from ``__dict__`` and ``__slots__``."""
    yield from getattr(obj, "__dict__", {}).items()
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield name, getattr(obj, name)
