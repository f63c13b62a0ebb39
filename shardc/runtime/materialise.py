"""Values for modules that were built on meta: one module at a time, so that no more than one is ever whole.

A meta tensor has no values to shard. PyTorch's convention is `reset_parameters()`, which draws those of one module; ranks
draw the same numbers, and the user's own random generator does not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import StateError
from shardc.runtime.agree import digest, exchange
from shardc.runtime.world import Ranks


def materialise(modules: Iterable[nn.Module], names: Mapping[int, str], ranks: Ranks) -> Iterator[tuple[Tensor, Tensor]]:
    """(meta tensor, the same with values on the mesh's device), module by module in the order of `modules`.

    Args:
        names: id -> path of each meta tensor that is to get values.

    Raises:
        StateError: a module without `reset_parameters`; a meta tensor that no module owns. Before anything is drawn.
    """
    owners = []
    left = dict(names)
    for module in modules:
        mine = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None and id(t) in left]
        if not mine:
            continue
        if not callable(getattr(module, "reset_parameters", None)):
            why = f": its owner {type(module).__name__} has no reset_parameters()"
            raise _no_values(names[id(mine[0])], mine[0], ranks, why)
        owners.append((module, mine))
        for t in mine:
            del left[id(t)]
    if left:
        raise StateError(f"{next(iter(left.values()))} is on meta and belongs to no module", where=next(iter(left.values())),
                         hint="make it on a device, with values")  # fmt: skip
    seed = exchange(ranks, digest("\n".join(names.values())), [torch.initial_seed() & (2**63 - 1)])[0][0]
    cuda = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        for module, mine in owners:
            yield from _drawn(module, mine, ranks.device)


def _drawn(module: nn.Module, mine: list[Tensor], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Let the module draw into fresh tensors; what it shares with a module before it is drawn again, and dropped."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    before = [dict(table) for table in tables]
    try:
        with torch.no_grad():
            for table in tables:
                for name, t in list(table.items()):
                    if t is not None:
                        fresh = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
                        table[name] = nn.Parameter(fresh, t.requires_grad) if isinstance(t, nn.Parameter) else fresh
        module.reset_parameters()  # type: ignore[operator]
        out = []
        for table, was in zip(tables, before, strict=True):
            for name, t in was.items():
                new = table[name]
                if new is not None and any(t is m for m in mine):
                    new.__dict__.update(t.__dict__)
                    out.append((t, new))
                    mine = [m for m in mine if m is not t]
        return out
    finally:
        for table, was in zip(tables, before, strict=True):
            table.update(was)


def _no_values(path: str, t: Tensor, ranks: Ranks, why: str) -> StateError:
    return StateError(
        f"{path} is on meta: it has a shape {list(t.shape)}, but no values{why}", where=path,
        hint=f"module.to_empty(device={ranks.device.type!r}) and initialise or load it before the first step",
    )  # fmt: skip
