"""Plans as JSON: a closed set of frozen values goes to plain data and back, exactly. No pickle, nothing is executed on load."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardc.dtypes import from_short, short
from shardc.errors import PlanError
from shardc.instructions import (
    Arrive,
    Collective,
    Compute,
    Delete,
    Guard,
    Input,
    Instruction,
    Local,
    LocalDim,
    LocalStart,
    Out,
    Read,
    Ref,
    Return,
    Transfer,
    Write,
)
from shardc.mesh import Mesh
from shardc.program import Slot, SlotKind, TensorType
from shardc.reshard import Step
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE

FORMAT = 1
"""Version of the JSON layout; a plan of another version is refused."""

INSTRUCTIONS: dict[str, type[Instruction]] = {
    c.__name__: c for c in (Read, Input, Compute, Collective, Transfer, Arrive, Guard, Write, Delete, Return)
}


class Encoder:
    """Values -> JSON data. Specs are written once per distinct object (planning is hot)."""

    def __init__(self) -> None:
        self._specs: dict[ShardSpec, str] = {}

    def spec(self, spec: ShardSpec) -> str:
        text = self._specs.get(spec)
        if text is None:
            text = self._specs[spec] = str(spec)
        return text

    def value(self, v: Any) -> Any:
        """Plain data for a value; everything but None, bool, int, finite float, str and list becomes a dict of one key.

        Raises:
            PlanError: a value of a type that a plan cannot hold.
        """
        if v is None or isinstance(v, (bool, str)) or type(v) is int:
            return v
        if isinstance(v, float):
            return v if math.isfinite(v) else {"float": repr(v)}
        if isinstance(v, Ref):
            return {"ref": v.reg}
        if isinstance(v, tuple):
            return {"tuple": [self.value(x) for x in v]}
        if isinstance(v, list):
            return [self.value(x) for x in v]
        if isinstance(v, ShardSpec):
            return {"spec": self.spec(v)}
        if isinstance(v, Out):
            out = [v.reg, None if v.spec is None else self.spec(v.spec), None if v.dtype is None else short(v.dtype)]
            return {"out": out if v.tier == DEVICE else [*out, v.tier]}
        if isinstance(v, Local):
            return {"local": self.spec(v.spec)}
        if isinstance(v, LocalDim):
            return {"local_dim": self.spec(ShardSpec((v.dim,)))}
        if isinstance(v, LocalStart):
            return {"local_start": self.spec(ShardSpec((v.dim,)))}
        if isinstance(v, Step):
            return {"step": [v.kind, v.axis, self.spec(v.src), self.spec(v.dst), v.op]}
        if isinstance(v, dict):
            return {"dict": [[self.value(k), self.value(x)] for k, x in v.items()]}
        if isinstance(v, slice):
            return {"slice": [self.value(x) for x in (v.start, v.stop, v.step)]}
        if isinstance(v, complex):
            return {"complex": [repr(v.real), repr(v.imag)]}
        if isinstance(v, torch.dtype):
            return {"dtype": short(v)}
        if isinstance(v, torch.device):
            return {"device": str(v)}
        if isinstance(v, (torch.layout, torch.memory_format)):
            return {type(v).__name__: str(v).removeprefix("torch.")}
        if isinstance(v, int):
            return int(v)
        raise PlanError(f"a plan cannot hold {v!r} ({type(v).__name__})")

    def instruction(self, i: Instruction) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": type(i).__name__}
        for f in _fields(type(i)):
            v = getattr(i, f.name)
            if v != f.default:
                out[f.name] = self.value(v)
        return out

    def slot(self, s: Slot) -> dict[str, Any]:
        return {
            "path": s.path, "kind": str(s.kind), "type": self.type(s.type), "of": s.of, "aliases": list(s.aliases),
            "trainable": s.trainable, "storage": None if s.storage is None else self.spec(s.storage),
            "compute": None if s.compute is None else self.spec(s.compute), **({} if s.tier == DEVICE else {"tier": s.tier}),
        }  # fmt: skip

    def type(self, t: TensorType) -> list[Any]:
        return [short(t.dtype), list(t.shape), list(t.stride)]


class Decoder:
    """JSON data -> values; the inverse of `Encoder`."""

    def __init__(self) -> None:
        self._specs: dict[str, ShardSpec] = {}
        self._tags: dict[str, Callable[[Any], Any]] = {
            "float": float,
            "ref": Ref,
            "tuple": lambda v: tuple(self.value(x) for x in v),
            "spec": self.spec,
            "out": lambda v: Out(v[0], self._maybe(v[1]), None if v[2] is None else from_short(v[2]), *v[3:]),
            "local": lambda v: Local(self.spec(v)),
            "local_dim": lambda v: LocalDim(self.spec(v).dims[0]),
            "local_start": lambda v: LocalStart(self.spec(v).dims[0]),
            "step": lambda v: Step(v[0], v[1], self.spec(v[2]), self.spec(v[3]), v[4]),
            "dict": lambda v: {self.value(k): self.value(x) for k, x in v},
            "slice": lambda v: slice(*(self.value(x) for x in v)),
            "complex": lambda v: complex(float(v[0]), float(v[1])),
            "dtype": from_short,
            "device": torch.device,
            "layout": lambda v: _torch_constant(v, torch.layout),
            "memory_format": lambda v: _torch_constant(v, torch.memory_format),
        }

    def spec(self, text: str) -> ShardSpec:
        out = self._specs.get(text)
        if out is None:
            out = self._specs[text] = ShardSpec.parse(text)
        return out

    def _maybe(self, text: str | None) -> ShardSpec | None:
        return None if text is None else self.spec(text)

    def value(self, v: Any) -> Any:
        """Raises:
        PlanError: data that no encoder wrote.
        """
        if isinstance(v, list):
            return [self.value(x) for x in v]
        if not isinstance(v, dict):
            return v
        if len(v) != 1 or next(iter(v)) not in self._tags:
            raise PlanError(f"unknown value in a saved plan: {v!r}")
        ((tag, body),) = v.items()
        return self._tags[tag](body)

    def instruction(self, data: dict[str, Any]) -> Instruction:
        cls = INSTRUCTIONS.get(data.get("kind", ""))
        if cls is None:
            kinds = ", ".join(INSTRUCTIONS)
            raise PlanError(f"unknown instruction in a saved plan: {data.get('kind')!r}", hint=f"one of {kinds}")
        names = {f.name for f in _fields(cls)}
        return cls(**{k: self.value(v) for k, v in data.items() if k in names})

    def slot(self, d: dict[str, Any]) -> Slot:
        return Slot(
            d["path"], SlotKind(d["kind"]), self.type(d["type"]), d["of"], tuple(d["aliases"]), d["trainable"],
            self._maybe(d["storage"]), self._maybe(d["compute"]), d.get("tier", DEVICE),
        )  # fmt: skip

    def type(self, v: list[Any]) -> TensorType:
        return TensorType(tuple(v[1]), from_short(v[0]), tuple(v[2]))


def encode_mesh(mesh: Mesh) -> dict[str, Any]:
    axes = [[n, s] for n, s in mesh.axes.items()]
    return {"axes": axes, "simulated": mesh.simulated, "device": mesh.device, "profile": mesh.profile}


def decode_mesh(d: Mapping[str, Any]) -> Mesh:
    return Mesh(dict(d["axes"]), simulated=d["simulated"], device=d["device"], profile=d["profile"])


def digest(data: Any) -> str:
    """sha256 over canonical JSON: the same in every process, whatever the order of sets and dicts there."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(v: Any) -> Any:
    """Options and the like as JSON data, for printing: values of other types as their text."""
    if v is None or isinstance(v, (bool, int, float, str)):
        return v
    if isinstance(v, Mapping):
        return {str(k): plain(x) for k, x in v.items()}
    if isinstance(v, (list, tuple)) and type(v) in (list, tuple):
        return [plain(x) for x in v]
    return str(v)


def _torch_constant(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise PlanError(f"torch.{name} is no {kind.__name__}")
    return value


def _fields(cls: type[Instruction]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)
