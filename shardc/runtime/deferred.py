"""Run code that makes a model without keeping any of its values, and make each tensor's values later, alone.

Inside `Recorder` all tensors are fake: they have shapes, strides and a device, but no memory. Every operator is recorded.
An operator that draws random numbers is also executed, on memory that is dropped at once, so that the generator moves as it
does on one device, and its state before the draw is kept. A tensor's values are then made by replaying, in order, those
operators that they depend on, and no others; draws start from their kept states. So whatever the code does (whole-matrix
initialisation, loops that reject samples, values derived from other parameters), each value is bit for bit that of a plain run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardc import _torch
from shardc._torch import FakeTensor, FakeTensorMode, TorchDispatchMode
from shardc.errors import StateError

_FILLS = {"normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "fill_", "zero_"}
"""Operators that overwrite all of their first argument without reading it; `copy_` too, which reads its second."""


@dataclass
class Call:
    """One recorded operator.

    Args:
        results: the tensors that it gave, in the order of a flattened result; None for other leaves.
        generator: state before the draw, for random operators.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor | None]
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    overwrites: int | None = None  # the storage that it replaces whole
    generator: Tensor | None = None


class Recorder(TorchDispatchMode):
    """See the module's text. ``with Recorder() as r: model = make()``; then ``r.value(t)`` of any tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._keep: list[Tensor] = []  # so that no storage's number comes again

    def __enter__(self) -> Recorder:
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if op is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self.value(args[0]).item()
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        before = self._draw(op, args, kwargs) if _torch.is_random(op) else None
        try:
            with self.fake:
                out = op(*args, **kwargs)
        except (_torch.DynamicOutputShapeException, _torch.DataDependentOutputException):
            return self._executed(op, args, kwargs)
        results = [t if isinstance(t, Tensor) else None for t in pytree.tree_leaves(out)]
        call = Call(op, args, kwargs, results, generator=before)
        mutated = _mutated(op, args, kwargs)
        call.writes = {_torch.storage_id(t) for t in (*mutated, *(r for r in results if r is not None))}
        call.reads = {_torch.storage_id(t) for t in inputs if isinstance(t, FakeTensor)}
        if mutated and mutated[0] is args[0] and _covers(args[0]):
            name = op._schema.name.rpartition("::")[2]
            whole = _torch.storage_id(args[0])
            if (name in _FILLS or name == "copy_" or (name == "bernoulli_" and not isinstance(args[1:2], Tensor))) and not any(
                _torch.storage_id(t) == whole for t in inputs if t is not args[0]
            ):
                call.overwrites = whole
        self._keep += [t for t in (*inputs, *results) if t is not None]
        self.calls.append(call)
        return out

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, t: Tensor) -> Tensor:
        """The values of a fake tensor made inside, as a plain tensor of its shape and strides. Peak memory: what its own
        operators need, usually the tensor itself and one temporary."""
        with _torch.without_modes(), torch.no_grad():
            calls, storage = self._slice(_torch.storage_id(t)), dict[int, Tensor]()
            last = {}
            for k, call in enumerate(calls):
                last.update({_torch.storage_id(x): k for x in _tensors(call)})
            last[_torch.storage_id(t)] = len(calls)
            real: dict[int, Tensor] = {}
            for k, call in enumerate(calls):
                self._replay(call, real, storage)
                for gone in [s for s, at in last.items() if at == k]:
                    storage.pop(gone, None)
                    real = {key: x for key, x in real.items() if self._owner[key] != gone}
            return self._view(t, real, storage)

    @property
    def _owner(self) -> dict[int, int]:
        return {id(t): _torch.storage_id(t) for t in self._keep}

    def _slice(self, wanted: int) -> list[Call]:
        """The calls behind the values of a storage, in order."""
        need, out = {wanted}, []
        for call in reversed(self.calls):
            if need & call.writes and (call.generator is not None or call.writes):
                out.append(call)
                if call.overwrites is not None:
                    need.discard(call.overwrites)
                    need |= call.reads - {call.overwrites}
                else:
                    need |= call.reads
        return out[::-1]

    def _replay(self, call: Call, real: dict[int, Tensor], storage: dict[int, Tensor]) -> None:
        args, kwargs = pytree.tree_map_only(FakeTensor, lambda x: self._view(x, real, storage), (call.args, call.kwargs))
        if call.generator is None:
            out = call.op(*args, **kwargs)
        else:
            out = _from_state(call.op, args, kwargs, call.generator)
        for made, result in zip(pytree.tree_leaves(out), call.results, strict=True):
            if result is not None:
                real[id(result)] = made
                storage.setdefault(_torch.storage_id(result), made)

    def _view(self, t: Tensor, real: dict[int, Tensor], storage: dict[int, Tensor]) -> Tensor:
        """The real counterpart of a fake tensor: what its operator gave, or a view of the memory that it shares."""
        found = real.get(id(t))
        if found is not None:
            return found
        base = storage.get(_torch.storage_id(t))
        if base is None:  # memory that another call overwrites before anything reads it
            size = max(t.untyped_storage().nbytes() // t.element_size(), 1)
            base = torch.empty(size, dtype=t.dtype, device=t.device)
            storage[_torch.storage_id(t)] = base
        out = base.new_empty(0).set_(base.untyped_storage(), t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload]
        return out if out.dtype == t.dtype else out.view(t.dtype)

    # -- while recording -------------------------------------------------------------------------------------------

    def _draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Execute a random operator for its effect on the generator; returns the state before."""
        generator = kwargs.get("generator")
        device = next((t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        device = device or torch.device(kwargs.get("device") or "cpu")
        before = generator.get_state() if generator is not None else _state(device)
        fills = op._schema.name.rpartition("::")[2] in (*_FILLS, "bernoulli_")
        first = args[0] if args else None

        def real(x: FakeTensor) -> Tensor:
            blank = (fills and x is first) or op._schema.name.endswith("_like")
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if blank else self.value(x)

        real_args, real_kwargs = pytree.tree_map_only(FakeTensor, real, (args, kwargs))
        with _torch.without_modes(), torch.no_grad():
            op(*real_args, **real_kwargs)
        return before

    def _executed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator whose result has a shape that depends on values: executed, its result is a constant from here."""
        real_args, real_kwargs = pytree.tree_map_only(FakeTensor, self.value, (args, kwargs))
        with _torch.without_modes(), torch.no_grad():
            out = op(*real_args, **real_kwargs)
        return out


def _tensors(call: Call) -> Iterable[Tensor]:
    yield from (t for t in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(t, FakeTensor))
    yield from (t for t in call.results if t is not None)


def _mutated(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    out = []
    for k, a in enumerate(op._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = kwargs.get(a.name, args[k] if k < len(args) else None)
            out += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return out


def _covers(t: Tensor) -> bool:
    """Whether a tensor has every element of its storage."""
    return t.numel() * t.element_size() == t.untyped_storage().nbytes()


def _state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    if device.type != "cpu":
        raise StateError(f"shardc.init cannot follow the random generator of {device}", where=str(device),
                         hint="make the model on the CPU or a CUDA device")  # fmt: skip
    return torch.get_rng_state()


def _from_state(op: Any, args: Any, kwargs: Any, state: Tensor) -> Any:
    """Run a random operator from a generator's earlier state; the generator itself does not move."""
    given = kwargs.get("generator")
    if given is not None:
        fresh = torch.Generator(given.device)
        fresh.set_state(state)
        return op(*args, **{**kwargs, "generator": fresh})
    device = next((t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
    device = device or torch.device(kwargs.get("device") or "cpu")
    now = _state(device)
    setter = torch.set_rng_state if device.type == "cpu" else lambda s: torch.cuda.set_rng_state(s, device)
    setter(state)
    try:
        return op(*args, **kwargs)
    finally:
        setter(now)
