"""The walk of what a step can reach: state slots, tensor inputs, numbers and static values, each under a readable path.

`observe` runs at every call, so it is one plain recursion without copies. Everything is named from the argument it was
reached through: ``model.h.0.attn.weight``, ``optimizer.state[3].exp_avg``, ``batch.x``, ``items[0]``; what the code reaches
through a closure or a global is named by that variable.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardc.capture.names import Resolved
from shardc.errors import CaptureError
from shardc.program import SlotKind


@dataclasses.dataclass
class SlotRef:
    """One piece of state and the places of the user's objects that hold it.

    Args:
        path: its name; `aliases` are further names of the same tensor.
        kind: parameter, buffer, optimizer state, gradient or other tensor.
        of: path of the parameter that optimizer state or a gradient belongs to.
        trainable: requires_grad.
        holders: the containers that hold it, each with its key; a tensor with key "grad" for a gradient.
    """

    path: str
    kind: SlotKind
    of: str = ""
    aliases: tuple[str, ...] = ()
    trainable: bool = False
    holders: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    owner: str = ""  # path of the optimizer whose state it is

    def get(self) -> Tensor:
        """The tensor as it lies: plain, or a DTensor."""
        return read(*self.holders[0])  # type: ignore[no-any-return]

    def set(self, tensor: Tensor | None) -> None:
        """Put `tensor` in every place that holds this slot."""
        for holder, key in self.holders:
            write(holder, key, tensor)

    def delete(self) -> None:
        """Remove it: a gradient becomes None, a key disappears."""
        for holder, key in self.holders:
            if isinstance(holder, Tensor) and key == "grad":
                holder.grad = None
            elif isinstance(holder, MutableMapping):
                holder.pop(key, None)
            else:
                write(holder, key, None)


def read(holder: Any, key: Any) -> Any:
    """What `holder` has under `key`: a mapping's or list's item, an object's attribute, a closure cell's content."""
    if isinstance(holder, types.CellType):
        return holder.cell_contents
    if isinstance(holder, (dict, list, tuple)):
        return holder[key]
    return getattr(holder, key)


def write(holder: Any, key: Any, value: Any) -> None:
    """The inverse of `read`; refuses tuples."""
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, (dict, list)):
        holder[key] = value
    else:
        object.__setattr__(holder, key, value) if not isinstance(holder, (nn.Module, Tensor)) else setattr(holder, key, value)


@dataclasses.dataclass
class World:
    """What one call of the step can reach. See `observe`."""

    arguments: dict[str, Any]
    slots: dict[str, SlotRef] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    number_holders: dict[str, tuple[Any, Any, int | None]] = dataclasses.field(default_factory=dict)
    signature: dict[str, Hashable] = dataclasses.field(default_factory=dict)
    modules: dict[int, str] = dataclasses.field(default_factory=dict)  # id -> path
    tensors: dict[int, str] = dataclasses.field(default_factory=dict)  # id -> path of its slot or input
    optimizers: dict[str, Optimizer] = dataclasses.field(default_factory=dict)
    schedulers: dict[str, LRScheduler] = dataclasses.field(default_factory=dict)
    outside: list[Resolved] = dataclasses.field(default_factory=list)  # closures and globals the code names
    graphs: set[str] = dataclasses.field(default_factory=set)  # attributes with an autograd graph, which a step may replace
    kept: frozenset[str] = frozenset()  # tensors inside of arguments that the step changes: state, not inputs
    places: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)  # path -> (container, key); of numbers
    # filled by a walk that indexes (which also fills `places` for everything), see `walk.containers`
    names: dict[int, str] = dataclasses.field(default_factory=dict)  # id of a container -> its path
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)  # path -> container
    atoms: dict[str, Any] = dataclasses.field(default_factory=dict)  # path -> plain value

    def summary(self) -> World:
        """What `why` and a comparison of signatures need, without a reference to any of the user's tensors."""
        inputs = {path: torch.empty(0, device="meta") for path in self.inputs}
        return World({}, inputs=inputs, numbers=dict(self.numbers), signature=dict(self.signature))

    def carry(self, paths: Iterable[str]) -> None:
        """Make plain numbers of the user's objects (a counter ``model.calls``) inputs of the program instead of constants.

        Paths that are absent, or not of type int or float, are left alone.
        """
        for path in paths:
            entry = self.signature.get(path)
            if path not in self.numbers and isinstance(entry, tuple) and entry[0] == "value" and path in self.places:
                holder, key = self.places[path]
                value = read(holder, key)
                if type(value) in (int, float):
                    self.numbers[path], self.number_holders[path] = value, (holder, key, None)
                    self.signature[path] = ("number", type(value).__name__)
        self.__dict__.pop("key", None)

    def set_number(self, path: str, value: float) -> None:
        """Write a number of `numbers` into the user's objects."""
        holder, key, index = self.number_holders[path]
        if index is None:
            write(holder, key, value)
        else:
            old = holder[key]
            new = [*old[:index], value, *old[index + 1 :]]
            holder[key] = tuple(new) if isinstance(old, tuple) else new

    def number_owner(self, path: str) -> tuple[str, str, Any]:
        """(optimizer, parameter, key) of a number in an optimizer's state."""
        holder, key, _ = self.number_holders[path]
        for name, optimizer in self.optimizers.items():
            for p, state in optimizer.state.items():
                if state is holder:
                    return name, self.tensors[id(p)], key
        raise CaptureError("a number appears in a place that cannot be carried", where=path)

    def group_of(self, optimizer: str, state: Any) -> dict[str, Any]:
        """The param_group of the parameter whose state dict is `state`."""
        found = self.optimizers[optimizer]
        for p, s in found.state.items():
            if s is state:
                return next((g for g in found.param_groups if any(q is p for q in g["params"])), {})
        return {}

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for two calls that the same program serves."""
        return tuple(self.signature.items())


def why(old: World, new: World) -> str:
    """The first difference between two worlds in words; "" if there is none."""
    for path, value in new.signature.items():
        if path not in old.signature:
            return f"{path}: new, {_words(value)}"
        if old.signature[path] != value:
            was, now = _words(old.signature[path]), _words(value)
            for one, two in zip(was.split(" · "), now.split(" · "), strict=False):
                if one != two:
                    what, _, value_now = two.partition(" ")
                    return f"{path}: {one} became {value_now if one.split(' ')[0] == what and value_now else two}"
            return f"{path}: {was} became {now}"
    gone = [path for path in old.signature if path not in new.signature]
    return f"{gone[0]}: gone (was {_words(old.signature[gone[0]])})" if gone else ""


def _words(value: Hashable) -> str:
    """A signature's entry in words."""
    if isinstance(value, tuple) and value and value[0] == "state":
        return f"{value[1]} entries of optimizer state"
    if isinstance(value, tuple) and value and value[0] == "module":
        return f"{value[1]} in {'training' if value[2] else 'evaluation'} mode"
    if isinstance(value, tuple) and value and value[0] == "number":
        return f"a {value[1]}"
    if isinstance(value, tuple) and len(value) == 7 and value[0] == "tensor":
        _, shape, dtype, stride, grad, trainable, _ = value
        parts = [f"shape {shape}", f"dtype {str(dtype).removeprefix('torch.')}", f"stride {stride}",
                 f"requires_grad {trainable}", f"grad {'present' if grad else 'None'}"]  # fmt: skip
        return " · ".join(parts)
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "value":
        return repr(value[1])
    return str(value)
