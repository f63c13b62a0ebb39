"""Random draws of a step, each rank its part: from a counter (by parts) or from a `torch.Generator` (torch's own numbers).

A stream draws the result of a random operator at the global shape ``spec.shape`` and gives the part that `coord` holds. What
it is given are the arguments of the local call: tensors are this rank's parts, sizes are ignored in favour of the spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardc.errors import RuntimeFailure
from shardc.mesh import Coord, Mesh
from shardc.spec import ShardSpec

RANDOM_OPS: dict[str, str] = {
    "aten.bernoulli.default": "bernoulli", "aten.bernoulli.p": "bernoulli", "aten.bernoulli.Tensor": "bernoulli",
    "aten.rand.default": "uniform", "aten.rand_like.default": "uniform", "aten.uniform.default": "uniform",
    "aten.randn.default": "normal", "aten.randn_like.default": "normal", "aten.normal_functional.default": "normal",
    "aten.normal.float_float": "normal", "aten.normal.Tensor_float": "normal", "aten.normal.float_Tensor": "normal",
    "aten.normal.Tensor_Tensor": "normal", "aten.log_normal.default": "log_normal",
    "aten.randint.default": "randint", "aten.randint.low": "randint", "aten.randint_like.default": "randint",
    "aten.randint_like.low_dtype": "randint", "aten.random.default": "randint", "aten.random.from": "randint",
    "aten.random.to": "randint", "aten.randperm.default": "randperm", "aten.exponential.default": "exponential",
    "aten.cauchy.default": "cauchy", "aten.geometric.default": "geometric", "aten.multinomial.default": "multinomial",
    "aten.native_dropout.default": "dropout", "aten._standard_gamma.default": "gamma",
    "aten._sample_dirichlet.default": "dirichlet", "aten.poisson.default": "poisson", "aten.binomial.default": "binomial",
}  # fmt: skip
"""The random operators that streams can draw, and what they draw. (Others are refused at capture.)"""

_WHOLE = frozenset(("gamma", "dirichlet", "poisson", "binomial"))
"""Draws that torch makes by rejection: how many numbers one takes depends on its parameters, which are whole on each rank."""

_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_CHUNK = 1 << 18
Raw = np.ndarray[Any, np.dtype[np.uint64]]
Index = np.ndarray[Any, np.dtype[np.int64]]


class Stream(Protocol):
    """What the executor asks for random numbers."""

    def draw(
        self, op_name: str, args: Sequence[Any], kwargs: Mapping[str, Any], spec: ShardSpec, mesh: Mesh, coord: Coord,
        index: int, dtype: torch.dtype, device: torch.device | str, order: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        """This rank's part of draw number `index` of the step: a tensor, or (output, mask) for native_dropout."""

    def state(self) -> dict[str, Any]:
        """All that later draws depend on."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Back to an earlier `state()`."""


class _Call:
    """A random call in one form for all overloads: its numbers and (local) tensors by meaning."""

    def __init__(self, op_name: str, args: Sequence[Any], kwargs: Mapping[str, Any], spec: ShardSpec) -> None:
        name = op_name if op_name in RANDOM_OPS else f"{op_name}.default"
        if name not in RANDOM_OPS:
            raise RuntimeFailure(
                f"{op_name} cannot be drawn from a random stream", hint=f"one of {', '.join(sorted(RANDOM_OPS))}"
            )
        if spec.partial:
            raise RuntimeFailure(f"{op_name} has the spec {spec}: random numbers cannot be partial")
        packet, overload = name.split(".")[1:]
        schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
        self.name, self.kind = name, RANDOM_OPS[name]
        self.given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.given.update(zip((a.name for a in schema.arguments), args, strict=False))
        self.given.update(kwargs)
        if self.given.get("generator") is not None:
            raise RuntimeFailure(f"{op_name} has a generator of its own", hint="torch's default generator")

    @property
    def like(self) -> Tensor | None:
        """The tensor operand whose shape and layout the result has."""
        for name in ("self", "input", "mean", "std"):
            if isinstance(self.given.get(name), Tensor):
                out: Tensor = self.given[name]
                return out
        return None

    @property
    def probability(self) -> float | Tensor:
        out: float | Tensor = self.given["p" if "p" in self.given else "self"]
        return out

    def bounds(self, dtype: torch.dtype) -> tuple[int, int]:
        """[low, high) of integers."""
        low, high = (self.given.get("low", self.given.get("from", 0)), self.given.get("high", self.given.get("to")))
        if high is None:  # random_() without bounds: what the dtype holds exactly
            if dtype.is_floating_point:
                high = (1 << _BITS[dtype]) + 1
            else:
                high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
        return int(low), int(high)

    def moments(self) -> tuple[float | Tensor, float | Tensor]:
        mean, std = self.given.get("mean", 0.0), self.given.get("std", 1.0)
        return mean, std


