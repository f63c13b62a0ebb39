"""How a collective moves data: what each rank sends to whom, packed in flat buffers, and what communicators have to do.

What moves follows from the index sets of a step's two specs alone, so any pair of them works: uneven, nested, factor
products, empty parts. Where a rank's part, or what it receives, already lies in memory in the order of the buffer, the
tensor itself is the buffer and nothing is packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardc import _torch
from shardc.errors import RuntimeFailure
from shardc.mesh import Coord, Mesh
from shardc.reshard import Step
from shardc.spec import Dim, ShardSpec


class Start:
    """A request to start a collective on flat buffers; the reply is a handle for `Wait`.

    - all_gather: `out` is as long as all `inp` together;
    - reduce_scatter: `inp` is as long as all `out` together;
    - all_reduce: in place, `inp` is `out`;
    - all_to_all: `sends` and `receives` are the numbers of elements for and from each rank.
    """

    __slots__ = ("move", "name", "inp", "out")

    def __init__(self, move: Move, name: str, inp: Tensor | None, out: Tensor | None) -> None:
        self.move, self.name, self.inp, self.out = move, name, inp, out

    def __str__(self) -> str:
        return f"{self.name} = {self.move.step.kind}@{self.move.step.axis} {self.move.step.dst} of {self.move.dtype}"


class Wait:
    """A request to wait until a started collective is done."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


Request = Start | Wait


class Communicator(Protocol):
    """Executes the requests of one rank."""

    def start(self, request: Start) -> Any:
        """Begin; returns a handle."""

    def wait(self, handle: Any) -> None:
        """Return when the collective of `handle` is done."""


def drive(run: Generator[Request, Any, Any], communicator: Communicator) -> Any:
    """Run a rank to its end; returns its outcome. What the communicator raises is raised inside the run, so that the
    failure names the instruction. No reference to a buffer outlives its request."""
    request: Request | None = None
    reply: Any = None
    try:
        request = next(run)
        while True:
            reply = None
            try:
                if isinstance(request, Start):
                    reply = communicator.start(request)
                else:
                    communicator.wait(request.handle)
            except Exception as error:
                request = None
                run.throw(error)
                raise
            request = None
            request = run.send(reply)
    except StopIteration as stop:
        return stop.value


class NullCommunicator:
    """Moves nothing: for dry runs."""

    def start(self, request: Start) -> None:
        return None

    def wait(self, handle: None) -> None:
        return None


# -- where the parts lie -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pick:
    """Positions along one dim: an offset and (count, stride) levels, major first; `index` where they have no such form."""

    offset: int
    levels: tuple[tuple[int, int], ...]
    index: tuple[int, ...] | None = None

    @staticmethod
    def of(positions: np.ndarray[Any, Any]) -> Pick:
        offset = int(positions[0]) if len(positions) else 0
        levels = _levels(positions)
        return Pick(offset, levels) if levels is not None else Pick(0, (), tuple(positions.tolist()))

    @staticmethod
    def run(offset: int, n: int) -> Pick:
        """`of(arange(offset, offset + n))`."""
        return Pick(offset if n else 0, () if n == 1 else ((n, 1),))


def _levels(p: np.ndarray[Any, Any]) -> tuple[tuple[int, int], ...] | None:
    if len(p) == 1:
        return ()
    if len(p) == 0:
        return ((0, 1),)
    steps = np.diff(p)
    change = np.flatnonzero(steps != steps[0])
    if not len(change):
        return ((len(p), int(steps[0])),)
    run = int(change[0]) + 1
    if len(p) % run:
        return None
    rows = p.reshape(-1, run)
    if (rows - rows[:, :1] != rows[0] - rows[0][0]).any():
        return None
    outer = _levels(rows[:, 0])
    return None if outer is None else (*outer, (run, int(steps[0])))


