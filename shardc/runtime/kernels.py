"""From the name of an operator to what a rank calls, and when a rank with an empty part does not call it at all."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc import _torch
from shardc.dtypes import identity
from shardc.errors import RuntimeFailure
from shardc.instructions import Compute, Local, LocalDim, LocalStart, Out, uses_of
from shardc.mesh import Coord, Mesh
from shardc.ops import INPLACE
from shardc.spec import ShardSpec, dim_axes, dim_start

MODULES = ("math", "operator", "torch", "builtins")
"""Python modules whose functions may stand for operators on numbers."""

RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default")
"""Views of the whole value that a part may not allow: its strides differ where it is a view into a larger tensor."""


@dataclass(frozen=True)
class Kernel:
    """What a rank calls for a `Compute`.

    Args:
        function: called with the evaluated arguments.
        sequence: it returns a sequence of results, even if of one.
        aliases: results may share storage with operands.
    """

    function: Callable[..., Any]
    sequence: bool
    aliases: bool


def resolve(op: str) -> Kernel:
    """The kernel of an operator name such as ``aten.mm.default``, ``shardc.adam.default``, ``math.sqrt``.

    Raises:
        RuntimeFailure: there is no such operator in this process.
    """
    space, _, rest = op.partition(".")
    try:
        if space in MODULES:
            return Kernel(getattr(importlib.import_module(space), rest), False, False)
        found = getattr(torch.ops, space)
        for part in rest.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise RuntimeFailure(f"unknown operator {op!r}", hint="import the module that registers it") from error
    if isinstance(found, torch._ops.OpOverloadPacket):
        found = found.default
    assert isinstance(found, torch._ops.OpOverload)
    function: Callable[..., Any] = torch.reshape if str(found) in RESHAPES else found
    return Kernel(function, _torch.returns_sequence(found), _torch.may_alias(found))


def inplace_kernel(instruction: Compute, functional: Kernel) -> Kernel:
    """The in-place form. Arguments that it would overwrite though their register lives on are copied first.

    Raises:
        RuntimeFailure: the operator has no in-place form, or aliases other results than the instruction says.
    """
    form = INPLACE.get(instruction.op)
    wanted = set(instruction.inplace)
    if form is None or not wanted <= set(form.aliases):
        can = sorted(form.aliases) if form else "none"
        raise RuntimeFailure(
            f"{instruction.op} cannot take over storage as {sorted(wanted)} says; it can: {can}",
            where=f"{instruction.name} ({instruction.module}, {instruction.line})",
        )
    copied = tuple(arg for result, arg in form.aliases if (result, arg) not in wanted)
    function: Callable[..., Any] = form.function
    if copied:

        def function(*args: Any, **kwargs: Any) -> Any:
            return form.function(*(a.clone() if k in copied else a for k, a in enumerate(args)), **kwargs)

    return Kernel(function, functional.sequence, functional.aliases)


def numbers_on_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """A dry run knows no values: a number that depends on a tensor, or cannot be computed from stand-ins, is a stand-in."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Tensor) for a in args):
            return STAND_IN
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, ValueError):
            return STAND_IN

    return call


def memoised_on_meta(
    op: str, function: Callable[..., Any], dtypes: Sequence[torch.dtype | None], memo: dict[Any, Any]
) -> Callable[..., Any]:
    """The operator on meta tensors, whose kernels are slow (Python, up to 1 ms): calls that differ in no shape, stride or
    constant run once. Only for operators whose results are new tensors.

    Args:
        dtypes: of the results on the device that is planned for; meta kernels follow another device now and then (the
            statistics of a bfloat16 layer norm).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        key = (op, _meta_key(args), _meta_key(tuple(kwargs.items())))
        found = memo.get(key)
        if found is None:
            results = function(*args, **kwargs)
            several = isinstance(results, (tuple, list))
            tensors = [_as(t, dtype) for t, dtype in zip(results if several else [results], dtypes, strict=False)]
            if not all(t is None or (isinstance(t, Tensor) and _compact(t)) for t in tensors):
                return results
            memo[key] = several, [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]
            return tensors if several else tensors[0]
        several, made = found
        out = [None if m is None else torch.empty_strided(m[0], m[1], dtype=m[2], device="meta") for m in made]
        return out if several else out[0]

    return call


def _as(t: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(t, Tensor) or dtype is None or t.dtype == dtype:
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="meta")


def _meta_key(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple(_meta_key(a) for a in tree)
    return type(tree), tree


def _compact(t: Tensor) -> bool:
    """Whether `empty_strided` would make a storage of the same size."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.storage_offset() == 0 and t.untyped_storage().nbytes() == span * t.dtype.itemsize


STAND_IN = 0.5
"""Stands for numbers whose value a dry run does not know: between 0 and 1, as betas are, so that 1 - x ** n is no zero."""


def evaluate(tree: Any, mesh: Mesh, coord: Coord, device: torch.device) -> Any:
    """An argument tree with its sizes and devices made this rank's; `Ref`s stay."""
    if isinstance(tree, Local):
        return list(tree.spec.local_shape(mesh, coord))
    if isinstance(tree, LocalDim):
        return math.prod(hi - lo for lo, hi in (f.interval(mesh, coord) for f in tree.dim))
    if isinstance(tree, LocalStart):
        return dim_start(tree.dim, mesh, coord)
    if isinstance(tree, torch.device):
        return device
    if isinstance(tree, (list, tuple)):
        return type(tree)(evaluate(a, mesh, coord, device) for a in tree)
    return tree


Fill = tuple[tuple[int, ...], torch.dtype, float | int | bool | None]
"""Local shape, dtype and value (None: no element) of a result that is made without calling the operator."""


def skipped(instruction: Compute, outs: Mapping[int, Out], mesh: Mesh, coord: Coord) -> tuple[Fill | None, ...] | None:
    """How a rank whose parts are empty makes the results of `instruction` without calling it; None: it calls it.

    A result without an element is an empty tensor. Where an operand lacks all the elements that others reduce over, the
    rank adds nothing: its part of the partial result is the identity of the reduction.

    Args:
        outs: register -> what it looks like.
    """
    if instruction.draw is not None:  # random streams advance by what all ranks draw
        return None
    missing: set[str] = set()
    for reg in uses_of(instruction):
        spec = outs[reg].spec if outs[reg].dtype is not None else None
        if spec is not None:
            missing |= _empty_axes(spec, mesh, coord)
    fills: list[Fill | None] = []
    for out in instruction.outs:
        if out is None:
            fills.append(None)
            continue
        if out.dtype is None or out.spec is None:
            return None
        shape = out.spec.local_shape(mesh, coord)
        ops = {op for axis, op in out.spec.partial if axis in missing}
        if 0 in shape:
            fills.append((shape, out.dtype, None))
        elif len(ops) == 1:
            fills.append((shape, out.dtype, identity(ops.pop(), out.dtype)))
        else:
            return None
    return tuple(fills) if any(f is not None for f in fills) else None


def _empty_axes(spec: ShardSpec, mesh: Mesh, coord: Coord) -> set[str]:
    """The axes that split a dim of which this rank has no element, though there are some."""
    if 0 in spec.shape:
        return set()
    return {
        axis
        for dim in spec.dims
        if dim_axes(dim) and any(lo == hi for lo, hi in (f.interval(mesh, coord) for f in dim))
        for axis in dim_axes(dim)
    }
