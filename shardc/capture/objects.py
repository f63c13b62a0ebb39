"""Which Python objects are walked and copied attribute by attribute, and which are atoms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
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


def attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    """Instance attributes, from ``__dict__`` and ``__slots__``."""
    yield from getattr(obj, "__dict__", {}).items()
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield name, getattr(obj, name)
