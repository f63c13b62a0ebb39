"""Values that depend on nothing but the code: known at capture, so Python may decide on them without a guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from shardc import _torch
from shardc.program import Info, TensorType

LIMIT = 1 << 22
"""Elements up to which a constant is computed at capture."""


def constant_value(node: fx.Node, info: Mapping[fx.Node, Info], constants: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a node whose ancestors are constants (``arange``, ``full``, tensors made from Python data); else None."""
    ancestors: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        if n in ancestors:
            continue
        kind = info[n].type
        if n.op == "placeholder" and info[n].module not in constants:
            return None
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload) and _torch.is_random(n.target):
            return None
        if isinstance(kind, TensorType) and kind.numel > LIMIT:
            return None
        ancestors[n] = None
        todo.extend(n.all_input_nodes)
    env: dict[fx.Node, Any] = {}
    with _torch.without_modes(), torch.no_grad():
        for n in node.graph.nodes:  # in order
            if n not in ancestors:
                continue
            if n.op == "placeholder":
                env[n] = constants[info[n].module]
                continue
            args, kwargs = fx.node.map_arg((n.args, dict(n.kwargs)), lambda a: env[a])
            env[n] = n.target(*args, **kwargs)
    value = env[node]
    return value if isinstance(value, Tensor) else None
