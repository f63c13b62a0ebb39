"""Updates of torch.optim as operators: one call for each parameter, functional in the graph, fused and in place at run time.

========================  =======================================================  ==========================================
operator                  tensors                                                  results
========================  =======================================================  ==========================================
adam                      p, grad, exp_avg, exp_avg_sq, step                       p, exp_avg, exp_avg_sq, step
adam_amsgrad              p, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step       p, exp_avg, exp_avg_sq, max_exp_avg_sq, step
sgd                       p, grad                                                  p
sgd_momentum_first        p, grad                                                  p, momentum_buffer
sgd_momentum              p, grad, momentum_buffer                                 p, momentum_buffer
adagrad                   p, grad, state_sum, step                                 p, state_sum, step
rmsprop[_centered]        p, grad, square_avg, step [, grad_avg]                   p, square_avg, step [, grad_avg ...]
  [_momentum]               [, momentum_buffer]
radam                     p, grad, exp_avg, exp_avg_sq, step                       p, exp_avg, exp_avg_sq, step
asgd                      p, grad, ax, mu, eta, step                               p, ax, mu, eta, step
========================  =======================================================  ==========================================

All arguments are positional; `step` is a 0-d tensor that counts the steps before this one. Numbers (lr, betas, ...) may be
symbolic. `INPLACE` has the form of each operator that updates its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc import _torch
from shardc.ops import loops
from shardc.ops.library import operator

_BLOCK = 1 << 18
Number = int | float | torch.SymInt | torch.SymFloat


@dataclass(frozen=True)
class InplaceForm:
    """Calls like the operator of that name, but results take over the storage of arguments.

    Args:
        function: same arguments as the operator; updates and returns them (does nothing on meta tensors).
        aliases: (result, argument position) pairs. Results that are not listed are new tensors.
    """

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    aliases: tuple[tuple[int, int], ...]

    def __call__(self, *args: Any) -> Tensor | tuple[Tensor, ...]:
        return self.function(*args)


INPLACE: dict[str, InplaceForm] = {}
"""Operator name (``shardc.adam.default``) -> its in-place form."""


def _fusable(p: Tensor, grad: Tensor, *state: Tensor) -> bool:
    """Whether torch's fused kernels may run. They walk memory, so layouts have to be one and the same, and dense (that of
    the gradient is put right by `_blocks`)."""
    if grad.dtype != p.dtype or any(t.dtype != p.dtype or t.stride() != p.stride() for t in state):
        return False
    if any(t.shape != p.shape for t in (grad, *state)):
        return False
    dense = 1
    for size, stride in sorted(zip(p.shape, p.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != dense:
                return p.numel() == 0
            dense *= size
    return p.is_floating_point() and p.device.type in ("cpu", "cuda")


def _blocks(p: Tensor, grad: Tensor, *state: Tensor) -> Iterator[list[Tensor]]:
    """Contiguous views of the tensors (fused kernels copy others). Where the gradient lies otherwise in memory than the
    parameter (a product transposed), blocks of them with a copy of the gradient's, so that no whole copy is ever alive."""
    strides = p.stride()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    views = [p, grad, *state] if p.is_contiguous() else [t.permute(order) for t in (p, grad, *state)]
    if grad.stride() == strides or not p.numel():
        yield views
        return
    rows = max(1, _BLOCK * views[0].shape[0] // p.numel())
    for k in range(0, views[0].shape[0], rows):
        part = [v[k : k + rows] for v in views]
        yield [part[0], part[1].contiguous(), *part[2:]]


def _on(step: Tensor, p: Tensor) -> Tensor:
    """The step number as the fused kernels want it: float32, beside the parameter."""
    return step.to(device=p.device, dtype=torch.float32)


def _adam(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, largest: Tensor | None, step: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool, decoupled: bool,
) -> None:  # fmt: skip
    step += 1
    more = [] if largest is None else [largest]
    if not _fusable(p, grad, exp_avg, exp_avg_sq, *more):
        return loops.adam(
            p, grad, exp_avg, exp_avg_sq, largest, step.item(), lr, beta1, beta2, eps, weight_decay, maximize, decoupled
        )
    fused = _torch.fused_adamw_ if decoupled else _torch.fused_adam_
    now = _on(step, p)
    for part, slope, first, second, *most in _blocks(p, grad, exp_avg, exp_avg_sq, *more):
        fused(
            [part], [slope], [first], [second], most, [now], lr=float(lr), beta1=float(beta1), beta2=float(beta2),
            weight_decay=float(weight_decay), eps=float(eps), amsgrad=largest is not None, maximize=maximize,
        )  # fmt: skip
    return None


def adam_(p, grad, exp_avg, exp_avg_sq, step, *numbers):  # type: ignore[no-untyped-def]
    if not p.is_meta:
        _adam(p, grad, exp_avg, exp_avg_sq, None, step, *numbers)
    return p, exp_avg, exp_avg_sq, step


def adam_amsgrad_(p, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, *numbers):  # type: ignore[no-untyped-def]
    if not p.is_meta:
        _adam(p, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, *numbers)
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq, step


def _sgd(
    p: Tensor, grad: Tensor, buffer: Tensor | None, first: bool,
    lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool,
) -> None:  # fmt: skip
    if p.is_meta:
        return None
    more = [] if buffer is None else [buffer]
    # torch 2.13's fused SGD on CPU leaves half parameters as they are (64 elements, bfloat16: no change at all)
    if not _fusable(p, grad, *more) or (p.device.type == "cpu" and p.dtype.itemsize < 4):
        return loops.sgd(p, grad, buffer, first, lr, momentum, dampening, weight_decay, nesterov, maximize)
    for part, slope, *buffers in _blocks(p, grad, *more):
        _torch.fused_sgd_(
            [part], [slope], buffers, weight_decay=float(weight_decay), momentum=float(momentum), lr=float(lr),
            dampening=float(dampening), nesterov=nesterov, maximize=maximize, is_first_step=first,
        )  # fmt: skip
    return None


def sgd_(p: Tensor, grad: Tensor, lr: float, weight_decay: float, maximize: bool) -> Tensor:
    _sgd(p, grad, None, False, lr, 0.0, 0.0, weight_decay, False, maximize)
    return p


def sgd_momentum_first_(
    p: Tensor, grad: Tensor, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool
) -> tuple[Tensor, Tensor]:
    buffer = torch.empty_like(p)
    _sgd(p, grad, buffer, True, lr, momentum, dampening, weight_decay, nesterov, maximize)
    return p, buffer


def sgd_momentum_(p, grad, momentum_buffer, *numbers):  # type: ignore[no-untyped-def]
    _sgd(p, grad, momentum_buffer, False, *numbers)
    return p, momentum_buffer


def adagrad_(
    p: Tensor, grad: Tensor, state_sum: Tensor, step: Tensor,
    lr: float, lr_decay: float, eps: float, weight_decay: float, maximize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if p.is_meta:
        return p, state_sum, step
    step += 1
    if not _fusable(p, grad, state_sum):
        loops.adagrad(p, grad, state_sum, step.item(), lr, lr_decay, eps, weight_decay, maximize)
        return p, state_sum, step
    now = _on(step, p)
    for part, slope, total in _blocks(p, grad, state_sum):
        _torch.fused_adagrad_(
            [part], [slope], [total], [now], lr=float(lr), lr_decay=float(lr_decay),
            weight_decay=float(weight_decay), eps=float(eps), maximize=maximize,
        )  # fmt: skip
    return p, state_sum, step


def _rmsprop_(centered: bool, momentum: bool) -> Callable[..., tuple[Tensor, ...]]:
    def function(p: Tensor, grad: Tensor, square_avg: Tensor, step: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        state, numbers = list(rest[: centered + momentum]), rest[centered + momentum :]
        if not p.is_meta:
            step += 1
            loops.rmsprop(p, grad, square_avg, state[0] if centered else None, state[-1] if momentum else None, *numbers)
        return p, square_avg, step, *state

    return function


def radam_(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not p.is_meta:
        step += 1
        loops.radam(p, grad, exp_avg, exp_avg_sq, step.item(), *numbers)
    return p, exp_avg, exp_avg_sq, step


def asgd_(
    p: Tensor, grad: Tensor, ax: Tensor, mu: Tensor, eta: Tensor, step: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not p.is_meta:
        step += 1
        loops.asgd(p, grad, ax, mu, eta, step.item(), *numbers)
    return p, ax, mu, eta, step


def _define(name: str, tensors: str, numbers: str, function: Callable[..., Any], created: int = 0) -> None:
    """One operator: `tensors` and `numbers` are its arguments; all tensors but grad come back, then `created` new ones."""
    words = tensors.split()
    written = [k for k, word in enumerate(words) if word != "grad"]
    arguments = [f"Tensor {word}" for word in words]
    for word in numbers.replace("bool ", "bool:").split():
        arguments.append(word.replace(":", " ") if ":" in word else f"Scalar {word}")
    count = len(written) + created
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    def kernel(*args: Any) -> Any:
        return function(*(a.clone() if k in written else a for k, a in enumerate(args)))

    def fake(*args: Any) -> Any:
        out = [torch.empty_like(args[k]) for k in written] + [torch.empty_like(args[0]) for _ in range(created)]
        return out[0] if count == 1 else tuple(out)

    operator(f"{name}({', '.join(arguments)}) -> {results}", kernel, fake)
    INPLACE[f"shardc.{name}.default"] = InplaceForm(function, tuple(enumerate(written)))


_ADAM = "lr beta1 beta2 eps weight_decay bool maximize bool decoupled"
_SGD = "lr momentum dampening weight_decay bool nesterov bool maximize"
_RMSPROP = "lr alpha eps weight_decay momentum bool maximize"
_define("adam", "p grad exp_avg exp_avg_sq step", _ADAM, adam_)
_define("adam_amsgrad", "p grad exp_avg exp_avg_sq max_exp_avg_sq step", _ADAM, adam_amsgrad_)
_define("sgd", "p grad", "lr weight_decay bool maximize", sgd_)
_define("sgd_momentum_first", "p grad", _SGD, sgd_momentum_first_, created=1)
_define("sgd_momentum", "p grad momentum_buffer", _SGD, sgd_momentum_)
_define("adagrad", "p grad state_sum step", "lr lr_decay eps weight_decay bool maximize", adagrad_)
_define("rmsprop", "p grad square_avg step", _RMSPROP, _rmsprop_(False, False))
_define("rmsprop_centered", "p grad square_avg step grad_avg", _RMSPROP, _rmsprop_(True, False))
_define("rmsprop_momentum", "p grad square_avg step momentum_buffer", _RMSPROP, _rmsprop_(False, True))
_define("rmsprop_centered_momentum", "p grad square_avg step grad_avg momentum_buffer", _RMSPROP, _rmsprop_(True, True))
_define("radam", "p grad exp_avg exp_avg_sq step", _ADAM, radam_)
_define("asgd", "p grad ax mu eta step", "lr lambd t0 alpha weight_decay bool maximize", asgd_)


# -- in the place of torch.optim's loops -----------------------------------------------------------------------------------

_Emit = Callable[[dict[str, Any]], None]


def _ordinary(given: dict[str, Any], numbers: str) -> bool:
    """Whether the operators cover this call: dense real tensors, plain or symbolic numbers, no special modes."""
    if torch.is_grad_enabled() or any(given.get(flag) is not None for flag in ("grad_scale", "found_inf")):
        return False  # gradients flow through the updates of a differentiable optimizer only
    if given.get("differentiable") or given.get("capturable"):
        return False
    tensors = [*given["params"], *given["grads"]]
    return all(isinstance(given[name], Number) for name in numbers.split()) and not any(
        t.is_sparse or t.is_complex() for t in tensors
    )


def _assign(targets: list[Tensor], values: Any) -> None:
    for target, value in zip(targets, [values] if isinstance(values, Tensor) else values, strict=True):
        _torch.assign(target, value)


def _emit_adam(a: dict[str, Any]) -> None:
    numbers = (*(a[k] for k in ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")), a["decoupled_weight_decay"])
    for k, (p, grad) in enumerate(zip(a["params"], a["grads"], strict=True)):
        largest = [a["max_exp_avg_sqs"][k]] if a["amsgrad"] else []
        state = [a["exp_avgs"][k], a["exp_avg_sqs"][k], *largest, a["state_steps"][k]]
        op = torch.ops.shardc.adam_amsgrad if a["amsgrad"] else torch.ops.shardc.adam
        _assign([p, *state], op(p, grad, *state, *numbers))


def _emit_sgd(a: dict[str, Any]) -> None:
    plain = (a["lr"], a["weight_decay"], a["maximize"])
    heavy = tuple(a[k] for k in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"))
    moving = a["momentum"] != 0
    for k, (p, grad) in enumerate(zip(a["params"], a["grads"], strict=True)):
        if not moving:
            _assign([p], torch.ops.shardc.sgd(p, grad, *plain))
        elif a["momentum_buffer_list"][k] is None:
            value, a["momentum_buffer_list"][k] = torch.ops.shardc.sgd_momentum_first(p, grad, *heavy)
            _assign([p], value)
        else:
            buffer = a["momentum_buffer_list"][k]
            _assign([p, buffer], torch.ops.shardc.sgd_momentum(p, grad, buffer, *heavy))


def _emit_adagrad(a: dict[str, Any]) -> None:
    numbers = tuple(a[k] for k in ("lr", "lr_decay", "eps", "weight_decay", "maximize"))
    for p, grad, *state in zip(a["params"], a["grads"], a["state_sums"], a["state_steps"], strict=True):
        _assign([p, *state], torch.ops.shardc.adagrad(p, grad, *state, *numbers))


def _emit_rmsprop(a: dict[str, Any]) -> None:
    numbers = tuple(a[k] for k in ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize"))
    centered, moving = bool(a["centered"]), bool(a["momentum"] > 0)
    op = getattr(torch.ops.shardc, "rmsprop" + "_centered" * centered + "_momentum" * moving)
    for k, (p, grad) in enumerate(zip(a["params"], a["grads"], strict=True)):
        state = [a["square_avgs"][k], a["state_steps"][k]]
        state += [a[name][k] for name, used in (("grad_avgs", centered), ("momentum_buffer_list", moving)) if used]
        _assign([p, *state], op(p, grad, *state, *numbers))


def _emit_radam(a: dict[str, Any]) -> None:
    numbers = (*(a[k] for k in ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")), a["decoupled_weight_decay"])
    for p, grad, *state in zip(a["params"], a["grads"], a["exp_avgs"], a["exp_avg_sqs"], a["state_steps"], strict=True):
        _assign([p, *state], torch.ops.shardc.radam(p, grad, *state, *numbers))


def _emit_asgd(a: dict[str, Any]) -> None:
    numbers = tuple(a[k] for k in ("lr", "lambd", "t0", "alpha", "weight_decay", "maximize"))
    for p, grad, *state in zip(a["params"], a["grads"], a["axs"], a["mus"], a["etas"], a["state_steps"], strict=True):
        _assign([p, *state], torch.ops.shardc.asgd(p, grad, *state, *numbers))


_EMITTERS: dict[str, tuple[_Emit, str]] = {
    "adam": (_emit_adam, "lr beta1 beta2 eps weight_decay"),
    "sgd": (_emit_sgd, "lr momentum dampening weight_decay"),
    "adagrad": (_emit_adagrad, "lr lr_decay eps weight_decay"),
    "rmsprop": (_emit_rmsprop, "lr alpha eps weight_decay momentum"),
    "radam": (_emit_radam, "lr beta1 beta2 eps weight_decay"),
    "asgd": (_emit_asgd, "lr lambd t0 alpha weight_decay"),
}


def _wrapper(emit: _Emit, numbers: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def update(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            if _ordinary(given, numbers):
                emit(given)
            else:
                original(*args, **kwargs)

        return update

    return make


@contextmanager
def optimizer_kernels() -> Iterator[None]:
    """While inside, the loop path (``foreach=False, fused=False``) of torch.optim's Adam, AdamW, SGD, Adagrad, RMSprop,
    RAdam and ASGD calls one operator for each parameter. Sparse or complex parameters, tensor hyperparameters, `capturable` and
    `differentiable` keep torch's own loop."""
    with _torch.replaced_optimizer_loops({name: _wrapper(*how) for name, how in _EMITTERS.items()}):
        yield
