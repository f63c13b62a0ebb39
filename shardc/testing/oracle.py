"""The oracle: the plain function on one device, and how much rounding alone can change what it does."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardc._torch import TorchDispatchMode
from shardc.testing.snapshot import Snapshot, flatten, snapshot

NUDGED = 8
"""Runs from nudged parameters and inputs that a comparison may ask for."""

SAME, SAME_NARROW = 1e-9, 1e-3
"""Relative differences up to which scalars do not depend on the order of the rows: in float64, and with narrower parts."""

NARROW, NARROW_THAN = torch.finfo(torch.float32).eps, torch.float64
"""A step that computes in float32 what it stores in float64 may differ as float32 does."""

SHUFFLED = 4
"""Runs with rows in random order that it may ask for in the end."""

MakeState = Callable[[], tuple[Any, ...]]
Batch = Any
"""A tuple of positional arguments, a dict of keyword arguments, or one argument."""


@dataclass(frozen=True)
class Step:
    """What one call returned and left behind."""

    results: Snapshot
    state: Snapshot


@dataclass(frozen=True)
class Run:
    """All steps of one run, and the state before the first."""

    start: Snapshot
    steps: tuple[Step, ...]
    random: bool


class Oracle:
    """A step, its state and its batches; runs them plainly, as often as a comparison needs.

    Args:
        fn: the undecorated step.
        make_state: returns the leading arguments, the same values each time (torch is seeded before each call).
        batches: the remaining arguments of each call.
        dtype: floating-point parameters, buffers and inputs are cast to it; None leaves them.
    """

    def __init__(
        self, fn: Callable[..., Any], make_state: MakeState, batches: Sequence[Batch], dtype: torch.dtype | None
    ) -> None:
        self.fn, self.make_state, self.batches, self.dtype = fn, make_state, list(batches), dtype
        self._plain: Run | None = None
        self._second: Run | None = None
        self._nudged: dict[tuple[int, float | None], Run] = {}
        self._shuffled: list[Run] = []
        self._roundoff: float | None = None

    @property
    def plain(self) -> Run:
        if self._plain is None:
            self._plain = self.run(self.fn)
        return self._plain

    @property
    def second(self) -> Run:
        """A run that differs from the plain one by rounding alone.

        Batch rows are reversed, which re-associates every sum over the batch. Where that would change more than rounding (the
        step draws random numbers, or its scalars depend on the order of the rows), parameters and inputs are moved by one unit
        in the last place instead.
        """
        if self._second is None:
            if not self.plain.random:
                run = self.run(self.fn, batch=reverse_rows)
                gap = _scalar_gap(self.plain.steps[0].results, run.steps[0].results)
                if gap <= SAME or gap <= SAME_NARROW and gap <= 16 * self.roundoff():
                    self._second = run
            if self._second is None:
                self._second = self.nudged(0)
        return self._second

    def roundoff(self) -> float:
        """The eps of the narrowest dtype that the step computes in: parts of a model may do so whatever its parameters are."""
        if self._roundoff is None:
            seen = Dtypes()

            def call(*args: Any, **kwargs: Any) -> Any:
                with seen:
                    return self.fn(*args, **kwargs)

            self.run(call)
            self._roundoff = max((torch.finfo(dtype).eps for dtype in seen.dtypes), default=0.0)
        return self._roundoff

    def nudged(self, k: int, eps: float | None = None) -> Run:
        """A run from parameters and inputs that are one unit in the last place larger or smaller, as `k` has it.

        Args:
            eps: such a unit, relatively; by default that of each tensor's own dtype.
        """
        if (k, eps) not in self._nudged:
            g = torch.Generator().manual_seed(k)
            state, batch = (functools.partial(f, generator=g, eps=eps) for f in (nudge, nudged_inputs))
            self._nudged[k, eps] = self.run(self.fn, state=state, batch=batch)
        return self._nudged[k, eps]

    def others(self) -> Iterator[Run]:
        """Runs that differ from the plain one by rounding alone, the dear ones made only if asked for.

        One may agree with it by chance, as a sum of two rows does with that of the rows reversed.
        """
        yield self.second
        for k in range(NUDGED):
            yield self.nudged(k)
        for k in range(SHUFFLED if self.second is not self.nudged(0) else 0):  # a narrow type may show few orders of a sum
            if len(self._shuffled) == k:
                self._shuffled.append(self.run(self.fn, batch=functools.partial(shuffle_rows, seed=k)))
            yield self._shuffled[k]
        if NARROW >= self.roundoff() > torch.finfo(self.dtype or NARROW_THAN).eps:  # sums inside a row, a loss in float32
            for k in range(NUDGED):
                yield self.nudged(k, self.roundoff())

    def state(self) -> tuple[Any, ...]:
        """The leading arguments, fresh, in the oracle's dtype."""
        torch.manual_seed(0)
        made = self.make_state()
        made = made if isinstance(made, tuple) else (made,)
        if self.dtype is not None:
            made = tuple(_cast_state(value, self.dtype) for value in made)
        return made

    def batch(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments of a call, as copies, in the oracle's dtype."""
        batch = self.batches[index]
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
        return pytree.tree_map(self._cast_input, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]

    def _cast_input(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.copy(x)
        return x.detach().to(self.dtype if self.dtype is not None and x.is_floating_point() else x.dtype, copy=True)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """The default dtype is the oracle's; it and the random state are restored afterwards."""
        default, rng = torch.get_default_dtype(), torch.get_rng_state()
        try:
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            yield
        finally:
            torch.set_default_dtype(default)
            torch.set_rng_state(rng)

    def names(self, state: Sequence[Any]) -> dict[str, Any]:
        """Leading argument name -> value."""
        names = list(inspect.signature(self.fn).parameters)
        return {names[i] if i < len(names) else f"args[{i}]": value for i, value in enumerate(state)}

    def run(
        self,
        call: Callable[..., Any],
        *,
        batch: Callable[[Any], Any] = lambda x: x,
        state: Callable[[Any], None] = lambda x: None,
        whole: Callable[[Tensor], Tensor] | None = None,
        each: Callable[[int, Step], None] = lambda i, step: None,
    ) -> Run:
        """Run all batches.

        Args:
            call: the plain or the compiled step.
            batch: applied to the arguments of each call.
            state: applied to the leading arguments once.
            whole: see `snapshot`.
            each: called after each step.
        """
        with self.environment():
            made = self.state()
            state(made)
            start, steps, random = snapshot(self.names(made), whole), [], False
            for index in range(len(self.batches)):
                args, kwargs = batch(self.batch(index))
                torch.manual_seed(1000 + index)
                before = torch.get_rng_state()
                returned = call(*made, *args, **kwargs)
                random = random or not torch.equal(before, torch.get_rng_state())
                results = {path: _copy(x) for path, x in flatten("result", returned)}
                steps.append(Step(results, snapshot(self.names(made), whole)))
                each(index, steps[-1])
            return Run(start, tuple(steps), random)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def rows_of(tree: Any) -> int:
    """The batch size: the most common dim 0 among the tensors; 0 without any."""
    sizes = [x.shape[0] for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.dim()]
    return max(sizes, key=sizes.count) if sizes else 0


def reverse_rows(tree: Any) -> Any:
    """All tensors of the batch's size, last row first."""
    rows = rows_of(tree)
    return pytree.tree_map(lambda x: x.flip(0) if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x, tree)


def shuffle_rows(tree: Any, seed: int) -> Any:
    """All tensors of the batch's size, rows in a random order."""
    rows = rows_of(tree)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return pytree.tree_map(lambda x: x[order] if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x, tree)


def nudge(state: Any, generator: torch.Generator, eps: float | None = None) -> None:
    """Move each floating-point parameter to a neighbour (see `Oracle.nudged`), in place."""
    for module in pytree.tree_leaves(state):
        if isinstance(module, nn.Module):
            for p in module.parameters():
                if p.is_floating_point() and p.device.type != "meta":
                    p.data.copy_(_neighbour(p.data, generator, eps))


def nudged_inputs(tree: Any, generator: torch.Generator, eps: float | None = None) -> Any:
    """Floating-point tensors moved to a neighbour (see `Oracle.nudged`); what is zero (or infinite) stays."""

    def moved(x: Any) -> Any:
        return _neighbour(x, generator, eps) if isinstance(x, Tensor) and x.is_floating_point() else x

    return pytree.tree_map(moved, tree)


def _neighbour(x: Tensor, generator: torch.Generator, eps: float | None) -> Tensor:
    up = torch.randint(2, x.shape, generator=generator).to(x) * 2 - 1
    return torch.where((x == 0) | ~x.isfinite(), x, torch.nextafter(x, x * up * 2) if eps is None else x * (1 + eps * up))


def _scalar_gap(a: Snapshot, b: Snapshot) -> float:
    """The largest relative difference of two runs' scalars."""
    gap = 0.0
    for path, x in a.items():
        if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point():
            gap = max(gap, abs(x.item() - b[path].item()) / max(1.0, abs(x.item())))
    return gap


class Dtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the floating-point dtypes of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.dtypes |= {x.dtype for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.dim() and x.is_floating_point()}
        return out


def _cast_state(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point state in another dtype. Modules and optimizers keep their identity, plain tensors are replaced."""
    if isinstance(value, nn.Module):
        # Unlike .to(dtype), these leave complex parameters alone.
        casts = {
            torch.float64: value.double,
            torch.float32: value.float,
            torch.bfloat16: value.bfloat16,
            torch.float16: value.half,
        }
        return casts[dtype]()
    if isinstance(value, torch.optim.Optimizer):
        for state in value.state.values():
            for key, item in state.items():
                if isinstance(item, Tensor) and item.is_floating_point() and item.dim():
                    state[key] = item.to(dtype)
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_cast_state(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast_state(item, dtype) for key, item in value.items()}
    return value
