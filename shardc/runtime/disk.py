"""The disk tier: one file for each rank, whose regions hold one tensor each.

A tensor at rest is mapped from the file, so whoever reads it outside of a step (a state dict, an evaluation) finds its values,
in page cache that the system can take back. Steps read and write by their own threads, past the page cache where the file
system can (O_DIRECT), and compare a checksum at every read: what was torn or changed on disk is an error, never a wrong value.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import StateError

PAGE = mmap.PAGESIZE
BOUNCE = 1 << 20
"""Bytes that are copied at a time where memory does not lie as O_DIRECT wants it."""
PREFIX, SUFFIX = "shardc-", ".offload"


def padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def aligned(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in whole pages of its own."""
    n = _numel(shape)
    if not n:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    memory = mmap.mmap(-1, padded(n * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=n).as_strided(tuple(shape), tuple(stride))


def _numel(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _bytes(t: Tensor, length: int) -> memoryview:
    """The memory of a dense tensor, and what follows it in its last page."""
    return memoryview((ctypes.c_char * length).from_address(t.data_ptr())).cast("B")


def sweep(folder: Path) -> None:
    """Remove the files of processes that are gone (killed): nobody holds their lock."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


class File:
    """The file of one rank, in `folder`; gone when the last region is, and at the end of the process.

    Raises:
        StateError: the folder cannot be written.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        where = _folder(folder)
        try:
            where.mkdir(parents=True, exist_ok=True)
            sweep(where)
            self.fd, name = tempfile.mkstemp(SUFFIX, f"{PREFIX}{os.getpid()}-rank{rank}-", where)
            fcntl.flock(self.fd, fcntl.LOCK_EX)
        except OSError as error:
            raise StateError(f"the disk tier cannot write to {where}: {error}", where=str(where),
                             hint='offload={..., "folder": "/a/fast/local/disk"}') from error  # fmt: skip
        self.path = Path(name)
        self._direct = _open_direct(self.fd)
        self._size, self._free = 0, list[tuple[int, int]]()
        self.reader = ThreadPoolExecutor(1, "shardc read")
        self.writer = ThreadPoolExecutor(1, "shardc write")
        # of multiprocessing, since children that it starts end without atexit; not run in forked children
        self.remove = Finalize(self, _remove, (self.path, self.fd, self._direct), exitpriority=0)

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._direct is not None

    def unlink(self) -> None:
        """The name goes at once; the space when the last region does."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def allocate(self, nbytes: int, name: str) -> Region:
        """Space for a tensor; first fit.

        Raises:
            StateError: the disk is full.
        """
        n = padded(nbytes)
        for k, (offset, size) in enumerate(self._free):
            if size >= n:
                self._free[k : k + 1] = [(offset + n, size - n)] if size > n else []
                return Region(self, offset, nbytes, name)
        offset, self._size = self._size, self._size + n
        try:
            os.posix_fallocate(self.fd, offset, n)
        except OSError as error:
            self._size = offset
            raise StateError(f"no space on disk for {name} ({nbytes:,} bytes): {error}", where=str(self.path),
                             hint='offload={..., "folder": "/a/larger/disk"}') from error  # fmt: skip
        return Region(self, offset, nbytes, name)

    def release(self, offset: int, size: int) -> None:
        """Give space back; neighbours are joined."""
        joined: list[tuple[int, int]] = []
        for a, n in sorted([*self._free, (offset, size)]):
            if joined and joined[-1][0] + joined[-1][1] == a:
                joined[-1] = joined[-1][0], joined[-1][1] + n
            else:
                joined.append((a, n))
        self._free = joined

    def pwrite(self, data: memoryview, offset: int, aligned: bool) -> None:
        """Whole pages; `data` of any other length, or not aligned, goes through a buffer of its own."""
        if self._direct is None or aligned:
            self._all(os.pwrite, self.fd if self._direct is None else self._direct, data, offset)
            return
        bounce = memoryview(mmap.mmap(-1, min(BOUNCE, padded(len(data))), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for at in range(0, len(data), BOUNCE):
            part = data[at : at + BOUNCE]
            bounce[: len(part)] = part
            self._all(os.pwrite, self._direct, bounce[: padded(len(part))], offset + at)

    def pread(self, data: memoryview, offset: int) -> None:
        """Into whole aligned pages."""
        fd = self.fd if self._direct is None else self._direct
        self._all(lambda fd, part, at: os.preadv(fd, [part], at), fd, data, offset)

    @staticmethod
    def _all(call: Any, fd: int, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            n = call(fd, data[done:], offset + done)
            if n <= 0:
                raise OSError(f"{done:,} of {len(data):,} bytes at {offset:,}, and no more")
            done += n


def _remove(path: Path, *fds: int | None) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    for fd in fds:
        if fd is not None:
            os.close(fd)


def _open_direct(fd: int) -> int | None:
    """A descriptor that goes past the page cache, if the file system has that and mapped pages agree with it both ways."""
    direct = None
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)  # also where the name is gone
        os.ftruncate(fd, PAGE)
        with mmap.mmap(fd, PAGE) as seen, mmap.mmap(-1, PAGE) as own:
            before = seen[0]
            own[:] = b"\1" * PAGE
            os.pwrite(direct, own, 0)
            good = before == 0 and seen[0] == 1
            seen[0] = 2
            os.preadv(direct, [own], 0)
            good = good and own[0] == 2
    except OSError:
        good = False
    if not good and direct is not None:
        os.close(direct)
    return direct if good else None


def disk_note(folder: str | None) -> str:
    """Words for a plan: where the files are, and how they are read and written."""
    where = _folder(folder)
    if not where.is_dir():
        return f"disk: one file for each rank in {where}"
    file = File(str(where), 0)
    how = "O_DIRECT" if file.direct else "through the page cache: the file system has no O_DIRECT, or maps do not follow it"
    file.remove()
    return f"disk: one file for each rank in {where} ({how})"


def _folder(given: str | None) -> Path:
    return Path(given if given is not None else tempfile.gettempdir())


class Region:
    """Where a tensor lies in a file.

    Attributes:
        name: the slot, or the node, whose value it is.
        checksum: of the bytes that were written last; None: none yet.
        version: of the tensor (`Tensor._version`) when it was last known to be what the checksum says.
        pending: the write under way.
    """

    tier = "disk"

    def __init__(self, file: File, offset: int, nbytes: int, name: str) -> None:
        self.file, self.offset, self.nbytes, self.name = file, offset, nbytes, name
        self.checksum: int | None = None
        self.version = 0
        self.pending: Future[None] | None = None
        weakref.finalize(self, file.release, offset, padded(nbytes))

    def mapped(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor as it lies in the file."""
        try:
            memory = mmap.mmap(self.file.fd, padded(self.nbytes), offset=self.offset)
        except (OSError, ValueError) as error:  # the file was cut
            raise self._wrong(f"cannot be mapped: {error}") from error
        return torch.frombuffer(memory, dtype=dtype, count=_numel(shape)).as_strided(tuple(shape), tuple(stride))

    def write(self, source: Tensor) -> None:
        """Start to write a dense tensor of this size; `pending` is done when it is there. `source` must not change."""
        before = self.pending

        def work() -> None:
            if before is not None:
                wait([before])  # whether it failed does not matter: all is written anew
            pages = source.data_ptr() % PAGE == 0
            data = _bytes(source, padded(self.nbytes) if pages else self.nbytes)
            self.checksum = zlib.crc32(data[: self.nbytes])
            self.file.pwrite(data, self.offset, pages)

        self.pending = self.file.writer.submit(work)

    def read(self, out: Tensor) -> Future[None]:
        """Start to read into a tensor of `aligned`; the future raises `StateError` if it is not what was written."""
        before = self.pending

        def work() -> None:
            if before is not None:
                wait([before])  # if it failed, so will the checksum
            data = _bytes(out, padded(self.nbytes))
            try:
                self.file.pread(data, self.offset)
            except OSError as error:
                raise self._wrong(f"cannot be read: {error}") from error
            self._compare(zlib.crc32(data[: self.nbytes]))

        return self.file.reader.submit(work)

    def settle(self) -> None:
        """Wait for the write under way, and raise what it raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def seen(self, t: Tensor) -> None:
        """`t` lies here: if it was changed in place since the last look, by the user, this is its value now."""
        if self.pending is not None:  # of a step that failed: what it wrote has another checksum than it should
            wait([self.pending])
            self.pending = None
        if t._version != self.version or self.checksum is None:
            self.checksum = zlib.crc32(_bytes(t, self.nbytes))
            self.version = t._version

    def verify(self, t: Tensor) -> None:
        """Raises `StateError`: the values of `t`, which lies here, are not those that were written."""
        self.seen(t)
        found = 0
        for at in range(0, self.nbytes, BOUNCE):  # by reading: where a file was cut, to touch its map would end the process
            n = min(BOUNCE, self.nbytes - at)
            data = os.pread(self.file.fd, n, self.offset + at)
            if len(data) < n:
                raise self._wrong(f"cannot be read: {at + len(data):,} of {self.nbytes:,} bytes, and no more")
            found = zlib.crc32(data, found)
        self._compare(found)

    def _compare(self, found: int) -> None:
        if found != self.checksum:
            raise self._wrong(f"has checksum {found:08x}, what was written had {self.checksum or 0:08x}")

    def _wrong(self, what: str) -> StateError:
        end = self.offset + self.nbytes
        return StateError(
            f"{self.name} on disk {what}", where=f"{self.file.path}, bytes {self.offset:,} to {end:,}",
            hint="the file was damaged or written to by something else (also through .data); load the last checkpoint",
        )  # fmt: skip
