"""`precision="fp16"`: dynamic loss scaling inside the step, as `torch.amp.GradScaler` does it by default.

Every backward of the step starts from the scale instead of one, and what arrives at a leaf is divided by it before anything of
the user's sees it: hooks, clipping and the optimizer work on true gradients. If a gradient of any parameter, on any rank, is
not finite then, the step overflowed: it changes nothing but the scale, which is halved. The scale doubles after `INTERVAL` good
steps in a row. It is state of the compiled step, and saved with it.

Whether a step overflowed is a decision on a value of the program, hence a guard: nothing is written before it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardc import _torch
from shardc.capture.effects import Effects
from shardc.capture.loss_scale import BACKOFF, GROWTH, INTERVAL, OVERFLOW, LossScale
from shardc.capture.numbers import Number
from shardc.errors import CaptureError

if TYPE_CHECKING:
    from shardc.capture.trace import Trace

class Scaling:
    """Loss scaling in one trace.

    Args:
        trace: of the step.
        twin: of its `LossScale`.
    """

    def __init__(self, trace: Trace, twin: LossScale) -> None:
        self.trace, self.twin = trace, twin
        self.inverse = twin.scale.reciprocal()
        self.gradients: list[Tensor] = []
        self.scaled = False  # within a call that is scaled already: torch's functions call themselves by their names

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While inside, backwards start from the scale."""
        with (
            _torch.replaced("torch.autograd", "backward", self._backward),
            _torch.replaced("torch.autograd", "grad", self._grad),
        ):
            yield

    def unscale(self, grad: Tensor) -> Tensor:
        """Hook of every leaf, before those of the user."""
        return grad * self.inverse

    def arrived(self, grad: Tensor) -> None:
        """A backward has left a gradient."""
        self.gradients.append(grad.detach().clone())

    def settle(self) -> bool:
        """At the end of the step: whether it overflowed. Sets the scale of the next one."""
        if not self.gradients:
            return False
        scale, good = self.twin.scale, self.twin.good_steps
        with torch.no_grad():
            bad: Any = 0
            for grad in self.gradients:  # counted, so that one sum over the ranks serves all
                size = torch.view_as_real(grad) if grad.is_complex() else grad
                bad = bad + torch.sum((size.abs() == float("inf")) | (size != size))
            number = (bad > 0).item()
            overflow = self._decide(number)
            if overflow:
                scale.mul_(BACKOFF)
                good.zero_()
            else:
                full = good + 1 == INTERVAL
                larger = scale * GROWTH
                scale.copy_(torch.where(full & (larger < float("inf")), larger, scale))
                good.copy_(torch.where(full, torch.zeros_like(good), good + 1))
        return overflow

    def _decide(self, number: Any) -> bool:
        node = number.node
        assert isinstance(node, Number)
        return bool(self.trace.recorder.decide(node.recorded(), bool, OVERFLOW, "a gradient is not finite"))

    def unchanged(self) -> Effects:
        """The effects of a step that overflowed: every slot keeps its value, but for the scale."""
        program = self.trace.program
        own = {id(t) for t in (self.twin.scale, self.twin.good_steps)}
        for path, twin in self.trace.slot_twins.items():
            node = self.trace.recorder.node_of(_torch.current_value(twin)) if id(twin) in own else program.entry[path]
            assert node is not None
            program.exit[path] = node
        return Effects()

    def _seeds(self, tensors: Sequence[Tensor], given: Any) -> list[Any]:
        grads = [None] * len(tensors) if given is None else [given] if isinstance(given, Tensor) else list(given)
        pairs = zip(tensors, grads, strict=True)
        ones = [torch.ones_like(t) if g is None and t.numel() == 1 else g for t, g in pairs]
        return [g if g is None else g * self.twin.scale.to(g.real.dtype) for g in ones]

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        self.scaled = True
        try:
            yield
        finally:
            self.scaled = False

    def _nested(self, given: Any) -> None:
        """A call within a scaled one may go on with gradients that it was given (a checkpoint's), which are scaled."""
        if given is None and _torch.in_backward():
            raise CaptureError(
                "a backward is started inside of a backward, where gradients have the loss scale in them",
                where=self.trace.recorder.line(), hint='precision="bf16" needs no scale',
            )  # fmt: skip

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self.scaled:
                self._nested(grad_tensors)
                return original(tensors, grad_tensors, *args, **kwargs)  # type: ignore[no-any-return]
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            with self._once():
                return original(roots, self._seeds(roots, grad_tensors), *args, **kwargs)  # type: ignore[no-any-return]

        return backward

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            of = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            leaves = {id(t) for t in self.trace.slot_twins.values()}  # whose hooks unscale what arrives
            if self.scaled:
                self._nested(None if leaves & set(map(id, of)) else grad_outputs)
                return original(outputs, inputs, grad_outputs, *args, **kwargs)
            with self._once():
                found = original(roots, of, self._seeds(roots, grad_outputs), *args, **kwargs)
            return tuple(g if g is None or id(t) in leaves else self.unscale(g) for t, g in zip(of, found, strict=True))

        return grad
