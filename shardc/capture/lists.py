"""Operators on lists of tensors (``_foreach_*``) as what they mean: one call of an ordinary operator for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Call = Callable[..., Any]
"""Calls an operator: ``call(op, args, kwargs)``."""

_OVERLOADS = {
    "add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor",
    "pow.List": "Tensor_Tensor", "pow.Scalar": "Tensor_Scalar", "pow.ScalarList": "Tensor_Scalar",
    "pow.ScalarAndTensor": "Scalar", "lerp.List": "Tensor", "lerp": "Scalar", "clamp_min.List": "Tensor",
    "clamp_max.List": "Tensor",
}  # fmt: skip
"""Overload of the ordinary operator, by name and overload, or by name, of the one on lists; else the default one."""

_RENAMED = {
    "maximum.Scalar": "clamp_min", "maximum.ScalarList": "clamp_min", "minimum.Scalar": "clamp_max",
    "minimum.ScalarList": "clamp_max", "norm.Scalar": "linalg_vector_norm",
}  # fmt: skip
"""Ordinary operators of another name."""


def is_list_op(op: Any) -> bool:
    """Whether `loop` knows an operator: it takes lists of tensors and treats each tensor alone."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.name.startswith("aten::_foreach_"):
        return False
    return _target(*_names(op)) is not None


def loop(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> list[Any]:
    """The results of a functional list operator (`is_list_op`), made by `call`, tensor by tensor."""
    given = dict(kwargs)
    given.update(zip((a.name for a in op._schema.arguments), args, strict=False))
    lists = [a.name for a in op._schema.arguments if isinstance(a.type, torch.ListType) and a.name in given]
    count = next(len(given[name]) for name in lists if isinstance(given[name], (list, tuple)))
    each = ({k: v[i] if k in lists else v for k, v in given.items()} for i in range(count))
    return [_one(op, one, i, call) for i, one in enumerate(each)]


def _one(op: torch._ops.OpOverload, given: dict[str, Any], index: int, call: Call) -> Any:
    """One tensor's call; `given` are its arguments by the names of the list operator."""
    full, name = _names(op)
    target = _target(full, name)
    assert target is not None
    if full in ("addcmul.Tensor", "addcdiv.Tensor"):  # the factors are one tensor
        x, a, b, factors = given.values()
        product = call((aten.mul if name == "addcmul" else aten.div).Tensor, (a, b), {})
        scaled = call(aten.mul.Tensor, (product, call(aten.select.int, (factors, 0, index), {})), {})
        return call(aten.add.Tensor, (x, scaled), {})
    if name in ("addcmul", "addcdiv"):
        x, a, b, *value = given.values()
        return call(target, (x, a, b), {"value": value[0]} if value else {})
    if name == "norm":
        norm = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
        return call(target, (given["self"], given.get("ord", 2)), norm)
    names = {a.name for a in target._schema.arguments if a.kwarg_only}
    return call(target, tuple(v for k, v in given.items() if k not in names), {k: v for k, v in given.items() if k in names})


def _names(op: torch._ops.OpOverload) -> tuple[str, str]:
    """``"mul.Scalar"`` and ``"mul"``."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    return f"{name}.{op._schema.overload_name}", name


def _target(full: str, name: str) -> torch._ops.OpOverload | None:
    """The operator for one tensor; None if torch has none."""
    packet = getattr(aten, _RENAMED.get(full, name), None)
    wanted = "default" if full in _RENAMED else _OVERLOADS.get(full, _OVERLOADS.get(name, "default"))
    return getattr(packet, wanted) if packet is not None and wanted in packet.overloads() else None
