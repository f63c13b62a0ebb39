"""A checkpoint on disk: a directory that is whole or not there.

A save writes to ``NAME.new``, syncs every file, seals it with a manifest that has the size and checksum of each file, and only
then renames: ``NAME`` to ``NAME.old``, ``NAME.new`` to ``NAME``, and removes the old one. Whenever a save is interrupted, at
least one of the three is complete, and reading takes the newest complete one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardc.errors import StateError

MANIFEST = "shardc.json"
METADATA = ".metadata"
FORMAT = 1
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        step: number of steps done.
        seed: of the counter stream.
        rng: "counter" or "torch".
        generator: state of torch's default CPU generator, hexadecimal; "" for rng="counter".
        saved_at: seconds since 1970.
        mesh: axes and sizes at the time, for people.
        zero: stage at the time, for people.
        numbers: plain numbers and flags that the step changes: path -> value.
        files: name -> (bytes, CRC-32).
    """

    step: int
    seed: int
    rng: str
    generator: str
    saved_at: float
    mesh: dict[str, int]
    zero: int
    numbers: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    def dump(self) -> str:
        body = {"format": FORMAT, **dataclasses.asdict(self)}
        text = json.dumps(body, sort_keys=True)
        return json.dumps({**body, "seal": zlib.crc32(text.encode())}, sort_keys=True, indent=1)

    @staticmethod
    def parse(text: str, where: str) -> Manifest:
        """Raises `StateError`: damaged, or of another format."""
        hint = "restore the checkpoint from a copy, or load an older one"
        try:
            body = json.loads(text)
            seal = body.pop("seal")
            intact = zlib.crc32(json.dumps(body, sort_keys=True).encode()) == seal
            version = body.pop("format")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"the checkpoint's manifest is damaged: {error}", where=where, hint=hint) from error
        if not intact:
            raise StateError("the checkpoint's manifest is damaged: its checksum is wrong", where=where, hint=hint)
        if version != FORMAT:
            raise StateError(f"the checkpoint has format {version}, this shardc reads {FORMAT}", where=where,
                             hint="load it with the release that wrote it")  # fmt: skip
        body["files"] = {name: (size, crc) for name, (size, crc) in body["files"].items()}
        return Manifest(**body)


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    crc, size = 0, 0
    with path.open("rb") as f:
        while block := f.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return size, crc


def damage(folder: Path, manifest: Manifest, names: Iterable[str]) -> str:
    """The first of the named files that is not what the manifest says, in words; "" if all are."""
    for name in names:
        want = manifest.files[name]
        try:
            got = checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if got != want:
            what = f"{got[0]} bytes, saved {want[0]}" if got[0] != want[0] else f"checksum {got[1]:08x}, saved {want[1]:08x}"
            return f"{name} is damaged: {what}"
    return ""


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a complete checkpoint; None where there is none.

    Raises:
        StateError: a manifest that is damaged.
    """
    try:
        text = (folder / MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest.parse(text, str(folder / MANIFEST))


def newest(path: Path) -> Path | None:
    """The newest complete checkpoint called `path` (also what an interrupted save left of it), else the newest of those that
    the folder `path` holds; None where there is none."""
    return _latest([path, *_siblings(path)]) or (_latest(sorted(path.iterdir())) if path.is_dir() else None)


def _siblings(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + ".new"), path.with_name(path.name + ".old")


def _latest(folders: Iterable[Path]) -> Path | None:
    found, broken = [], None
    for folder in folders:
        try:
            manifest = manifest_of(folder)
        except StateError as error:  # an older one may be whole; damage is an error only where nothing else is left
            broken = broken or error
            continue
        if manifest is not None:
            found.append((manifest.saved_at, folder))
    if not found and broken is not None:
        raise broken
    return max(found, key=lambda pair: pair[0])[1] if found else None


def begin(path: Path) -> Path:
    """An empty directory to save to. What an interrupted save left is finished first if it is complete, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = _siblings(path)
    if path.exists() and manifest_of(path) is None and not (path.is_dir() and not any(path.iterdir())):
        kind = "a torch.distributed checkpoint of another program" if (path / METADATA).exists() else "not a checkpoint"
        raise StateError(f"{path} exists and is {kind}: it would be overwritten", where=str(path), hint="save to another path")
    left = _latest([p for p in (path, new, old) if p.exists()])
    if left == new:
        commit(path)
    elif left == old:
        if path.exists():
            shutil.rmtree(path)
        old.rename(path)
    for folder in (new, old):
        if folder.exists():
            shutil.rmtree(folder)
    new.mkdir()
    sync_folder(path.parent)
    return new


def seal(path: Path, manifest: Manifest) -> None:
    """Complete ``NAME.new`` and make it `path`. All its files are written and synced."""
    new, _ = _siblings(path)
    unfinished = new / (MANIFEST + ".tmp")
    with unfinished.open("w") as f:
        f.write(manifest.dump())
        f.flush()
        os.fsync(f.fileno())
    sync_folder(new)
    unfinished.rename(new / MANIFEST)
    sync_folder(new)
    commit(path)


def commit(path: Path) -> None:
    """Put a complete ``NAME.new`` in the place of `path`."""
    new, old = _siblings(path)
    if old.exists():
        shutil.rmtree(old)
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync_folder(path.parent)
    if old.exists():
        shutil.rmtree(old)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def share(files: Mapping[str, Any], rank: int, world: int) -> list[str]:
    """The files that one of `world` ranks checks."""
    return sorted(files)[rank::world]
