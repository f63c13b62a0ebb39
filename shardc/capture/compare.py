"""The twin after the trace against the user's objects: the program's exits, and the effects of a run."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from torch import fx

from shardc import _torch
from shardc._torch import FunctionalTensor
from shardc.capture import hooks
from shardc.capture.effects import Created, Effects
from shardc.capture.names import Resolved
from shardc.capture.numbers import is_symbol
from shardc.capture.walk import SCOPE, walk_world
from shardc.capture.world import SlotRef, World
from shardc.errors import CaptureError
from shardc.program import Slot, SlotKind, TensorType

if TYPE_CHECKING:
    from shardc.capture.trace import Trace


def after(trace: Trace, arguments: dict[str, Any]) -> Effects:
    """Compare the twin world with the user's and fill in the program's exits.

    Raises:
        CaptureError: something changed that a program cannot carry; names it.
    """
    return _Comparison(trace, _walk_twin(trace, arguments)).run()


def _walk_twin(trace: Trace, arguments: dict[str, Any]) -> World:
    outside: list[Resolved] = []
    for found in trace.world.outside:
        holder = trace.twin.namespace(found.holder)
        if holder is None:
            value = trace.twin.memo.get(id(found.value), found.value)
        elif found.key:
            value = holder.get(found.key, found.value)
        else:
            try:
                value = holder.cell_contents
            except ValueError:
                continue
        outside.append(Resolved(found.name, value, holder, found.key))
    rebound = trace.twin.rebound_globals()
    named = {found.key for found in trace.world.outside}
    if bad := [name for name in rebound if name not in named]:
        raise CaptureError(
            f"the step assigns the global {bad[0]}", where=bad[0], hint="keep it in an object passed as an argument"
        )
    return walk_world(arguments, outside, twin=True, kept=trace.world.kept)


class InputsChanged(CaptureError):
    """The step changes inputs in place. Those that lie in a list, dict or object of an argument can be state, but for parts of
    the batch: those of as many rows as an input that the step only reads, unless they are shaped as a parameter."""

    def __init__(self, paths: list[str], world: World) -> None:
        super().__init__(
            f"the step changes the input {paths[0]} in place", where=paths[0],
            hint="clone it first, or hold it in a list or a module (a buffer), where it is state",
        )  # fmt: skip
        self.paths = frozenset(paths)
        shapes = {tuple(slot.get().shape) for slot in world.slots.values() if slot.kind is SlotKind.PARAMETER}
        read = {t.shape[0] for path, t in world.inputs.items() if t.dim() and path not in self.paths}

        def state(path: str) -> bool:
            t = world.inputs.get(path)
            if t is None or not ("." in path or "[" in path):
                return False
            return not t.dim() or tuple(t.shape) in shapes or t.shape[0] not in read

        self.nested = all(map(state, paths))


class Carry(Exception):
    """Plain numbers change in the step: it is traced again with them as inputs."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self.paths = paths


