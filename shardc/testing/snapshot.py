"""What a step leaves behind, as a flat map from path to value: the thing that two runs are compared by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Snapshot = dict[str, Any]
"""Path -> whole plain tensor (a copy), number, or other Python value. Insertion order is the order of reporting."""


def snapshot(named: Mapping[str, Any], whole: Callable[[Tensor], Tensor] | None = None) -> Snapshot:
    """Everything that a step may change in its arguments.

    Parameters, buffers and gradients of modules by their names, the `state_dict` of optimizers and schedulers, plain tensors,
    and numbers in lists, dicts and dataclasses. A missing gradient is there as None.

    Args:
        named: argument name -> argument.
        whole: makes a plain whole tensor of a distributed one; default: as it is.
    """
    make = whole or (lambda t: t)
    entries = [entry for name, value in named.items() for entry in _walk(name, value)]
    # Gradients first: where one is wrong, what the optimizer made of it is wrong too.
    entries.sort(key=lambda entry: entry[0])
    out: Snapshot = {}
    for _, path, value in entries:
        out[path] = _strided(make(value).detach()) if isinstance(value, Tensor) else value
    return out


def flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested lists, tuples, dicts and dataclasses, with their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from flatten(f"{path}[{i}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from flatten(f"{path}.{field.name}", getattr(value, field.name))
    else:
        yield path, value


def _strided(t: Tensor) -> Tensor:
    """A copy. Sparse gradients, which shardc keeps dense, are compared by their values."""
    return t.to_dense() if t.layout is torch.sparse_coo else t.clone()


GRADIENT, BUFFER, OPTIMIZER, PARAMETER, OTHER = range(5)


def _walk(name: str, value: Any) -> Iterator[tuple[int, str, Any]]:
    for path, leaf in flatten(name, value):
        if isinstance(leaf, nn.Module):
            for key, p in leaf.named_parameters(remove_duplicate=False):
                yield GRADIENT, f"{path}.{key}.grad", p.grad
                yield PARAMETER, f"{path}.{key}", p
            for key, buffer in leaf.named_buffers(remove_duplicate=False):
                yield BUFFER, f"{path}.{key}", buffer
        elif isinstance(leaf, Tensor):
            yield OTHER, path, leaf
            if leaf.is_leaf and leaf.requires_grad:
                yield GRADIENT, f"{path}.grad", leaf.grad
        elif isinstance(leaf, torch.optim.Optimizer):
            # By position, as in state_dict(), but without its side effects (hooks).
            position = {id(p): i for i, p in enumerate(p for group in leaf.param_groups for p in group["params"])}
            for param, state in leaf.state.items():
                for key, item in flatten("", state):
                    yield OPTIMIZER, f"{path}.state[{position.get(id(param), '?')}]{key}", item
            for i, group in enumerate(leaf.param_groups):
                for key, item in flatten("", {k: v for k, v in group.items() if k != "params"}):
                    yield OTHER, f"{path}.param_groups[{i}]{key}", item
        elif isinstance(leaf, torch.optim.lr_scheduler.LRScheduler):
            for key, item in flatten(path, leaf.state_dict()):
                if isinstance(item, (int, float)):
                    yield OTHER, key, item
        elif isinstance(leaf, (int, float, bool, str, type(None))):
            yield OTHER, path, leaf
