"""One concrete call for each operator of the tables: what their rules are proved on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardc.rules import pointwise
from shardc.rules.arithmetic import aten
from shardc.rules.call import overload
from shardc.rules.sample import Op, Sample, index, ints
from shardc.rules.samples_networks import networks


def is_random(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def elementwise(op: Op) -> Iterator[Sample]:
    """Calls made from the schema: whole numbers, then fractions; dtypes that the operator does not take are left out."""
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: (x.abs() + 1) / 8,
        lambda x: x.to(torch.int64).abs() + 1,
        lambda x: x > 0,
    ]
    for kind in kinds:
        shapes = [(5, 3), (3,), (5, 1), (5, 3)]
        args: list[Any] = []
        for a in op._schema.arguments:
            text = str(a.type)
            if a.has_default_value() or a.kwarg_only:
                break
            if text in ("Tensor", "Optional[Tensor]"):
                args.append(kind(ints(*shapes[sum(isinstance(x, Tensor) for x in args) % 4])))
            else:
                args.append({"bool": False, "str": "none"}.get(text, 2))
        tensors = [x for x in args if isinstance(x, Tensor)]
        if tensors and tensors[0].shape != (5, 3):
            continue
        if "_backward" in op._schema.name or "mask" in [a.name for a in op._schema.arguments]:
            args = [kind(ints(5, 3, hi=6 + k)) if isinstance(x, Tensor) else x for k, x in enumerate(args)]
        args = [x > 0 if isinstance(x, Tensor) and a.name in ("condition", "mask") else x
                for a, x in zip(op._schema.arguments, args, strict=False)]  # fmt: skip
        try:
            op(*args)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        yield Sample(op, tuple(args))


def written() -> Iterator[Sample]:
    """Calls of operators that have arguments of their own."""
    x = ints(4, 3, 5)

    def call(op: Op, *args: Any, **kwargs: Any) -> Sample:
        return Sample(op, args, kwargs)

    # views
    for op in (aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.lift_fresh, aten.resolve_conj, aten._neg_view):
        yield call(op.default, x)
    for size in ([12, 5], [4, 15], [60], [4, 3, 5], [2, 2, 3, 5, 1], [1, 4, 3, 5], [4, 3, 1, 5]):
        yield call(aten.view.default, x, size)
        for op in (aten._unsafe_view, aten.view_copy, aten.reshape, aten._reshape_copy):
            yield call(op.default, x, size)
    yield call(aten.view.default, ints(6, 4), [4, 6])
    yield call(aten.view.default, ints(12, 10), [2, 6, 5, 2])
    yield call(aten.view.default, ints(1, 5), [5])
    yield call(aten.view.default, ints(2, 7, 12), [14, 3, 4])
    yield call(aten.expand.default, ints(4, 1, 5), [2, 4, 3, -1])
    yield call(aten.expand_copy.default, ints(4, 1, 5), [4, 3, 5])
    yield call(aten.view.dtype, x, torch.float32)
    yield call(aten.view.dtype, x, torch.int64)
    yield call(aten.permute.default, x, [2, 0, -2])
    yield call(aten.transpose.int, x, 0, -1)
    yield call(aten.t.default, ints(4, 3))
    yield call(aten.t.default, ints(4))
    yield call(aten.unsqueeze.default, x, -1)
    yield call(aten.squeeze.default, ints(4, 1, 5))
    yield call(aten.squeeze.dim, ints(4, 1, 5), 1)
    yield call(aten.squeeze.dim, x, 1)
    yield call(aten.squeeze.dims, ints(4, 1, 5, 1), [1, -1])
    yield call(aten.select.int, x, 1, -1)
    yield call(aten.unbind.int, x, 1)
    yield call(aten.slice.Tensor, x, 1, 0, 2**63 - 1)
    yield call(aten.slice.Tensor, x, 0, 1, 3)
    yield call(aten.slice.Tensor, x, -1, 0, 5, 2)
    yield call(aten.split.Tensor, ints(4, 12), 4, 1)
    yield call(aten.split.Tensor, ints(4, 10), 4, -1)
    yield call(aten.split_with_sizes.default, ints(4, 16), [8, 4, 4], 1)
    yield call(aten.split_with_sizes.default, ints(4, 8), [3, 5], 1)
    yield call(aten.cat.default, [ints(4, 3), ints(4, 6), ints(4, 9)], 1)
    yield call(aten.cat.default, [ints(0), ints(4, 3), ints(4, 5)], 1)
    yield call(aten.stack.default, [ints(4, 3), ints(4, 3, hi=9)], 1)
    yield call(aten.repeat.default, ints(4, 3), [2, 1, 3])
    yield call(aten.flip.default, x, [1])
    yield call(aten.roll.default, x, [1], [1])
    yield call(aten.tril.default, x)
    yield call(aten.triu.default, x, 1)
    yield call(aten.constant_pad_nd.default, x, [1, 2])
    yield call(aten.constant_pad_nd.default, x, [0, 0, -1, 2], 3.0)
    yield call(aten.select_backward.default, ints(4, 5), [4, 3, 5], 1, 2)
    yield call(aten.slice_backward.default, ints(4, 2, 5), [4, 3, 5], 1, 0, 2, 1)
    yield call(aten.slice_backward.default, x, [4, 3, 5], 1, 0, 2**63 - 1, 1)
    yield call(aten.view_as_real.default, torch.complex(ints(4, 3), ints(4, 3, hi=9)))
    yield call(aten.view_as_complex.default, ints(4, 3, 2))
    yield call(aten.diagonal.default, ints(4, 3, 5), 0, 0, 2)
    yield call(aten.diagonal_backward.default, ints(3, 4), [4, 3, 5], 0, 0, 2)
    yield call(aten.diag_embed.default, ints(4, 3), 1)
    yield call(aten.unsafe_split.Tensor, ints(4, 12), 4, 1)
    yield call(aten.unsafe_split_with_sizes.default, ints(4, 12), [4, 8], 1)
    yield call(aten._conj.default, torch.complex(ints(4, 3), ints(4, 3, hi=9)))
    # reductions
    for name in ("sum.dim_IntList", "amax.default", "amin.default", "mean.dim", "any.dims", "all.dims"):
        op = overload(f"aten.{name}")
        if op is not None:
            yield call(op, x, [0, -1])
            yield call(op, x, [1], True)
    for name in ("sum", "max", "min", "mean", "any", "all", "prod", "argmax", "argmin", "count_nonzero", "median"):
        op = overload(f"aten.{name}.default")
        if op is not None:
            yield call(op, x)
    for name in ("max.dim", "min.dim", "any.dim", "all.dim", "median.dim", "prod.dim_int", "cumsum.default", "cumprod.default",
                 "cummax.default", "cummin.default", "sort.default", "argsort.default", "argmax.default",
                 "logcumsumexp.default", "mode.default"):  # fmt: skip
        op = overload(f"aten.{name}")
        if op is not None:
            yield call(op, x, 1)
    yield call(aten.sum.dim_IntList, x, [0], dtype=torch.float32)
    yield call(aten.count_nonzero.dim_IntList, x, [1])
    yield call(aten.sort.stable, x, stable=True, dim=1)
    yield call(aten.argsort.stable, x, stable=True, dim=1)
    yield call(aten.aminmax.default, x, dim=1)
    yield call(aten.kthvalue.default, x, 2, 1)
    yield call(aten.logsumexp.default, x, [1])
    yield call(aten.topk.default, x, 2, 1)
    yield call(aten.nansum.default, x, [1])
    yield call(aten.linalg_vector_norm.default, x, 2, [1])
    yield call(aten.norm.ScalarOpt_dim, x, 2, [1])
    yield call(aten.norm.Scalar, x)
    for name in ("var", "std", "var_mean", "std_mean"):
        op = overload(f"aten.{name}.correction")
        if op is not None:
            yield call(op, x, [1], correction=1)
    # products
    a, b = ints(4, 6), ints(6, 5)
    yield call(aten.mm.default, a, b)
    yield call(aten.bmm.default, ints(3, 4, 6), ints(3, 6, 5))
    yield call(aten.mv.default, a, ints(6))
    yield call(aten.dot.default, ints(7), ints(7, hi=9))
    yield call(aten.vdot.default, ints(7), ints(7, hi=9))
    yield call(aten.addmm.default, ints(5), a, b)
    yield call(aten.addmm.default, ints(4, 5), a, b, beta=0)
    yield call(aten.baddbmm.default, ints(3, 1, 5), ints(3, 4, 6), ints(3, 6, 5), alpha=2)
    yield call(aten.addmv.default, ints(4), a, ints(6))
    # indices
    yield call(aten.embedding.default, ints(7, 5), index(4, 3, below=7))
    yield call(aten.embedding_dense_backward.default, x, index(4, 3, below=7), 7, 2, False)
    yield call(aten.embedding_dense_backward.default, x, index(4, 3, below=7), 7, -1, True)
    for picks in ([index(2, below=4)], [None, index(2, 6, below=3)], [index(6, 1, below=4), index(2, below=3)],
                  [index(2, below=4), None, index(2, below=5)]):  # fmt: skip
        yield call(aten.index.Tensor, x, picks)
        yield call(aten._unsafe_index.Tensor, x, picks)
        values = ints(*aten.index.Tensor(x, picks).shape, hi=9)
        yield call(aten.index_put.default, x, picks, values, True)
        yield call(aten._unsafe_index_put.default, x, picks, values, True)
    yield call(aten.gather.default, x, 1, index(4, 2, 5, below=3))
    yield call(aten.gather.default, x, 2, index(4, 2, 6, below=5))
    at = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(k))[:2] for k in range(20)])
    at = at.view(4, 5, 2).transpose(1, 2).contiguous()
    yield call(aten.scatter.src, x, 1, at, ints(4, 2, 5, hi=9))
    yield call(aten.scatter.value, x, 1, at, 0)
    yield call(aten.scatter.value, x, 1, at, 3)
    yield call(aten.scatter_add.default, x, 1, index(4, 2, 5, below=3), ints(4, 2, 5, hi=9))
    yield call(aten.scatter_reduce.two, x, 1, at, ints(4, 2, 5, hi=9), "amax")
    yield call(aten.index_reduce.default, x, 1, index(2, below=3), ints(4, 2, 5), "amin")
    yield call(aten.index_select.default, x, 1, index(2, below=3))
    yield call(aten.index_add.default, x, 1, index(2, below=3), ints(4, 2, 5))
    yield call(aten.index_copy.default, x, 1, torch.tensor([2, 0]), ints(4, 2, 5))
    yield call(aten.index_fill.int_Scalar, x, 1, index(2, below=3), 2)
    yield call(aten.select_scatter.default, x, ints(4, 5), 1, 2)
    yield call(aten.slice_scatter.default, x, ints(4, 2, 5), 1, 0, 2)
    yield call(aten.bucketize.Tensor, x, torch.tensor([-3.0, 0.5, 2.0], dtype=torch.float64))
    yield call(aten.searchsorted.Tensor, torch.tensor([-3.0, 0.5, 2.0], dtype=torch.float64), x)
    # creation
    yield call(aten.full.default, [4, 3], 2.0)
    yield call(aten.zeros.default, [4, 3])
    yield call(aten.ones.default, [4, 3])
    yield call(aten.scalar_tensor.default, 2.0)
    yield call(aten.new_zeros.default, ints(2), [4, 3])
    yield call(aten.new_ones.default, ints(2), [4, 3])
    yield call(aten.new_full.default, ints(2), [4, 3], 2.0)
    for op in (aten.zeros_like, aten.ones_like):
        yield call(op.default, x)
    yield call(aten.full_like.default, x, 2.0)
    yield call(aten.arange.default, 5)
    yield call(aten.arange.start, 2, 5)
    yield call(aten.arange.start_step, 2, 9, 2)
    yield call(aten.linspace.default, 0, 1, 5)
    yield call(aten.eye.default, 3)
    yield call(aten.eye.m, 3, 4)
    yield call(aten.tril_indices.default, 3, 4)
    yield call(aten.triu_indices.default, 3, 4)
    for name in ("hann", "hamming", "blackman", "bartlett", "kaiser"):
        yield call(getattr(aten, f"{name}_window").default, 5)
        yield call(getattr(aten, f"{name}_window").periodic, 5, True)
    yield call(aten._is_any_true.default, x > 0)
    yield call(aten._is_all_true.default, x > 0)
    # elementwise with arguments of their own
    yield call(aten._to_copy.default, x, dtype=torch.float32)
    yield call(aten._to_copy.default, ints(4, 3, dtype=torch.float32), dtype=torch.float64)
    yield call(aten._to_copy.default, x)
    yield call(aten.masked_fill.Scalar, x, x > 0, 0)
    yield call(aten.masked_fill.Scalar, x, x > 0, 2.0)
    yield call(aten.copy.default, x, ints(3, 5))
    yield call(aten.fill.Tensor, x, torch.tensor(3.0, dtype=torch.float64))
    yield call(aten.div.Tensor_mode, x, ints(3, 5, lo=1), rounding_mode="floor")
    yield call(aten.div.Scalar_mode, x, 2, rounding_mode="trunc")
    yield call(aten.div.Tensor_mode, x, ints(3, 5, lo=1), rounding_mode=None)
    yield call(aten.masked_fill.Tensor, x, x > 0, torch.tensor(3.0, dtype=torch.float64))
    yield call(aten.clamp.default, x, -2, 3)
    yield call(aten.clamp.Tensor, x, ints(3, 5), None)
    yield call(aten.mul.Tensor, ints(4, 3, dtype=torch.int64), ints(4, 3, hi=9))
    yield call(aten.add.Tensor, x, ints(1, 5), alpha=2)


def samples(only: str | None = None) -> Iterator[Sample]:
    """At least one call of every operator of the tables that draws no random numbers; or those of one operator."""
    for name in pointwise.TABLE if only is None else {only} & set(pointwise.TABLE):
        op = overload(name)
        if op is not None and not is_random(op):
            yield from elementwise(op)
    for sample in itertools.chain(written(), networks()):
        if only in (None, str(sample.op)):
            yield sample
