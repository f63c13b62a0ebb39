"""The user's state on a real mesh: sharded into DTensors at the first call, checked and taken up at each later one.

Under process groups parameters, gradients and per-element optimizer state become DTensors over this rank's part. What is
replicated and not per element of a parameter (buffers, step counters, other tensors) stays a plain tensor, as with FSDP2:
`state_dict()` and `torch.distributed.checkpoint` store it once, and eager code that reads a buffer goes on working. On one
rank without process group, and on a simulated mesh, all tensors stay plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc import _torch
from shardc._torch import compute_local_shape_and_global_offset
from shardc.errors import SpecError, StateError
from shardc.placements import from_placements, to_placements
from shardc.program import SlotKind, TensorType
from shardc.runtime.agree import agree_values
from shardc.runtime.fingerprint import fingerprint
from shardc.runtime.layout import cut, gather
from shardc.runtime.materialise import materialise
from shardc.runtime.owners import places, strangers
from shardc.runtime.tiers import tier_of
from shardc.runtime.world import Ranks
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE


class Values(Protocol):
    """Where values come from that the user's tensors do not have yet: a checkpoint, a deferred initialisation."""

    def gives(self, t: Tensor) -> bool:
        """Whether it has the values of a tensor without memory."""

    def replaces(self, t: Tensor) -> bool:
        """Whether the values that a tensor has do not matter."""

    def whole(self, t: Tensor, device: torch.device) -> Tensor:
        """The whole tensor on `device`; it is dropped before the next is asked for."""


Adopt = Callable[[str, Tensor], bool]
"""Takes a path and this rank's part of it."""


class Ref(Protocol):
    """A piece of state in the user's objects (`shardc.capture` makes them)."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> SlotKind: ...
    @property
    def of(self) -> str: ...
    def get(self) -> Tensor: ...
    def set(self, tensor: Tensor) -> None: ...


def to_local(t: Tensor) -> Tensor:
    """This rank's part: the very tensor inside a DTensor, or a plain tensor itself; detached from autograd."""
    return _torch.local_of(t) if isinstance(t, DTensor) else t.detach()


def own_part(t: Tensor) -> Tensor:
    """The tensor in which the user's object holds this rank's part: that inside a DTensor, or a plain tensor itself."""
    return _torch.local_of(t) if isinstance(t, DTensor) else t


def wrap(local: Tensor, spec: ShardSpec, type: TensorType, ranks: Ranks, where: str = "") -> DTensor:
    """A DTensor of global `type` over `local` (no copy, no communication).

    Raises:
        SpecError: `spec` cannot be written as placements, or `local` has not the shape that spec and torch give this rank.
    """
    placements = to_placements(spec, ranks.mesh, where)
    mesh = ranks.device_mesh
    assert mesh is not None, "without process groups tensors stay plain"
    want = spec.local_shape(ranks.mesh, ranks.coord)
    theirs, _ = compute_local_shape_and_global_offset(torch.Size(type.shape), mesh, placements)
    if not tuple(local.shape) == want == tuple(theirs):
        raise SpecError(
            f"part of shape {list(local.shape)} at {ranks.coord} of {spec}: shardc expects {list(want)}, torch {list(theirs)}",
            where=where,
        )
    stride = type.stride or torch.empty(type.shape, device="meta").stride()
    out = DTensor.from_local(local.detach(), mesh, placements, run_check=False, shape=torch.Size(type.shape), stride=stride)
    if local.device.type != out.device.type:  # at rest on the host; torch has made a copy on the device
        _torch.local_of(out).data = local
    return out


def is_distributed(kind: SlotKind, of: str, spec: ShardSpec) -> bool:
    """Whether a slot rests as a DTensor under process groups (see the module docstring)."""
    if kind in (SlotKind.PARAMETER, SlotKind.GRADIENT):
        return True
    return bool(spec.axes) or (kind is SlotKind.OPTIMIZER and bool(of) and bool(spec.shape))


def rest(local: Tensor, kind: SlotKind, of: str, spec: ShardSpec, type: TensorType, ranks: Ranks, where: str = "") -> Tensor:
    """A newly created slot (optimizer state, a gradient) as it is put into the user's objects."""
    if not ranks.distributed or not is_distributed(kind, of, spec):
        return local
    return wrap(local, spec, type, ranks, where)


# -- the first call ----------------------------------------------------------------------------------------------------------