def _part(whole: Tensor, spec: ShardSpec, mesh: Mesh, coord: Coord) -> Tensor:
    """The elements of `whole` that `coord` holds, in a storage of their own where they are not all."""
    part = whole
    for k, index in enumerate(spec.indices(mesh, coord)):
        if len(index) == whole.shape[k]:
            continue
        if not index or index[-1] - index[0] + 1 == len(index):
            part = part.narrow(k, index[0] if index else 0, len(index))
        else:
            part = part.index_select(k, torch.tensor(index, device=whole.device))
    return part if part.numel() == whole.numel() else part.clone()


def _dropout(x: Tensor, mask: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return x * (mask.to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p))), mask  # rounds as torch does


def _sampled(keys: Tensor, weights: Tensor, count: int) -> Tensor:
    """Without replacement: the `count` largest of weights / exponential keys (Efraimidis and Spirakis 2006)."""
    q = weights / keys
    return q.argmax(-1, keepdim=True) if count == 1 else q.topk(count, -1)[1]


def _searched(u: Tensor, weights: Tensor) -> Tensor:
    """With replacement: inverse of the cumulative distribution of each row at u."""
    total = weights.double().cumsum(-1)
    total = total / total[..., -1:]
    return torch.searchsorted(total, u.contiguous()).clamp_(max=weights.shape[-1] - 1)


def _inverted(call: _Call, u: Tensor) -> Tensor:
    """Draws of `_WHOLE` by the inverse of their cumulative distribution at u, uniform in (0, 1)."""
    from scipy import special, stats  # type: ignore[import-untyped]

    first: Tensor = call.given["count" if call.kind == "binomial" else "self"].double().cpu()
    if call.kind in ("gamma", "dirichlet"):
        out = torch.as_tensor(special.gammaincinv(first.numpy(), u.numpy()))
        return out if call.kind == "gamma" else out / out.sum(-1, keepdim=True)
    if call.kind == "poisson":
        return torch.as_tensor(stats.poisson.ppf(u.numpy(), first.numpy()))
    return torch.as_tensor(stats.binom.ppf(u.numpy(), first.numpy(), call.given["prob"].double().cpu().numpy()))


