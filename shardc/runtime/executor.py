"""One rank's run of an instruction list, as generated straight-line Python.

The list is turned into the source of a generator function, one line for each instruction: operators are resolved, sizes
evaluated at the rank's coordinate, empty parts decided, and registers are local variables that are deleted at their last
use, so that storages die exactly there. The function yields a request (`Start`, `Wait`) where it has to communicate and
leaves the rest to a driver. There are two versions of it: the first run counts memory and checks what operators return;
sizes are the same in every later run, which counts nothing.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from shardc import _torch
from shardc.dtypes import short
from shardc.errors import InputError, RuntimeFailure, ShardcError, StateError
from shardc.instructions import Collective, Compute, Delete, Input, Instruction, Out, Read, Ref, Return, Write
from shardc.mesh import Coord, Mesh
from shardc.runtime import kernels
from shardc.runtime.accounting import MemoryProfile, Stats, Tracker
from shardc.runtime.comm import Move, Request, Start, Wait
from shardc.runtime.liveness import Liveness, outs_of, uses_of
from shardc.spec import ShardSpec


class Stream(Protocol):
    """Random numbers that do not depend on the mesh; see `shardc.runtime.rng`."""

    def draw(
        self, op_name: str, args: Any, kwargs: Any, spec: ShardSpec, mesh: Mesh, coord: Coord, index: int,
        dtype: torch.dtype, device: torch.device,
    ) -> Any: ...  # fmt: skip


@dataclass
class Outcome:
    """What a rank's run leaves.

    Args:
        results: the step's results on this rank, in order (tensors and numbers); they share no storage with state.
        written: slot -> its tensor after the step; the one passed in, updated in place, where the slot existed.
        deleted: slots that are absent after the step.
        numbers: the numbers that the step changed.
        stats: what it cost; seconds are filled in by the driver.
    """

    results: list[Any]
    written: dict[str, Tensor]
    deleted: tuple[str, ...]
    numbers: dict[str, Any]
    stats: Stats


class Executor:
    """Runs a list of instructions as the rank at `coord` of `mesh`, with tensors on `device`.

    Args:
        instructions: the plan's list; the last one is a `Return`.
        mesh, coord, device: who runs it, and where. On "meta" it is a dry run: no data, no numbers.
        categories: slot, input path or instruction name -> category of the memory that it brings.
        timeline: keep the bytes alive after each instruction of the measured run (`profile`).
        measure: "first" counts memory and checks results in the first run, "always" in each one.

    Raises:
        RuntimeFailure: an unknown operator or instruction, or a step that the ranks of its axis cannot do.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        mesh: Mesh,
        coord: Coord,
        device: torch.device | str,
        *,
        categories: Mapping[str, str] | None = None,
        timeline: bool = False,
        measure: str = "first",
    ) -> None:
        self.instructions, self.mesh, self.coord, self.device = tuple(instructions), mesh, tuple(coord), torch.device(device)
        self.rank = mesh.rank(self.coord)
        self.categories, self.timeline, self.measure = dict(categories or {}), timeline, measure
        self.profile: MemoryProfile | None = None
        self.outs: dict[int, Out] = {o.reg: o for i in instructions for o in outs_of(i)}
        self.liveness = Liveness(self.instructions, mesh)
        self.reads = tuple(i.slot for i in instructions if isinstance(i, Read))
        self.paths = tuple(i.path for i in instructions if isinstance(i, Input))
        self.deleted = tuple(i.slot for i in instructions if isinstance(i, Delete))
        self.moves: dict[Any, Move] = {}
        self.comm_bytes = self.collectives = 0
        self.constants: dict[str, Any] = {
            "write": _write, "apart": _apart, "filled": _filled, "count": _count, "Wait": Wait,
            "mesh": mesh, "coord": self.coord, "device": self.device,
        }  # fmt: skip
        self.names: dict[int, str] = {}
        self.fast: Callable[..., Any] | None = None
        self.lines = {m: [self._line(k, i, m) for k, i in enumerate(self.instructions)] for m in (False, True)}
        self.filename = f"<shardc rank {self.rank}>"

    def __repr__(self) -> str:
        return f"Executor({len(self.instructions)} instructions, rank {self.rank} of {self.mesh}, {self.device})"

    # -- running ---------------------------------------------------------------------------------------------------

    def run(
        self, slots: Mapping[str, Tensor], inputs: Mapping[str, Any], stream: Stream | None = None
    ) -> Generator[Request, Any, Outcome]:
        """Execute; yields requests and returns the `Outcome`. To be driven without gradients (`execution`).

        Args:
            slots: the state that exists, this rank's parts in their storage specs; written in place.
            inputs: this rank's parts of the tensor arguments, and the numbers.
            stream: random numbers; needed where the step draws.

        Raises:
            StateError, InputError: a slot or an input is missing.
            RuntimeFailure: an instruction failed.
        """
        if missing := [s for s in self.reads if s not in slots]:
            raise StateError(f"rank {self.rank} has no state {missing[0]!r} ({len(missing)} missing)", where=missing[0])
        if missing := [p for p in self.paths if p not in inputs]:
            raise InputError(f"rank {self.rank} was given no {missing[0]!r} ({len(missing)} missing)", where=missing[0])
        written: dict[str, Tensor] = {}
        self.dirty = False
        stats = Stats(comm_bytes=self.comm_bytes, collectives=self.collectives)
        measured = self.profile is None or self.measure == "always"
        tracker = Tracker(self.timeline)
        if measured:
            for path, value in [*slots.items(), *inputs.items()]:
                if isinstance(value, Tensor):
                    tracker.pin(value, self.categories.get(path, "other"))
            tracker.begin()
            function = self._compile(measured=True)
        else:
            function = self.fast = self.fast or self._compile(measured=False)
        error: Exception
        try:
            results, numbers = yield from function(slots, inputs, stream, written, tracker, self._check)
        except ShardcError as failure:
            self.dirty = bool(written)
            traceback.clear_frames(failure.__traceback__)  # frames hold registers, and with them memory
            raise
        except Exception as failure:
            error = failure
        else:
            if measured:
                self.profile = tracker.profile()
            assert self.profile is not None
            stats.peak_bytes, stats.peak_at = self.profile.peak_bytes, self.profile.peak_at
            return Outcome(results, written, self.deleted, numbers, stats)
        self.dirty = bool(written)
        failed = self._failure(error)
        traceback.clear_frames(error.__traceback__)
        raise failed from error

    def _failure(self, error: Exception) -> RuntimeFailure:
        """The failure of the instruction in which `error` was raised."""
        frame: TracebackType | None = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != self.filename:
            frame = frame.tb_next
        said = f"{type(error).__name__}: {error}"
        if frame is None or not 0 <= frame.tb_lineno - 2 < len(self.instructions):
            return RuntimeFailure(f"rank {self.rank}: {said}")
        i = self.instructions[frame.tb_lineno - 2]
        registers = frame.tb_frame.f_locals
        seen = [_describe(r, registers.get(f"r{r}")) for r in dict.fromkeys(uses_of(i))]
        what = i.op if isinstance(i, Compute) else str(i.step) if isinstance(i, Collective) else type(i).__name__.lower()
        return RuntimeFailure(
            f"rank {self.rank}: {what} ({i.name}) failed: {said}",
            where=", ".join(w for w in (i.line, i.module, i.phase) if w) + (f"; operands {', '.join(seen)}" if seen else ""),
        )

    def _check(self, reg: int, value: Any, name: str, tracker: Tracker, category: str) -> None:
        """In the measured run: what a register got is what the plan says, and its storage is counted."""
        out = self.outs[reg]
        if out.dtype is None or out.spec is None:
            return
        shape = out.spec.local_shape(self.mesh, self.coord)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != out.dtype:
            raise RuntimeFailure(
                f"rank {self.rank}: {name} is {_describe(reg, value)}, not {short(out.dtype)}{list(shape)} of {out.spec}",
                hint="a factor rule that does not fit its operator, or state or inputs of another shape",
            )
        tracker.add(reg, value, category)

    # -- the generated function --------------------------------------------------------------------------------------

    def _compile(self, measured: bool) -> Callable[..., Any]:
        head = "def run(slots, inputs, stream, written, tracker, check):"
        body = [" " + line for line in self.lines[measured]]
        tail = " yield"  # makes it a generator also where nothing is sent; never reached
        space = dict(self.constants)
        exec(compile("\n".join([head, *body, tail]), self.filename, "exec"), space)
        function: Callable[..., Any] = space["run"]
        return function

    def _const(self, value: Any) -> str:
        """The name of a constant in the generated function."""
        if id(value) not in self.names:
            self.names[id(value)] = f"c{len(self.constants)}"
            self.constants[self.names[id(value)]] = value  # kept alive here, so that its id stays its own
        return self.names[id(value)]

    def _tree(self, tree: Any) -> str:
        """Source of an argument tree."""
        if isinstance(tree, Ref):
            return f"r{tree.reg}"
        if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
            body = "".join(self._tree(a) + ", " for a in tree)
            return f"[{body}]" if isinstance(tree, list) else f"({body})"
        if tree is None or type(tree) in (bool, int, str) or (type(tree) is float and math.isfinite(tree)):
            return repr(tree)
        return self._const(tree)

    def _line(self, k: int, i: Instruction, measured: bool) -> str:
        """The source line of an instruction."""
        counted: list[str] = []
        outs = outs_of(i)
        if isinstance(i, Read):
            parts = [f"r{i.out.reg} = slots[{i.slot!r}]"]
        elif isinstance(i, Input):
            parts = [f"r{i.out.reg} = inputs[{i.path!r}]"]
        elif isinstance(i, Compute):
            parts = [self._compute(i)]
        elif isinstance(i, Collective):
            return self._collective(k, i, measured)
        elif isinstance(i, Write):
            held = self.liveness.holders[k]
            parts = [f"r{r} = apart(slots[{i.slot!r}], r{i.src}, r{r})" for r in held]
            parts += [f"tracker.drop(({r},)); tracker.add({r}, r{r})" for r in held] if measured else []
            parts += [f"write(slots, written, {i.slot!r}, r{i.src}, {self.liveness.taken[k]})"]
            counted = [f"tracker.pin(written[{i.slot!r}], {self._category(i.slot)})", f"tracker.mark({i.name!r})"]
        elif isinstance(i, Delete):
            parts = ["pass"]
        elif isinstance(i, Return):
            own = sorted(self.liveness.shared[k])
            parts = [f"r{r} = r{r}.clone()" + f"; tracker.add({r}, r{r})" * measured for r in own]
            numbers = "".join(f"{path!r}: r{r}, " for path, r in i.numbers)
            value = f"return [{''.join(f'r{r}, ' for r in i.results)}], {{{numbers}}}"
            return "; ".join([*parts, *([f"tracker.mark({i.name!r})"] if measured and own else []), value])
        else:
            raise RuntimeFailure(f"unknown instruction {type(i).__name__}", where=i.name)
        return "; ".join([*parts, *(self._counted(i, outs) + counted if measured else []), *_freed(i.frees, measured)])

    def _counted(self, i: Instruction, outs: list[Out]) -> list[str]:
        """Statements that check and count results."""
        key = i.slot if isinstance(i, Read) else i.path if isinstance(i, Input) else i.name
        checks = [f"check({o.reg}, r{o.reg}, {i.name!r}, tracker, {self._category(key)})" for o in outs]
        return [*checks, f"tracker.mark({i.name!r})"] if checks else []

    def _category(self, name: str) -> str:
        return repr(self.categories.get(name, "other"))

    def _compute(self, i: Compute) -> str:
        fills = kernels.skipped(i, self.outs, self.mesh, self.coord)
        outs = [(n, o) for n, o in enumerate(i.outs) if o is not None]
        if fills is not None:
            args = {n: i.args[a] for n, a in i.inplace}
            made = []
            for n, o in outs:
                fill = fills[n]
                assert fill is not None
                source = self._tree(args[n]) if n in args else f"filled({self._fill(fill)})"
                made.append(f"r{o.reg} = {source}")
            return "; ".join(made)
        kernel = kernels.resolve(i.op)
        function = kernels.inplace_kernel(i, kernel).function if i.inplace else kernel.function
        args, kwargs = (kernels.evaluate(t, self.mesh, self.coord, self.device) for t in (i.args, dict(i.kwargs)))
        kwargs = {key: kernels.evaluate(v, self.mesh, self.coord, self.device) for key, v in kwargs.items()}
        if i.draw is not None:
            call = self._draw(i, outs[0][1], args, kwargs)
        else:
            if self.device.type == "meta" and outs and all(o.dtype is None for _, o in outs):
                function = kernels.numbers_on_meta(function)
            given = [self._tree(a) for a in args] + [f"{key}={self._tree(v)}" for key, v in kwargs.items()]
            call = f"{self._const(function)}({', '.join(given)})"
        if not outs:
            return call
        if not kernel.sequence:
            return f"r{outs[0][1].reg} = {call}"
        if len(outs) == len(i.outs):
            return f"{', '.join(f'r{o.reg}' for _, o in outs)}, = {call}"
        picked = "; ".join(f"r{o.reg} = several[{n}]" for n, o in outs)
        return f"several = {call}; {picked}; del several"

    def _draw(self, i: Compute, out: Out, args: Any, kwargs: Mapping[str, Any]) -> str:
        assert out.spec is not None and out.dtype is not None
        if self.device.type == "meta":
            return f"filled({self._fill((out.spec.local_shape(self.mesh, self.coord), out.dtype, None))})"
        given = f"{i.op!r}, {self._tree(tuple(args))}, {{{', '.join(f'{k!r}: {self._tree(v)}' for k, v in kwargs.items())}}}"
        return f"stream.draw({given}, {self._const(out.spec)}, mesh, coord, {i.draw}, {self._const(out.dtype)}, device)"

    def _fill(self, fill: kernels.Fill) -> str:
        shape, dtype, value = fill
        return f"{shape}, {self._const(dtype)}, device, {self._tree(value)}"

    def _collective(self, k: int, i: Collective, measured: bool) -> str:
        """A step: pack, start, wait, unpack; the operand dies as soon as it is packed."""
        assert i.out.dtype is not None
        step, out, done = i.step, f"r{i.out.reg}", self.liveness.last[k]
        if self.mesh.axes[step.axis] == 1:
            part = f"{out} = r{i.src}"
        elif step.kind == "slice":  # copied where a view would keep the whole value alive for the sake of a part of it
            part = f"{out} = {self._const(self._move(i, False).cut)}(r{i.src}, {done})"
        else:
            move = self._move(i, done)
            if not move.silent:
                self.comm_bytes += 0 if measured else step.nbytes(i.out.dtype, self.mesh)
                self.collectives += not measured
                return self._sent(i, move, measured)
            part = f"{out} = filled({self._fill((move.shape, i.out.dtype, None))})"
        return "; ".join([part, *(self._counted(i, [i.out]) if measured else []), *_freed(i.frees, measured)])

    def _sent(self, i: Collective, move: Move, measured: bool) -> str:
        early, late = [r for r in i.frees if r == i.src], [r for r in i.frees if r != i.src]
        parts = [f"x = {self._const(move.open)}(r{i.src}, {i.name!r})"]
        parts += [f"count(tracker, x, {self._category(i.name)})", f"tracker.mark({i.name!r})"] if measured else []
        parts += [*_freed(early, measured), "yield Wait((yield x))", "x.inp = None"]
        parts += ["tracker.drop((-1,))"] if measured else []
        parts += [f"r{i.out.reg} = {self._const(move.close)}(x)"]
        parts += [*self._counted(i, [i.out]), "tracker.drop((-2,))"] if measured else []
        return "; ".join([*parts, "del x", *_freed(late, measured)])

    def _move(self, i: Collective, reuse: bool) -> Move:
        """The move of a step; equal steps (of repeated layers) share it."""
        assert i.out.dtype is not None
        reuse = reuse and i.step.kind == "all_reduce"
        key = (i.step, i.out.dtype, reuse)
        if key not in self.moves:
            self.moves[key] = Move(i.step, i.out.dtype, self.mesh, self.coord, reuse)
        return self.moves[key]