def shard_module_state(
    refs: Iterable[Ref],
    specs: Mapping[str, ShardSpec],
    ranks: Ranks,
    owners: Iterable[object],
    *,
    compare: bool = True,
    values: Values | None = None,
    adopt: Adopt | None = None,
) -> bool:
    """Replace the user's state by this rank's part of it, on the mesh's device, tensor by tensor.

    Each Parameter becomes one new Parameter, a DTensor, in all places that `owners` reach (modules, optimizer groups and
    state, lists, closures), so what was tied stays tied; requires_grad, attributes and hooks go with it. The refs are stale
    afterwards: observe the world anew.

    Args:
        refs: all slots. Tensors that are DTensors already stay as they are.
        specs: storage spec of each path; a gradient without one rests as its parameter does.
        owners: the arguments of the step, and what its code reaches through closures and globals.
        compare: whether to check that all ranks hold the same values.
        adopt: puts a tensor on the tier where it rests, as soon as it is there; False where that is the device.
        values: of tensors that have none; without it modules draw those of meta tensors themselves.

    Returns:
        Whether tensors were replaced: the refs are stale then, observe the world anew.

    Raises:
        StateError: a reference from outside of `owners`; meta tensors without a way to values; a DTensor of other placements.
        AgreementError: ranks hold different values; names the first such tensor.
    """
    kept = {ref.path: ref for ref in refs}
    spec_of = {path: _spec(ref, specs) for path, ref in kept.items()}
    plain: dict[str, Tensor] = {}
    for path, ref in kept.items():
        t = ref.get()
        if isinstance(t, DTensor):
            _check_placed(path, t, spec_of[path], ranks)
        else:
            plain[path] = t
    given = {path for path, t in plain.items() if values is not None and values.gives(t)}
    meta = {id(t): path for path, t in plain.items() if t.is_meta and path not in given}
    if compare and ranks.distributed:
        names = [f"{path} {TensorType.of(t)}" for path, t in plain.items()]
        agree_values(ranks, names, [_known(t, values) for t in plain.values()], "initial state")
    moving = {path: t for path, t in plain.items() if t.is_meta or path in given or (
        ranks.distributed and _moves(kept[path], spec_of[path], t))}
    if not moving:
        return _move(plain, ranks, adopt)
    where = places(owners, moving.values())
    where.known.update(id(h) for ref in kept.values() for h, _ in getattr(ref, "holders", ()) if not isinstance(h, Tensor))
    where.known.update(map(id, (kept, plain, moving)))
    _refuse_strangers({p: t for p, t in moving.items() if kept[p].kind is SlotKind.PARAMETER}, where.known)
    moving.clear()

    def replace(path: str, old: Tensor, value: Tensor) -> None:
        ref, new = kept[path], value
        if ranks.distributed and is_distributed(ref.kind, ref.of, spec_of[path]):
            new = _sharded(value, spec_of[path], spec_of.get(f"{path}.grad", spec_of[path]), ranks, path)
        if adopt is not None:
            adopt(path, own_part(new))
        for put in where.put.pop(id(old), ()):
            put(new)
        if ref.get() is old:
            ref.set(new)

    for path in [p for p in plain if p in given]:
        assert values is not None
        old = plain.pop(path)
        replace(path, old, values.whole(old, ranks.device))
    for old, value in materialise(where.modules, meta, ranks) if meta else ():
        replace(meta[id(old)], old, value)
        del plain[meta[id(old)]]
    for path in list(plain):  # each whole tensor is let go before the next is cut
        t = plain.pop(path)
        if ranks.distributed and _moves(kept[path], spec_of[path], t):
            replace(path, t, t)
        elif kept[path].kind is not SlotKind.GRADIENT:
            _move({path: t}, ranks, adopt)
    for module in where.modules:
        known = any(getattr(hook, "hook", None) is _place_loaded for hook in module._load_state_dict_pre_hooks.values())
        if not known and any(isinstance(t, DTensor) for t in (*module._parameters.values(), *module._buffers.values())):
            module.register_load_state_dict_pre_hook(_place_loaded)  # type: ignore[no-untyped-call]
    return True


def _known(t: Tensor, values: Values | None) -> int:
    """A number for the values of a tensor that the ranks compare."""
    return 0 if t.is_meta or (values is not None and (values.gives(t) or values.replaces(t))) else fingerprint(t)


def _moves(ref: Ref, spec: ShardSpec, t: Tensor) -> bool:
    """Whether a plain tensor becomes a DTensor of its own accord (gradients go with their parameter)."""
    if isinstance(t, nn.Parameter) and type(t) is not nn.Parameter:
        raise StateError(f"{ref.path} is a {type(t).__name__}, whose class would be lost when it is sharded", where=ref.path,
                         hint="use nn.Parameter (initialise lazy modules by one eager call)")  # fmt: skip
    return ref.kind is not SlotKind.GRADIENT and is_distributed(ref.kind, ref.of, spec)


