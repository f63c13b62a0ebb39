"""Sparse gradients: dense in the program, with a mask of the rows that the global batch has hit.

Inside the trace the gradient of ``nn.Embedding(sparse=True)`` is the dense one, and a `Rows` says which of its rows are there.
To torch.optim it looks sparse: `is_sparse`, `coalesce`, `_values`, `sparse_mask` and the making of sparse tensors are answered
here. Values have a row for each row of the table, and what a sparse tensor is made of is masked, so that an update writes the
rows hit and no others, with exactly the numbers it has on coalesced values. Whatever else a step does with such a gradient is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from shardc import _torch
from shardc._torch import FunctionalTensor
from shardc.capture.recorder import Recorder
from shardc.errors import CaptureError

aten = torch.ops.aten
_MISSING = object()
_LOOKUPS = (F.embedding, torch.embedding)
_NAMES = {F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
          torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")}  # fmt: skip
_KEEPS = ("neg", "__neg__", "mul", "__mul__", "__rmul__", "div", "__truediv__", "mul_", "div_", "detach", "coalesce")
"""Functions of a sparse tensor, and of numbers, that give one with the same rows."""
_READS = ("shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "is_cuda", "grad", "is_meta", "itemsize",
          "size", "dim", "is_complex", "is_floating_point", "numel", "get_device", "requires_grad_", "data_ptr")  # fmt: skip
_THROUGH = (aten.alias.default, aten.detach.default, aten.clone.default, aten.neg.default, aten.mul.Scalar, aten.div.Scalar,
            aten.mul.Tensor, aten.div.Tensor, aten._to_copy.default)  # fmt: skip


class Rows:
    """Which rows of a table are hit, by the lookups whose gradients were added up; the mask is computed when it is needed."""

    def __init__(self, lookups: list[tuple[Tensor, int]], table: Tensor) -> None:
        self.lookups, self.table = lookups, table
        self._mask: Tensor | None = None

    def mask(self) -> Tensor:
        """bool [rows, 1, ...]: the gradient of a sum of the rows looked up is above zero. Padding is not hit."""
        if self._mask is None:
            counts: Tensor | None = None
            for indices, padding in self.lookups:
                ones = torch.ones((*indices.shape, 1), dtype=torch.float32, device=indices.device)
                hits = aten.embedding_dense_backward.default(ones, indices, self.table.shape[0], padding, False)
                counts = hits if counts is None else counts + hits
            assert counts is not None
            self._mask = counts > 0
        return self._mask


class SparseGradients:
    """The sparse tensors of one trace.

    Args:
        recorder: of the trace.
        path_of: id of a parameter's twin -> its path.
    """

    def __init__(self, recorder: Recorder, path_of: dict[int, str]) -> None:
        self.recorder, self.path_of = recorder, path_of
        self.sparse: dict[int, tuple[Tensor, Rows]] = {}  # id of a tensor that looks sparse -> itself, its rows
        self.indices: dict[int, tuple[Tensor, Rows]] = {}  # the same for what `_indices()` gives
        self.lookups: dict[tuple[str, fx.Node], tuple[Tensor, bool]] = {}  # (table, node of the indices) -> indices, sparse
        self.tables: dict[str, int] = {}  # parameters with such gradients -> bytes of the dense one
        self.active = True

    def notes(self) -> list[str]:
        """For the plan."""
        return [f"{path}.grad is sparse in torch; here it is dense, {n:,} bytes, with a mask of the rows hit"
                for path, n in self.tables.items()]  # fmt: skip

    def release(self) -> None:
        self.sparse.clear()
        self.indices.clear()
        self.lookups.clear()
        self.active = False

    # -- how a gradient becomes sparse -------------------------------------------------------------------------------------

    def gradient(self, path: str, param: Tensor, grad: Tensor) -> None:
        """A backward has left `grad` in a parameter: it is sparse if it is a sum of the gradients of sparse lookups alone."""
        self.sparse.pop(id(grad), None)
        if not any(table == path and sparse for (table, _), (_, sparse) in self.lookups.items()):
            return
        assert isinstance(grad, FunctionalTensor)
        found = self._lookups(path, self.recorder.node_of(_torch.current_value(grad)))
        if found is not None:
            self.sparse[id(grad)] = (grad, Rows(found, param))
            self.tables[path] = grad.numel() * grad.element_size()

    def _lookups(self, path: str, node: Any) -> list[tuple[Tensor, int]] | None:
        """The sparse lookups in `path` that a value is the sum of gradients of; None where something dense is in it."""
        if not isinstance(node, fx.Node):
            return None
        if node.target is aten.embedding_dense_backward.default:
            indices = node.args[1]
            assert isinstance(indices, fx.Node) and isinstance(node.args[3], int)
            given, sparse = self.lookups.get((path, indices), (None, False))
            return [(given, node.args[3])] if given is not None and sparse else None
        if node.target is aten.add.Tensor:
            parts = [self._lookups(path, n) for n in node.args[:2]]
            return None if parts[0] is None or parts[1] is None else [*parts[0], *parts[1]]
        return self._lookups(path, node.args[0]) if node.target in _THROUGH else None

    def _looked_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A lookup, whose gradient is dense in the program."""
        given = dict(zip(_NAMES[func], args, strict=False)) | kwargs
        weight, indices = given["weight"], given["input" if func is F.embedding else "indices"]
        sparse = bool(given.get("sparse", False))
        if isinstance(weight, FunctionalTensor) and isinstance(indices, FunctionalTensor):
            node = self.recorder.node_of(_torch.current_value(indices))
            path = self.path_of.get(id(weight))
            if sparse and weight.requires_grad and path is None:
                raise CaptureError(
                    "a sparse lookup in a table that is not a parameter (computed, or cast by precision=)",
                    where=self.recorder.line(), hint="nn.Embedding(..., sparse=False)",
                )  # fmt: skip
            if path is not None and node is not None:
                before = self.lookups.get((path, node))
                self.lookups[path, node] = (indices, sparse and (before is None or before[1]))
        return func(**given | ({"sparse": False} if sparse else {}))

    # -- how it looks ------------------------------------------------------------------------------------------------------

    def answers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call that is about a sparse gradient; `_MISSING` for all others.

        Raises:
            CaptureError: a call that a dense gradient with a mask cannot answer.
        """
        if func in _LOOKUPS:
            return self._looked_up(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "embedding_bag" and (kwargs.get("sparse") or (func is torch.embedding_bag and args[5:6] == (True,))):
            raise self._refused("embedding_bag(sparse=True)", "sparse=False, or nn.Embedding(sparse=True) and a sum")
        if not self.sparse or not self.active:
            return _MISSING
        held = [self.sparse.get(id(x)) for x in args]
        own = held[0] if held else None
        rows = next((self.indices[id(x)][1] for x in args if id(x) in self.indices), None)
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if own is None and rows is None and not any(held):
            return _MISSING
        if name in ("new", "sparse_coo_tensor") and rows is not None:
            values = args[2] if name == "new" else args[1]
            return self._made(torch.where(_beside(rows.mask(), values), values, torch.zeros_like(values)), rows)
        if rows is not None:
            return func(*args, **kwargs) if name in _READS else self._deny(name)
        if own is None:
            return self._with_dense(func, name, args, kwargs, next(h for h in held if h is not None))
        return self._of_sparse(func, name, args, kwargs, own)

    def _of_sparse(self, func: Any, name: str, args: Any, kwargs: Any, own: tuple[Tensor, Rows]) -> Any:
        tensor, rows = own
        if name in ("is_sparse", "layout"):
            return True if name == "is_sparse" else torch.sparse_coo
        if name == "is_coalesced":
            return False
        if name == "coalesce":
            return tensor
        if name in _KEEPS and not any(isinstance(x, Tensor) and x.dim() for x in args[1:]):
            out = func(*args, **kwargs)
            return out if out is tensor else self._made(out, rows)
        if name in ("_indices", "indices", "_values", "values") and _torch_optim_calls():
            if "values" in name:
                return tensor.view_as(tensor)
            out = torch.arange(tensor.shape[0], device=tensor.device).unsqueeze(0)
            self.indices[id(out)] = (out, rows)
            return out
        if name == "to_dense":
            return tensor.clone()
        return func(*args, **kwargs) if name in _READS else self._deny(name)

    def _with_dense(self, func: Any, name: str, args: Any, kwargs: Any, sparse: tuple[Tensor, Rows]) -> Any:
        """A dense tensor and a sparse one."""
        if name == "sparse_mask":
            return self._made(args[0].clone(), sparse[1])
        if name in ("add_", "sub_", "add", "sub", "__iadd__", "__isub__", "__add__", "__sub__") and args[1] is sparse[0]:
            return func(*args, **kwargs)
        return self._deny(name)

    def _made(self, tensor: Tensor, rows: Rows) -> Tensor:
        self.sparse[id(tensor)] = (tensor, rows)
        return tensor

    def _deny(self, name: str) -> Any:
        raise self._refused(f"{name} of a sparse gradient", "nn.Embedding(..., sparse=False), or clear gradients with None")

    def _refused(self, what: str, hint: str) -> CaptureError:
        return CaptureError(f"{what} is not captured", where=self.recorder.line(), hint=hint)


def answered(sparse: SparseGradients, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Whether a call is about a sparse gradient, and its result."""
    out = sparse.answers(func, args, kwargs)
    return out is not _MISSING, out


def _beside(mask: Tensor, values: Tensor) -> Tensor:
    return mask.view(mask.shape[0], *[1] * (values.dim() - 1))


def _torch_optim_calls() -> bool:
    """Whether the caller is code of torch.optim, which only computes on values what it computes on each row alone."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("shardc."):
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("torch.optim.")
