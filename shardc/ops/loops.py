"""The updates of torch.optim as plain tensor arithmetic, in place, for layouts and dtypes that fused kernels do not take.

Same formulas, same order of operations as torch's loop path; `step` is already the number of this step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adam(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, largest: Tensor | None, step: float,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool, decoupled: bool,
) -> None:  # fmt: skip
    """Adam (Kingma and Ba 2015), AMSGrad where `largest` is given, AdamW (Loshchilov and Hutter 2019) where decoupled."""
    grad = -grad if maximize else grad
    if weight_decay != 0:
        if decoupled:
            p.mul_(1 - lr * weight_decay)
        else:
            grad = grad.add(p, alpha=weight_decay)
    exp_avg.lerp_(grad.to(exp_avg.dtype), 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if largest is not None:
        torch.maximum(largest, exp_avg_sq, out=largest)
    denominator = ((exp_avg_sq if largest is None else largest).sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
    p.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def sgd(
    p: Tensor, grad: Tensor, buffer: Tensor | None, first: bool,
    lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool,
) -> None:  # fmt: skip
    """SGD, with momentum where `buffer` is given; `first`: the buffer is filled with the gradient."""
    grad = -grad if maximize else grad
    if weight_decay != 0:
        grad = grad.add(p, alpha=weight_decay)
    if buffer is not None:
        if first:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
        grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
    p.add_(grad, alpha=-lr)


def adagrad(
    p: Tensor, grad: Tensor, state_sum: Tensor, step: float,
    lr: float, lr_decay: float, eps: float, weight_decay: float, maximize: bool,
) -> None:  # fmt: skip
    """Adagrad (Duchi et al. 2011)."""
    grad = -grad if maximize else grad
    if weight_decay != 0:
        grad = grad.add(p, alpha=weight_decay)
    state_sum.addcmul_(grad, grad, value=1)
    p.addcdiv_(grad, state_sum.sqrt().add_(eps), value=-lr / (1 + (step - 1) * lr_decay))


def rmsprop(
    p: Tensor, grad: Tensor, square_avg: Tensor, grad_avg: Tensor | None, buffer: Tensor | None,
    lr: float, alpha: float, eps: float, weight_decay: float, momentum: float, maximize: bool,
) -> None:  # fmt: skip
    """RMSprop, centered where `grad_avg` is given, with momentum where `buffer` is."""
    grad = -grad if maximize else grad
    if weight_decay != 0:
        grad = grad.add(p, alpha=weight_decay)
    square_avg.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
    if grad_avg is None:
        root = square_avg.sqrt()
    else:
        grad_avg.lerp_(grad, 1 - alpha)
        root = square_avg.addcmul(grad_avg, grad_avg, value=-1).sqrt_()
    root.add_(eps)
    if buffer is None:
        p.addcdiv_(grad, root, value=-lr)
    else:
        buffer.mul_(momentum).addcdiv_(grad, root)
        p.add_(buffer, alpha=-lr)


def radam(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool, decoupled: bool,
) -> None:  # fmt: skip
    """RAdam (Liu et al. 2020): as Adam once the variance of its step size exists, with momentum alone before."""
    grad = -grad if maximize else grad
    if weight_decay != 0:
        if decoupled:
            p.mul_(1 - lr * weight_decay)
        else:
            grad = grad.add(p, alpha=weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction = 1 - beta2**step
    last = 2 / (1 - beta2) - 1  # length of the moving average, in the end and now
    length = last - 2 * step * beta2**step / correction
    change = exp_avg / (1 - beta1**step) * lr
    if length > 5.0:
        rectified = ((length - 4) * (length - 2) * last / ((last - 4) * (last - 2) * length)) ** 0.5
        change = change * (correction**0.5 / exp_avg_sq.sqrt().add_(eps)) * rectified
    p.add_(change, alpha=-1.0)


def asgd(
    p: Tensor, grad: Tensor, ax: Tensor, mu: Tensor, eta: Tensor, step: float,
    lr: float, lambd: float, t0: float, alpha: float, weight_decay: float, maximize: bool,
) -> None:  # fmt: skip
    """Averaged SGD (Polyak and Juditsky 1992): `ax` averages the parameter from step `t0` on."""
    grad = -grad if maximize else grad
    if weight_decay != 0:
        grad = grad.add(p, alpha=weight_decay)
    rate = eta.item()
    p.mul_(1 - lambd * rate).add_(grad, alpha=-rate)
    if mu.item() != 1:
        ax.add_(p.sub(ax).mul_(mu))
    else:
        ax.copy_(p)
    eta.fill_(lr / ((1 + lambd * lr * step) ** alpha))
    mu.fill_(1 / max(1, step - t0))
