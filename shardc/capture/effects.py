"""What a step leaves behind in the user's objects: found by walking the twin after the trace, written back after a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardc.capture.hooks import Hooks
from shardc.capture.walk import containers
from shardc.capture.world import World, write
from shardc.errors import StateError
from shardc.program import Slot, SlotKind, TensorType


@dataclass(frozen=True)
class Created:
    """An entry that a step adds to the user's objects.

    Args:
        path: its name.
        kind: what it is as a slot; None for a plain number or value.
        owner: path of the optimizer whose state it joins, else of the container.
        of: path of the parameter, for optimizer state and gradients.
        key: key in the state dict or container.
        value: of a plain entry; None where a run computes it (`program.number_exit`).
        type: of a tensor: eager's strides are kept.
        on_cpu: a step count that torch keeps on the host whatever the parameter's device.
        persistent: of a buffer.
    """

    path: str
    kind: SlotKind | None
    owner: str
    of: str
    key: Any
    value: Any = None
    type: TensorType | None = None
    on_cpu: bool = False
    persistent: bool = True


@dataclass(frozen=True)
class Computed:
    """Stands for a number that a run computes: its name in `program.number_exit`."""

    name: str


@dataclass(frozen=True)
class Scheduled:
    """A call of a scheduler's `step`, made on the host after the program.

    Args:
        path: of the scheduler.
        given: its arguments by position or name.
    """

    path: str
    given: dict[int | str, Any]

    def run(self, scheduler: Any, numbers: dict[str, Any]) -> None:
        """Args: numbers: computed values by name; those that are used are taken out."""
        given = {k: numbers.pop(v.name) if isinstance(v, Computed) else v for k, v in self.given.items()}
        names = {k: v for k, v in given.items() if isinstance(k, str)}
        scheduler.step(*(v for k, v in given.items() if isinstance(k, int)), **names)


@dataclass
class Effects:
    """See `commit`.

    Args:
        created: entries added, in the order eager adds them.
        deleted: slots that are gone after the step.
        assigned: plain values that the step changed: path -> (container's path, key, value).
        constants: numbers of optimizers that the step sets to a plain value.
        training: modules whose training flag changed.
        requires_grad: slots whose requires_grad changed.
        stepped: optimizers that stepped (a scheduler asks).
        scheduled: calls of schedulers, run on the host at the end.
        containers: new lists and dicts, outer ones first: path -> ("list" or "dict", container's path, key); new state dicts of
            parameters: path -> ("state", path of the optimizer, path of the parameter).
        hooks: what the step leaves in the tables of hooks of modules.
        lengths: lists that are new or changed their length: path -> number of entries.
    """

    created: list[Created] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    assigned: dict[str, tuple[str, Any, Any]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    stepped: set[str] = field(default_factory=set)
    scheduled: list[Scheduled] = field(default_factory=list)
    containers: dict[str, tuple[str, str, Any]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    hooks: list[Hooks] = field(default_factory=list)

    def commit(
        self, world: World, tensors: dict[str, Tensor], deleted: set[str] | None = None, numbers: dict[str, Any] | None = None
    ) -> None:
        """Write a run's effects into the objects of the call that `world` was observed from.

        Args:
            world: of this call.
            tensors: final values by slot path; needed for created slots only (existing ones were written in place).
            deleted: slots to remove; by default those that the captured step removes.
            numbers: final values by path of `program.number_exit`.

        Raises:
            StateError: a created slot has no value.
        """
        for entry in self.created:
            if entry.kind is not None and entry.path not in tensors:
                raise StateError("a slot that the step creates got no value", where=entry.path)
        for path in self.deleted if deleted is None else deleted:
            if path in world.slots:
                world.slots[path].delete()
        index: dict[str, Any] | None = self._contain(world) if self.containers or self.lengths else None
        numbers = dict(numbers or {})
        names = [v.name for call in self.scheduled for v in call.given.values() if isinstance(v, Computed)]
        computed = {name: numbers.pop(name) for name in names}
        for entry in self.created:
            value: Any = numbers.pop(entry.path, entry.value)
            if entry.type is not None:
                value = _laid_out(tensors[entry.path], entry.type)
            if entry.kind is SlotKind.GRADIENT:
                world.slots[entry.of].get().grad = value
            elif entry.owner in world.optimizers and entry.of:
                if entry.on_cpu and value.device.type != "cpu":
                    value = value.cpu()
                world.optimizers[entry.owner].state[world.slots[entry.of].get()][entry.key] = value
            else:
                index = index if index is not None else containers(world)
                if entry.kind is SlotKind.BUFFER:
                    index[entry.owner].register_buffer(entry.key, value, persistent=entry.persistent)
                else:
                    write(index[entry.owner], entry.key, value)
        for path, (owner, key, value) in self.assigned.items():
            index = index if index is not None else containers(world)
            if owner not in index:
                raise StateError(f"{path} cannot be set: {owner} is gone", where=path)
            write(index[owner], key, value)
        for path, number in {**self.constants, **numbers}.items():
            world.set_number(path, number)
        for path, flag in self.training.items():
            index = index if index is not None else containers(world)
            index[path].training = flag
        for hooks in self.hooks:
            index = index if index is not None else containers(world)
            hooks.install(index[hooks.module])
        for path, flag in self.requires_grad.items():
            world.slots[path].get().requires_grad_(flag)
        for path in self.stepped:
            if hasattr(world.optimizers[path].step, "_wrapped_by_lr_sched"):
                world.optimizers[path]._opt_called = True  # type: ignore[attr-defined]
        for call in self.scheduled:
            call.run(world.schedulers[call.path], computed)

    def _contain(self, world: World) -> dict[str, Any]:
        """Make the new containers and give lists their length; returns all containers by path."""
        for kind, owner, key in self.containers.values():
            if kind == "state":
                world.optimizers[owner].state[world.slots[key].get()]  # a defaultdict
        index = containers(world)
        for path, (kind, owner, key) in self.containers.items():
            if kind != "state":
                index[path] = [] if kind == "list" else {}
                write(index[owner], key, index[path])
        for path, length in self.lengths.items():
            found = index[path]
            del found[length:]
            found.extend([None] * (length - len(found)))
        return index

    @contextlib.contextmanager
    def pretended(self, world: World, slots: Mapping[str, Slot]) -> Iterator[None]:
        """While inside, the objects look as they do after a step: created optimizer state and gradients are there (without
        values), deleted ones are gone. For planning the steady state of a fresh optimizer; undone on exit.

        Args:
            slots: `program.slots`: the types of what is created.
        """
        made: list[tuple[dict[Any, Any], Any, bool]] = []
        grads = {
            path: world.slots[path].get()
            for path in self.deleted
            if path in world.slots and world.slots[path].kind is SlotKind.GRADIENT
        }
        new_grads: list[Tensor] = []
        try:
            for path in grads:
                world.slots[path].delete()
            for entry in self.created:
                if not entry.of or entry.of not in world.slots:
                    continue
                p = world.slots[entry.of].get()
                if entry.kind is SlotKind.GRADIENT:
                    p.grad = _blank(slots[entry.path].type, p.device)
                    new_grads.append(p)
                elif entry.owner in world.optimizers:
                    state = world.optimizers[entry.owner].state
                    fresh = p not in state
                    state[p][entry.key] = entry.value if entry.kind is None else _blank(slots[entry.path].type, p.device)
                    made.append((state, p, fresh))
            yield
        finally:
            for state, p, fresh in reversed(made):
                if fresh:
                    state.pop(p, None)
            for entry in self.created:
                if entry.owner in world.optimizers and entry.of in world.slots and entry.kind is not SlotKind.GRADIENT:
                    state = world.optimizers[entry.owner].state
                    if (p := world.slots[entry.of].get()) in state:
                        state[p].pop(entry.key, None)
            for p in new_grads:
                p.grad = None
            for path, grad in grads.items():
                world.slots[world.slots[path].of].get().grad = grad


def _blank(type_: TensorType, device: torch.device) -> Tensor:
    """A tensor without values; on the CPU its memory is not touched."""
    return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=device)


def _laid_out(t: Tensor, type_: TensorType) -> Tensor:
    """`t` with the strides of `type_`; a shard keeps its own."""
    if hasattr(t, "placements") or tuple(t.shape) != type_.shape or t.numel() < 2 or tuple(t.stride()) == type_.stride:
        return t
    return torch.empty_strided(type_.shape, type_.stride, dtype=t.dtype, device=t.device).copy_(t)
