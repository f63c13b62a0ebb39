"""What surrounds the trace: optimizers on their loop path, schedulers noted down for the host, host generators guarded."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
from torch import Tensor

from shardc import _torch
from shardc.capture.effects import Computed, Scheduled
from shardc.capture.numbers import Number, is_symbol, symbol
from shardc.errors import CaptureError

if TYPE_CHECKING:
    from shardc.capture.trace import Trace


@contextlib.contextmanager
def optimizers(trace: Trace) -> Iterator[None]:
    """Optimizers run their loop path in the twin, with the arithmetic they have outside of compilers.

    Flags and hooks are put back before the world is compared.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    handles: list[Any] = []
    entered: list[contextlib.ExitStack] = []
    throughout = contextlib.ExitStack()
    for path, optimizer in trace.world.optimizers.items():
        twin = trace.twin.memo[id(optimizer)]
        inside = contextlib.ExitStack()
        entered.append(inside)
        handles.append(twin.register_step_post_hook(lambda o, *_, p=path: trace.optimizer_stepped(p, o)))
        handles.append(twin.register_step_pre_hook(lambda *_, s=inside: s.enter_context(_torch.compiling(False))))
        handles.append(twin.register_step_post_hook(lambda *_, s=inside: s.close()))
        throughout.enter_context(_torch.states_of_fused(twin, [g for g in twin.param_groups if g.get("fused")]))
        for group in twin.param_groups:
            for flag in ("foreach", "fused"):
                if flag in group:
                    saved.append((group, flag, group[flag]))
                    group[flag] = False
    try:
        yield
    finally:
        throughout.close()
        for group, flag, value in reversed(saved):  # optimizers may share groups
            group[flag] = value
        for handle in handles:
            handle.remove()
        for inside in entered:  # left open by an error inside of a step
            inside.close()


@contextlib.contextmanager
def schedulers(trace: Trace) -> Iterator[None]:
    """In the twin a scheduler's `step` is only noted down; the user's runs on the host after the program."""
    twins = {path: trace.twin.memo[id(s)] for path, s in trace.world.schedulers.items()}
    for path, twin in twins.items():
        twin.__dict__["step"] = functools.partial(_schedule, trace, path, twin)
    try:
        yield
    finally:
        for twin in twins.values():
            twin.__dict__.pop("step", None)


def _schedule(trace: Trace, path: str, twin: Any, *args: Any, **kwargs: Any) -> None:
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    for key, value in given.items():
        given[key] = _computed(trace, f"{path}.step({len(trace.scheduled)}, {key})", value)
    trace.scheduled.append(Scheduled(path, given))
    trace.program.notes.append(f"{path}.step() runs on the host after the step ({trace.recorder.line()})")

    def later(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(later(v) for v in value)
        return symbol(Number.set_later(trace.recorder, value.node.pytype)) if is_symbol(value) else value

    for group in twin.optimizer.param_groups:
        for name, value in group.items():
            if name == "lr" or _changes_all(type(twin)) and name not in ("params", "initial_lr"):
                group[name] = later(value)
    for name, value in twin.__dict__.items():
        if is_symbol(value):
            twin.__dict__[name] = later(value)


def _computed(trace: Trace, name: str, value: Any) -> Any:
    """A value that the step computes for a scheduler becomes a number of the program, by this name."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise CaptureError(
                f"a scheduler is given a tensor of shape {tuple(value.shape)}",
                where=trace.recorder.line(), hint="give a number",
            )  # fmt: skip
        value = value.item()
    if not is_symbol(value):
        return value
    trace.program.number_exit[name] = value.node.recorded()
    return Computed(name)


def _changes_all(scheduler: type) -> bool:
    """Whether a scheduler may change more of a group than its learning rate: momentum, betas, or any if a user's."""
    return "Cycl" in scheduler.__name__ or scheduler.__module__ != "torch.optim.lr_scheduler"


@contextlib.contextmanager
def host_random() -> Iterator[None]:
    """Python's and numpy's generators must not be drawn from: their numbers would be frozen into the program."""
    python, numpys = random.getstate(), numpy.random.get_state()
    try:
        yield
        names = [
            name
            for name, same in (
                ("Python's random", random.getstate() == python),
                ("numpy.random", all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), numpys, strict=True))),
            )
            if not same
        ]
    finally:
        random.setstate(python)
        numpy.random.set_state(numpys)
    if names:
        raise CaptureError(f"the step draws from {names[0]}, which the program cannot repeat",
                           hint="draw with torch, or outside of the step and pass the value")  # fmt: skip
