"""From the arguments of a call at global shapes to those of the same call on a rank's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardc.errors import RuleError
from shardc.instructions import Local, LocalDim, LocalStart
from shardc.rules.rule import Extent, Rule, Shape, Sized, Start
from shardc.spec import Dim, ShardSpec, dim_axes


def localise(
    target: torch._ops.OpOverload,
    rule: Rule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result_specs: Sequence[ShardSpec | None],
    operand_specs: Sequence[ShardSpec],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same argument tree, with size arguments as spec expressions; sizes of what is not split stay as they are.

    Args:
        result_specs: one for each result of the rule.
        operand_specs: one for each tensor operand, as the rule requires them.

    Raises:
        RuleError: specs that do not fit the rule.
    """
    for what, specs, factors in (("operands", operand_specs, rule.operands), ("results", result_specs, rule.results)):
        if len(specs) != len(factors):
            raise RuleError(f"{target}: specs for {len(specs)} {what}, the rule {rule} has {len(factors)}")
    new, named = list(args), dict(kwargs)
    for key, how in rule.sized.items():
        if isinstance(key, int):
            new[key] = _local(target, how, result_specs, operand_specs, new[key])
        else:
            named[key] = _local(target, how, result_specs, operand_specs, named[key])
    return tuple(new), named


def _local(
    target: torch._ops.OpOverload,
    how: Sized,
    specs: Sequence[ShardSpec | None],
    operands: Sequence[ShardSpec],
    old: Any,
) -> Any:
    if isinstance(how, tuple) and how and isinstance(how[0], Start):
        return [_local(target, one, specs, operands, n) for one, n in zip(how, old, strict=True)]
    if isinstance(how, Start):
        owner = specs[how.tensor] if how.of_result else operands[how.tensor]
        assert owner is not None
        return LocalStart(owner.dims[how.dim]) if dim_axes(owner.dims[how.dim]) else old
    if isinstance(how, Shape):
        spec = specs[how.result]
        if spec is None:
            raise RuleError(f"{target}: a size is that of result {how.result}, which has no spec")
        return Local(ShardSpec(spec.dims)) if spec.axes else old
    extents = how if isinstance(how, tuple) else (how,)
    dims: list[Dim] = []
    for extent in extents:
        assert isinstance(extent, Extent)
        spec = specs[extent.result]
        if spec is None:
            raise RuleError(f"{target}: a size is that of dim {extent.dim} of result {extent.result}, which has no spec")
        dims.append(spec.dims[extent.dim])
    if not any(dim_axes(d) for d in dims):
        return old
    return [LocalDim(d) for d in dims] if isinstance(how, tuple) else LocalDim(dims[0])