def _refuse_strangers(parameters: Mapping[str, Tensor], known: set[int]) -> None:
    outside = strangers(parameters, {*known, id(parameters)})
    if outside:
        path, words = next(iter(outside.items()))
        raise StateError(
            f"{path} is also held by {words}, which is not among the arguments: it would keep the old, whole tensor"
            + (f" ({len(outside)} such references)" if len(outside) > 1 else ""),
            where=path, hint="drop that reference (del) before the first step, or pass its owner as an argument",
        )  # fmt: skip


def _move(tensors: Mapping[str, Tensor], ranks: Ranks, adopt: Adopt | None) -> bool:
    """To the mesh's device, or to where it rests, in place. Returns False: no object is replaced."""
    for path, t in tensors.items():
        if not (adopt is not None and adopt(path, t)) and t.device.type != ranks.device.type:
            t.data = t.data.to(ranks.device)
    return False


def _sharded(t: Tensor, spec: ShardSpec, grad_spec: ShardSpec, ranks: Ranks, path: str) -> Tensor:
    """`t` as a DTensor (a Parameter if it is one), with all that hangs on it."""
    with torch.no_grad():
        local = cut(t.detach(), spec, ranks.mesh, ranks.coord, ranks.device)
        new: Tensor = wrap(local, spec, TensorType.of(t), ranks, path)
        if isinstance(t, nn.Parameter):
            new = nn.Parameter(new, requires_grad=t.requires_grad)
        else:
            new.requires_grad_(t.requires_grad)
        if t.is_leaf and t.grad is not None and not isinstance(t.grad, DTensor):
            part = cut(t.grad.detach(), grad_spec, ranks.mesh, ranks.coord, ranks.device)
            new.grad = wrap(part, grad_spec, TensorType.of(t.grad), ranks, f"{path}.grad")
    new.__dict__.update({k: v for k, v in t.__dict__.items() if k not in new.__dict__})
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(t, hooks, None):
            setattr(new, hooks, getattr(t, hooks))  # the same dict, so that handles still remove their hook
    return new


def _place_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module takes a state dict: whole tensors of the right shape become DTensors like those they are copied to."""
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        new = state.get(prefix + name)
        if isinstance(own, DTensor) and isinstance(new, Tensor) and not isinstance(new, DTensor) and new.shape == own.shape:
            state[prefix + name] = place_like(new, own)


def place_like(whole: Tensor, like: DTensor) -> DTensor:
    """A whole plain tensor, the same on all ranks, as a DTensor placed like `like` (no communication)."""
    ranks = Ranks.of(like.device_mesh)
    spec = from_placements(like.placements, like.shape, ranks.mesh)
    local = cut(whole.detach(), spec, ranks.mesh, ranks.coord, to_local(like).device)
    return wrap(local, spec, TensorType.of(whole), ranks)


# -- later calls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """How a parameter or a piece of optimizer state was left behind."""

    kind: SlotKind
    tensor: Tensor | None  # of a parameter; no weak reference: `module.to()` could not swap a DTensor that has one
    shape: tuple[int, ...]
    dtype: torch.dtype


class Watch:
    """Remembers parameters and optimizer state between steps, and refuses what was changed behind the step's back: on any
    mesh, also on one rank. New values are fine: copied in place, or loaded with `load_state_dict`."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def remember(self, refs: Iterable[Ref]) -> None:
        """After a step (or after sharding): this is how the state lies now."""
        self._seen = {}
        for ref in refs:
            if ref.kind in (SlotKind.PARAMETER, SlotKind.OPTIMIZER):
                t = ref.get()
                self._seen[ref.path] = _Seen(ref.kind, None if ref.kind is SlotKind.OPTIMIZER else t, tuple(t.shape), t.dtype)

    def check(self, refs: Iterable[Ref]) -> None:
        """Before a step.

        Raises:
            StateError: a parameter that is gone, was replaced, retyped or reshaped; loaded state of the wrong shape or dtype.
        """
        now = {ref.path: ref for ref in refs}
        for path, seen in self._seen.items():
            ref = now.get(path)
            if ref is None:
                if seen.kind is SlotKind.PARAMETER:
                    raise StateError(f"{path} is gone since the last step", where=path, hint=_REPLACED)
                continue  # a cleared optimizer state is created again
            t = ref.get()
            loaded = seen.kind is SlotKind.OPTIMIZER
            if tuple(t.shape) != seen.shape:
                raise StateError(
                    f"{path} has shape {list(t.shape)}, the compiled step left it with {list(seen.shape)}", where=path,
                    hint="load a state dict of the same model" if loaded else _REPLACED,
                )  # fmt: skip
            if t.dtype != seen.dtype:
                raise StateError(
                    f"{path} was retyped from {seen.dtype} to {t.dtype} since the last step", where=path,
                    hint="load a state dict of the same dtypes" if loaded else "convert the model before the first step",
                )  # fmt: skip
            if not loaded and t is not seen.tensor:
                raise StateError(f"{path} was replaced by another Parameter since the last step", where=path, hint=_REPLACED)


