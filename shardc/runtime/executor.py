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

from shardc.dtypes import identity
from shardc.errors import InputError, RuntimeFailure, ShardcError, StateError
from shardc.instructions import (
    Arrive,
    Collective,
    Compute,
    Delete,
    Guard,
    Input,
    Instruction,
    Out,
    Read,
    Ref,
    Return,
    Transfer,
    Write,
    outs_of,
    uses_of,
)
from shardc.mesh import Coord, Mesh
from shardc.runtime import called, kernels
from shardc.runtime.accounting import MemoryProfile, Stats
from shardc.runtime.comm import Move, Request, Wait
from shardc.runtime.liveness import Liveness
from shardc.runtime.measure import Measure, describe
from shardc.runtime.ragged import SIZE, Ragged
from shardc.runtime.tiers import Tiers
from shardc.runtime.workspace import workspace_of
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE


class Stream(Protocol):
    """Random numbers that do not depend on the mesh; see `shardc.runtime.rng`."""

    def draw(
        self, op_name: str, args: Any, kwargs: Any, spec: ShardSpec, mesh: Mesh, coord: Coord, index: int,
        dtype: torch.dtype, device: torch.device, order: tuple[int, ...] | None = None,
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
        failed: the guard that did not hold, and the value that it found: the run ended there and wrote nothing.
    """

    results: list[Any]
    written: dict[str, Tensor]
    deleted: tuple[str, ...]
    numbers: dict[str, Any]
    stats: Stats
    failed: tuple[Guard, Any] | None = None


class Executor:
    """Runs a list of instructions as the rank at `coord` of `mesh`, with tensors on `device`.

    Args:
        instructions: the plan's list; the last one is a `Return`.
        mesh, coord, device: who runs it, and where. On "meta" it is a dry run: no data, no numbers.
        categories: slot, input path or instruction name -> category of the memory that it brings.
        timeline: keep the bytes alive after each instruction of the measured run (`profile`).
        tiers: the rank's host and disk tier; by default of its own.
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
        tiers: Tiers | None = None,
    ) -> None:
        self.instructions, self.mesh, self.coord, self.device = tuple(instructions), mesh, tuple(coord), torch.device(device)
        self.rank = mesh.rank(self.coord)
        self.kind = mesh.kind if self.device.type == "meta" else self.device.type
        self.categories, self.timeline, self.measure = dict(categories or {}), timeline, measure
        self.profile: MemoryProfile | None = None
        self.outs: dict[int, Out] = {o.reg: o for i in instructions for o in outs_of(i)}
        self.ragged = Ragged(self.instructions)
        self.liveness = Liveness(self.instructions, mesh)
        self.reads = tuple(i.slot for i in instructions if isinstance(i, Read))
        self.paths = tuple(i.path for i in instructions if isinstance(i, Input))
        self.deleted = tuple(i.slot for i in instructions if isinstance(i, Delete))
        self.moves: dict[Any, Move] = {}
        self.comm_bytes = self.collectives = 0
        self.constants: dict[str, Any] = {
            "check": called.check, "write": called.write, "apart": called.apart, "filled": called.filled, "Wait": Wait,
            "mesh": mesh, "coord": self.coord, "ragged": self.ragged, "device": self.device,
            "tiers": tiers or Tiers(rank=self.rank), "host": torch.device("meta" if self.device.type == "meta" else "cpu"),
        }  # fmt: skip
        self.names: dict[int, str] = {}
        self.fast: Callable[..., Any] | None = None
        self.sources: dict[int, str] = {}  # position of a Compute -> its call
        self.shapes: dict[ShardSpec, tuple[int, ...]] = {}
        self.filename = f"<shardc rank {self.rank}>"
        self.dirty = False
        """Whether the last run failed after it had begun to overwrite state."""
        self.measured: Callable[..., Any] | None = self._compile(measured=True)

    def __repr__(self) -> str:
        return f"Executor({len(self.instructions)} instructions, rank {self.rank} of {self.mesh}, {self.device})"

    # -- running ---------------------------------------------------------------------------------------------------

    def run(
        self, slots: Mapping[str, Tensor], inputs: Mapping[str, Any], stream: Stream | None = None, trusted: int = 0
    ) -> Generator[Request, Any, Outcome]:
        """Execute; yields requests and returns the `Outcome`. To be driven without gradients (`execution`).

        Args:
            slots: the state that exists, this rank's parts in their storage specs; written in place.
            inputs: this rank's parts of the tensor arguments, and the numbers.
            stream: random numbers; needed where the step draws.
            trusted: number of the first guards that are known to hold in this call, and are not asked again.

        Raises:
            StateError, InputError: a slot or an input is missing.
            RuntimeFailure: an instruction failed.
        """
        if missing := [s for s in self.reads if s not in slots]:
            raise StateError(f"rank {self.rank} has no state {missing[0]!r} ({len(missing)} missing)", where=missing[0])
        if missing := [p for p in self.paths if p not in inputs]:
            raise InputError(f"rank {self.rank} was given no {missing[0]!r} ({len(missing)} missing)", where=missing[0])
        self.constants["tiers"].begin()
        written: dict[str, Tensor] = {}
        touched: list[int] = []
        self.dirty = False
        stats = Stats(comm_bytes=self.comm_bytes, collectives=self.collectives)
        measured = self.profile is None or self.measure == "always"
        measure = Measure(
            self.instructions, self._shape, self.ragged, self.categories, self.rank, self.timeline, self.mesh.axes, self.kind
        )  # fmt: skip
        if measured:
            measure.begin(slots, inputs)
            function = self.measured or self._compile(measured=True)
            self.measured = function if self.measure == "always" else None  # the first run needs it once
        else:
            function = self.fast = self.fast or self._compile(measured=False)
        error: Exception
        done = False
        try:
            results, numbers = yield from function(slots, inputs, stream, written, touched, measure, trusted)
            done = True
        except called.Differs as differs:
            done = True
            traceback.clear_frames(differs.__traceback__)
            self.measured = function if measured else self.measured  # the measured run is still to come
            return Outcome([], {}, (), {}, stats, (differs.guard, differs.value))
        except ShardcError as failure:
            traceback.clear_frames(failure.__traceback__)  # frames hold registers, and with them memory
            raise
        except Exception as failure:
            error = failure
        else:
            if measured:
                self.profile = measure.tracker.profile()
            assert self.profile is not None
            stats.peak_bytes, stats.peak_at, stats.tiers = self.profile.peak_bytes, self.profile.peak_at, self.profile.tiers
            return Outcome(results, written, self.deleted, numbers, stats)
        finally:
            self.dirty = not done and bool(written or touched)
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
        seen = [f"r{r}: {describe(registers.get(f'r{r}'))}" for r in dict.fromkeys(uses_of(i))]
        what = i.op if isinstance(i, Compute) else str(i.step) if isinstance(i, Collective) else type(i).__name__.lower()
        return RuntimeFailure(
            f"rank {self.rank}: {what} ({i.name}) failed: {said}",
            where=", ".join(w for w in (i.line, i.module, i.phase) if w) + (f"; operands {', '.join(seen)}" if seen else ""),
        )

    # -- the generated function --------------------------------------------------------------------------------------

    def _compile(self, measured: bool) -> Callable[..., Any]:
        head = "def run(slots, inputs, stream, written, touched, measure, trusted):"
        self.comm_bytes = self.collectives = 0
        body = [" " + self._line(k, i, measured) for k, i in enumerate(self.instructions)]
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
        outs = outs_of(i)
        count = f"measure.results({k}, {''.join(f'r{o.reg}, ' for o in outs)})" if outs or i.frees else ""
        if isinstance(i, Read):
            parts = [f"r{i.out.reg} = slots[{i.slot!r}]"]
        elif isinstance(i, Input):
            parts = [f"r{i.out.reg} = inputs[{i.path!r}]"]
        elif isinstance(i, Compute):
            if k not in self.sources:
                self.sources[k] = self._compute(i)
            parts = [self.sources[k], *(self._inside(i) if measured else [])]
        elif isinstance(i, Collective):
            return self._collective(k, i, measured)
        elif isinstance(i, Transfer):
            into = f"r{i.into}" if i.into >= 0 else "None"
            begun = "touched.append(1); " if i.into >= 0 else ""
            parts = [f"{begun}r{i.out.reg} = tiers.move({self._const(i)}, r{i.src}, {into}, device)"]
        elif isinstance(i, Arrive):
            parts = [f"r{i.out.reg} = tiers.arrive(r{i.moved})"]
        elif isinstance(i, Write):
            held = self.liveness.holders[k]
            parts = [f"r{r} = apart(slots[{i.slot!r}], r{i.src}, r{r})" for r in held]
            parts += [f"measure.moved({r}, r{r})" for r in held] if measured else []
            parts += [f"write(slots, written, {i.slot!r}, r{i.src}, {self.liveness.taken[k]})"]
            count = f"measure.wrote({k}, written)"
        elif isinstance(i, Guard):
            meta = self.device.type == "meta"  # a dry run knows no values
            parts = ["pass" if meta else f"check({self._const(i)}, r{i.reg}, trusted)"]
        elif isinstance(i, Delete):
            parts = ["pass"]
        elif isinstance(i, Return):
            own = sorted(self.liveness.shared[k])
            parts = [f"r{r} = r{r}.clone()" + f"; measure.moved({r}, r{r})" * measured for r in own]
            numbers = "".join(f"{path!r}: r{r}, " for path, r in i.numbers)
            value = f"return [{''.join(f'r{r}, ' for r in i.results)}], {{{numbers}}}"
            return "; ".join([*parts, *([f"measure.end({k})"] if measured and own else []), value])
        else:
            raise RuntimeFailure(f"unknown instruction {type(i).__name__}", where=i.name)
        return "; ".join([*parts, *([count] if measured and count else []), *_freed(i.frees)])

    def _compute(self, i: Compute) -> str:
        fills = self._fills(i)
        outs = [(n, o) for n, o in enumerate(i.outs) if o is not None]
        if fills is not None:
            args = {n: i.args[a] for n, a in i.inplace}
            made = []
            for n, o in outs:
                fill = fills[n]
                assert fill is not None
                source = self._tree(args[n]) if n in args else f"filled({self._fill(fill, o.tier)})"
                made.append(f"r{o.reg} = {source}")
            return "; ".join(made)
        kernel = self.liveness.kernel(i.op)
        function = kernels.inplace_kernel(i, kernel).function if i.inplace else kernel.function
        if self.device.type == "meta" and not i.inplace and not kernel.aliases:
            planned = [None if o is None else o.dtype for o in i.outs]
            function = kernels.memoised_on_meta(i.op, function, planned, self.mesh.memo.setdefault("meta results", {}))
        device = self.constants["host"] if outs and outs[0][1].tier != DEVICE else self.device
        args, kwargs = (kernels.evaluate(t, self.mesh, self.coord, device) for t in (i.args, dict(i.kwargs)))
        kwargs = {key: kernels.evaluate(v, self.mesh, self.coord, device) for key, v in kwargs.items()}
        if i.draw is not None:
            call = self._draw(i, outs[0][1], args, kwargs)
        else:
            if self.device.type == "meta" and i.op != SIZE and outs and all(o.dtype is None for _, o in outs):
                function = kernels.numbers_on_meta(function)
            given = [self._tree(a) for a in args] + [f"{key}={self._tree(v)}" for key, v in kwargs.items()]
            call = self._of_rows(i, f"{self._const(function)}({', '.join(given)})")
        if i.inplace:
            call = f"(touched.append(1), {call})[1]"
        if not outs:
            return call
        if not kernel.sequence:
            return f"r{outs[0][1].reg} = {call}"
        if len(outs) == len(i.outs):
            return f"{', '.join(f'r{o.reg}' for _, o in outs)}, = {call}"
        picked = "; ".join(f"r{o.reg} = several[{n}]" for n, o in outs)
        return f"several = {call}; {picked}; del several"

    def _of_rows(self, i: Compute, call: str) -> str:
        """A call that takes the largest of rows that data selects: a rank without any adds the identity, as `kernels.skipped`
        has it where the plan knows that a part is empty."""
        rows = [r for r in uses_of(i) if self.ragged.dims(self.outs[r].spec)]
        outs = outs_of(i)
        spec, dtype = (outs[0].spec, outs[0].dtype) if len(outs) == 1 else (None, None)
        ops = {op for _, op in spec.partial} - {"sum"} if spec is not None else set()
        if not rows or spec is None or dtype is None or len(ops) != 1 or self.ragged.dims(spec):
            return call
        fill = (self._shape(spec), dtype, identity(ops.pop(), dtype))
        return f"({call} if {' and '.join(f'r{r}.numel()' for r in rows)} else filled({self._fill(fill)}))"

    def _inside(self, i: Compute) -> list[str]:
        """Source that counts what the kernel of a Compute holds beyond its results."""
        outs = outs_of(i)
        found = None
        here = bool(outs) and outs[0].dtype is not None and outs[0].tier == DEVICE
        if here and i.draw is None and not i.inplace and self._fills(i) is None:
            found = workspace_of(i.op, self.liveness.kernel(i.op).function, self.kind)
        if found is None:
            return []
        args = self._tree(tuple(kernels.evaluate(i.args, self.mesh, self.coord, self.device)))
        return [f"measure.inside({self._const(found)}, {args}, {', '.join(f'r{o.reg}' for o in outs)})"]

    def _draw(self, i: Compute, out: Out, args: Any, kwargs: Mapping[str, Any]) -> str:
        assert out.spec is not None and out.dtype is not None
        if self.device.type == "meta":
            return f"filled({self._fill((self._shape(out.spec), out.dtype, None))})"
        given = f"{i.op!r}, {self._tree(tuple(args))}, {{{', '.join(f'{k!r}: {self._tree(v)}' for k, v in kwargs.items())}}}"
        spec, dtype = self._const(out.spec), self._const(out.dtype)
        return f"stream.draw({given}, {spec}, mesh, coord, {i.draw}, {dtype}, device, {i.order})"

    def _shape(self, spec: ShardSpec) -> tuple[int, ...]:
        """Local shape; layers repeat, so that few specs are evaluated."""
        if spec not in self.shapes:
            self.shapes[spec] = spec.local_shape(self.mesh, self.coord)
        return self.shapes[spec]

    def _fills(self, i: Compute) -> tuple[kernels.Fill | None, ...] | None:
        regs = uses_of(i)
        specs = [*(self.outs[r].spec for r in regs), *(o.spec for o in i.outs if o is not None)]
        if any(self.ragged.dims(s) for s in specs):
            return None  # the kernel is given the rows that there are, perhaps none
        if not any(s is not None and 0 in self._shape(s) for s in specs):
            return None
        return kernels.skipped(i, self.outs, self.mesh, self.coord)

    def _fill(self, fill: kernels.Fill, tier: str = DEVICE) -> str:
        shape, dtype, value = fill
        return f"{shape}, {self._const(dtype)}, {'device' if tier == DEVICE else 'host'}, {self._tree(value)}"

    def _collective(self, k: int, i: Collective, measured: bool) -> str:
        """A step: pack, start, wait, unpack; the operand dies as soon as it is packed."""
        assert i.out.dtype is not None
        step, out, done = i.step, f"r{i.out.reg}", self.liveness.last[k]
        if self.mesh.axes[step.axis] == 1:
            part = f"{out} = r{i.src}"
        elif step.kind == "slice":  # copied where a view would keep the whole value alive for the sake of a part of it
            cut = f"{self._ragged(i)}.cut" if self.ragged.dims(step.src) else self._const(self._move(i, False).cut)
            part = f"{out} = {cut}(r{i.src}, {done})"
        elif self.ragged.dims(step.src):
            self.comm_bytes += step.nbytes(i.out.dtype, self.mesh)
            self.collectives += 1
            return f"move = {self._ragged(i)}; " + self._sent(k, i, "move.open", "move.close", measured)
        else:
            move = self._move(i, done)
            if not move.silent:
                self.comm_bytes += step.nbytes(i.out.dtype, self.mesh)
                self.collectives += 1
                return self._sent(k, i, self._const(move.open), self._const(move.close), measured)
            part = f"{out} = filled({self._fill((move.shape, i.out.dtype, None))})"
        return "; ".join([part, *([f"measure.results({k}, {out})"] if measured else []), *_freed(i.frees)])

    def _ragged(self, i: Collective) -> str:
        """Source of the move of a tensor whose shape is known when it is there."""
        return f"ragged.move({self._const(i.step)}, {self._const(i.out.dtype)}, mesh, coord, r{i.src})"

    def _sent(self, k: int, i: Collective, opens: str, closes: str, measured: bool) -> str:
        early, late = [r for r in i.frees if r == i.src], [r for r in i.frees if r != i.src]
        parts = [f"x = {opens}(r{i.src}, {i.name!r})"]
        parts += [f"measure.opened({k}, x, {early})"] if measured else []
        parts += [*_freed(early), "yield Wait((yield x))", "x.inp = None"]
        parts += ["measure.sent()"] if measured else []
        parts += [f"r{i.out.reg} = {closes}(x)"]
        parts += [f"measure.received({k}, r{i.out.reg})"] if measured else []
        return "; ".join([*parts, "del x", *_freed(late)])

    def _move(self, i: Collective, reuse: bool) -> Move:
        """The move of a step; equal steps (of repeated layers) share it."""
        assert i.out.dtype is not None
        reuse = reuse and i.step.kind == "all_reduce"
        key = (i.step, i.out.dtype, reuse)
        if key not in self.moves:
            self.moves[key] = Move(i.step, i.out.dtype, self.mesh, self.coord, reuse)
        return self.moves[key]


def _freed(registers: Sequence[int]) -> list[str]:
    return [f"del {', '.join(f'r{r}' for r in registers)}"] if registers else []
