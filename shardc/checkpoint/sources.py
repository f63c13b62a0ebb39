"""Where state is read from: checkpoints of torch.distributed.checkpoint, files of `torch.save`, safetensors.

A source reads any rectangle of any tensor; what a rank does not need stays on disk.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardc.checkpoint.directory import MANIFEST, METADATA
from shardc.checkpoint.pieces import Piece
from shardc.checkpoint.tree import Flat
from shardc.errors import StateError


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Wanted:
    """The pieces of the stored tensor `key` to be read into the memory `local`."""

    key: str
    local: Tensor
    pieces: tuple[Piece, ...]


class Source(Protocol):
    where: str

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    @property
    def values(self) -> Iterable[str]:
        """Keys of everything that is not a tensor."""

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Copy pieces of tensors into memory; casts to its dtype."""

    def value(self, key: str) -> Any:
        """A stored value. Unpickled: a checkpoint is trusted like the program that wrote it."""


def source_of(path: Path) -> Source:
    """Raises `StateError`: nothing there that can be read."""
    if path.is_dir():
        if (path / METADATA).exists() or (path / MANIFEST).exists():
            return Distributed(path)
        if (path / "model.safetensors.index.json").exists() or list(path.glob("*.safetensors")):
            return Safetensors(path)
    elif path.suffix == ".safetensors" and path.exists():
        return Safetensors(path)
    elif path.exists():
        return Plain(path)
    raise StateError(f"there is no checkpoint at {path}", where=str(path),
                     hint="a directory of shardc.save, a file of torch.save, or safetensors")  # fmt: skip


class Distributed(LoadPlanner):
    """A checkpoint of torch.distributed.checkpoint."""

    def __init__(self, path: Path) -> None:
        self.where, self._reader = str(path), FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # whatever unpickling damaged bytes raises
            raise StateError(f"{path / METADATA} cannot be read: {error}", where=self.where,
                             hint="load an older checkpoint") from error  # fmt: skip
        self._reader.set_up_storage_reader(metadata, False)
        order = {k: n for n, k in enumerate(metadata.planner_data or ())}  # as the writer had them, not as ranks wrote them
        found = metadata.state_dict_metadata
        entries = {k: found[k] for k in sorted(found, key=lambda k: order.get(k, len(order)))}
        self._known = {k: m for k, m in entries.items() if isinstance(m, TensorStorageMetadata)}
        self.tensors = {k: Stored(tuple(m.size), m.properties.dtype) for k, m in self._known.items()}
        self.values = [k for k, m in entries.items() if isinstance(m, BytesStorageMetadata)]
        self._targets: dict[MetadataIndex, Tensor] = {}
        self._bytes: dict[str, bytes] = {}

    def read(self, wanted: Iterable[Wanted]) -> None:
        items: list[ReadItem] = []
        self._targets.clear()
        for w in wanted:
            chunks = [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.size)) for p in w.pieces]
            for k, p in enumerate(w.pieces):
                self._targets[MetadataIndex(w.key, torch.Size(p.offset), k)] = p.of(w.local)
            found = create_read_items_for_chunk_list(w.key, self._known[w.key], chunks)
            want, have = sum(_volume(p.size) for p in w.pieces), sum(_volume(i.lengths) for i in found)
            if want != have:
                raise StateError(f"{w.key}: {have} of the {want} elements that are read are stored", where=self.where,
                                 hint="load an older checkpoint")  # fmt: skip
            items += found
        self._reader.read_data(LoadPlan(items), self).wait()
        self._targets.clear()

    def value(self, key: str) -> Any:
        index = MetadataIndex(key)
        item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size((0,)), index, torch.Size((0,)), torch.Size((0,)))
        self._reader.read_data(LoadPlan([item]), self).wait()
        return torch.load(io.BytesIO(self._bytes.pop(key)), map_location="cpu", weights_only=False)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: `read` makes the plans."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._bytes[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        t = self._targets[read_item.dest_index]
        for k, (at, n) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            t = t.narrow(k, at, n)
        return t

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was copied in place."""


class Plain:
    """A file of `torch.save`: a tree of dicts of plain tensors, such as ``step.full_state_dict()``. Mapped, not read whole."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # damaged, or not a file of torch.save: of many types
            raise StateError(f"{path} cannot be read as a file of torch.save: {error}", where=self.where,
                             hint="torch.save(step.full_state_dict(), path)") from error  # fmt: skip
        flat = Flat()
        if not isinstance(tree, Mapping):
            raise StateError(f"{path} holds a {type(tree).__name__}, not a dict", where=self.where)
        for name, value in tree.items():
            _spread((str(name),), value, flat)
        self._flat = flat
        self.tensors = {k: Stored(tuple(t.shape), t.dtype) for k, t in flat.tensors.items()}
        self.values = list(flat.values)

    def read(self, wanted: Iterable[Wanted]) -> None:
        for w in wanted:
            for p in w.pieces:
                window = self._flat.tensors[w.key]
                for k, (at, n) in enumerate(zip(p.offset, p.size, strict=True)):
                    window = window.narrow(k, at, n)
                p.of(w.local).copy_(window)

    def value(self, key: str) -> Any:
        return self._flat.values[key]


def _spread(path: tuple[str | int, ...], value: Any, flat: Flat) -> None:
    """Keys as torch.distributed.checkpoint makes them; scheduler states and the like stay one value."""
    if isinstance(value, Mapping) and (path[-1] in ("state", "param_groups") or _has_tensors(value) or not value):
        for k, v in value.items():
            _spread((*path, str(k)), v, flat)
    elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
        for k, v in enumerate(value):
            if path[-1] == "param_groups":
                for name, x in v.items():
                    flat.add((*path, k, name), x)
            else:
                _spread((*path, k), v, flat)
    elif isinstance(value, Mapping) and "param_groups" in value:  # an optimizer without state
        for k, v in value.items():
            _spread((*path, str(k)), v, flat)
    else:
        flat.add(path, value)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensors(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(v) for v in value)
    return isinstance(value, Tensor)


class Safetensors:
    """A safetensors file, or a folder of them as transformers writes it."""

    def __init__(self, path: Path) -> None:
        self.where, self.values = str(path), tuple[str, ...]()
        if path.is_file():
            names = [path]
        elif (index := path / "model.safetensors.index.json").exists():
            names = [path / n for n in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            names = sorted(path.glob("*.safetensors"))
        self._files: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        for name in names:
            try:
                opened: Any = safetensors.safe_open(name, framework="pt")
                for key in opened.keys():  # noqa: SIM118 (not a dict)
                    part = opened.get_slice(key)
                    self._files[key] = opened
                    self.tensors[key] = Stored(tuple(part.get_shape()), _DTYPES[part.get_dtype()])
            except (OSError, safetensors.SafetensorError, KeyError) as error:
                raise StateError(f"{name} cannot be read as safetensors: {error}", where=str(name),
                                 hint="restore it from a copy") from error  # fmt: skip

    def read(self, wanted: Iterable[Wanted]) -> None:
        for w in wanted:
            for p in w.pieces:
                opened = self._files[w.key]
                window = tuple(slice(at, at + n) for at, n in zip(p.offset, p.size, strict=True))
                p.of(w.local).copy_(opened.get_slice(w.key)[window] if window else opened.get_tensor(w.key))

    def value(self, key: str) -> Any:
        raise StateError(f"safetensors hold tensors only, not {key}", where=self.where)


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


SAFETENSORS_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _volume(size: Iterable[int]) -> int:
    out = 1
    for n in size:
        out *= n
    return out
