"""Hooks that a step installs on modules and leaves there, as transformers does to collect the outputs of layers."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from torch import nn

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


def added(path: str, old: tuple[int, ...], new: World, scopes: set[int]) -> Hooks:
    """The hooks in the table at `path` of the twin world that come after `old` ones, found to hold nothing of the step.

    Args:
        path: of the table: ``model.h.0._forward_hooks``.
        old: ids of the hooks that were there before.
        scopes: ids of dicts of globals that belong to the twin.

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
    fresh = [key for key in held if key not in old]
    for key in fresh:
        if not _plain(held[key], scopes, set()):
            raise CaptureError(
                f"the step leaves a hook in {path} that holds objects of the step: {held[key]!r}", where=path,
                hint="register it outside of the step, or remove it at the end",
            )  # fmt: skip
    flags = {key: tuple(f for f in _FLAGS[table] if key in getattr(module, f)) for key in fresh}
    return Hooks(owner, table, tuple((key, held[key], flags[key]) for key in fresh))


def _plain(value: Any, scopes: set[int], seen: set[int]) -> bool:
    """Whether a value leads to nothing but functions and constants."""
    if isinstance(value, ATOMS) or isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, (tuple, frozenset)):
        return all(_plain(v, scopes, seen) for v in value)
    if not isinstance(value, types.FunctionType) or id(value.__globals__) in scopes:
        return False
    kept = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        try:
            kept.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return all(_plain(v, scopes, seen) for v in kept)
