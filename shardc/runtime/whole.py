"""Whole plain tensors out of sharded state: for evaluation and generation, and as state dicts. Collective on real meshes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc import _torch
from shardc.errors import StateError
from shardc.placements import from_placements
from shardc.runtime.agree import digest, exchange
from shardc.runtime.fingerprint import fingerprint
from shardc.runtime.layout import gather
from shardc.runtime.owners import places
from shardc.runtime.tiers import verified
from shardc.runtime.world import Ranks


def whole(t: Tensor, ranks: Ranks | None = None) -> Tensor:
    """The global value of a DTensor on every rank (collective), or a plain tensor itself; detached. Never through
    `DTensor.full_tensor`, which is wrong for unevenly nested shards."""
    if not isinstance(t, DTensor):
        return verified(t.detach())
    ranks = ranks or Ranks.of(t.device_mesh)
    with torch.no_grad():
        local = verified(_torch.local_of(t).detach()).to(ranks.device)
        return gather(local, from_placements(t.placements, t.shape, ranks.mesh), ranks)


@contextlib.contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """While inside, the parameters and buffers of `modules` are whole and plain: call, evaluate and generate as ever.

    All ranks enter and leave together. For reading only: on leaving, the sharded state is back in place, and a value that
    was changed inside is an error, as is a gradient that was computed there. On a mesh of one process the modules are left
    as they are.

    Raises:
        StateError: something that is not a module; a value changed inside.
        AgreementError: another rank is doing something else.
    """
    for m in modules:
        if not isinstance(m, nn.Module):
            raise StateError(f"gathered() takes modules, not {type(m).__name__}", hint="with shardc.gathered(model): ...")
    tables: dict[int, dict[str, Tensor | None]] = {}
    names: dict[int, str] = {}
    for root in modules:
        for path, module in root.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                tables[id(table)] = table
                for name, t in table.items():
                    if t is not None:
                        names.setdefault(id(t), f"{path}.{name}" if path else name)
    saved = {key: dict(table) for key, table in tables.items()}
    originals = {id(t): t for table in saved.values() for t in table.values() if t is not None}
    sharded = [t for t in originals.values() if isinstance(t, DTensor)]
    for t in originals.values():
        if not isinstance(t, DTensor):
            verified(t.detach())
    ranks = Ranks.of(sharded[0].device_mesh) if sharded else None
    if ranks is not None:
        text = "\n".join(f"{names[id(t)]} {tuple(t.shape)}" for t in sharded)
        exchange(ranks, digest(f"gathered {text}"), (), lambda: {"call": "shardc.gathered", "tensors": text})
    inside: dict[int, Tensor] = {}
    for key, t in originals.items():
        inside[key] = _readable(t, ranks) if ranks is not None else t
    before = {key: fingerprint(t) for key, t in inside.items()}
    if ranks is not None:
        _swap(modules, [(t, inside[key]) for key, t in originals.items()])
    try:
        yield
        _refuse_changes(tables, saved, inside, before, names, check_grads=ranks is not None)
    finally:
        if ranks is not None:
            _swap(modules, [(inside[key], t) for key, t in originals.items()])
            for key, table in tables.items():
                table.clear()
                table.update(saved[key])


def _swap(modules: Sequence[nn.Module], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Replace tensors in all places that the modules reach (an LSTM, say, keeps a list of its weights beside the table)."""
    where = places(modules, [old for old, _ in pairs])
    for old, new in pairs:
        for put in where.put.get(id(old), ()):
            put(new)


def _readable(t: Tensor, ranks: Ranks | None) -> Tensor:
    """A plain tensor of the same value; a copy also of what is plain already, since a module may write to its buffers."""
    value = whole(t, ranks)
    if not isinstance(t, DTensor) or value.data_ptr() == _torch.local_of(t).data_ptr():
        value = value.clone()
    if not isinstance(t, nn.Parameter):
        return value
    out = nn.Parameter(value, requires_grad=t.requires_grad)
    out.__dict__.update({k: v for k, v in t.__dict__.items() if k != "_is_param"})
    return out


def _refuse_changes(
    tables: Mapping[int, Mapping[str, Tensor | None]],
    saved: Mapping[int, Mapping[str, Tensor | None]],
    inside: Mapping[int, Tensor],
    before: Mapping[int, int],
    names: Mapping[int, str],
    check_grads: bool,
) -> None:
    hint = "read only inside gathered() (model.eval(), torch.no_grad()); change state in place outside of it, or in a step"
    for key, table in tables.items():
        for name in {**saved[key], **table}:
            old, now = saved[key].get(name), table.get(name)
            if (None if old is None else inside[id(old)]) is not now:
                path = names.get(id(old), name)
                raise StateError(f"{path} was replaced inside gathered()", where=path, hint=hint)
    for key, t in inside.items():
        if fingerprint(t) != before[key]:
            raise StateError(f"{names[key]} was changed inside gathered(), which is for reading", where=names[key], hint=hint)
        if check_grads and t.grad is not None:
            raise StateError(f"a gradient of {names[key]} was computed inside gathered(): it would be lost", where=names[key],
                             hint=hint)  # fmt: skip


def full_state_dict(arguments: Mapping[str, object]) -> dict[str, Any]:
    """``{argument name: its state_dict() with whole, plain tensors}`` on every rank (collective), in argument order.

    Lists, tuples, dicts and dataclasses of objects nest; arguments without a `state_dict` are left out. Tensors are copies
    (tied ones one copy), made one by one, so the peak is one tensor over the result. DTensors must lie on one mesh.
    """
    out: dict[str, Any] = {}
    plain = {name: got for name, value in arguments.items() if (got := _states(value)) is not None}
    first = _first_dtensor(plain)
    ranks = Ranks.of(first.device_mesh) if first is not None else None
    if ranks is not None:
        exchange(ranks, digest(f"full_state_dict {list(plain)}"), (), lambda: {"call": f"full_state_dict of {list(plain)}"})
    done: dict[int, Tensor] = {}
    for name, value in plain.items():
        out[name] = _copied(value, ranks, done)
    return out


def _states(value: object) -> Any:
    """The state dict of an object, or a tree of them, or None where there is none."""
    if isinstance(value, nn.Module):
        return value.state_dict(keep_vars=True)  # the tensors themselves, so that tied ones are seen to be tied
    if isinstance(value, (Tensor, type)):
        return None
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        items = {k: s for k, v in value.items() if (s := _states(v)) is not None}
        return items or None
    if isinstance(value, (list, tuple)):
        parts = [s for v in value if (s := _states(v)) is not None]
        return parts or None
    if dataclasses.is_dataclass(value):
        return _states({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return None


def _first_dtensor(tree: Any) -> DTensor | None:
    if isinstance(tree, DTensor):
        return tree
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return next((t for v in values if (t := _first_dtensor(v)) is not None), None)


def _copied(tree: Any, ranks: Ranks | None, done: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        if id(tree) not in done:
            value = whole(tree, ranks)
            own = _torch.local_of(tree) if isinstance(tree, DTensor) else tree
            aliased = value.data_ptr() == own.data_ptr()
            done[id(tree)] = value.clone() if aliased else value
        return done[id(tree)]
    if isinstance(tree, dict):
        out = copy.copy(tree)  # keeps OrderedDict and the versions in its `_metadata`
        for key, value in tree.items():
            out[key] = _copied(value, ranks, done)
        return out
    if isinstance(tree, list):
        return [_copied(v, ranks, done) for v in tree]
    if isinstance(tree, tuple):
        items = [_copied(v, ranks, done) for v in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return copy.deepcopy(tree)
