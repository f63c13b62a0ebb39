"""Writing a checkpoint in the format of torch.distributed.checkpoint: each rank its pieces, rank 0 metadata and seal."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from shardc.checkpoint.directory import METADATA, Manifest, begin, checksum, seal
from shardc.checkpoint.pieces import Part, Parts, Piece
from shardc.checkpoint.together import Together
from shardc.checkpoint.tree import Flat
from shardc.runtime.tiers import verified


@dataclass(frozen=True)
class Written:
    """A piece that this rank writes."""

    key: str
    shape: tuple[int, ...]
    piece: Piece
    data: Tensor


class Content(SavePlanner):
    """What one rank writes: its pieces, and on rank 0 all other values. Tensors that several ranks hold alike are dealt out
    among them, so that each writes about the same number of bytes.

    Args:
        flat: the state; each rank passes the same keys.
        parts: makes this rank's parts.
        rank: of this process.
        copy: take the values now, in host memory of their own, so that training may go on.
    """

    def __init__(self, flat: Flat, parts: Parts, rank: int, copy: bool) -> None:
        self.paths = dict(flat.paths)
        self.values = {key: _pickled(value) for key, value in flat.values.items()} if rank == 0 else {}
        self.written: dict[tuple[str, tuple[int, ...]], Written] = {}
        dealt: dict[int, list[int]] = {}
        for key, t in flat.tensors.items():
            part = parts.of(t)
            verified(part.local)
            load = dealt.setdefault(part.replicas, [0] * part.replicas)
            writer = load.index(min(load))  # the same on all ranks: global sizes alone count
            load[writer] += t.numel() * t.element_size()
            if writer == part.replica:
                self._take(key, part, rank, copy)

    def _take(self, key: str, part: Part, rank: int, copy: bool) -> None:
        found = part.pieces
        if 0 in part.shape and rank == 0:  # no rank has an element; its shape is to be known all the same
            found = (Piece((0,) * len(part.shape), part.shape, (0,) * len(part.shape)),)
            part = dataclasses.replace(part, local=part.local.new_empty(part.shape))
        for piece in found:
            view = piece.of(part.local)
            data = view.to("cpu", copy=True) if copy else view
            self.written[key, piece.offset] = Written(key, part.shape, piece, data)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the content is there already."""

    def create_local_plan(self) -> SavePlan:
        items = [_item(w) for w in self.written.values()]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.values]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self.paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.values[index.fqn])
        assert index.offset is not None
        return self.written[index.fqn, tuple(index.offset)].data


def _item(w: Written) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(w.piece.offset), torch.Size(w.piece.size))
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(w.data), torch.Size(w.shape))
    return WriteItem(MetadataIndex(w.key, torch.Size(w.piece.offset)), WriteItemType.SHARD, tensor_data=data)


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def write(path: Path, content: Content, manifest: Manifest, ranks: Together) -> None:
    """Write a checkpoint at `path`; the one that is there stays until the new one is complete.

    Raises:
        StateError: on all ranks, if one cannot write.
    """
    folder = ranks.first("preparing the checkpoint's directory", lambda: begin(path))
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(ranks.rank == 0)
    plans = ranks.all("planning the checkpoint", lambda: writer.prepare_local_plan(content.create_local_plan()))
    # Every rank makes the same global plan of the same local plans.
    all_plans, metadata = content.create_global_plan(plans)
    mine = writer.prepare_global_plan(all_plans)[ranks.rank]

    def data() -> tuple[Any, dict[str, tuple[int, int]]]:
        results = writer.write_data(mine, content).wait()
        names = {r.storage_data.relative_path for r in results}
        return results, {name: checksum(folder / name) for name in sorted(names)}

    rows = ranks.all("writing the checkpoint", data)

    def finish() -> None:
        writer.finish(metadata, [results for results, _ in rows])
        files = {name: sums for _, found in rows for name, sums in found.items()}
        files[METADATA] = checksum(folder / METADATA)
        seal(path, dataclasses.replace(manifest, files=files, saved_at=time.time()))

    ranks.first("completing the checkpoint", finish)


class Saving:
    """A save under way.

    Args:
        path: where the checkpoint will be.
    """

    def __init__(self, path: Path, content: Content, manifest: Manifest, ranks: Together) -> None:
        self.path = path
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(path, content, manifest, ranks), name="shardc save")
        self._thread.start()

    def _run(self, *args: Any) -> None:
        try:
            write(*args)
        except Exception as error:  # raised by result(), and by the next save
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait for the save.

        Raises:
            StateError: it failed; the checkpoint before it is still there.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


def saving_group() -> dist.ProcessGroup:
    """A group of all ranks on which another thread may talk while steps run. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


