"""Records the operator calls of ordinary code, as rules see them: functional, after shardc's decompositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardc._torch import TorchDispatchMode
from shardc.rules.call import map_operands
from shardc.rules.decompose import decompositions
from shardc.rules.layouts import is_tensor
from shardc.rules.sample import Sample

SKIPPED = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


REWRITTEN = (torch.ops.aten.copy.default, torch.ops.aten._efficientzerotensor.default)
"""What no program contains: `normalize` turns copies into casts and expands; tangents of forward mode."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills `calls` with what runs under it.

    Left out: tensors without values (`empty`), random operators (proved by the runtime's own tests), operators whose
    result's size or value depends on data (they are numbers or ragged dims of a program), and calls that take or return
    no tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Sample] = []
        self._table = decompositions(split_products=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        op = _functional(func)
        if op is not None:
            kept = map_operands(args, {k: v for k, v in kwargs.items() if k in _names(op)}, _copy, is_tensor)
            if op in self._table:
                with self:
                    self._table[op](*kept[0], **kept[1])
            elif (
                not any(tag in op.tags for tag in SKIPPED)
                and "empty" not in op._schema.name
                and op not in REWRITTEN
                and op._schema.returns
            ):
                self.calls.append(Sample(op, *kept))
        return func(*args, **kwargs)


def calls_of(function: Callable[[], Any]) -> list[Sample]:
    """The operator calls of a function; those made before an error, too."""
    recorder = Recorder()
    with recorder:
        function()
    return recorder.calls


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def _names(op: torch._ops.OpOverload) -> set[str]:
    return {a.name for a in op._schema.arguments}


def _functional(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator without writing (`add_` -> `add`); None where there is none."""
    if not func._schema.is_mutable:
        return func
    space, name = func._schema.name.split("::")
    packet = getattr(getattr(torch.ops, space), name.rstrip("_"), None)
    found = getattr(packet, func._overloadname, None)
    return found if found is not None and not found._schema.is_mutable else None
