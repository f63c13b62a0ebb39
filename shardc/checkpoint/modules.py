"""Weights of one module, sharded or not: from whatever holds tensors of its names, and out to safetensors."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardc.checkpoint.compare import Problems, tensors
from shardc.checkpoint.directory import newest, sync_folder
from shardc.checkpoint.pieces import Parts
from shardc.checkpoint.restore import Loading
from shardc.checkpoint.sources import SAFETENSORS_NAMES, Source, Wanted
from shardc.checkpoint.together import Together
from shardc.checkpoint.tree import Flat, flatten
from shardc.errors import StateError
from shardc.runtime.whole import whole
from shardc.runtime.world import Ranks


def _ranks(flat: Flat) -> Ranks | None:
    mesh = next((t.device_mesh for t in flat.tensors.values() if isinstance(t, DTensor)), None)
    return None if mesh is None else Ranks.of(mesh)


def load_module(path: Path, module: nn.Module) -> None:
    """See `shardc.load`. Names may have a common prefix in the file (``model.``)."""
    flat = flatten(module, (), Flat())
    blank = next((k for k, t in flat.tensors.items() if t.is_meta), None)
    if blank is not None:
        raise StateError(f"{blank} is on meta: it has no memory to be loaded into", where=blank,
                         hint="shardc.init(make_model, step) makes it sharded, or module.to_empty(device=...)")  # fmt: skip
    ranks = _ranks(flat)
    source = Loading(newest(path) or path, None).open(ranks)
    prefix = _prefix(flat, source)
    problems = Problems(missing=[k for k in flat.tensors if prefix + k not in source.tensors])
    if prefix or not problems.missing:
        known = {prefix + k for k in flat.tensors}
        problems.unexpected += [k for k in source.tensors if k.startswith(prefix) and k not in known]
        tensors({prefix + k: t for k, t in flat.tensors.items()}, source, False, problems)
    problems.refuse(source.where, hint="load it into a module with these names and shapes")
    parts, wanted = Parts(ranks), []
    for k, t in flat.tensors.items():
        part = parts.of(t)
        wanted.append(Wanted(prefix + k, part.local, part.pieces))
    with torch.no_grad():
        Together.of(ranks).all("reading weights", lambda: source.read(wanted))


def _prefix(flat: Flat, source: Source) -> str:
    """What stands before a module's names in a source: nothing, or the one prefix that makes all of them known (where several
    do, a part of another model would be taken for this one)."""
    names = list(flat.tensors)
    if not names or names[0] in source.tensors:
        return ""
    ends = [k[: -len(names[0])] for k in source.tensors if k.endswith(f".{names[0]}")]
    fitting = [p for p in ends if all(p + n in source.tensors for n in names)]
    return fitting[0] if len(fitting) == 1 else ""


def save_module(path: Path, module: nn.Module) -> None:
    """See `shardc.save`. Tensors are gathered and written one by one, so no rank holds more than one of them whole; tied ones
    are written under their first name, as the format has no ties."""
    if path.suffix != ".safetensors":
        raise StateError(f"a module is saved as safetensors, not as {path.name}", where=str(path),
                         hint='shardc.save("model.safetensors", model), or pass the compiled step')  # fmt: skip
    flat = flatten(module, (), Flat())
    ranks, seen, header, at = _ranks(flat), set[int](), {}, 0
    together = Together.of(ranks)
    kept = {k: t for k, t in flat.tensors.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]
    for key, t in kept.items():
        size = t.numel() * t.element_size()
        header[key] = {"dtype": SAFETENSORS_NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    raw += b" " * (-len(raw) % 8)
    unfinished = path.with_name(path.name + ".new")
    out = together.all_own("opening the file", lambda: unfinished.open("wb") if together.rank == 0 else None)
    if out is not None:
        out.write(struct.pack("<Q", len(raw)) + raw)
    for t in kept.values():
        value = whole(t, ranks)
        if out is not None:
            flat_value = value.cpu().contiguous().view(-1)
            out.write(flat_value.view(torch.uint8).numpy().tobytes() if flat_value.numel() else b"")

    def finish() -> None:
        assert out is not None
        out.flush()
        os.fsync(out.fileno())
        out.close()
        unfinished.rename(path)
        sync_folder(path.parent)

    together.first("completing the file", finish)
