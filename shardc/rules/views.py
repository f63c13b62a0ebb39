"""Operators that move elements and change none: any pending reduction passes through them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardc.rules.call import Builder, Call, Draft, rising, sets
from shardc.rules.rule import WHOLE, DimFactors, Rule, Shape


def same(call: Call) -> Rule:
    """Clone, detach, alias: nothing moves."""
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape)
    return draft.rule([dims], [dims], any_partial=True)


def reinterpreted(call: Call) -> Rule:
    """view.dtype: other numbers in the same bytes; the last dim changes where items differ in size."""
    draft = Draft(call)
    x, result = call.operands[0], call.results[0]
    assert result is not None
    if x.shape == result.shape:
        dims = draft.fresh(x.shape)
        return draft.rule([dims], [dims])
    dims = draft.fresh(x.shape[:-1])
    return draft.rule([[*dims, draft.new(x.shape[-1], WHOLE)]], [[*dims, draft.new(result.shape[-1], WHOLE)]])


def refine(draft: Draft, left: Sequence[int], right: Sequence[int]) -> tuple[list[DimFactors], list[DimFactors]]:
    """The factors of a reshape: the coarsest common refinement of both lists of sizes.

    Where the borders of the two sides do not nest (``[6, 4] -> [4, 6]``), the common major part is a factor and the rest of
    the group is whole on both sides. Dims of size one are factors where both sides have them in the same place.
    """
    out: tuple[list[list[str]], list[list[str]]] = ([[] for _ in left], [[] for _ in right])
    if 0 in left or 0 in right:
        return _empty(draft, left, right)
    i = j = 0
    while i < len(left) or j < len(right):
        if i < len(left) and j < len(right) and left[i] == right[j]:
            name = draft.new(left[i])[0]
            out[0][i].append(name)
            out[1][j].append(name)
            i, j = i + 1, j + 1
        elif i < len(left) and left[i] == 1:
            i += 1
        elif j < len(right) and right[j] == 1:
            j += 1
        else:
            i, j = _group(draft, left, right, i, j, out)
    first, second = out
    return [tuple(d) for d in first], [tuple(d) for d in second]


def _group(
    draft: Draft, left: Sequence[int], right: Sequence[int], i: int, j: int, out: tuple[list[list[str]], list[list[str]]]
) -> tuple[int, int]:
    """Factors of the shortest runs of dims from (i, j) on that hold as many elements; returns where they end."""
    a, b, p, q = left[i], right[j], i + 1, j + 1
    while a != b:
        if a < b:
            a, p = a * left[p], p + 1
        else:
            b, q = b * right[q], q + 1
    x, y = left[i], right[j]  # what is left of the current dims
    while True:
        cut = x if y % x == 0 else y if x % y == 0 else math.gcd(x, y)
        if cut > 1:
            name = draft.new(cut)[0]
            out[0][i].append(name)
            out[1][j].append(name)
        nested = cut in (x, y)
        x, y = x // cut, y // cut
        if not nested:  # the rest does not line up: whole, with sizes of its own on each side
            for side, k, end, rest, sizes in ((0, i, p, x, left), (1, j, q, y, right)):
                for m in range(k, end):
                    size = rest if m == k else sizes[m]
                    if size > 1:
                        out[side][m].append(draft.new(size, WHOLE)[0])
            return p, q
        while x == 1 and i + 1 < p:
            i, x = i + 1, left[i + 1]
        while y == 1 and j + 1 < q:
            j, y = j + 1, right[j + 1]
        if x == 1 and y == 1:
            return p, q


def _empty(draft: Draft, left: Sequence[int], right: Sequence[int]) -> tuple[list[DimFactors], list[DimFactors]]:
    """No elements: only dims that are equal from the left on are certain."""
    k = 0
    while k < min(len(left), len(right)) and left[k] == right[k]:
        k += 1
    common = draft.fresh(left[:k])
    return common + draft.fresh(left[k:], WHOLE), common + draft.fresh(right[k:], WHOLE)


def view(size: str) -> Builder:
    """A reshape whose size argument has this name."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        result = call.results[0]
        assert result is not None
        left, right = refine(draft, call.operands[0].shape, result.shape)
        return draft.rule([left], [right], any_partial=True, sized=call.sized(size, Shape()))

    return build


def expand(call: Call) -> Rule:
    """New and stretched dims are factors of the result alone: each part makes its own."""
    draft = Draft(call)
    result = call.results[0]
    assert result is not None
    dims = draft.fresh(result.shape)
    operand = draft.broadcast(call.operands[0].shape, dims)
    return draft.rule([operand], [dims], any_partial=True, sized=call.sized("size", Shape()))


