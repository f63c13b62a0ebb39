"""Everything that a checkpoint of a step holds: found by the walk that capture uses, so that nothing is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardc.capture.names import named_values
from shardc.capture.walk import walk_world
from shardc.capture.world import World, read
from shardc.checkpoint.tree import Flat, Path, flatten, objects
from shardc.program import SlotKind

SLOT = "shardc:slot:"
"""Key prefix of state that is in no state dict: surviving gradients, tensors in lists, other attributes."""


@dataclass
class Content:
    """Args:
    objects: modules, optimizers, schedulers and others with a state dict, each with its path and its own table.
    flat: their tables together, and the slots that none of them has.
    world: the walk behind it.
    """

    objects: list[tuple[Path, Any, Flat]]
    flat: Flat
    world: World

    @property
    def slots(self) -> dict[str, Tensor]:
        """Key -> tensor of what is in no state dict."""
        return {k: t for k, t in self.flat.tensors.items() if k.startswith(SLOT)}


def collect(arguments: Mapping[str, Any], fn: Callable[..., Any], kept: frozenset[str] = frozenset()) -> Content:
    """The state of the step `fn` for arguments by name. Non-persistent buffers are left out, as in `state_dict()`.

    Args:
        kept: paths of tensors in arguments that are state, see `World.kept`.

    Raises:
        StateError: two entries of one name.
    """
    world = walk_world(dict(arguments), named_values(fn), index=True, kept=kept)
    found: list[tuple[Path, Any, Flat]] = []
    known: set[int] = set()

    def take(path: Path, obj: Any) -> None:
        if id(obj) not in known:
            known.update(id(m) for m in obj.modules()) if isinstance(obj, nn.Module) else known.add(id(obj))
            found.append((path, obj, flatten(obj, path, Flat())))

    for path, obj in objects(arguments):
        take(path, obj)
    for name, obj in world.objects.items():
        if isinstance(obj, (nn.Module, Optimizer, LRScheduler)):
            take((name,), obj)
    flat, held = Flat(), set()
    for _, _, own in found:
        for key, path in own.paths.items():
            flat.add(path, own.tensors[key]) if key in own.tensors else _add_value(flat, path, own.values[key])
        held |= {id(t) for t in own.tensors.values()}
    for slot, ref in world.slots.items():
        if ref.kind is not SlotKind.BUFFER and id(t := ref.get()) not in held:
            held.add(id(t))
            flat.add((SLOT + slot,), t)
    return Content(found, flat, world)


def _add_value(flat: Flat, path: Path, value: Any) -> None:
    key = ".".join(map(str, path))
    flat.paths[key], flat.values[key] = path, value


def plain_numbers(world: World, paths: Iterable[str]) -> dict[str, Any]:
    """The values of plain attributes (counters, flags) that a step changes, those that JSON can write."""
    out = {}
    for path in sorted(set(paths)):
        if path in world.places and isinstance(value := read(*world.places[path]), (int, float, str, bool, type(None))):
            out[path] = value
    return out
