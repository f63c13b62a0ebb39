"""What the generated function of an executor calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardc import _torch
from shardc.errors import StateError
from shardc.instructions import Guard
from shardc.program import alike
from shardc.runtime.measure import describe


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, value: float | int | bool | None) -> Tensor:
    if value is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.full(shape, value, dtype=dtype, device=device)


class Differs(Exception):
    """A guard does not hold."""

    def __init__(self, guard: Guard, value: Any) -> None:
        super().__init__(guard.name)
        self.guard, self.value = guard, value


def check(guard: Guard, value: Any, trusted: int) -> None:
    if guard.index >= trusted and not alike(value, guard.expected):
        raise Differs(guard, value)


def apart(storage: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """`other`, moved off the storage of a slot that is about to be overwritten with `value`."""
    used = _torch.storage_id(storage)
    return other.clone() if _torch.storage_id(other) == used != _torch.storage_id(value) else other


def write(slots: Mapping[str, Tensor], written: dict[str, Tensor], slot: str, value: Tensor, taken: bool) -> None:
    """The slot takes the value: in its own storage if it has one; else the tensor itself, unless something else may hold
    its storage or it is a part of a larger one."""
    storage = written.get(slot, slots.get(slot))
    if storage is None:
        whole = value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
        written[slot] = value if whole and not taken else value.clone()
        return
    written[slot] = storage
    if storage is value:
        return
    if storage.shape != value.shape or storage.dtype != value.dtype:
        raise StateError(
            f"{slot} rests as {describe(storage)}, the step gives {describe(value)}",
            where=slot, hint="a state tensor that was replaced between two steps",
        )  # fmt: skip
    if _torch.storage_id(storage) == _torch.storage_id(value):
        if storage.storage_offset() == value.storage_offset() and storage.stride() == value.stride():
            return
        value = value.clone()  # another view of the same memory
    storage.copy_(value)
