"""Tiers of memory: where a value lies, what moves it from one to the next, and the option that says what rests where.

A value lies on the device, in host memory, or on disk. `to_tier` moves it one tier away from the device, `from_tier` one tier
nearer; both start the move. A move that runs beside the computation is finished by `arrive`, which keeps its source alive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardc.errors import OptionError

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
"""From the nearest to the farthest."""

SECTOR = 512
"""What is smaller than this many bytes rests in host memory where the disk is asked for: a file moves sectors."""


def to_tier(x: torch.Tensor, tier: str, into: torch.Tensor | None = None, wait: bool = True) -> torch.Tensor:
    """Target of nodes: a copy of `x` one tier farther from the device.

    Args:
        tier: "host" or "disk".
        into: the resting value of a slot there, which the copy overwrites.
        wait: the move is finished when the next node runs; else by `arrive`.
    """
    raise AssertionError("moves are executed by the runtime")  # pragma: no cover


def from_tier(x: torch.Tensor, tier: str, into: torch.Tensor | None = None, wait: bool = True) -> torch.Tensor:
    """Target of nodes: a copy of `x` one tier nearer to the device; see `to_tier`."""
    raise AssertionError("moves are executed by the runtime")  # pragma: no cover


def arrive(moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Target of nodes: `moved`, when it is there; until then `source` lives."""
    raise AssertionError("moves are executed by the runtime")  # pragma: no cover


MOVES = (to_tier, from_tier)


def hops(here: str, there: str) -> list[str]:
    """The tiers that a value passes from `here` to `there`, the last one included."""
    a, b = TIERS.index(here), TIERS.index(there)
    return list(TIERS[a + 1 : b + 1]) if b > a else list(reversed(TIERS[b:a]))


@dataclass(frozen=True)
class Offload:
    """The option `offload`: what rests where between its uses. None: state rests where it lies already, on the device unless
    another step put it elsewhere; activations stay on the device.

    Args:
        optimizer: tensors of optimizer state.
        params: parameters (this rank's part of them), between steps and between their uses.
        gradients: gradients that survive a step.
        activations: values that the forward leaves for the backward.
        staging: bound in bytes on what is on its way in, and on what is on its way out; None: twice the largest tensor.
        folder: of the files of the disk tier; None: the system's folder for temporary files.
    """

    optimizer: str | None = None
    params: str | None = None
    gradients: str | None = None
    activations: str | None = None
    staging: int | None = None
    folder: str | None = None

    @staticmethod
    def of(value: Any) -> Offload:
        """The option as the user wrote it.

        Raises:
            OptionError: an unknown key, tier or size.
        """
        if value is None or isinstance(value, Offload):
            return value or Offload()
        allowed = '{"optimizer": "host", "params": "disk", "gradients": "host", "activations": "host"}, any of them'
        if not isinstance(value, Mapping):
            raise OptionError(f"option offload={value!r} ({type(value).__name__}) is not allowed", hint=f"use {allowed}")
        out = dict(value)
        for key, given in value.items():
            if key == "staging":
                out[key] = _size(given)
            elif key == "folder":
                if given is not None and not isinstance(given, str):
                    raise OptionError(f"option offload[{key!r}]={given!r} is not allowed", hint="use the path of a folder")
            elif key not in ("optimizer", "params", "gradients", "activations"):
                raise OptionError(f"option offload has no key {key!r}", hint=f"use {allowed}; and staging, folder")
            elif given not in TIERS:
                raise OptionError(f"option offload[{key!r}]={given!r} is not allowed", hint=f"one of {', '.join(TIERS)}")
        return Offload(**out)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _size(value: Any) -> int | None:
    """Bytes of ``"256MiB"`` or a number."""
    if value is None or (type(value) is int and value >= 0):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise OptionError(f"option offload['staging']={value!r} is no size", hint='use bytes, or "256MiB"')
    return int(float(found[1]) * _UNITS[found[2].upper()])
