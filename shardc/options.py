"""The options of `shardc.compile`, checked once and frozen."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from shardc.errors import OptionError
from shardc.mesh import Mesh
from shardc.spec import P
from shardc.tiers import Offload

TIME = "mb"
"""The mesh axis of microbatches, which run one after another on the same rank."""

LATER = {
    "reduce_dtype": None,
    "backend": "eager",
}
"""Options of the design that this version does not implement yet, with the one value that it accepts."""


@dataclass(frozen=True)
class Options:
    """See `shardc.compile` for the meaning of each.

    Raises:
        OptionError: a value of wrong type or range, or an option that this version does not implement.
    """

    mesh: Mesh = field(default_factory=lambda: Mesh(dp=-1))
    batch: tuple[str, ...] = ("dp",)
    inputs: Mapping[str, P] = field(default_factory=dict)
    inputs_are: str | None = None
    zero: int = 0
    params: Mapping[str, P] = field(default_factory=dict)
    activations: Mapping[str, P] = field(default_factory=dict)
    plan: str | None = None
    seed: int | None = None
    rng: str = "counter"
    max_variants: int = 64
    microbatches: int = 1
    recompute: Any = None
    offload: Any = None
    precision: Any = None
    reduce_dtype: Any = None
    memory_budget: int | None = None
    backend: str = "eager"

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """Options from keywords as the user wrote them."""
        names = [f.name for f in dataclasses.fields(Options)]
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                raise OptionError(
                    f"unknown option {name!r} of shardc.compile",
                    hint=f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(names)}",
                )
        values = dict(given)
        if "mesh" in values:
            values["mesh"] = _mesh(values["mesh"])
        if "batch" in values:
            values["batch"] = _batch(values["batch"])
        elif "mesh" in values and "dp" not in values["mesh"].axes:
            values["batch"] = ()
        if isinstance(values.get("plan"), os.PathLike):
            values["plan"] = os.fspath(values["plan"])
        if values.get("memory_budget") is not None:
            values["memory_budget"] = bytes_of(values["memory_budget"], "memory_budget")
            values.setdefault("recompute", "auto")  # left open
        out = Options(**values)
        out._check()
        return out

    def _check(self) -> None:
        for axis in self.batch:
            self.mesh.index(axis)
        _want(
            isinstance(self.zero, int) and not isinstance(self.zero, bool) and self.zero in (0, 1, 2, 3),
            "zero",
            self.zero,
            "0, 1, 2 or 3",
        )
        _want(self.zero == 0 or bool(self.batch), "zero", self.zero, "0: there is no batch axis to shard state over")
        _want(self.inputs_are in (None, "local", "global"), "inputs_are", self.inputs_are, '"local" or "global"')
        _want(
            isinstance(self.microbatches, int) and not isinstance(self.microbatches, bool) and self.microbatches > 0,
            "microbatches",
            self.microbatches,
            "a positive int",
        )
        alone = self.microbatches == 1 or TIME not in self.mesh.axes
        _want(alone, "microbatches", self.microbatches, f"a mesh without an axis {TIME!r}")
        saves = isinstance(self.recompute, Mapping) and [*self.recompute] == ["save"] and type(self.recompute["save"]) is list
        allowed = 'None, "full", "auto" or {"save": [names]}'
        _want(self.recompute in (None, "full", "auto") or saves, "recompute", self.recompute, allowed)
        Offload.of(self.offload)
        _want(self.rng in ("counter", "torch"), "rng", self.rng, '"counter" or "torch"')
        _want(self.precision in (None, "bf16", "fp16"), "precision", self.precision, 'None, "bf16" or "fp16"')
        _want(
            self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool)),
            "seed",
            self.seed,
            "an int or None",
        )
        _want(
            isinstance(self.max_variants, int) and not isinstance(self.max_variants, bool) and self.max_variants > 0,
            "max_variants",
            self.max_variants,
            "a positive int",
        )
        _want(self.plan is None or isinstance(self.plan, str), "plan", self.plan, "None or the path of a saved plan")
        _want(self.plan != "auto", "plan", self.plan, "None or the path of a saved plan: the search is not implemented yet")
        for name in ("inputs", "params", "activations"):
            table = getattr(self, name)
            _want(isinstance(table, Mapping), name, table, "a dict {pattern: P(...)}")
            for pattern, p in table.items():
                _want(
                    isinstance(pattern, str) and isinstance(p, P),
                    f"{name}[{pattern!r}]",
                    p,
                    'P(...), for example P("tp", None)',
                )
                for entry in p:
                    for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
                        self.mesh.index(axis)
        for name, only in LATER.items():
            _want(getattr(self, name) == only, name, getattr(self, name), f"{only!r}: other values are not implemented yet")


def _want(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise OptionError(f"option {name}={value!r} ({type(value).__name__}) is not allowed", hint=f"use {allowed}")


_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{u}ib": 1024**k for k, u in enumerate("kmgt", 1)} | {f"{u}b": 1000**k for k, u in enumerate("kmgt", 1)}


def bytes_of(value: object, name: str) -> int:
    """Bytes that a user wrote: ``16 * 2**30``, ``"16GiB"``, ``"800 MB"``, ``"1.5GB"``.

    Args:
        name: what the value is for, in the error.

    Raises:
        OptionError: no positive number of bytes.
    """
    allowed = 'bytes as an int, or text like "16GiB", "800MB"'
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", value, re.IGNORECASE)
        unit = _UNITS.get(match[2].lower()) if match else None
        _want(match is not None and unit is not None, name, value, allowed)
        assert match is not None and unit is not None
        value = int(Fraction(match[1]) * unit)
    _want(isinstance(value, int) and not isinstance(value, bool) and value > 0, name, value, allowed)
    assert isinstance(value, int)
    return value


def _mesh(value: object) -> Mesh:
    if isinstance(value, Mesh):
        return value
    _want(isinstance(value, Mapping), "mesh", value, 'a dict {"dp": 2} or shardc.Mesh(dp=2)')
    return Mesh(dict(value))  # type: ignore[call-overload]


def _batch(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    _want(names is not None and all(isinstance(a, str) for a in names), "batch", value, "an axis name or a tuple of names")
    assert names is not None
    return names
