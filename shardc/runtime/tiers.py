"""Moves between the tiers of one rank, and where the user's tensors lie.

What a tensor rests on is noted on its storage, so that it is known through views, detached copies and DTensors alike, also to
another compiled step.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from shardc import _torch
from shardc.instructions import Transfer
from shardc.runtime.disk import File, Region, aligned
from shardc.runtime.layout import dense_strides
from shardc.tiers import DEVICE, DISK, HOST

ALIGNED = 1 << 16
"""From so many bytes on, copies on the host are made in pages of their own, which disks read and write without another copy."""


class Resting:
    """Notes that a storage rests on a tier (the host; `Region` for the disk)."""

    def __init__(self, tier: str) -> None:
        self.tier = tier


def rest_of(t: Tensor) -> Resting | Region | None:
    """What is noted on the storage of a plain tensor; None: it lies on the device, or nobody has asked otherwise."""
    found: Resting | Region | None = None if t.is_meta else getattr(t.untyped_storage(), "_shardc_rest", None)
    return found


def tier_of(t: Tensor) -> str:
    """Where a plain tensor rests."""
    found = rest_of(t)
    return DEVICE if found is None else found.tier


def _note(t: Tensor, rest: Resting | Region | None) -> None:
    t.untyped_storage()._shardc_rest = rest  # type: ignore[attr-defined]


def verified(t: Tensor) -> Tensor:
    """`t`, a plain tensor that is about to be read outside of a step.

    Raises:
        StateError: it rests on disk, and its values are not those that were written.
    """
    found = rest_of(t)
    if isinstance(found, Region):
        found.verify(t)
    return t


class Tiers:
    """The host and the disk tier of a rank.

    Args:
        folder: for the file of the disk tier, which is made when something first rests there.
        rank: for its name.
    """

    def __init__(self, folder: str | None = None, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self._file: File | None = None
        self._streams: dict[torch.device, Any] = {}
        self._pending: dict[int, Any] = {}  # storage of a copy under way -> a future, or an event of the device

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = File(self.folder, self.rank)
            weakref.finalize(self, self._file.unlink)
        return self._file

    def begin(self) -> None:
        """A run begins: what an earlier one left under way, since it failed, is not asked for any more."""
        self._pending.clear()

    # -- moves ---------------------------------------------------------------------------------------------------------

    def move(self, i: Transfer, src: Tensor, into: Tensor | None, device: torch.device) -> Tensor:
        """Start the move of an instruction; finish it if it says so.

        Raises:
            StateError: no space on disk.
        """
        if src.is_meta:
            if into is not None:
                return into
            return torch.empty_strided(src.shape, self._stride(i, src), dtype=src.dtype, device="meta")
        there = i.out.tier
        if there == DISK:
            out = self._store(i.module or i.name, src, into, self._stride(i, src))
        elif isinstance(rest_of(src), Region):
            out = self._load(src, self._stride(i, src), device)
        else:
            out = self._made(src, self._stride(i, src), there, device) if into is None else into
            self._copy(out, src)
        return self.arrive(out) if i.wait else out

    def arrive(self, moved: Tensor) -> Tensor:
        """A copy whose move is finished."""
        if moved.is_meta:
            return moved
        rest = rest_of(moved)
        if isinstance(rest, Region):
            rest.settle()
            return moved
        pending = self._pending.pop(_torch.storage_id(moved), None)
        if isinstance(pending, Future):
            pending.result()
        elif pending is not None and moved.is_cuda:
            torch.cuda.current_stream(moved.device).wait_event(pending)
        elif pending is not None:
            pending.synchronize()  # the host, or a file, reads it next
        return moved

    @staticmethod
    def _stride(i: Transfer, src: Tensor) -> tuple[int, ...]:
        return dense_strides(src.shape, i.stride or src.stride())

    def _made(self, src: Tensor, stride: tuple[int, ...], tier: str, device: torch.device) -> Tensor:
        """An uninitialised tensor like `src` on the device or the host."""
        if tier == DEVICE:
            return torch.empty_strided(src.shape, stride, dtype=src.dtype, device=device)
        if device.type == "cuda":
            return torch.empty_strided(src.shape, stride, dtype=src.dtype, pin_memory=True)
        if src.numel() * src.dtype.itemsize >= ALIGNED:
            return aligned(src.shape, stride, src.dtype)
        return torch.empty_strided(src.shape, stride, dtype=src.dtype)

    def _copy(self, out: Tensor, src: Tensor) -> None:
        """Between device and host: at once on a CPU, on a stream of its own beside the computation on CUDA."""
        if not (out.is_cuda or src.is_cuda):
            out.copy_(src)
            return
        near = out if out.is_cuda else src
        stream = self._streams.setdefault(near.device, None) or torch.cuda.Stream(near.device)  # type: ignore[no-untyped-call]
        self._streams[near.device] = stream
        stream.wait_stream(torch.cuda.current_stream(near.device))
        with torch.cuda.stream(stream):
            out.copy_(src, non_blocking=True)
        near.record_stream(stream)
        self._pending[_torch.storage_id(out)] = stream.record_event()

    def _store(self, name: str, src: Tensor, into: Tensor | None, stride: tuple[int, ...]) -> Tensor:
        if not src.numel():
            return torch.empty_strided(src.shape, stride, dtype=src.dtype) if into is None else into
        out = self._space(name, src, stride) if into is None else into
        region = rest_of(out)
        assert isinstance(region, Region), f"{name} does not rest on disk"
        if src.stride() != out.stride():
            src = aligned(src.shape, out.stride(), src.dtype).copy_(src)
        region.write(src)
        return out

    def _space(self, name: str, like: Tensor, stride: tuple[int, ...]) -> Tensor:
        """A tensor like `like` on disk, without values yet."""
        region = self.file.allocate(like.numel() * like.dtype.itemsize, name)
        out = region.mapped(like.shape, stride, like.dtype)
        _note(out, region)
        return out

    def _load(self, src: Tensor, stride: tuple[int, ...], device: torch.device) -> Tensor:
        region = rest_of(src)
        assert isinstance(region, Region) and stride == src.stride()
        out = aligned(src.shape, stride, src.dtype)
        self._pending[_torch.storage_id(out)] = region.read(out)
        return out

    # -- the user's tensors --------------------------------------------------------------------------------------------

    def adopt(self, name: str, t: Tensor, tier: str, device: torch.device) -> bool:
        """Put a plain tensor of the user's where the plan wants it to rest, in place (`t.data` is replaced).

        Returns:
            Whether its memory is another now.

        Raises:
            StateError: no space on disk; values on disk that are not those that were written.
        """
        rest = rest_of(t)
        if tier == (DEVICE if rest is None else rest.tier):
            if isinstance(rest, Region):
                rest.seen(t)
            if tier != HOST or not t.is_cuda:
                return False
        with torch.no_grad():
            verified(t)
            stride = dense_strides(t.shape, t.stride())
            if tier == DISK and t.numel():
                new = self._space(name, t, stride)
                region = rest_of(new)
                assert isinstance(region, Region)
                region.write(t.detach().cpu().contiguous() if t.is_cuda else aligned(t.shape, stride, t.dtype).copy_(t))
                region.version = t._version
                region.settle()
            elif tier == HOST and rest is None and not t.is_cuda and device.type != "cuda":
                _note(t, Resting(HOST))
                return False
            elif tier == DEVICE and not isinstance(rest, Region) and t.device.type == device.type:
                _note(t, None)
                return False
            else:
                new = self._made(t, stride, DEVICE if tier == DEVICE else HOST, device)
                new.copy_(t)
                _note(new, None if tier == DEVICE else Resting(tier))
            t.data = new
        return True
