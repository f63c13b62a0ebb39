"""Hooks that a step installs on modules and leaves there, as transformers does to collect the outputs of layers."""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardc.capture.floats import NAME
from shardc.capture.objects import ATOMS
from shardc.capture.world import World
from shardc.errors import CaptureError

_FLAGS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""Tables of a module whose hooks may stay, and the tables that say how each of their hooks is called."""


@dataclass(frozen=True)
class Hooks:
    """Forward hooks that a step adds to a module, in order.

    Args:
        module: path of the module.
        table: "_forward_hooks" or "_forward_pre_hooks".
        added: each hook under its id, with the further tables that have the id.
    """

    module: str
    table: str
    added: tuple[tuple[int, Any, tuple[str, ...]], ...]

    def install(self, module: nn.Module) -> None:
        for key, hook, flags in self.added:
            getattr(module, self.table)[key] = hook
            for flag in flags:
                getattr(module, flag)[key] = True


def added(path: str, old: tuple[int, ...], new: World, scopes: dict[int, dict[str, Any]]) -> Hooks:
    """The hooks in the table at `path` of the twin world that come after `old` ones, found to hold nothing of the step.

    Args:
        path: of the table: ``model.h.0._forward_hooks``.
        old: ids of the hooks that were there before.
        scopes: the user's dict of globals, by the id of the twin's.

    Raises:
        CaptureError: the step removes a hook of before, or a hook is of another kind or leads to objects of the step.
    """
    owner, table = path.rsplit(".", 1)
    module = new.objects[owner]
    held: dict[int, Any] = getattr(module, table)
    if table not in _FLAGS or tuple(held)[: len(old)] != old:
        raise CaptureError(
            f"the step changes the hooks in {path}", where=path, hint="register and remove them outside of the step"
        )
    fresh: dict[int, Any] = {}
    for key in [key for key in held if key not in old]:
        try:
            fresh[key] = _own(held[key], scopes, {})
        except _Held:
            raise CaptureError(
                f"the step leaves a hook in {path} that holds objects of the step: {held[key]!r}", where=path,
                hint="register it outside of the step, or remove it at the end",
            ) from None  # fmt: skip
    flags = {key: tuple(f for f in _FLAGS[table] if key in getattr(module, f)) for key in fresh}
    return Hooks(owner, table, tuple((key, hook, flags[key]) for key, hook in fresh.items()))


class _Held(Exception):
    """A hook leads to an object of the step."""


def _own(value: Any, scopes: dict[int, dict[str, Any]], made: dict[int, Any]) -> Any:
    """A value that leads to nothing but functions and constants, with functions over the user's globals."""
    if isinstance(value, (*ATOMS, type, types.ModuleType, types.BuiltinFunctionType)):
        return value
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, (tuple, frozenset)):
        return type(value)(_own(v, scopes, made) for v in value)
    if not isinstance(value, types.FunctionType) or NAME in value.__code__.co_names:
        raise _Held
    cells = [types.CellType() for _ in value.__closure__ or ()]
    scope = scopes.get(id(value.__globals__), value.__globals__)
    out = types.FunctionType(value.__code__, scope, value.__name__, None, tuple(cells) or None)
    made[id(value)] = out
    for cell, old in zip(cells, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents = _own(old.cell_contents, scopes, made)
    out.__defaults__ = _own(value.__defaults__, scopes, made)
    out.__kwdefaults__ = {k: _own(v, scopes, made) for k, v in (value.__kwdefaults__ or {}).items()} or None
    out.__qualname__, out.__module__ = value.__qualname__, value.__module__
    return out
