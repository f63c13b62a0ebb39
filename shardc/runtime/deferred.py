"""Run code that makes a model without keeping any of its values, and make each tensor's values later, alone.

Inside `Recorder` all tensors are on meta: they have shapes and strides, but no memory. Every operator is recorded.
An operator that draws random numbers is also executed, on memory that is dropped at once, so that the generator moves as it
does on one device, and its state before the draw is kept. A tensor's values are then made by replaying, in order, those
operators that they depend on, and no others; draws start from their kept states. So whatever the code does (whole-matrix
initialisation, loops that reject samples, values derived from other parameters), each value is bit for bit that of a plain run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardc import _torch
from shardc._torch import TorchDispatchMode
from shardc.errors import StateError

_FILLS = {"normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "fill_", "zero_"}
"""Operators that overwrite all of their first argument without reading it; `copy_` too, which reads its second."""


@dataclass(frozen=True)
class Ref:
    """A blank tensor as it was when an operator met it (its object may be given other memory later, by ``.data =`` say)."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class Call:
    """One recorded operator, with a `Ref` for each blank tensor.

    Args:
        results: what it gave, in the order of a flattened result; None for leaves that are no tensors.
        reads, writes: storages.
        overwrites: the storage that it replaces whole, if any.
        generator: state before the draw, for random operators.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Ref | None]
    reads: set[int]
    writes: set[int]
    overwrites: int | None = None
    generator: Tensor | None = None

    @property
    def storages(self) -> set[int]:
        return self.reads | self.writes


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module's text. ``with Recorder() as r: model = make()``; then ``r.value(t)`` of any tensor made inside.

    Inside, tensors are on meta but say that they are on the device that they were made for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.devices: dict[int, torch.device] = {}
        self._keep: list[Any] = []  # the storages, so that no number comes again
        self._spoken = _Device(self)

    def __enter__(self) -> Recorder:
        self._spoken.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._spoken.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = pytree.tree_leaves((args, kwargs))
        blank = [t for t in leaves if _is_blank(t)]
        if op is torch.ops.aten._local_scalar_dense.default:
            with _torch.without_modes():
                return (self.value(args[0]) if blank else args[0]).item()
        asked = kwargs.get("device")
        known = None if asked is None or torch.device(asked).type == "meta" else asked
        device = known or (self._device(blank[0]) if blank else torch.device("cpu"))
        before = self._draw(op, args, kwargs, torch.device(device)) if _torch.is_random(op) else None
        try:
            out = op(*_on_meta(args), **_on_meta({k: v for k, v in kwargs.items() if k != "generator"}, op))
        except (NotImplementedError, RuntimeError) as error:
            if before is None and not _needs_values(error):
                raise
            return self._executed(op, args, kwargs, before)
        self._record(op, args, kwargs, out, torch.device(device), before)
        return out

    def _record(self, op: Any, args: Any, kwargs: Any, out: Any, device: torch.device, before: Tensor | None) -> None:
        made = [t for t in pytree.tree_leaves(out) if _is_blank(t)]
        for t in made:
            self.devices.setdefault(_torch.storage_id(t), device)
        given, named = pytree.tree_map(
            lambda x: self._ref(x) if _is_blank(x) else device if isinstance(x, torch.device) and x.type == "meta" else x,
            (args, kwargs),
        )
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if _is_blank(t)]
        mutated = [t for t in _mutated(op, args, kwargs) if _is_blank(t)]
        self._keep += [t.untyped_storage() for t in (*inputs, *made)]
        self.calls.append(
            Call(
                op, given, named, [self._ref(t) if _is_blank(t) else None for t in pytree.tree_leaves(out)],
                {_torch.storage_id(t) for t in inputs}, {_torch.storage_id(t) for t in (*mutated, *made)},
                _overwritten(op, mutated, inputs), before,
            )
        )  # fmt: skip

    def _device(self, t: Tensor) -> torch.device:
        return self.devices.get(_torch.storage_id(t), torch.device("cpu"))

    def _ref(self, t: Tensor) -> Ref:
        return Ref(_torch.storage_id(t), tuple(t.shape), tuple(t.stride()), int(t.storage_offset()), t.dtype, self._device(t))

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, t: Tensor) -> Tensor:
        """The values of a blank tensor made inside, as a plain tensor of its shape and strides. Peak memory: what its own
        operators need, usually the tensor itself and one temporary."""
        wanted = self._ref(t)
        with _torch.without_modes(), torch.no_grad():
            calls, memory, last = self._slice(wanted.storage), dict[int, Tensor](), dict[int, int]()
            for k, call in enumerate(calls):
                last.update(dict.fromkeys(call.storages, k))
            last.pop(wanted.storage, None)
            for k, call in enumerate(calls):
                _replay(call, memory)
                for gone in [s for s, at in last.items() if at == k]:
                    memory.pop(gone, None)
            return _view(wanted, memory)

    def _slice(self, wanted: int) -> list[Call]:
        """The calls behind the values of a storage, in order."""
        need, out = {wanted}, []
        for call in reversed(self.calls):
            if need & call.writes:
                out.append(call)
                need |= call.reads
                if call.overwrites is not None:
                    need.discard(call.overwrites)
        return out[::-1]

    # -- while recording -------------------------------------------------------------------------------------------

    def _draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Tensor:
        """Execute a random operator for its effect on the generator; returns the state before."""
        generator = kwargs.get("generator")
        name = op._schema.name.rpartition("::")[2]
        fills = name in (*_FILLS, "bernoulli_") or name.endswith("_like")
        first = args[0] if args else None

        def real(x: Tensor) -> Tensor:
            if fills and x is first:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._device(x))
            return self.value(x)

        with _torch.without_modes(), torch.no_grad():
            before = generator.get_state() if generator is not None else _state(device)
            real_args, real_kwargs = _map_blank(real, (args, kwargs))
            op(*real_args, **real_kwargs)
        return before

    def _executed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Tensor | None) -> Any:
        """An operator that needs values, for the shape of its result say: executed, its results are constants from here."""
        with _torch.without_modes(), torch.no_grad():
            real_args, real_kwargs = _map_blank(self.value, (args, kwargs))
            for t in _mutated(op, args, kwargs):
                raise StateError(f"shardc.init cannot follow {op} in place on a tensor of shape {list(t.shape)}",
                                 hint="make the model on meta with reset_parameters(), or whole on each rank")  # fmt: skip
            out = op(*real_args, **real_kwargs) if before is None else _from_state(op, real_args, real_kwargs, before)
        return pytree.tree_map_only(Tensor, self._constant, out)

    def _constant(self, value: Tensor) -> Tensor:
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._record(torch.ops.aten.clone.default, (value,), {}, out, value.device, None)
        return out


class _Device(TorchFunctionMode):
    """Blank tensors say the device that they were made for, to the code that makes the model."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.device) and out.type == "meta" and args and isinstance(args[0], Tensor):
            return self.recorder._device(args[0])
        if out is True and func == _IS_META:
            return False
        return out


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _is_blank(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_meta


def _map_blank(f: Callable[[Tensor], Any], tree: Any) -> Any:
    return pytree.tree_map(lambda x: f(x) if _is_blank(x) else x, tree)


def _on_meta(tree: Any, op: Any = None) -> Any:
    """Arguments as they are on meta: tensors without memory, devices replaced; a factory makes its result there."""
    out = pytree.tree_map(
        lambda x: x.to("meta") if isinstance(x, Tensor) and not x.is_meta
        else torch.device("meta") if isinstance(x, torch.device) else x, tree,
    )  # fmt: skip
    if op is not None and any(a.name == "device" for a in op._schema.arguments) and (
        "device" in out or not any(isinstance(a.type, torch.TensorType) for a in op._schema.arguments)
    ):
        out = {**out, "device": torch.device("meta"), **({"pin_memory": False} if "pin_memory" in out else {})}
    return out


def _needs_values(error: Exception) -> bool:
    """Whether an operator failed on meta for want of values or of a kernel, rather than for the user's fault."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _replay(call: Call, memory: dict[int, Tensor]) -> None:
    """Execute a call on real memory. Constants are copied: what comes after may write to them."""
    given = pytree.tree_map_only(Tensor, torch.clone, (call.args, call.kwargs))
    args, kwargs = pytree.tree_map_only(Ref, lambda r: _view(r, memory), given)
    out = call.op(*args, **kwargs) if call.generator is None else _from_state(call.op, args, kwargs, call.generator)
    for made, ref in zip(pytree.tree_leaves(out), call.results, strict=True):
        if ref is not None:
            memory.setdefault(ref.storage, made)


def _view(ref: Ref, memory: dict[int, Tensor]) -> Tensor:
    """The real counterpart of a blank tensor, on the memory of its storage."""
    if ref.storage not in memory:  # to be overwritten before anything reads it
        size = 1 + ref.offset + sum((n - 1) * s for n, s in zip(ref.shape, ref.stride, strict=True))
        memory[ref.storage] = torch.empty(size if 0 not in ref.shape else 0, dtype=ref.dtype, device=ref.device)
    base = memory[ref.storage].untyped_storage()
    return torch.empty(0, dtype=ref.dtype, device=ref.device).set_(base, ref.offset, ref.shape, ref.stride)


def _overwritten(op: Any, mutated: list[Tensor], inputs: list[Tensor]) -> int | None:
    """The storage that an operator replaces whole without reading it."""
    name = op._schema.name.rpartition("::")[2]
    if name not in (*_FILLS, "copy_", "bernoulli_") or not mutated or not _covers(mutated[0]):
        return None
    whole = _torch.storage_id(mutated[0])
    others = sum(_torch.storage_id(t) == whole for t in inputs)
    return whole if others == 1 else None


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
