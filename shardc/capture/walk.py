"""The walk of what a step can reach: everything is named from the argument, closure or global it was reached through.

It runs at every call, so it is one plain recursion without copies. ``model.h.0.attn.weight``, ``optimizer.state[3].exp_avg``,
``batch.x``, ``items[0]``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import types
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardc.capture.names import Resolved, named_values
from shardc.capture.numbers import is_symbol
from shardc.capture.objects import ATOMS, attributes, descends, value_of
from shardc.capture.world import SlotRef, World
from shardc.errors import CaptureError
from shardc.program import SlotKind

_MODULE_OWN = frozenset(
    ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
     "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
     "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
     "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
)  # fmt: skip
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DataParallel": "module",
}
_OPTIMIZER_OWN = frozenset(("param_groups", "state", "defaults", "_warned_capturable_if_run_uncaptured", "_opt_called"))


def observe(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    carried: Iterable[str] = (),
    kept: frozenset[str] = frozenset(),
) -> World:
    """Walk everything reachable from the arguments, and from closures and globals that the code names.

    Args:
        carried: paths of plain numbers that are inputs of the program, see `Captured.carried` and `World.carry`.
        kept: paths of tensors in arguments that are state, see `World.kept`.

    Raises:
        CaptureError: the arguments do not fit the function, or a tensor is of a kind that cannot be state or input.
    """
    world = walk_world(bind(fn, args, kwargs), named_values(fn), kept=kept)
    world.carry(carried)
    return world


GRAPH = "carries an autograd graph from outside of the step"
SCOPE = "the scope of {}"
"""Name of the closure cell or the globals that hold a variable of the code."""


def walk_world(
    arguments: dict[str, Any],
    outside: list[Resolved],
    index: bool = False,
    twin: bool = False,
    kept: frozenset[str] = frozenset(),
) -> World:
    """`observe` for given arguments and outside variables; `index` fills the tables of containers, `twin` implies it."""
    world = World(arguments, outside=outside, kept=kept)
    walk = _Walk(world, index or twin, twin)
    for name, value in arguments.items():
        walk.visit(name, value, arguments, name, True)
    for found in outside:
        if found.holder is not None:
            walk.named(SCOPE.format(found.name), found.holder)
        if id(found.value) not in walk.seen:
            name = found.name if found.name not in world.signature else f"{found.name} (outside)"
            walk.visit(name, found.value, found.holder, found.key, False)
    walk.finish()
    return world


def containers(world: World) -> dict[str, Any]:
    """The containers of a world by path (walks it again)."""
    return walk_world(world.arguments, world.outside, index=True, kept=world.kept).objects


def bind(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Argument names to values, ``*args`` as a tuple, ``**kwargs`` merged in."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return {f"arg{i}": a for i, a in enumerate(args)} | kwargs
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"the arguments do not fit {getattr(fn, '__name__', fn)}{signature}: {error}") from error
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            out.update(value)
        else:
            out[name] = value
    return out


class _Walk:
    def __init__(self, world: World, index: bool, twin: bool) -> None:
        self.world, self.seen, self.index, self.twin = world, set[int](), index, twin
        self.keep: list[Any] = []
        self.parameters: list[tuple[str, Tensor]] = []
        self.optimizers: list[tuple[str, Optimizer]] = []
        self.groups: dict[int, str] = {}  # id -> path

    # `data`: inside the pytree of an argument, where tensors are inputs and not state
    def visit(self, path: str, obj: Any, holder: Any, key: Any, data: bool) -> None:
        if self.index or type(obj) in (int, float) and holder is not None and type(holder) is not tuple:
            self.world.places[path] = (holder, key)
        if isinstance(obj, ATOMS):
            self.world.signature[path] = ("value", obj) if not isinstance(obj, float) else ("value", repr(obj))
            if self.index:
                self.world.atoms[path] = obj
            return
        if isinstance(obj, Tensor):
            self.tensor(path, obj, holder, key, SlotKind.TENSOR, data)
            return
        if is_symbol(obj):
            self.number(path, obj, holder, key, None)
            return
        if id(obj) in self.seen:
            return
        self.seen.add(id(obj))
        self.named(path, obj)
        if isinstance(obj, nn.Module):
            self.module(path, obj)
        elif isinstance(obj, Optimizer):
            self.optimizers.append((path, obj))
        elif isinstance(obj, LRScheduler):
            self.scheduler(path, obj)
        elif isinstance(obj, dict):
            self.world.signature[path] = ("dict", type(obj).__name__, len(obj))
            for k, v in obj.items():
                if isinstance(k, Tensor):
                    self.visit(f"{path}[{self.world.tensors.get(id(k), '?')}]", v, obj, k, data)
                else:
                    self.visit(f"{path}.{k}" if isinstance(k, str) and k.isidentifier() else f"{path}[{k!r}]", v, obj, k, data)
        elif isinstance(obj, collections.UserDict):
            self.visit(path, obj.data, obj, "data", data)
        elif isinstance(obj, (list, tuple, collections.deque)):
            self.world.signature[path] = (type(obj).__name__, len(obj))
            names = getattr(obj, "_fields", None)
            for i, v in enumerate(obj):
                self.visit(f"{path}.{names[i]}" if names else f"{path}[{i}]", v, obj, i, data)
        elif isinstance(obj, (set, frozenset)):
            self.world.signature[path] = (
                type(obj).__name__,
                len(obj),
                tuple(sorted(repr(x) for x in obj if isinstance(x, ATOMS))),
            )
        elif isinstance(obj, types.FunctionType):
            self.world.signature[path] = (
                "function",
                obj.__qualname__,
                obj.__code__.co_firstlineno,
                zlib.crc32(obj.__code__.co_code),
            )
            for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # an empty cell
                    self.visit(f"{path}.{name}", cell.cell_contents, cell, "", False)
            for i, value in enumerate(obj.__defaults__ or ()):
                self.visit(f"{path}.default[{i}]", value, obj.__defaults__, i, False)
            for name, value in (obj.__kwdefaults__ or {}).items():
                self.visit(f"{path}.{name}", value, obj.__kwdefaults__, name, False)
        elif isinstance(obj, (types.MethodType, functools.partial)):
            self.world.signature[path] = (type(obj).__name__,)
            inner = (obj.__self__, obj.__func__) if isinstance(obj, types.MethodType) else (obj.func, obj.args, obj.keywords)
            for x in inner:
                self.visit(f"{path}.{type(x).__name__}", x, None, None, False)
        elif isinstance(obj, weakref.ref):
            target = obj()
            if target is not None:
                self.visit(path, target, None, None, False)
        else:
            self.object(path, obj, data and dataclasses.is_dataclass(obj))

    def named(self, path: str, obj: Any) -> None:
        if self.index:
            self.world.names[id(obj)] = path
            self.world.objects[path] = obj

    def object(self, path: str, obj: Any, data: bool) -> None:
        cls = type(obj)
        self.world.signature[path] = ("object", cls.__module__, cls.__qualname__)
        if isinstance(obj, type) or not descends(cls):
            self.world.signature[path] = ("object", cls.__module__, cls.__qualname__, value_of(obj))
            return
        for name, value in attributes(obj):
            if isinstance(value, (types.FunctionType, type)):
                continue
            self.visit(f"{path}.{name}", value, obj, name, data)

    def module(self, path: str, module: nn.Module) -> None:
        world, signature = self.world, self.world.signature
        if type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
            inner = _WRAPPERS[type(module).__name__]
            raise CaptureError(
                f"{path} is wrapped in {type(module).__name__}; shardc compiles and shards the module itself", where=path,
                hint=f"pass the module in it ({path}.{inner})",
            )  # fmt: skip
        world.modules[id(module)] = path
        signature[path] = ("module", type(module).__qualname__, module.training)
        for name, p in module._parameters.items():
            if p is not None:
                self.tensor(f"{path}.{name}", p, module._parameters, name, SlotKind.PARAMETER, False)
        for name, b in module._buffers.items():
            if b is not None:
                world.places.setdefault(f"{path}.{name}", (module, name)) if self.index else None
                self.tensor(f"{path}.{name}", b, module._buffers, name, SlotKind.BUFFER, False)
        for name, value in module.__dict__.items():
            if name == "training" or name in _MODULE_OWN:
                if value and name.endswith("_hooks") and "state_dict" not in name:
                    signature[f"{path}.{name}"] = ("hooks", tuple(value))
                    for i, hook in enumerate(value.values()):
                        self.visit(f"{path}.{name}[{i}]", hook, None, None, False)
                continue
            self.visit(f"{path}.{name}", value, module, name, False)
        for name, child in module._modules.items():
            if child is not None and id(child) not in self.seen:
                self.seen.add(id(child))
                self.named(f"{path}.{name}", child)
                self.module(f"{path}.{name}", child)
            elif child is not None:
                self._alias_tensors(f"{path}.{name}", child)

    def _alias_tensors(self, path: str, module: nn.Module) -> None:
        for name, p in module.named_parameters(remove_duplicate=False):
            slot = self.world.slots[self.world.tensors[id(p)]]
            slot.aliases = (*slot.aliases, f"{path}.{name}")

    def tensor(self, path: str, t: Tensor, holder: Any, key: Any, kind: SlotKind, data: bool) -> None:
        world = self.world
        known = world.tensors.get(id(t))
        if known is not None:
            world.signature[path] = ("same as", known)
            slot = world.slots.get(known)
            if slot is not None:
                slot.aliases = (*slot.aliases, path)
                slot.holders.append((holder, key))
            return
        if t.layout is not torch.strided:
            raise CaptureError(f"{path} is a tensor of layout {t.layout}", where=path, hint="pass dense tensors")
        if t.requires_grad and not t.is_leaf and not self.twin:  # in the twin it is kept without its graph
            if data:
                raise CaptureError(f"{path} {GRAPH}", where=path, hint="detach it")
            world.graphs.add(path)
        trainable = t.requires_grad and t.is_leaf
        is_input = data and not t.requires_grad and path not in world.kept and not hasattr(t, "placements")
        grad = t.grad if t.is_leaf and t.requires_grad else None
        world.signature[path] = (
            "tensor",
            tuple(t.shape),
            t.dtype,
            tuple(t.stride()),
            grad is not None,
            trainable,
            is_input,
        )
        world.tensors[id(t)] = path
        self.keep.append(t)
        if is_input:
            world.inputs[path] = t
            return
        if isinstance(t, nn.Parameter):
            kind = SlotKind.PARAMETER
        world.slots[path] = SlotRef(path, kind, "", (), trainable, [(holder, key)])
        if trainable or grad is not None:
            self.parameters.append((path, t))

    def optimizer(self, path: str, optimizer: Optimizer) -> None:
        world, signature = self.world, self.world.signature
        world.optimizers[path] = optimizer
        signature[path] = ("optimizer", type(optimizer).__qualname__)
        index: dict[int, int] = {}
        for g, group in enumerate(optimizer.param_groups):
            shared = self.groups.setdefault(id(group), f"{path}.param_groups[{g}]")
            if shared != f"{path}.param_groups[{g}]":  # with an optimizer inside of this one
                signature[f"{path}.param_groups[{g}]"] = ("same as", shared)
                for p in group["params"]:
                    index[id(p)] = len(index)
                continue
            for name, value in group.items():
                where = f"{path}.param_groups[{g}].{name}"
                if name == "params":
                    for i, p in enumerate(value):
                        index[id(p)] = len(index)
                        if id(p) not in world.tensors:
                            self.tensor(f"{path}.param_groups[{g}].params[{i}]", p, value, i, SlotKind.PARAMETER, False)
                    signature[where] = tuple(world.tensors[id(p)] for p in value)
                elif isinstance(value, float) or is_symbol(value):
                    self.number(where, value, group, name, None)
                elif isinstance(value, (tuple, list)) and any(isinstance(v, float) or is_symbol(v) for v in value):
                    signature[where] = (type(value).__name__, len(value))
                    for i, v in enumerate(value):
                        if isinstance(v, float) or is_symbol(v):
                            self.number(f"{where}[{i}]", v, group, name, i)
                        else:
                            self.visit(f"{where}[{i}]", v, value, i, False)
                elif isinstance(value, Tensor):
                    self.tensor(where, value, group, name, SlotKind.OPTIMIZER, False)
                elif name != "param_names":
                    self.visit(where, value, group, name, False)
        for p, state in optimizer.state.items():
            if not isinstance(p, Tensor):
                self.visit(f"{path}.state[{p!r}]", state, optimizer.state, p, False)
                continue
            if id(p) not in index:
                raise CaptureError(
                    f"{path}.state holds an entry for a tensor of shape {tuple(p.shape)} in none of its groups", where=path
                )
            base, of = f"{path}.state[{index[id(p)]}]", world.tensors[id(p)]
            self.named(base, state)
            signature[base] = ("state", len(state))
            for name, value in state.items():
                where = f"{base}.{name}"
                if isinstance(value, Tensor):
                    self.tensor(where, value, state, name, SlotKind.OPTIMIZER, False)
                    slot = world.slots.get(where)
                    if slot is not None:
                        slot.of, slot.owner = of, path
                elif (isinstance(value, (int, float)) and not isinstance(value, bool)) or is_symbol(value):
                    self.number(where, value, state, name, None)
                else:
                    self.visit(where, value, state, name, False)
        for name, value in optimizer.__dict__.items():
            if name not in _OPTIMIZER_OWN and not isinstance(value, types.FunctionType):
                self.visit(f"{path}.{name}", value, optimizer, name, False)

    def scheduler(self, path: str, scheduler: LRScheduler) -> None:
        """Its own numbers may change at every call without another program: its step runs on the host."""
        self.world.schedulers[path] = scheduler
        self.world.signature[path] = ("scheduler", type(scheduler).__qualname__)
        for name, value in scheduler.__dict__.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) or is_symbol(value):
                self.number(f"{path}.{name}", value, scheduler, name, None)
            elif isinstance(value, (Optimizer, list)) and name != "_last_lr":
                self.visit(f"{path}.{name}", value, scheduler, name, False)

    def number(self, path: str, value: Any, holder: Any, key: Any, index: int | None) -> None:
        self.world.numbers[path] = value
        self.world.number_holders[path] = (holder, key, index)
        self.world.signature[path] = ("number", value.node.pytype.__name__ if is_symbol(value) else type(value).__name__)

    def finish(self) -> None:
        """Optimizers last, when every parameter has its module's name; then the gradients."""
        i = 0
        while i < len(self.optimizers):
            self.optimizer(*self.optimizers[i])
            i += 1
        world = self.world
        for path, p in self.parameters:
            if p.grad is not None:
                if p.grad.layout is not torch.strided:
                    raise CaptureError(f"the gradient of {path} has layout {p.grad.layout}", where=path,
                                       hint="optimizer.zero_grad() before the first compiled step")  # fmt: skip
                grad = f"{path}.grad"
                world.tensors.setdefault(id(p.grad), grad)
                world.slots[grad] = SlotRef(grad, SlotKind.GRADIENT, path, (), False, [(p, "grad")])
                world.signature[grad] = (
                    "tensor",
                    tuple(p.grad.shape),
                    p.grad.dtype,
                    tuple(p.grad.stride()),
                    False,
                    False,
                    False,
                )
