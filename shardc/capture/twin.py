"""The twin: a second Python world over fake tensors, in which the step is traced so that nothing of the user's is touched.

Every container, object and function that can lead to state is copied once, tensors are replaced by stand-ins, and everything
else is shared. `copy.deepcopy` does not do: optimizers drop attributes under it and functions are atoms to it.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardc.capture.floats import NAME, as_float, renamed
from shardc.capture.lines import is_user_code
from shardc.capture.names import Resolved
from shardc.capture.objects import ATOMS, attributes, descends

_SHARED = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, frozenset, range, slice, property)


class Twin:
    """Copies objects; `memo` maps the id of an original to its copy.

    Args:
        tensor: makes the stand-in of a tensor.
        outside: variables that the step's code names, to be replaced in copied functions.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor], outside: list[Resolved]) -> None:
        self.tensor, self.memo = tensor, dict[int, Any]()
        self.originals: list[Any] = []  # kept alive: ids are keys
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._real: dict[int, dict[str, Any]] = {}
        self._outside: dict[int, list[Resolved]] = {}
        for found in outside:
            if found.key:
                self._outside.setdefault(id(found.holder), []).append(found)

    def copy(self, obj: Any) -> Any:
        """The twin of `obj`: `obj` itself if it cannot lead to state."""
        if isinstance(obj, ATOMS):
            return obj
        known = self.memo.get(id(obj))
        if known is not None:
            return known
        if isinstance(obj, Tensor):
            return self._remember(obj, self.tensor(obj))
        if isinstance(obj, _SHARED):
            return obj
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, types.MethodType):
            return self._remember(obj, types.MethodType(self.copy(obj.__func__), self.copy(obj.__self__)))
        if isinstance(obj, types.CellType):
            return self._cell(obj)
        if isinstance(obj, weakref.ref):
            target = obj()
            return obj if target is None else self._remember(obj, weakref.ref(self.copy(target)))
        if isinstance(obj, functools.partial):
            keywords = {k: self.copy(v) for k, v in obj.keywords.items()}
            return self._remember(obj, functools.partial(self.copy(obj.func), *map(self.copy, obj.args), **keywords))
        if isinstance(obj, dict):
            return self._dict(obj)
        if isinstance(obj, (list, set, collections.deque)):
            return self._collection(obj)
        if isinstance(obj, tuple):
            parts = [self.copy(x) for x in obj]
            if all(a is b for a, b in zip(parts, obj, strict=True)):
                return obj
            return self._remember(obj, type(obj)(*parts) if hasattr(obj, "_fields") else type(obj)(parts))
        return self._object(obj) if descends(type(obj)) or isinstance(obj, collections.UserDict) else obj

    def release(self) -> None:
        """Forget originals and copies."""
        for table in (self.memo, self.originals, self._globals, self._real, self._outside):
            table.clear()

    def _remember(self, obj: Any, twin: Any) -> Any:
        self.memo[id(obj)] = twin
        self.originals.append(obj)
        return twin

    def _dict(self, obj: dict[Any, Any]) -> Any:
        cls: Any = type(obj)
        if isinstance(obj, collections.defaultdict):
            twin: Any = cls(obj.default_factory)
        else:
            twin = cls.__new__(cls)
            if isinstance(obj, collections.OrderedDict):
                collections.OrderedDict.__init__(twin)
        self._remember(obj, twin)
        put = collections.OrderedDict.__setitem__ if isinstance(obj, collections.OrderedDict) else dict.__setitem__
        for k, v in obj.items():
            put(twin, self.copy(k) if isinstance(k, Tensor) else k, self.copy(v))
        for name, value in getattr(obj, "__dict__", {}).items():
            twin.__dict__[name] = self.copy(value)
        return twin

    def _collection(self, obj: Any) -> Any:
        cls: Any = type(obj)
        twin = self._remember(obj, cls(maxlen=obj.maxlen) if isinstance(obj, collections.deque) else cls.__new__(cls))
        if isinstance(obj, set):
            twin.update(self.copy(x) for x in obj)
        else:
            twin.extend(self.copy(x) for x in obj)
        for name, value in getattr(obj, "__dict__", {}).items():
            twin.__dict__[name] = self.copy(value)
        return twin

    def _object(self, obj: Any) -> Any:
        cls: Any = type(obj)
        try:
            twin = cls.__new__(cls) if isinstance(obj, nn.Module) else object.__new__(cls)
        except TypeError:
            twin = copy.copy(obj)
        self._remember(obj, twin)
        for name, value in attributes(obj):
            value = self.copy(value)
            if name in getattr(obj, "__dict__", {}):
                twin.__dict__[name] = value
            else:
                object.__setattr__(twin, name, value)
        return twin

    # -- functions -----------------------------------------------------------------------------------------------------

    def _cell(self, cell: types.CellType) -> types.CellType:
        known = self.memo.get(id(cell))
        if known is not None:
            return known  # type: ignore[no-any-return]
        twin = self._remember(cell, types.CellType())
        try:
            twin.cell_contents = self.copy(cell.cell_contents)
        except ValueError:
            return twin  # type: ignore[no-any-return]  # an empty cell
        return twin  # type: ignore[no-any-return]

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        """A function over copied cells and, where its code names state, over a copy of its globals."""
        mine = is_user_code(fn.__code__)
        code = renamed(fn.__code__) if mine and "float" not in fn.__globals__ else fn.__code__
        names = (self._outside.get(id(fn.__globals__)) if mine else None) or code is not fn.__code__
        if not fn.__closure__ and not names and not fn.__defaults__ and not fn.__kwdefaults__:
            return fn
        closure = tuple(self._cell(c) for c in fn.__closure__ or ())
        defaults, named = self.copy(fn.__defaults__), self.copy(fn.__kwdefaults__)
        same = all(_same(a, b) for a, b in zip(closure, fn.__closure__ or (), strict=True)) and defaults is fn.__defaults__
        same = same and all(value is named[name] for name, value in (fn.__kwdefaults__ or {}).items())
        if same and not names:
            return self._remember(fn, fn)  # type: ignore[no-any-return]
        scope, missing = self._scope(fn.__globals__) if names else (fn.__globals__, [])
        twin = types.FunctionType(code, scope, fn.__name__, defaults, closure or None)
        self._remember(fn, twin)
        twin.__kwdefaults__ = named
        twin.__dict__.update(fn.__dict__)
        twin.__qualname__, twin.__module__ = fn.__qualname__, fn.__module__
        for found in missing:
            scope[found.key] = self.copy(found.value)
        return twin

    def _scope(self, real: dict[str, Any]) -> tuple[dict[str, Any], list[Resolved]]:
        """The copy of a dict of globals, and the names in it that are still to be replaced."""
        known = self._globals.get(id(real))
        if known is not None:
            return known[0], []
        scope = {**real, NAME: as_float}
        self._globals[id(real)], self._real[id(real)] = (scope, dict(scope)), real
        return scope, self._outside.get(id(real), [])

    def namespace(self, holder: Any) -> Any:
        """The twin of a closure cell or of a dict of globals (the original where it was not copied)."""
        if id(holder) in self._globals:
            return self._globals[id(holder)][0]
        return self.memo.get(id(holder), holder)

    def scopes(self) -> dict[int, dict[str, Any]]:
        """The user's dict of globals, by the id of its copy."""
        return {id(scope): self._real[key] for key, (scope, _) in self._globals.items()}

    def rebound_globals(self) -> list[str]:
        """Names of globals that the step assigned."""
        out: list[str] = []
        for scope, before in self._globals.values():
            for name, value in scope.items():
                old = before.get(name, _ABSENT)
                if (
                    value is not old
                    and value is not self.memo.get(id(old), _ABSENT)
                    and not isinstance(value, types.MethodType)
                ):
                    out.append(name)
        return out


_ABSENT = object()


def _same(a: types.CellType, b: types.CellType) -> bool:
    try:
        return a.cell_contents is b.cell_contents
    except ValueError:
        return True