class CounterStream:
    """Numbers from Philox4x64-10 (Salmon et al. 2011): element i of draw k of a step is a function of (seed, step, k, i) alone,
    i being its row-major global index. So parts need no communication, and neither plan nor order matters.

    Args:
        seed: any int; its lower 64 bits count.
        step: number of the step, from 0.
    """

    def __init__(self, seed: int, step: int = 0) -> None:
        self.seed, self.step = seed, step

    def state(self) -> dict[str, Any]:
        return {"kind": "counter", "seed": self.seed, "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seed, self.step = state["seed"], state["step"]

    def draw(
        self, op_name: str, args: Sequence[Any], kwargs: Mapping[str, Any], spec: ShardSpec, mesh: Mesh, coord: Coord,
        index: int, dtype: torch.dtype, device: torch.device | str, order: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        """See `Stream.draw`."""
        call, device = _Call(op_name, args, kwargs, spec), torch.device(device)
        shape = spec.local_shape(mesh, coord)
        if device.type == "meta":
            if call.kind == "dropout":
                return torch.empty_like(call.given["input"]), torch.empty(shape, dtype=torch.bool, device=device)
            return torch.empty(shape, dtype=dtype, device=device)
        if call.kind == "randperm":
            keys = self._raw(index, 0, spec.shape[0])
            return _part(torch.from_numpy(np.argsort(keys, kind="stable")).to(dtype), spec, mesh, coord).to(device)
        if call.kind == "multinomial":
            return self._multinomial(call, spec, mesh, coord, index).to(device=device, dtype=dtype)
        if call.kind in _WHOLE:
            u = self._fill(torch.empty(shape, dtype=torch.float64), spec, mesh, coord, index, _open)
            return _inverted(call, u).to(device=device, dtype=dtype)

        def made(transform: Callable[[Raw], Tensor], of: torch.dtype = dtype) -> Tensor:
            return self._fill(torch.empty(shape, dtype=of), spec, mesh, coord, index, transform).to(device)

        if call.kind in ("bernoulli", "dropout"):
            p = call.probability
            if call.kind == "dropout":
                if call.given["train"] is False:
                    return call.given["input"].clone(), torch.ones(shape, dtype=torch.bool, device=device)
                keep = 1 - float(call.given["p"])
                return _dropout(call.given["input"], made(lambda raw: _open(raw) < keep, torch.bool), float(call.given["p"]))
            if isinstance(p, Tensor):
                return (made(_open, torch.float64) < p).to(dtype)
            return made(lambda raw: _open(raw) < float(p))
        if call.kind == "uniform":
            low, high = float(call.given.get("from", 0.0)), float(call.given.get("to", 1.0))
            return made(lambda raw: _below(raw, dtype) * (high - low) + low)
        if call.kind == "randint":
            low, high = call.bounds(dtype)
            size = np.uint64(high - low)
            return made(lambda raw: torch.from_numpy((raw % size).view(np.int64)) + low)
        if call.kind == "normal":
            mean, std = call.moments()
            if isinstance(mean, Tensor) or isinstance(std, Tensor):
                return made(_normal) * std + mean
            return made(lambda raw: _normal(raw) * std + mean)
        if call.kind == "log_normal":
            return made(lambda raw: (_normal(raw) * call.given["std"] + call.given["mean"]).exp_())
        if call.kind == "cauchy":
            return made(lambda raw: ((_open(raw) - 0.5) * math.pi).tan_() * call.given["sigma"] + call.given["median"])
        if call.kind == "geometric":
            scale = math.log1p(-float(call.given["p"])) if call.given["p"] < 1 else -math.inf
            return made(lambda raw: (_open(raw).log_() / scale).ceil_().clamp_(min=1))
        return made(lambda raw: _open(raw).log_() / -float(call.given["lambd"]))

    def _multinomial(self, call: _Call, spec: ShardSpec, mesh: Mesh, coord: Coord, index: int) -> Tensor:
        weights, count = call.given["self"].cpu(), int(call.given["num_samples"])
        rows = spec.dims[:-1]
        if call.given["replacement"] and count > 1:
            out = torch.empty(spec.local_shape(mesh, coord), dtype=torch.float64)
            return _searched(self._fill(out, spec, mesh, coord, index, _open), weights)
        keyed = ShardSpec((*rows, ShardSpec.parse(f"[{weights.shape[-1]}]").dims[0]))
        keys = torch.empty(weights.shape, dtype=torch.float64)
        return _sampled(self._fill(keys, keyed, mesh, coord, index, lambda raw: -_open(raw).log_()), weights, count)

    def _raw(self, index: int, begin: int, count: int) -> Raw:
        """64 random bits for each of the elements begin, begin + 1, ... of draw `index`."""
        mask = (1 << 64) - 1
        key = np.array([self.seed & mask, self.step & mask], dtype=np.uint64)
        counter = np.array([begin // 4, 0, index, 0], dtype=np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count + begin % 4)[begin % 4 :]

    def _fill(
        self, out: Tensor, spec: ShardSpec, mesh: Mesh, coord: Coord, index: int, transform: Callable[[Raw], Tensor]
    ) -> Tensor:
        """Write ``transform(bits)`` into `out` (contiguous), in chunks. Where an inner dim is split, short runs between gaps
        are drawn with the gaps, since starting a run costs as much as some thousand elements."""
        if not out.numel():
            return out
        held, flat = spec.indices(mesh, coord), out.view(-1)
        inner, k = 1, len(held)  # dims from k on are whole: together one run of `inner` elements
        while k and len(held[k - 1]) == spec.shape[k - 1]:
            k -= 1
            inner *= spec.shape[k]
        rows = np.zeros(1, dtype=np.int64)  # where the runs start
        for d in range(k):
            rows = (rows[:, None] * spec.shape[d] + np.asarray(held[d], dtype=np.int64)[None, :]).reshape(-1)
        starts = rows * inner
        at = 0
        for begin, count, gaps in _spans(starts, inner):
            for lo in range(0, count, _CHUNK):
                n = min(_CHUNK, count - lo)
                raw = self._raw(index, begin + lo, n)
                if gaps is not None:
                    raw = raw[gaps - begin]
                    n = len(gaps)
                flat[at : at + n] = transform(raw)
                at += n
        return out


def _spans(starts: Index, inner: int) -> Iterator[tuple[int, int, Index | None]]:
    """(first element, count, elements to keep or None for all), covering runs of `inner` elements at `starts`, in order."""
    joined = np.flatnonzero(np.diff(starts) != inner) + 1  # runs that touch are one
    begins = starts[np.concatenate([[0], joined]).astype(np.int64)]
    ends = starts[np.concatenate([joined - 1, [len(starts) - 1]]).astype(np.int64)] + inner
    wide = np.flatnonzero(begins[1:] - ends[:-1] > 2048) + 1  # gaps that are worth a new start
    for k, last in zip([0, *wide.tolist()], [*wide.tolist(), len(begins)], strict=True):
        while k < last:
            j = max(k + 1, min(last, int(np.searchsorted(ends, begins[k] + _CHUNK, side="right"))))
            begin, count = int(begins[k]), int(ends[j - 1] - begins[k])
            lengths = ends[k:j] - begins[k:j]
            before = np.cumsum(lengths) - lengths
            keep = np.repeat(begins[k:j] - before, lengths) + np.arange(int(lengths.sum())) if j - k > 1 else None
            yield begin, count, keep
            k = j


def _open(raw: Raw) -> Tensor:
    """float64 in the open interval (0, 1), of 52 bits."""
    return torch.from_numpy((raw >> np.uint64(12)).astype(np.float64)).add_(0.5).mul_(2.0**-52)


def _below(raw: Raw, dtype: torch.dtype) -> Tensor:
    """float64 in [0, 1), of as many bits as `dtype` has, so that rounding never gives 1."""
    bits = _BITS.get(dtype, 53)
    return torch.from_numpy((raw >> np.uint64(64 - bits)).astype(np.float64)).mul_(2.0**-bits)


def _normal(raw: Raw) -> Tensor:
    """float64, standard normal, by the inverse of the error function."""
    return _open(raw).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


class TorchStream:
    """torch's own numbers: every rank draws each whole tensor with the same operator and keeps its part.

    Draws have to come in the order of the program; one that comes again (a recomputed dropout) gets its numbers again.

    Args:
        generator: in the same state on all ranks; afterwards in the state that the plain function leaves it in. Its device is
            where draws are made.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.before: list[Tensor] = []

    def begin(self) -> None:
        """A new step: its first draw has index 0."""
        self.before.clear()

    def state(self) -> dict[str, Any]:
        return {"kind": "torch", "generator": self.generator.get_state(), "before": list(self.before)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.before = list(state["before"])

    def draw(
        self, op_name: str, args: Sequence[Any], kwargs: Mapping[str, Any], spec: ShardSpec, mesh: Mesh, coord: Coord,
        index: int, dtype: torch.dtype, device: torch.device | str, order: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        """See `Stream.draw`.

        Raises:
            RuntimeFailure: a draw that skips an earlier one.
        """
        call, device = _Call(op_name, args, kwargs, spec), torch.device(device)
        if device.type == "meta":
            return CounterStream(0).draw(op_name, args, kwargs, spec, mesh, coord, index, dtype, device)
        if index > len(self.before):
            raise RuntimeFailure(
                f"draw {index} ({op_name}) comes before draw {len(self.before)}; torch's generator draws in program order",
                hint='rng="counter", whose numbers do not depend on the order',
            )
        if index == len(self.before):
            self.before.append(self.generator.get_state())
            return self._draw(call, spec, mesh, coord, dtype, device, order)
        now = self.generator.get_state()
        self.generator.set_state(self.before[index])
        try:
            return self._draw(call, spec, mesh, coord, dtype, device, order)
        finally:
            self.generator.set_state(now)

    def _draw(
        self, call: _Call, spec: ShardSpec, mesh: Mesh, coord: Coord, dtype: torch.dtype, device: torch.device,
        order: Sequence[int] | None,
    ) -> Any:  # fmt: skip
        g = self.generator

        def part(whole: Tensor, of: ShardSpec = spec) -> Tensor:
            return _part(whole, of, mesh, coord).to(device)

        def whole(of: torch.dtype = dtype) -> Tensor:
            return _blank(call.like, order, spec.shape, of, g.device, call.given.get("memory_format"))

        if call.kind == "dropout":
            x, p = call.given["input"], float(call.given["p"])
            if call.given["train"] is False:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            return _dropout(x, part(whole(torch.bool).bernoulli_(1 - p, generator=g)), p)
        if call.kind == "bernoulli":
            chance = call.probability
            if isinstance(chance, Tensor):  # torch compares a uniform number with each p: a double for doubles, else a float
                of = torch.float64 if chance.dtype == torch.float64 else torch.float32
                like = call.like if call.name == "aten.bernoulli.Tensor" else None  # the other makes a contiguous result
                u = _blank(like, order, spec.shape, of, g.device).uniform_(generator=g)
                return (part(u) < chance.to(device)).to(dtype)
            # Most often a dropout's `empty_like(x).bernoulli_(p)`: torch fills in the order of memory.
            return part(whole().bernoulli_(float(chance), generator=g))
        if call.kind == "normal":
            mean, std = call.moments()
            if isinstance(mean, Tensor) or isinstance(std, Tensor):
                return part(torch.empty(spec.shape, dtype=dtype, device=g.device).normal_(generator=g)).mul_(std).add_(mean)
            return part(whole().normal_(float(mean), float(std), generator=g))
        if call.kind == "multinomial":
            weights, count = call.given["self"], int(call.given["num_samples"])
            if call.given["replacement"] and count > 1:
                u = torch.empty(spec.shape, dtype=torch.float64, device=g.device).uniform_(generator=g)
                return _searched(part(u), weights)
            keyed = ShardSpec((*spec.dims[:-1], ShardSpec.parse(f"[{weights.shape[-1]}]").dims[0]))
            keys = torch.empty(keyed.shape, dtype=weights.dtype, device=g.device).exponential_(1, generator=g)
            return _sampled(part(keys, keyed), weights, count)
        if call.kind in _WHOLE:
            operands = [t.to(g.device) for t in call.given.values() if isinstance(t, Tensor)]
            packet = getattr(torch.ops.aten, call.name.split(".")[1])
            return packet(*operands, generator=g).to(device=device, dtype=dtype)
        if call.kind == "randperm":
            return part(torch.randperm(spec.shape[0], generator=g, dtype=dtype, device=g.device))
        if call.kind == "randint":
            if call.name == "aten.random.default":
                return part(whole().random_(generator=g))
            return part(whole().random_(*call.bounds(dtype), generator=g))
        fill, names = {
            "uniform": ("uniform_", ("from", "to")), "log_normal": ("log_normal_", ("mean", "std")),
            "cauchy": ("cauchy_", ("median", "sigma")), "geometric": ("geometric_", ("p",)),
            "exponential": ("exponential_", ("lambd",)),
        }[call.kind]  # fmt: skip
        numbers = [float(call.given[name]) for name in names if name in call.given]
        return part(getattr(whole(), fill)(*numbers, generator=g))


def _blank(
    like: Tensor | None, order: Sequence[int] | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
    layout: torch.memory_format | None = None,
) -> Tensor:  # fmt: skip
    """An empty whole tensor whose dims lie in memory in `order` (by default that of `like`, a part, which cannot tell the order
    of dims of size one), or as `layout` says: torch fills in the order of memory."""
    if layout not in (None, torch.preserve_format):
        return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout)
    if like is None or like.dim() != len(shape):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    strides = like.stride()
    order = order or sorted(range(len(strides)), key=lambda d: -strides[d])
    return torch.empty_permuted(tuple(shape), list(order), dtype=dtype, device=device)