def permuted(call: Call, order: Sequence[int]) -> Rule:
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape)
    return draft.rule([dims], [[dims[k] for k in order]], any_partial=True)


def permute(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    return permuted(call, [int(d) % rank for d in call["dims"]])


def transpose(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    order = list(range(rank))
    if rank:
        a, b = call.dim("dim0", rank), call.dim("dim1", rank)
        order[a], order[b] = order[b], order[a]
    return permuted(call, order)


def t(call: Call) -> Rule:
    return permuted(call, list(reversed(range(len(call.operands[0].shape)))))


def unsqueeze(call: Call) -> Rule:
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape)
    k = int(call["dim"]) % (len(dims) + 1)
    return draft.rule([dims], [[*dims[:k], (), *dims[k:]]], any_partial=True)


def squeeze(call: Call) -> Rule:
    """Dims of size one go. A named dim that is larger stays, and must stay larger on each part: it is whole."""
    draft = Draft(call)
    shape = call.operands[0].shape
    named = call.dims("dim", len(shape)) if "dim" in call else range(len(shape))
    dims = [() if k in named and n == 1 else draft.new(n, WHOLE if k in named else "pass") for k, n in enumerate(shape)]
    return draft.rule([dims], [[d for k, d in enumerate(dims) if d or k not in named]], any_partial=True)


def select(call: Call) -> Rule:
    draft = Draft(call)
    shape = call.operands[0].shape
    k = call.dim("dim", len(shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(shape)]
    return draft.rule([dims], [[*dims[:k], *dims[k + 1 :]]], any_partial=True)


def unbind(call: Call) -> Rule:
    draft = Draft(call)
    shape = call.operands[0].shape
    k = call.dim("dim", len(shape))
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(shape)]
    return draft.rule([dims], [[*dims[:k], *dims[k + 1 :]]] * len(call.results), any_partial=True)


def slice_(call: Call) -> Rule:
    """The sliced dim is whole, unless the slice takes all of it."""
    draft = Draft(call)
    shape = call.operands[0].shape
    result = call.results[0]
    assert result is not None
    k = call.dim("dim", len(shape))
    if result.shape[k] == shape[k] and call["step"] == 1 and isinstance(call["end"], (int, type(None))):
        dims = draft.fresh(shape)
        return draft.rule([dims], [dims], any_partial=True)
    dims = [draft.new(n, WHOLE if i == k else "pass") for i, n in enumerate(shape)]
    return draft.rule([dims], [[*dims[:k], draft.new(result.shape[k], WHOLE), *dims[k + 1 :]]], any_partial=True)


def repeat(call: Call) -> Rule:
    """``[d] -> [(r d)]``: the copies are whole, what is copied passes."""
    draft = Draft(call)
    shape, repeats = call.operands[0].shape, [int(n) for n in call["repeats"]]
    dims = draft.fresh(shape)
    new = [draft.new(n, WHOLE) if n != 1 else () for n in repeats]
    lead = len(repeats) - len(shape)
    return draft.rule([dims], [new[:lead] + [(*r, *d) for r, d in zip(new[lead:], dims, strict=True)]], any_partial=True)


def whole_dims(name: str, last: int = 0) -> Builder:
    """The dims named by an argument (or the last ones) are whole, the others pass: flip, roll, tril."""

    def build(call: Call) -> Rule:
        draft = Draft(call)
        shape = call.operands[0].shape
        whole = call.dims(name, len(shape)) if name else range(len(shape) - last, len(shape))
        dims = [draft.new(n, WHOLE if k in whole else "pass") for k, n in enumerate(shape)]
        return draft.rule([dims], [dims], sets("0"), any_partial=bool(name), orders=rising(0) if last else ())

    return build


def pad(call: Call) -> Rule:
    """Padded dims are whole; linear where the padding is zero."""
    draft = Draft(call)
    shape, amounts = call.operands[0].shape, list(call["pad"])
    result = call.results[0]
    assert result is not None
    left, right = [], []
    for k, n in enumerate(shape):
        at = 2 * (len(shape) - 1 - k)
        touched = at < len(amounts) and any(a != 0 for a in amounts[at : at + 2])
        left.append(draft.new(n, WHOLE if touched else "pass"))
        right.append(draft.new(result.shape[k], WHOLE) if touched else left[-1])
    return draft.rule([left], [right], sets("0" if call["value"] == 0 else ""), orders=rising(0))


def backward_of_slice(call: Call) -> Rule:
    """select_backward, slice_backward: the dim is whole, or passes where the slice took all of it."""
    draft = Draft(call)
    result = call.results[0]
    assert result is not None
    k = call.dim("dim", len(result.shape))
    grad = call.operands[0]
    full = "end" in call and call["step"] == 1 and grad.shape[k] == result.shape[k] and isinstance(call["end"], int)
    right = [draft.new(n, WHOLE if i == k and not full else "pass") for i, n in enumerate(result.shape)]
    if "end" not in call:
        left = [*right[:k], *right[k + 1 :]]
    else:
        left = [*right[:k], right[k] if full else draft.new(grad.shape[k], WHOLE), *right[k + 1 :]]
    return draft.rule([left], [right], sets("0"), sized=call.sized("input_sizes", Shape()), orders=rising(0))


def real_view(call: Call) -> Rule:
    """Complex numbers as pairs: one more dim."""
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape)
    return draft.rule([dims], [[*dims, draft.new(2, WHOLE)]], sets("0"))  # each half of a pending sum is one


