"""A torch-function mode over the trace: in-place edits of slots become versions, assignments to ``.data`` are honoured,
sparse gradients look sparse, modules can be copied, and `bincount` has the size that is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardc._torch import FunctionalTensor
from shardc.capture.sparse import SparseGradients, answered
from shardc.errors import CaptureError

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SETTERS = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__")
)

# Operators that autocast runs in float32 on CUDA and not on the CPU, where the trace runs (torch's documentation of amp).
_FLOAT32_ON_CUDA = frozenset(
    ("__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cosh",
     "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp",
     "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log_softmax", "log1p",
     "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm", "normalize",
     "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss",
     "softmax", "softmin", "softplus", "sum", "renorm", "tan", "triplet_margin_loss")
)  # fmt: skip


def _copied(x: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a tensor inside the step."""
    if id(x) not in memo:
        if not x.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment")
        memo[id(x)] = out = x.detach().clone().requires_grad_(x.requires_grad)
        if isinstance(x, torch.nn.Parameter):
            out._is_param = True
    return memo[id(x)]


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Of `minlength` bins if no value is larger, which is a decision; else their number is one."""
    bins = minlength
    if input.numel() and not (minlength and bool((input < minlength).all())):
        bins = max(minlength, int(input.max()) + 1)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return torch.zeros(bins, dtype=weights.dtype, device=input.device).index_add(0, input.long(), weights)


def _float32(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


class Watch(TorchFunctionMode):
    """See the module docstring.

    Args:
        edited: called with a tensor after an in-place operator on it.
        line: the user's line.
        device: kind of device that the step is for.
        sparse: the sparse gradients of the trace.
    """

    def __init__(
        self, edited: Callable[[Tensor], None], line: Callable[[], str], device: str, sparse: SparseGradients
    ) -> None:
        super().__init__()
        self.edited, self.line, self.device, self.sparse = edited, line, device, sparse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__set__" and func == _SET_DATA:
            return self._set_data(*args)
        if func is torch.Tensor.__deepcopy__:
            return _copied(*args)
        if name == "bincount":
            return _bincount(*args, **(kwargs or {}))
        if self.device != "cpu" and name in _FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = tuple(map(_float32, args)), {k: _float32(v) for k, v in (kwargs or {}).items()}
        if name == "bernoulli" and args and isinstance(args[0], Tensor):
            # Makes a contiguous result and fills it in that order. Functional, `bernoulli_` is the same operator, but fills in
            # the order that its tensor has in memory, which is what a stream draws for it.
            args = (args[0].contiguous(), *args[1:])
        done, out = answered(self.sparse, func, args, kwargs or {})
        if not done:
            out = func(*args, **(kwargs or {}))
        if args and (name in _SETTERS or (name.endswith("_") and not name.endswith("__"))):
            for target in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(target, FunctionalTensor):
                    self.edited(target)
        return out

    def _set_data(self, target: Tensor, value: Tensor) -> None:
        """``target.data = value``: `target` becomes another name of `value`'s memory; torch would change the wrapper alone."""
        if not isinstance(target, FunctionalTensor) or not isinstance(value, FunctionalTensor):
            raise CaptureError(
                "a tensor from outside of the step is assigned to .data", where=self.line(), hint="pass it as an argument"
            )
        new = value.detach()
        if (target.shape, target.dtype, target.stride()) != (new.shape, new.dtype, new.stride()):
            raise CaptureError(
                f"an assignment to .data changes a tensor from {tuple(target.shape)} {target.dtype} strides {target.stride()} "
                f"to {tuple(new.shape)} {new.dtype} strides {new.stride()}",
                where=self.line(), hint="use copy_",
            )  # fmt: skip
        assert isinstance(new, FunctionalTensor)
        target.elem = new.elem
        self.edited(target)