@dataclass(frozen=True)
class Block:
    """Part of a local tensor, or the whole of it: one Pick for each dim."""

    shape: tuple[int, ...]
    picks: tuple[Pick, ...]
    whole: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def start(self, local: tuple[int, ...]) -> int | None:
        """Where the block begins if it is one run of a contiguous tensor of shape `local`, else None."""
        if self.whole:
            return 0
        stride, begin, full = 1, 0, True
        for n, m, pick in zip(reversed(self.shape), reversed(local), reversed(self.picks), strict=True):
            if n != 1 and (not full or pick.index is not None or pick.levels != ((n, 1),)):
                return None
            full = full and n == m
            begin += pick.offset * stride
            stride *= m
        return begin

    def view(self, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """A strided view of the block in `tensor`, and the view's shape (with one dim for each level); None: no such view."""
        if any(p.index is not None for p in self.picks):
            return None
        sizes: list[int] = []
        strides: list[int] = []
        offset = tensor.storage_offset()
        for pick, stride in zip(self.picks, tensor.stride(), strict=True):
            offset += pick.offset * stride
            sizes += [n for n, _ in pick.levels]
            strides += [s * stride for _, s in pick.levels]
        return tensor.as_strided(sizes, strides, offset), tuple(sizes)

    def index(self, device: torch.device) -> tuple[Tensor, ...]:
        """Index tensors that broadcast to the block (the slow way, for positions without structure)."""
        out = []
        for k, pick in enumerate(self.picks):
            grid = np.zeros(1, np.int64) + pick.offset
            for n, s in pick.levels:
                grid = np.add.outer(grid, np.arange(n) * s).reshape(-1)
            positions = grid if pick.index is None else np.asarray(pick.index)
            out.append(torch.as_tensor(positions).to(device).view([-1 if j == k else 1 for j in range(len(self.picks))]))
        return tuple(out)

    def read(self, tensor: Tensor, buffer: Tensor) -> None:
        """Copy the block into a flat buffer of its length."""
        found = self.view(tensor)
        if found is None:
            buffer.view(self.shape).copy_(tensor[self.index(tensor.device)])
        else:
            buffer.view(found[1]).copy_(found[0])

    def write(self, tensor: Tensor, buffer: Tensor) -> None:
        """Copy a flat buffer into the block."""
        found = self.view(tensor)
        if found is None:
            tensor[self.index(tensor.device)] = buffer.view(self.shape)
        else:
            found[0].copy_(buffer.view(found[1]))


def _indices(dim: Dim, mesh: Mesh, coord: Coord) -> np.ndarray[Any, Any]:
    out = np.zeros(1, np.int64)
    for f in dim:
        lo, hi = f.interval(mesh, coord)
        out = np.add.outer(out * f.size, np.arange(lo, hi)).reshape(-1)
    return out


def _interval(dim: Dim, mesh: Mesh, coord: Coord) -> tuple[int, int] | None:
    """First position and length, if the part is one run of the dim: without a list of its positions, which may be millions."""
    begin, n = 0, 1
    for f in dim:
        lo, hi = f.interval(mesh, coord)
        if n == 1:
            begin, n = begin * f.size + lo, hi - lo
        elif (lo, hi) == (0, f.size):
            begin, n = begin * f.size, n * f.size
        else:
            return None
    return begin, n


def common(have: ShardSpec, at: Coord, want: ShardSpec, to: Coord, mesh: Mesh) -> tuple[Block, Block]:
    """What the part of `have` at `at` and the part of `want` at `to` have in common, as a block of each."""
    shape, one, two = [], [], []
    for d, e in zip(have.dims, want.dims, strict=True):
        mine, theirs = _interval(d, mesh, at), _interval(e, mesh, to)
        if mine is not None and theirs is not None:
            lo = max(mine[0], theirs[0])
            n = max(0, min(sum(mine), sum(theirs)) - lo)
            shape.append(n)
            one.append((Pick.run(lo - mine[0], n), mine[1]))
            two.append((Pick.run(lo - theirs[0], n), theirs[1]))
            continue
        a, b = _indices(d, mesh, at), _indices(e, mesh, to)
        both = a if np.array_equal(a, b) else np.intersect1d(a, b, assume_unique=True)
        shape.append(len(both))
        one.append((Pick.of(np.searchsorted(a, both)), len(a)))
        two.append((Pick.of(np.searchsorted(b, both)), len(b)))
    return tuple(  # type: ignore[return-value]
        Block(tuple(shape), tuple(p for p, _ in side), all(n == m for n, (_, m) in zip(shape, side, strict=True)))
        for side in (one, two)
    )


# -- collectives ---------------------------------------------------------------------------------------------------------


class Move:
    """One collective as one rank does it: `open` packs, the request in between moves, `close` unpacks.

    Args:
        step, dtype: the step and the dtype of the tensor.
        reuse: an all_reduce may overwrite its operand.

    Raises:
        RuntimeFailure: the ranks of the step's axis do not hold between them what this rank has to have.
    """

    def __init__(self, step: Step, dtype: torch.dtype, mesh: Mesh, coord: Coord, reuse: bool = False) -> None:
        self.step, self.dtype, self.reuse = step, dtype, reuse
        self.shape, self.local = step.dst.local_shape(mesh, coord), step.src.local_shape(mesh, coord)
        group = mesh.group(coord, step.axis)
        self.me = coord[mesh.index(step.axis)]
        src, dst = step.src, step.dst
        out_blocks: list[Block] = []
        self.send_blocks: list[Block] = []
        self.size = 0  # longest share of a rank
        if step.kind == "all_gather":
            out_blocks = [common(src, c, dst, coord, mesh)[1] for c in group]
            self.send_blocks = [common(src, coord, src, coord, mesh)[0]]
            self.size = max(b.numel for b in out_blocks)
            self.begins = [k * self.size for k in range(len(group))]
            self.out_length, self.in_length = len(group) * self.size, self.size
        elif step.kind == "reduce_scatter":
            self.send_blocks = [common(src, coord, dst, c, mesh)[0] for c in group]
            self.size = max(b.numel for b in self.send_blocks)
            out_blocks = [common(src, coord, dst, coord, mesh)[1]]
            self.begins = [0]
            self.out_length, self.in_length = self.size, len(group) * self.size
        elif step.kind == "all_to_all":
            self.send_blocks = [common(src, coord, dst, c, mesh)[0] for c in group]
            out_blocks = [common(src, c, dst, coord, mesh)[1] for c in group]
            self.out_length, self.in_length = math.prod(self.shape), math.prod(self.local)
            self.begins = [sum(b.numel for b in out_blocks[:k]) for k in range(len(group))]
            self.size = max(math.prod(src.local_shape(mesh, c)) for c in group)
        elif step.kind == "all_reduce":
            out_blocks = [common(src, coord, dst, coord, mesh)[1]]
            self.size = self.out_length = self.in_length = math.prod(self.shape)
            self.begins = [0]
        else:
            out_blocks = [common(src, coord, dst, coord, mesh)[1]]
            self.slice = common(src, coord, dst, coord, mesh)[0]
            self.begins, self.out_length, self.in_length = [0], 0, 0
        held = sum(b.numel for b in out_blocks)
        if held != math.prod(self.shape):
            raise RuntimeFailure(
                f"{step}: the ranks of {step.axis} hold {held} of {math.prod(self.shape)} elements for rank {mesh.rank(coord)}",
                hint="a step of more than one axis has to be cut into several",
            )  # fmt: skip
        self.out_blocks = out_blocks
        self.sends, self.receives = [b.numel for b in self.send_blocks], [b.numel for b in out_blocks]
        sending = [k * self.size if step.kind != "all_to_all" else sum(self.sends[:k]) for k in range(len(self.sends))]
        self.sending = sending
        self.straight_in = self.in_length == math.prod(self.local) and all(
            b.start(self.local) == at for b, at in zip(self.send_blocks, sending, strict=True) if b.numel
        )
        self.straight_out = all(b.start(self.shape) == at for b, at in zip(out_blocks, self.begins, strict=True) if b.numel)
        self.wire, self.scale = _wire(dtype, reduces=step.kind in ("all_reduce", "reduce_scatter"))
        # bool has no sum in a communicator; its maximum is the same "any"
        self.op = "max" if dtype == torch.bool and step.op == "sum" else step.op

    @property
    def silent(self) -> bool:
        """Whether no rank of the group has anything to send."""
        return self.size == 0

    def open(self, x: Tensor, name: str) -> Start:
        """Pack this rank's part, for the instruction of that name (the same on all ranks)."""
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        if self.step.kind == "all_reduce":
            if not (self.reuse and x.is_contiguous()):
                x = torch.empty(self.shape, dtype=x.dtype, device=x.device).copy_(x)
            return Start(self, name, None, self.wire(x.view(-1)))
        out = torch.empty(self.out_length, dtype=x.dtype, device=x.device)
        if self.straight_in:
            return Start(self, name, self.wire(x.contiguous().view(-1)), self.wire(out))
        packed = torch.empty(self.in_length, dtype=x.dtype, device=x.device)
        for block, at, n in zip(self.send_blocks, self.sending, self.sends, strict=True):
            if n:
                block.read(x, packed.narrow(0, at, n))
        return Start(self, name, self.wire(packed), self.wire(out))

    def close(self, request: Start) -> Tensor:
        """This rank's part of the result, from the buffer that the request has filled."""
        assert request.out is not None
        out = _unwire(request.out, self.dtype)
        if self.straight_out:
            return out.narrow(0, 0, math.prod(self.shape)).view(self.shape)
        result = torch.empty(self.shape, dtype=self.dtype, device=out.device)
        for block, at, n in zip(self.out_blocks, self.begins, self.receives, strict=True):
            if n:
                block.write(result, out.narrow(0, at, n))
        return result

    def cut(self, x: Tensor, copy: bool) -> Tensor:
        """The part of a slice step: a view of `x` where there is one and `copy` is not asked for."""
        found = self.slice.view(x)
        if found is None:
            return x[self.slice.index(x.device)].view(self.shape)
        view = found[0] if found[1] == self.shape else found[0].reshape(self.shape)
        return view.clone() if copy and _torch.storage_id(view) == _torch.storage_id(x) else view


def _wire(dtype: torch.dtype, reduces: bool) -> tuple[Callable[[Tensor], Tensor], int]:
    """How a flat tensor is shown to a communicator, and how many entries an element has there: complex numbers as pairs,
    bools and rare dtypes as bytes."""
    if dtype.is_complex:
        return (lambda t: torch.view_as_real(t).view(-1)), 2
    if dtype in WIRE_DTYPES or (reduces and dtype != torch.bool):
        return (lambda t: t), 1
    return (lambda t: t.view(torch.uint8)), dtype.itemsize


WIRE_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
"""What gloo and nccl both know."""


def _unwire(t: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(t.view(-1, 2))
    return t if t.dtype == dtype else t.view(dtype)