def complex_view(call: Call) -> Rule:
    draft = Draft(call)
    dims = draft.fresh(call.operands[0].shape[:-1])
    return draft.rule([[*dims, draft.new(2, WHOLE)]], [dims], sets("0"))


def diagonal(call: Call) -> Rule:
    draft = Draft(call)
    shape = call.operands[0].shape
    result = call.results[0]
    assert result is not None
    taken = (call.dim("dim1", len(shape)), call.dim("dim2", len(shape)))
    dims = [draft.new(n, WHOLE if k in taken else "pass") for k, n in enumerate(shape)]
    rest = [d for k, d in enumerate(dims) if k not in taken]
    return draft.rule([dims], [[*rest, draft.new(result.shape[-1], WHOLE)]], any_partial=True)


def diag_embed(call: Call) -> Rule:
    draft = Draft(call)
    result = call.results[0]
    assert result is not None
    rank = len(result.shape)
    a, b = call.dim("dim1", rank), call.dim("dim2", rank)
    right = [draft.new(n, WHOLE if k in (a, b) else "pass") for k, n in enumerate(result.shape)]
    rest = [d for k, d in enumerate(right) if k not in (a, b)]
    return draft.rule([[*rest, draft.new(call.operands[0].shape[-1], WHOLE)]], [right], sets("0"), orders=rising(0))


def diagonal_backward(call: Call) -> Rule:
    draft = Draft(call)
    result = call.results[0]
    assert result is not None
    rank = len(result.shape)
    taken = (call.dim("dim1", rank), call.dim("dim2", rank))
    right = [draft.new(n, WHOLE if k in taken else "pass") for k, n in enumerate(result.shape)]
    rest = [d for k, d in enumerate(right) if k not in taken]
    left = [*rest, draft.new(call.operands[0].shape[-1], WHOLE)]
    return draft.rule([left], [right], sets("0"), sized=call.sized("input_sizes", Shape()), orders=rising(0))


def strided(call: Call) -> Rule:
    raise call.refuse(
        "addresses the storage of its operand, which a part does not have",
        "write the step with view, permute, slicing or unfold instead of as_strided",
    )


TABLE: dict[str, Builder] = {
    "aten.clone.default": same,
    "aten.detach.default": same,
    "aten.alias.default": same,
    "aten.lift_fresh_copy.default": same,
    "aten.lift_fresh.default": same,
    "aten.view.dtype": reinterpreted,
    "aten._conj.default": whole_dims("", 0),
    "aten.resolve_conj.default": whole_dims("", 0),
    "aten._neg_view.default": whole_dims("", 0),
    "aten.view.default": view("size"),
    "aten._unsafe_view.default": view("size"),
    "aten.reshape.default": view("shape"),
    "aten._reshape_copy.default": view("size"),
    "aten.view_copy.default": view("size"),
    "aten.expand.default": expand,
    "aten.expand_copy.default": expand,
    "aten.permute.default": permute,
    "aten.transpose.int": transpose,
    "aten.t.default": t,
    "aten.unsqueeze.default": unsqueeze,
    "aten.squeeze.default": squeeze,
    "aten.squeeze.dim": squeeze,
    "aten.squeeze.dims": squeeze,
    "aten.select.int": select,
    "aten.unbind.int": unbind,
    "aten.slice.Tensor": slice_,
    "aten.repeat.default": repeat,
    "aten.flip.default": whole_dims("dims"),
    "aten.roll.default": whole_dims("dims"),
    "aten.tril.default": whole_dims("", 2),
    "aten.triu.default": whole_dims("", 2),
    "aten.constant_pad_nd.default": pad,
    "aten.select_backward.default": backward_of_slice,
    "aten.slice_backward.default": backward_of_slice,
    "aten.view_as_real.default": real_view,
    "aten.view_as_complex.default": complex_view,
    "aten.diagonal.default": diagonal,
    "aten.diagonal_backward.default": diagonal_backward,
    "aten.diag_embed.default": diag_embed,
    "aten.as_strided.default": strided,
    "aten.as_strided_scatter.default": strided,
}