def _freed(registers: Sequence[int], measured: bool) -> list[str]:
    if not registers:
        return []
    return [f"tracker.drop({tuple(registers)})"] * measured + [f"del {', '.join(f'r{r}' for r in registers)}"]


def _describe(reg: int, value: Any) -> str:
    if isinstance(value, Tensor):
        return f"r{reg}: {short(value.dtype)}{list(value.shape)}"
    return f"r{reg}: {type(value).__name__} {value!r}"


# -- what the generated function calls -------------------------------------------------------------------------------------


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, value: float | int | bool | None) -> Tensor:
    if value is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.full(shape, value, dtype=dtype, device=device)


def _count(tracker: Tracker, request: Start, category: str) -> None:
    """The buffers of a collective are registers -1 and -2."""
    for register, buffer in ((-1, request.inp), (-2, request.out)):
        if buffer is not None:
            tracker.add(register, buffer, category)


def _apart(storage: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """`other`, moved off the storage of a slot that is about to be overwritten with `value`."""
    used = _torch.storage_id(storage)
    return other.clone() if _torch.storage_id(other) == used != _torch.storage_id(value) else other


def _write(slots: Mapping[str, Tensor], written: dict[str, Tensor], slot: str, value: Tensor, taken: bool) -> None:
    """The slot takes the value: in its own storage if it has one; else the tensor itself, unless something else may hold
    its storage or it is a part of a larger one."""
    storage = written.get(slot, slots.get(slot))
    if storage is None:
        whole = value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
        written[slot] = value if whole and not taken else value.clone()
        return
    written[slot] = storage
    if storage is value:
        return
    if storage.shape != value.shape or storage.dtype != value.dtype:
        raise StateError(
            f"{slot} rests as {_describe(0, storage)[4:]}, the step gives {_describe(0, value)[4:]}",
            where=slot, hint="a state tensor that was replaced between two steps",
        )  # fmt: skip
    if _torch.storage_id(storage) == _torch.storage_id(value):
        if storage.storage_offset() == value.storage_offset() and storage.stride() == value.stride():
            return
        value = value.clone()  # another view of the same memory
    storage.copy_(value)
