"""Where the user's objects hold a tensor, and who else holds it.

A tensor cannot be turned into a DTensor where it is: it is replaced, in every place that the arguments reach, and a
reference that they do not reach would silently go on with the old one. So those are looked for and refused by name.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import StateError

Put = Callable[[Any], None]

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size)


@dataclass
class Places:
    """Args:
    put: id of a wanted tensor -> functions that each replace it in one place.
    known: ids of the objects that were walked, and of their attribute dicts.
    modules: the modules among them.
    """

    put: dict[int, list[Put]] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    modules: list[nn.Module] = field(default_factory=list)


def places(owners: Iterable[object], wanted: Iterable[Tensor]) -> Places:
    """Every place in which `owners` (modules, optimizers, containers, any object with attributes) hold a wanted tensor:
    attributes, dict values and keys (`optimizer.state`), lists, sets, tuples, closures of functions."""
    ids, out = {id(t) for t in wanted}, Places()
    keep: list[object] = []  # temporary objects must outlive the walk, or their ids come again
    todo: list[tuple[object, Put]] = []
    todo.extend((owner, _refuse) for owner in reversed(list(owners)))
    while todo:
        value, put = todo.pop()
        inner: list[tuple[object, Put]] = []
        if isinstance(value, Tensor):
            if id(value) in ids:
                if id(value) not in out.put:  # hooks may hold parameters too, in closures
                    hooks = (getattr(value, "_backward_hooks", None), getattr(value, "_post_accumulate_grad_hooks", None))
                    inner.extend((x, _refuse) for x in (*hooks, value.__dict__) if x)
                out.put.setdefault(id(value), []).append(put)
            todo.extend(inner)
            continue
        if isinstance(value, weakref.ref):  # an LSTM watches its weights so
            if id(target := value()) in ids:
                out.put.setdefault(id(target), []).append(functools.partial(_set_weak, put))
            continue
        if isinstance(value, _ATOMS) or id(value) in out.known and not isinstance(value, tuple):
            continue
        out.known.add(id(value))
        keep.append(value)
        if isinstance(value, nn.Module):
            out.modules.append(value)
        if isinstance(value, dict):
            for key in list(value):
                if isinstance(key, Tensor) and id(key) in ids:
                    out.put.setdefault(id(key), []).append(functools.partial(_rekey, value, key))
                inner.append((value[key], functools.partial(_set_by_old_key, value, key)))
        elif isinstance(value, list):
            inner.extend((x, functools.partial(value.__setitem__, k)) for k, x in enumerate(value))
        elif isinstance(value, tuple):
            box = _Box(value, put)
            inner.extend((x, functools.partial(box.set, k)) for k, x in enumerate(value))
        elif isinstance(value, set):
            inner.extend((x, functools.partial(_swap_in_set, value, x)) for x in list(value))
        else:
            for name, x in _attributes(value, out.known, keep):
                inner.append((x, functools.partial(_set_attribute, value, name)))
        todo.extend(reversed(inner))  # depth first, in the order of the attributes
    return out


def _attributes(value: object, known: set[int], keep: list[object]) -> list[tuple[str, object]]:
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, types.FunctionType):
        return [("", cell) for cell in value.__closure__ or ()] + [("__defaults__", value.__defaults__ or ())]
    if isinstance(value, types.CellType):
        try:
            return [("cell_contents", value.cell_contents)]
        except ValueError:  # a variable that is not set yet
            return []
    if isinstance(value, functools.partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    own = getattr(value, "__dict__", None)
    found: list[tuple[str, object]] = []
    if isinstance(own, dict):
        known.add(id(own))
        keep.append(own)
        found = list(own.items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = cls.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found.append((name, member.__get__(value)))
                except AttributeError:
                    continue
    return found


class _Box:
    """A tuple that is rebuilt in its own place as its elements change."""

    def __init__(self, value: tuple[Any, ...], put: Put) -> None:
        self.value, self.put = value, put

    def set(self, k: int, new: Any) -> None:
        items = [*self.value[:k], new, *self.value[k + 1 :]]
        kind = type(self.value)
        self.value = kind(*items) if hasattr(kind, "_fields") else kind(items)
        self.put(self.value)


def _refuse(new: Any) -> None:
    raise StateError("a tuple or tensor that is itself an argument cannot be replaced where the caller holds it",
                     hint="pass state in a list, a dict, or an object")  # fmt: skip


def _set_attribute(owner: object, name: str, new: Any) -> None:
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict) and name in own:
        own[name] = new  # past __setattr__ of modules, which would move it to another table
    elif name:
        object.__setattr__(owner, name, new)
    else:
        _refuse(new)


def _set_weak(put: Put, new: Any) -> None:
    put(weakref.ref(new))


def _rekey(table: dict[Any, Any], old: Tensor, new: Tensor) -> None:
    """`new` takes the place of `old` as a key; the order stays."""
    items = [(new if key is old else key, value) for key, value in table.items()]
    table.clear()
    table.update(items)


def _set_by_old_key(table: dict[Any, Any], key: Any, new: Any) -> None:
    if key not in table:  # the key was a tensor and has been replaced: its value was a container, replaced in place
        raise StateError("a tensor is both key and value of one dict", hint="keep state tensors out of dict keys")
    table[key] = new


def _swap_in_set(values: set[Any], old: Any, new: Any) -> None:
    values.discard(old)
    values.add(new)


# -- who else ----------------------------------------------------------------------------------------------------------


def strangers(named: Mapping[str, Tensor], known: set[int]) -> dict[str, str]:
    """Path of a tensor -> words for a live reference to it from outside the arguments.

    Looks at local variables of the calling functions, and asks the garbage collector; what has no name a user would know
    (an iterator's leftovers, the library's own frames) is passed over, as is what a `for p in model.parameters()` left in its
    loop variable. One scan of the heap, up to three more where containers hold one.
    """
    paths = {id(t): path for path, t in named.items()}
    out: dict[str, str] = {}
    frame = sys._getframe(1)
    here: set[int] = set()
    copies: list[dict[str, Any]] = []
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not _internal(module):
            for name, value in list(frame.f_locals.items()):
                for path in _direct(value, paths, known):
                    if not name.isidentifier() or isinstance(value, Tensor) and name in _loop_variables(frame.f_code):
                        continue  # not the user's: a temporary of pytest's assertions, or what a loop left behind
                    where = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
                    kind = "" if isinstance(value, Tensor) else f", a {type(value).__name__},"
                    scope = "global" if frame.f_locals is frame.f_globals else f"local variable of {frame.f_code.co_name}()"
                    out.setdefault(path, f"'{name}'{kind} ({scope}, {where})")
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            copies.append(frame.f_locals)
        here.add(id(frame))
        here.add(id(frame.f_locals))
        frame = frame.f_back  # type: ignore[assignment]
    tensors = list(named.values())
    skip = known | here | {id(x) for x in (tensors, named, paths, out)}
    origin, level = dict(paths), list[Any](tensors)
    for _ in range(_DEPTH):  # holders, then holders of those containers that have no name themselves, and so on
        upper: list[Any] = []
        for holder in _referrers(level, skip):
            path = next(origin[id(x)] for x in gc.get_referents(holder) if id(x) in origin)
            words = _name(holder, origin)
            if words:
                out.setdefault(path, words)
            elif isinstance(holder, _CONTAINERS):
                origin[id(holder)] = path
                upper.append(holder)
        skip |= {id(level), id(upper), *map(id, upper)}
        if not upper:
            break
        level = upper
    for values in copies:  # Python keeps them with the frame: what the function lets go would live on
        values.clear()
    return out


def _loop_variables(code: types.CodeType) -> set[str]:
    """Names that `code` binds as targets of `for` loops, and nowhere else."""
    targets: set[str] = set()
    others = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    due = 0  # how many of the next stores are targets
    for op in dis.get_instructions(code):
        if op.opname == "FOR_ITER":
            due = 1
        elif op.opname == "UNPACK_SEQUENCE" and due:
            due += int(op.arg or 0) - 1
        elif op.opname.startswith("STORE_") and "ATTR" not in op.opname and "SUBSCR" not in op.opname:
            names = op.argval if isinstance(op.argval, tuple) else (op.argval,)
            for name in names[:1] if op.opname.endswith("LOAD_FAST") else names:
                (targets if due > 0 else others).add(str(name))
                due -= 1
        elif op.opname not in ("EXTENDED_ARG", "CACHE"):
            due = 0
    return targets - others


_DEPTH = 4
_CONTAINERS = (dict, list, tuple, set, frozenset, types.CellType)


def _internal(module: str) -> bool:
    return module.split(".")[0] in {"shardc", "torch", "importlib", "functools", "contextlib"}


def _direct(value: object, paths: Mapping[int, str], known: set[int]) -> list[str]:
    """Paths of the tensors that `value` is, or holds at its first level."""
    if id(value) in paths:
        return [paths[id(value)]]
    if id(value) in known:
        return []
    if isinstance(value, dict):
        return [paths[id(x)] for pair in value.items() for x in pair if id(x) in paths]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [paths[id(x)] for x in value if id(x) in paths]
    return []


def _referrers(targets: list[Any], skip: set[int]) -> list[Any]:
    """One scan of the heap."""
    found = gc.get_referrers(*targets)
    return [x for x in found if id(x) not in skip and x is not targets and not isinstance(x, types.FrameType)]


def _name(holder: Any, held: Mapping[int, str]) -> str:
    """Words for an object by which a user knows it; "" for plain containers, and for the library's own objects."""
    if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
        names = [] if _internal(str(holder["__name__"])) else [k for k, v in holder.items() if id(v) in held]
        return f"global {names[0]!r} of module {holder['__name__']}" if names else ""
    if isinstance(holder, _CONTAINERS):
        return ""
    if isinstance(holder, types.FunctionType):
        return "" if _internal(holder.__module__ or "") else f"closure of function {holder.__qualname__}()"
    if isinstance(holder, (nn.Module, torch.optim.Optimizer)):
        return f"a {type(holder).__name__} that is not among the arguments"
    module = type(holder).__module__
    return "" if _internal(module) or module == "builtins" else f"an object of class {module}.{type(holder).__qualname__}"