class _Comparison:
    def __init__(self, trace: Trace, new: World) -> None:
        self.trace, self.old, self.new = trace, trace.world, new
        self.program, self.effects = trace.program, Effects()
        self.counters: set[str] = set()
        self.hooks: tuple[str, ...] = ()  # under which paths the hooks lie that the step leaves

    def run(self) -> Effects:
        self._inputs()
        self._slots()
        self._numbers()
        for path, value in self.new.signature.items():
            if self.hooks and path.startswith(self.hooks):
                continue
            if path not in self.old.signature:
                self._appeared(path, value)
            elif self.old.signature[path] != value:
                self._changed(path, self.old.signature[path], value)
        self._gone()
        if self.counters:
            raise Carry(frozenset(self.counters))
        self.effects.stepped, self.effects.scheduled = self.trace.stepped, self.trace.scheduled
        return self.effects

    def _node(self, t: Any, path: str) -> fx.Node:
        if not isinstance(t, FunctionalTensor):
            raise CaptureError(f"{path} became a tensor from outside of the step", where=path)
        node = self.trace.recorder.node_of(_torch.current_value(t))
        assert node is not None
        return node

    def _inputs(self) -> None:
        entries = {**self.trace.recorder.const_nodes, **self.program.inputs}
        changed = [path for path, twin in self.trace.input_twins.items() if self._node(twin, path) is not entries[path]]
        if changed:
            raise InputsChanged(changed, self.old)

    def _slots(self) -> None:
        program, trace = self.program, self.trace
        for path, ref in self.old.slots.items():
            new = self.new.slots.get(path)
            if new is None:
                continue
            twin: Any = new.get()
            replaced = twin is not trace.slot_twins[path]
            if replaced and ref.kind is SlotKind.PARAMETER:
                raise CaptureError("the step replaces a parameter by another tensor", where=path, hint="copy_ into it")
            if new.trainable != trace.slot_twins[path].requires_grad and replaced:
                raise CaptureError("the step replaces a tensor by one with another requires_grad", where=path)
            if new.trainable != ref.trainable and not self._graph(path, twin):
                self.effects.requires_grad[path] = bool(twin.requires_grad)
            if replaced:
                self._graph(path, twin)
            node = self._node(twin, path)
            type_ = TensorType.of(_torch.current_value(twin))
            if (type_.shape, type_.dtype) != (program.slots[path].type.shape, program.slots[path].type.dtype):
                if ref.kind is SlotKind.PARAMETER:
                    raise CaptureError(
                        f"the step turns a parameter of type {program.slots[path].type} into {type_}", where=path
                    )
                self._resized(path, ref, type_)
            program.exit[path] = node
            program.versions.setdefault(node, path)

    def _graph(self, path: str, twin: Any) -> bool:
        """Whether a tensor that is kept has an autograd graph, which is not kept: the plan says so."""
        if twin.is_leaf or not twin.requires_grad:
            return False
        self.program.notes.append(f"{path} is kept without its autograd graph")
        return True

    def _resized(self, path: str, ref: SlotRef, type_: TensorType) -> None:
        raise CaptureError(
            f"the step changes the size or dtype of {path} from {self.program.slots[path].type} to {type_}", where=path
        )

    def _create(self, path: str, ref: SlotRef) -> None:
        twin: Any = ref.get()
        node = self._node(twin, path)
        owner, key = (ref.owner, ref.holders[0][1]) if ref.owner else self._container(path, ref)
        self._graph(path, twin)
        on_cpu = False
        if ref.kind is SlotKind.OPTIMIZER and key == "step" and ref.owner:
            group = self.new.group_of(ref.owner, ref.holders[0][0])
            on_cpu = not (group.get("capturable") or group.get("fused"))
        type_ = TensorType.of(_torch.current_value(twin))
        self.program.slots[path] = Slot(path, ref.kind, type_, ref.of, tuple(ref.aliases), ref.trainable)
        self.program.exit[path] = node
        self.program.versions.setdefault(node, path)
        persistent = ref.kind is not SlotKind.BUFFER or key not in self.new.objects[owner]._non_persistent_buffers_set
        self.effects.created.append(
            Created(path, ref.kind, owner, ref.of, key, type=type_, on_cpu=on_cpu, persistent=persistent)
        )

    def _container(self, path: str, ref: SlotRef) -> tuple[str, Any]:
        """Path of the container that holds a new entry, and its key there."""
        if ref.kind is SlotKind.GRADIENT:
            return ref.of, "grad"
        return self._place(path)

    def _place(self, path: str) -> tuple[str, Any]:
        holder, key = self.new.places[path]
        owner = self.new.names.get(id(holder))
        known = owner is not None and (
            owner in self.old.signature or owner in self.effects.containers or owner.startswith(SCOPE.format(""))
        )
        if owner is None or not known or isinstance(holder, tuple):
            raise CaptureError(
                f"a value of the step escapes into {path}", where=path,
                hint="return it from the step and store it outside",
            )  # fmt: skip
        return owner, key

    def _numbers(self) -> None:
        value: Any
        for path, value in self.new.numbers.items():
            if path not in self.old.numbers:
                continue
            if not is_symbol(value):
                self.effects.constants[path] = value
            elif value.node.later:
                continue
            elif value.node.constant is not None:
                self.effects.constants[path] = value.node.constant
            elif value.node.fx_node is not self.program.numbers[path]:
                self.program.number_exit[path] = value.node.fx_node

    def _create_number(self, path: str, value: Any) -> None:
        computed = is_symbol(value) and value.node.constant is None
        if computed:
            self.program.number_exit[path] = value.node.recorded()
        plain = None if computed else value.node.constant if is_symbol(value) else value
        owner, of, key = self.new.number_owner(path)
        self.effects.created.append(Created(path, None, owner, of, key, plain))

    def _appeared(self, path: str, value: Hashable) -> None:
        if path in self.new.slots:
            return self._create(path, self.new.slots[path])
        if path in self.new.numbers:
            return self._create_number(path, self.new.numbers[path])
        kind = value[0] if isinstance(value, tuple) else None
        if kind == "state":  # an optimizer's new dict for a parameter; its entries are created one by one
            self.effects.containers[path] = self._state_of(path)
            return
        if kind in ("list", "dict"):
            holder = self.new.objects[path]
            if type(holder) is list or type(holder) is dict:
                owner, key = self._place(path)
                self.effects.containers[path] = (kind, owner, key)
                if type(holder) is list:
                    self.effects.lengths[path] = len(holder)
                return
        if kind == "hooks":
            return self._hooks(path, ())
        if kind == "value":
            owner, key = self._place(path)
            assert isinstance(value, tuple)
            self.effects.assigned[path] = (owner, key, self.new.atoms[path])
            return
        raise CaptureError(
            f"the step keeps {path} beyond the call", where=path, hint="return it from the step and store it outside"
        )

    def _hooks(self, path: str, old: tuple[int, ...]) -> None:
        found = hooks.added(path, old, self.new, self.trace.twin.scopes())
        self.effects.hooks.append(found)
        self.hooks += tuple(f"{path}[{len(old) + i}]" for i in range(len(found.added)))

    def _state_of(self, path: str) -> tuple[str, str, Any]:
        """Of the state dict of a parameter: ("state", path of the optimizer, path of the parameter)."""
        for name, optimizer in self.new.optimizers.items():
            for p, state in optimizer.state.items():
                if self.new.names.get(id(state)) == path:
                    return "state", name, self.new.tensors[id(p)]
        raise CaptureError(f"{path} belongs to no optimizer", where=path)

    def _changed(self, path: str, old: Any, new: Any) -> None:
        kind = new[0]
        if path in self.new.slots and path not in self.old.slots and path not in self.old.inputs:
            return self._create(path, self.new.slots[path])
        if path in self.old.slots and path not in self.new.slots and kind in ("value", "number"):
            if self.old.slots[path].kind is SlotKind.PARAMETER:
                raise CaptureError("the step removes a parameter", where=path)
            self.effects.deleted.append(path)
            return self._appeared(path, new)
        if path in self.old.numbers:
            if path not in self.new.numbers:
                self.effects.constants[path] = self.new.atoms[path]
            return
        if kind == "tensor" and old[0] == "tensor":
            return  # seen with the slots
        value = self.new.numbers[path] if path in self.new.numbers else self.new.atoms.get(path)
        number = is_symbol(value) or type(value) in (int, float)
        if number and old[0] == "value" and path in self.old.places:
            self.counters.add(path)
        elif kind == "value" and old[0] == "value":
            owner, key = self._place(path)
            self.effects.assigned[path] = (owner, key, self.new.atoms[path])
        elif kind == "hooks" and old[0] == kind:
            self._hooks(path, old[1])
        elif kind == "module" and old[:2] == new[:2]:
            self.effects.training[path] = new[2]
        elif kind == "state" or (kind in ("dict", "object") and old[:2] == new[:2]):
            return  # its entries are seen one by one
        elif path in self.new.numbers:
            raise CaptureError(
                f"a number computed from a tensor is kept in {path}, so that every later call would be another program",
                where=path, hint="keep it as a tensor, or return it from the step",
            )  # fmt: skip
        elif kind == "list" and old[0] == kind and any(path.startswith(f"{o}.state[") for o in self.new.optimizers):
            self.effects.lengths[path] = new[1]
        elif kind in ("list", "tuple") and old[0] == kind:
            raise CaptureError(
                f"{path} has {new[1]} entries after the step and had {old[1]} before: a value of the step escapes into it",
                where=path, hint="return the value from the step and append it outside",
            )  # fmt: skip
        else:
            raise CaptureError(f"the step changes {path}: {old} became {new}", where=path, hint="change it outside of the step")

    def _gone(self) -> None:
        for path in self.old.signature:
            if path in self.new.signature:
                continue
            if path in self.old.slots:
                if self.old.slots[path].kind is SlotKind.PARAMETER:
                    raise CaptureError("the step removes a parameter", where=path)
                self.effects.deleted.append(path)
            elif path in self.old.inputs or path in self.old.numbers:
                raise CaptureError(f"the step removes {path}", where=path)