_REPLACED = "change it in place (with torch.no_grad(): p.copy_(...), or load_state_dict without assign=True), or compile anew"


def take_up(
    refs: Iterable[Ref], specs: Mapping[str, ShardSpec], types: Mapping[str, TensorType], ranks: Ranks
) -> dict[str, Tensor]:
    """This rank's part of every slot, ready to run; what the user put there since the last step is sharded first.

    `optimizer.load_state_dict` puts whole plain tensors, or DTensors of any placements, where the last step left shards;
    they are cut again, with the same values on all ranks taken for granted.

    Args:
        specs, types: storage spec and global type of each path.

    Raises:
        StateError: a plain tensor of a shape that is not the global one, or a parameter that is not sharded (any more).
    """
    out: dict[str, Tensor] = {}
    for ref in refs:
        path, t = ref.path, ref.get()
        spec, type = _spec(ref, specs), types[path]
        if not ranks.distributed:
            out[path] = t.detach()
        elif isinstance(t, DTensor) and tuple(t.shape) == type.shape and _lies(t, spec, ranks, path):
            out[path] = _torch.local_of(t)
        elif not isinstance(t, DTensor) and not is_distributed(ref.kind, ref.of, spec) and (
            t.device.type == ranks.device.type or tier_of(t) != DEVICE
        ):
            out[path] = t.detach()
        else:
            new = _again(ref, t, spec, type, ranks)
            ref.set(new)
            out[path] = to_local(new)
    return out


def _again(ref: Ref, t: Tensor, spec: ShardSpec, type: TensorType, ranks: Ranks) -> Tensor:
    path = ref.path
    if ref.kind is SlotKind.PARAMETER:
        if isinstance(t, DTensor):
            _check_placed(path, t, spec, ranks)
        raise StateError(f"{path} is a plain tensor, the compiled step left it sharded as {spec}", where=path, hint=_REPLACED)
    if tuple(t.shape) != type.shape:
        raise StateError(
            f"{path} has shape {list(t.shape)}, its global shape is {list(type.shape)}", where=path,
            hint="put the whole tensor there, or a DTensor of that global shape",
        )  # fmt: skip
    with torch.no_grad():
        if isinstance(t, DTensor):
            theirs = Ranks.of(t.device_mesh)
            t = gather(_torch.local_of(t), from_placements(t.placements, t.shape, theirs.mesh, path), theirs)
        local = cut(t.detach(), spec, ranks.mesh, ranks.coord, ranks.device)
    return rest(local, ref.kind, ref.of, spec, type, ranks, path)


def _spec(ref: Ref, specs: Mapping[str, ShardSpec]) -> ShardSpec:
    spec = specs.get(ref.path) or (specs.get(ref.of) if ref.kind is SlotKind.GRADIENT else None)
    if spec is None:
        raise StateError(f"{ref.path} has no storage spec", where=ref.path, hint="this is a bug of shardc: please report it")
    return spec


def _check_placed(path: str, t: DTensor, spec: ShardSpec, ranks: Ranks) -> None:
    if not _same_mesh(t, ranks):
        raise StateError(f"{path} is a DTensor on mesh {t.device_mesh}, the step runs on {ranks.mesh}", where=path,
                         hint="compile the step with the mesh that the state lies on")  # fmt: skip
    if tuple(t.shape) != spec.shape or not _lies(t, spec, ranks, path):
        raise StateError(
            f"{path} is a DTensor of shape {list(t.shape)} placed {t.placements}, the step keeps it as {spec}", where=path,
            hint="redistribute it, or pin it with params={...} to where it lies",
        )  # fmt: skip


def _same_mesh(t: DTensor, ranks: Ranks) -> bool:
    mesh = t.device_mesh
    return mesh is ranks.device_mesh or (mesh.mesh_dim_names == ranks.mesh.names and tuple(mesh.shape) == ranks.mesh.shape)


def _lies(t: DTensor, spec: ShardSpec, ranks: Ranks, path: str) -> bool:
    """Whether every rank's part of a DTensor of the right shape is that of `spec`."""
    if not _same_mesh(t, ranks):
        return False
    placements = to_placements(spec, ranks.mesh, path)
    return tuple(t.placements) == placements or from_placements(t.placements, t.shape, ranks.mesh, path).same(spec, ranks.mesh)
