"""Closures and globals that the code of a step names: what it reaches beside its arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.capture.lines import is_user_code
from shardc.capture.loss_scale import NAME, Scaled


@dataclass(frozen=True)
class Resolved:
    """A variable outside of the step that its code names.

    Args:
        name: the variable.
        value: what it holds now.
        holder: the closure cell, or the dict of globals; None for what the callable carries along.
        key: the name in the globals; "" for a cell.
    """

    name: str
    value: Any
    holder: Any
    key: str


def underlying(fn: Callable[..., Any]) -> types.FunctionType | None:
    """The Python function behind a method, a partial or a callable object; None for a builtin."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    if isinstance(fn, types.FunctionType):
        return fn
    call = type(fn).__call__
    return call if isinstance(call, types.FunctionType) else None


def bound_values(fn: Callable[..., Any]) -> Iterator[Resolved]:
    """What a callable carries along: the object of a method, the arguments of a partial, a callable object itself."""
    if isinstance(fn, functools.partial):
        yield from bound_values(fn.func)
        given: dict[str, Any] = {f"args[{i}]": x for i, x in enumerate(fn.args)} | fn.keywords
        with contextlib.suppress(TypeError, ValueError):
            given = dict(inspect.signature(fn.func).bind_partial(*fn.args, **fn.keywords).arguments)
        yield from (Resolved(name, value, None, "") for name, value in given.items())
    elif isinstance(fn, types.MethodType):
        yield Resolved("self", fn.__self__, None, "")
    elif not isinstance(fn, types.FunctionType):
        yield Resolved("self", fn, None, "")


def code_names(code: types.CodeType) -> Iterator[str]:
    """Names of globals (and attributes) in a code object and the functions defined inside of it."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from code_names(const)


def named_values(fn: Callable[..., Any]) -> list[Resolved]:
    """What `fn`, and the user's functions that it names, reach through closures and globals and that may hold state."""
    if isinstance(fn, Scaled):
        return [*named_values(fn.__wrapped__), Resolved(NAME, fn.loss_scale, None, "")]
    out = list(bound_values(fn))
    seen: set[int] = set()
    queue = [f for f in (underlying(fn), underlying(inspect.unwrap(fn))) if f is not None]
    while queue:
        function = queue.pop(0)
        if id(function) in seen or not is_user_code(function.__code__):
            continue
        seen.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            _take(Resolved(name, value, cell, ""), out, queue)
        for name in dict.fromkeys(code_names(function.__code__)):
            if name in function.__globals__:
                _take(Resolved(name, function.__globals__[name], function.__globals__, name), out, queue)
    return out


def _take(found: Resolved, out: list[Resolved], queue: list[types.FunctionType]) -> None:
    value = found.value
    if isinstance(value, types.FunctionType):
        queue.append(value)
        out.append(found)
    elif isinstance(value, (types.MethodType, functools.partial)):
        function = underlying(value)
        if function is not None:
            queue.append(function)
        out.append(found)
    elif isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
        return
    elif (
        isinstance(value, (Tensor, nn.Module, Optimizer, list, dict, set, tuple)) or _plain(value) or hasattr(value, "__dict__")
    ):
        out.append(found)


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))
