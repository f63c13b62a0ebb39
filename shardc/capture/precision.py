"""`precision="bf16"` or "fp16": forward and backward compute in that dtype, the weights stay what they are.

While a module is called, the parameters of it and of its children read as casts of the masters, and floating-point inputs are
cast; what it returns is float32 again, so that a loss is taken in float32. The casts are nodes of the program like any other:
gradients flow through them to the masters, and a sharded parameter is cast before it is gathered, in half the bytes.

Batch normalisation keeps its statistics and its arithmetic in float32, as elsewhere in PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardc import _torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@contextlib.contextmanager
def compute_in(precision: str | None) -> Iterator[None]:
    """While inside, outermost calls of modules compute in `precision`; None changes nothing."""
    if precision is None:
        yield
        return
    with _torch.modules_called_by(_Caller(DTYPES[precision]).around):
        yield


class _Caller:
    """Calls modules with cast parameters; one for each trace."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.inside = False

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if isinstance(module, BATCH_NORMS):
                out = original(module, *self._cast(args, torch.float32), **self._cast(kwargs, torch.float32))
                return self._cast(out, self.dtype) if self.inside else out
            if self.inside:
                return original(module, *args, **kwargs)
            self.inside = True
            try:
                with self._parameters(module):
                    out = original(module, *self._cast(args, self.dtype), **self._cast(kwargs, self.dtype))
            finally:
                self.inside = False
            # a checkpoint's second forward runs inside the backward, and gives back what the first one saved
            return out if _torch.in_backward() else self._cast(out, torch.float32)

        return call

    def _cast(self, tree: Any, dtype: torch.dtype) -> Any:
        def leaf(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.dtype in (torch.float32, *DTYPES.values()) else x

        if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, dict)):
            changed = {f.name: self._cast(getattr(tree, f.name), dtype) for f in dataclasses.fields(tree) if f.init}
            return dataclasses.replace(tree, **changed)
        return pytree.tree_map(leaf, tree)

    @contextlib.contextmanager
    def _parameters(self, root: nn.Module) -> Iterator[None]:
        """The float32 parameters below `root` read as casts, tied ones as one; put back on exit."""
        made: dict[int, Tensor] = {}

        def cast(p: Any) -> Any:
            if not isinstance(p, Tensor) or p.dtype != torch.float32:
                return p
            if id(p) not in made:
                made[id(p)] = p.to(self.dtype)
            return made[id(p)]

        swapped: list[tuple[nn.Module, str, Any]] = []
        try:
            for module in root.modules():
                if isinstance(module, BATCH_NORMS):
                    continue
                own = module.__dict__
                swapped.append((module, "_parameters", own["_parameters"]))
                own["_parameters"] = _Casts(own["_parameters"], cast)
                if "_flat_weights" in own:  # of recurrent modules, which read their parameters from a list
                    swapped.append((module, "_flat_weights", own["_flat_weights"]))
                    own["_flat_weights"] = [cast(p) for p in own["_flat_weights"]]
            yield
        finally:
            for module, name, value in swapped:
                module.__dict__[name] = value


class _Casts(dict[str, Any]):
    """A module's parameters, cast as they are read: a cast made early would have its gradient wait until the end."""

    def __init__(self, parameters: dict[str, Any], cast: Callable[[Any], Any]) -> None:
        super().__init__(parameters)
        self.cast = cast

    def __getitem__(self, name: str) -> Any:
        return self.cast(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self.cast(super().get(name, default))

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]
