"""What a compiled step has to know of the arguments of a call."""

from __future__ import annotations

import dataclasses

from shardc.capture import World
from shardc.runtime.state import own_part
from shardc.runtime.tiers import tier_of
from shardc.tiers import DEVICE


def tier_now(world: World, path: str) -> str:
    """Where a slot rests now: another step may have put it there."""
    ref = world.slots.get(path)
    return tier_of(own_part(ref.get())) if ref is not None else DEVICE


def static_values(world: World) -> str:
    """The static values of a call, a line each."""
    return "\n".join(f"{path}: {value}" for path, value in world.signature.items() if path not in world.inputs)


def has_state(value: object) -> bool:
    """Whether an argument is, or holds, an object with a `state_dict`; batches are not kept beyond their call."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(has_state(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, dict):
        return any(map(has_state, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(has_state, value))
    return hasattr(value, "state_dict")
