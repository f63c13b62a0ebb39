"""The state among a step's arguments as one flat table of tensors and values, under the keys that `state_dict()` gives.

Keys are those that ``torch.distributed.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})``
writes, ``model.h.0.weight`` and ``optimizer.state.3.exp_avg``, so that plain torch reads them. What holds tensors in other
containers is one value that names them by their place, see `Hole`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import StateError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Hole:
    """Stands in a stored value for a tensor that is stored under a key of its own.

    Args:
        key: the tensor's, relative to that of the value.
    """

    key: str


@dataclass
class Flat:
    """Args:
    tensors: key -> tensor, plain or DTensor, as it lies.
    values: key -> any other value.
    paths: key -> the path of dict keys and list indices behind it.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def add(self, path: Path, value: Any) -> None:
        """Raises `StateError` where two entries have one key."""
        key = ".".join(map(str, path))
        if key in self.paths:
            raise StateError(f"two pieces of state are called {key} in a checkpoint", where=key, hint="rename an argument")
        self.paths[key] = path
        if isinstance(value, Tensor):
            self.tensors[key] = value
            return
        found: list[Tensor] = []
        self.values[key] = punched(value, found)
        for k, t in enumerate(found):
            self.add((*path, str(k)), t)


def punched(value: Any, found: list[Tensor]) -> Any:
    """`value` with a `Hole` in place of each tensor, which joins `found`."""
    if isinstance(value, Tensor):
        found.append(value)
        return Hole(str(len(found) - 1))
    if not _holds(value, lambda x: isinstance(x, Tensor)):
        return value
    return _map(value, lambda x: punched(x, found))


def filled(value: Any, get: Callable[[str], Tensor]) -> Any:
    """`value` with each hole filled by the tensor of its key."""
    if isinstance(value, Hole):
        return get(value.key)
    return _map(value, lambda x: filled(x, get)) if _holds(value, lambda x: isinstance(x, Hole)) else value


def _map(value: Any, f: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {k: f(v) for k, v in value.items()}
    items = [f(v) for v in value]
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items


def _holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(v, wanted) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(v, wanted) for v in value)
    return wanted(value)


def objects(arguments: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Modules, optimizers and other objects with a `state_dict` among arguments, also in lists, dicts and dataclasses."""
    for name, value in arguments.items():
        yield from _objects((name,), value)


def _objects(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (Tensor, type)):
        return
    if callable(getattr(value, "state_dict", None)):
        yield path, value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _objects((*path, str(k)), v)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from _objects((*path, i), v)
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from _objects((*path, f.name), getattr(value, f.name))


def is_plain_optimizer(obj: Any) -> bool:
    """Whether an optimizer's state is what torch.optim makes of it: `state` and `param_groups`."""
    cls = type(obj)
    return (
        isinstance(obj, Optimizer)
        and cls.state_dict is Optimizer.state_dict
        and cls.load_state_dict is Optimizer.load_state_dict
    )


def flatten(obj: Any, path: Path, out: Flat) -> Flat:
    """Add an object's state to `out`."""
    if isinstance(obj, nn.Module):
        for name, value in obj.state_dict(keep_vars=True).items():
            out.add((*path, name), value)
    elif is_plain_optimizer(obj):
        packed = obj.state_dict()
        for i, state in packed["state"].items():
            for name, value in state.items():
                out.add((*path, "state", str(i), name), value)
        for g, group in enumerate(packed["param_groups"]):
            for name, value in group.items():
                out.add((*path, "param_groups", g, name), value)
    else:
        out.add(path, obj.state_dict())
    return out
