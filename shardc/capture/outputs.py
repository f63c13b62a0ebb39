"""What modules return: recorded while a step is traced, so that `activations={...}` can pin it by the module's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, fx, nn

from shardc import _torch
from shardc.capture.results import flatten

Found = Callable[[Tensor], "fx.Node | None"]
"""The node whose value a tensor of the trace is now."""


def module_outputs(
    names: Mapping[int, str], node_of: Found, outputs: dict[str, tuple[fx.Node, ...]]
) -> AbstractContextManager[None]:
    """While inside, calls of modules enter their tensors into `outputs`: ``model.h.0.mlp`` for a single tensor,
    ``model.h.0.attn[0]`` for the first of several; one node for each call.

    Args:
        names: id of a module -> its path.
        node_of: see `Found`.
        outputs: filled in.
    """

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = original(module, *args, **kwargs)
            name = names.get(id(module))
            if name is not None:
                flatten(out, enter, name)
            return out

        return call

    def enter(value: Any, path: str) -> tuple[str, Any]:
        node = node_of(value) if isinstance(value, Tensor) else None
        if node is not None and node not in outputs.get(path, ()):
            outputs[path] = (*outputs.get(path, ()), node)
        return "const", None

    return _torch.modules_called_by(around)
