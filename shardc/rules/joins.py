"""Tensors side by side and apart again: cat, stack, split."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardc.rules.call import Builder, Call, Draft, choosing
from shardc.rules.rule import WHOLE, DimFactors, Extent, Rule


def parts(draft: Draft, sizes: Sequence[int]) -> tuple[list[DimFactors], DimFactors]:
    """Dims of these sizes, and the dim that they make side by side: (how many blocks, whole) x (a block, passes).

    A fused projection of q, k and v is thus split inside each of the three.
    """
    block = math.gcd(*sizes)
    if block <= 1:
        return [draft.new(n, WHOLE) for n in sizes], draft.new(sum(sizes), WHOLE)
    inner = draft.new(block)
    if len(sizes) == 1:
        return [inner], inner
    return [inner if n == block else (*draft.new(n // block, WHOLE), *inner) for n in sizes], (
        *draft.new(sum(sizes) // block, WHOLE),
        *inner,
    )


def split(call: Call) -> Rule:
    draft = Draft(call)
    shape = call.operands[0].shape
    k = call.dim("dim", len(shape))
    dims = draft.fresh([*shape[:k], *shape[k + 1 :]])
    pieces, joined = parts(draft, [r.shape[k] for r in call.results if r is not None])
    if call.key("split_sizes") is not None:
        sized = call.sized("split_sizes", tuple(Extent(i, k) for i in range(len(pieces))))
    else:
        sized = call.sized("split_size", Extent(0, k))
    return draft.rule(
        [[*dims[:k], joined, *dims[k:]]], [[*dims[:k], p, *dims[k:]] for p in pieces], any_partial=True, sized=sized
    )


def cat(call: Call) -> Rule:
    """Side by side: jointly linear."""
    draft = Draft(call)
    result = call.results[0]
    assert result is not None
    k = call.dim("dim", len(result.shape))
    dims = draft.fresh([*result.shape[:k], *result.shape[k + 1 :]])
    legacy = [t.shape == (0,) and len(result.shape) != 1 for t in call.operands]  # torch ignores empty lists among matrices
    pieces, joined = parts(draft, [0 if skip else t.shape[k] for t, skip in zip(call.operands, legacy, strict=True)])
    operands = [draft.fresh([0], WHOLE) if skip else [*dims[:k], p, *dims[k:]] for p, skip in zip(pieces, legacy, strict=True)]
    return draft.rule(
        operands, [[*dims[:k], joined, *dims[k:]]], [frozenset(range(len(operands)))], orders=choosing(*range(len(operands)))
    )


def stack(call: Call) -> Rule:
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape)
    k = int(call["dim"]) % (len(dims) + 1)
    new = draft.new(len(call.operands), WHOLE)
    every = range(len(call.operands))
    return draft.rule([dims for _ in every], [[*dims[:k], new, *dims[k:]]], [frozenset(every)], orders=choosing(*every))


TABLE: dict[str, Builder] = {
    "aten.split.Tensor": split,
    "aten.split_with_sizes.default": split,
    "aten.unsafe_split.Tensor": split,
    "aten.unsafe_split_with_sizes.default": split,
    "aten.cat.default": cat,
    "aten.stack.default": stack,
}
