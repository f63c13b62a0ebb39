"""Where a compiled step runs: all ranks in this process (`LocalHost`; also the one rank of a plain script), or one rank of a
process group (`ProcessHost`). A host turns the user's tensors into each rank's parts, runs the executors, and gives back what
the user gets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor

from shardc.capture.world import World
from shardc.errors import AgreementError, InputError, RuntimeFailure
from shardc.instructions import Guard, Input, Return
from shardc.options import Options
from shardc.plan import Plan
from shardc.program import TensorType
from shardc.runtime.accounting import Stats
from shardc.runtime.agree import agree, digest, exchange
from shardc.runtime.batch import chunk_rows, global_rows, unchunk_rows
from shardc.runtime.executor import Executor, Outcome
from shardc.runtime.layout import assemble, cut, split
from shardc.runtime.process import ProcessGroupCommunicator
from shardc.runtime.rng import CounterStream, Stream, TorchStream
from shardc.runtime.simulate import simulate
from shardc.runtime.state import Values, own_part, rest, shard_module_state, take_up, to_local
from shardc.runtime.tiers import Tiers, verified
from shardc.runtime.world import Ranks
from shardc.spec import Factor, P, ShardSpec
from shardc.tiers import DEVICE, Offload


@dataclass(frozen=True)
class Call:
    """One call, as the ranks agree on it.

    Args:
        types: global types of the tensor inputs.
        rows: for inputs that are split by rows: dim 0 on each rank, in rank order (process groups only).
    """

    types: dict[str, TensorType]
    rows: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Finished:
    """What a run leaves for the user: global results, and the slots that changed."""

    results: list[Any]
    created: dict[str, Tensor]
    deleted: set[str]
    numbers: dict[str, Any]
    stats: list[Stats]
    failed: tuple[Guard, Any] | None = None
    """The guard that did not hold, with what it found: nothing has changed, and there are no results."""


class Host(Protocol):
    ranks: Ranks

    def meet(self, world: World, options: Options, signature: str, static: Callable[[], str]) -> Call: ...

    def agree(self, what: Mapping[str, str]) -> None: ...

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what each rank does alone: if it fails on one, the others are told and stop too."""

    def place(self, world: World, plan: Plan, owners: Sequence[object], values: Values | None = None) -> bool:
        """Put state where the plan wants it; True if the user's objects were replaced (observe anew)."""

    def executors(self, plan: Plan) -> list[Executor]: ...

    def run(
        self,
        executors: Sequence[Executor],
        plan: Plan,
        world: World,
        call: Call,
        inputs: Mapping[str, Any],
        streams: Streams,
        trusted: int = 0,
    ) -> Finished:
        """Run a step; `trusted` of the first guards are known to hold. The caller commits `streams`."""


class Streams:
    """Makes the random stream of each rank for one step."""

    def __init__(self, options: Options, seed: int, step: int) -> None:
        self.kind, self.seed, self.step = options.rng, seed, step
        self.start = torch.default_generator.get_state() if self.kind == "torch" else None
        self.generators: list[torch.Generator] = []

    def make(self) -> Stream:
        if self.start is None:
            return CounterStream(self.seed, self.step)
        generator = torch.Generator()
        generator.set_state(self.start)
        self.generators.append(generator)
        return TorchStream(generator)

    def commit(self) -> None:
        """The default generator goes on from where the step left it."""
        if self.generators:
            torch.default_generator.set_state(self.generators[0].get_state())


def check_rows(types: Mapping[str, TensorType], options: Options) -> None:
    """Refuse a global batch without rows."""
    for path, t in types.items():
        if t.shape and t.shape[0] == 0 and not _overridden(path, options) and options.batch:
            raise InputError(f"the global batch has no rows: {path} is {t}", where=path,
                             hint="skip the step when no data is left")  # fmt: skip


def row_axes(path: str, t: Tensor, options: Options) -> tuple[str, ...]:
    """The axes over which dim 0 of an input is split."""
    if not t.dim():
        return ()
    p = _overridden(path, options)
    if p is None:
        return options.batch
    entry = p[0] if len(p) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)  # type: ignore[arg-type]


def _overridden(path: str, options: Options) -> P | None:
    return next((p for pattern, p in options.inputs.items() if fnmatchcase(path, pattern)), None)


class LocalHost:
    """All ranks of a simulated mesh, or the single rank of a process without a process group. The user's tensors stay whole."""

    def __init__(self, ranks: Ranks, options: Options) -> None:
        self.ranks, self.mesh = ranks, ranks.mesh
        self.tiers = [Tiers(Offload.of(options.offload).folder, rank) for rank in range(ranks.mesh.size)]

    def meet(self, world: World, options: Options, signature: str, static: Callable[[], str]) -> Call:
        if options.inputs_are == "local" and self.mesh.size > 1:
            raise InputError("inputs_are='local' on a simulated mesh: there is one caller", hint="pass the global batch")
        types = {path: TensorType.of(t) for path, t in world.inputs.items()}
        check_rows(types, options)
        return Call(types)

    def agree(self, what: Mapping[str, str]) -> None:
        pass

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def place(self, world: World, plan: Plan, owners: Sequence[object], values: Values | None = None) -> bool:
        adopt = _adopter(self.tiers[0], plan, self.ranks.device) if self.mesh.size == 1 else None
        return shard_module_state(
            world.slots.values(), _storage(plan), self.ranks, owners, compare=False, values=values, adopt=adopt
        )

    def executors(self, plan: Plan) -> list[Executor]:
        return [
            Executor(plan.instructions, self.mesh, c, self.ranks.device, tiers=tiers)
            for c, tiers in zip(self.mesh.coords(), self.tiers, strict=True)
        ]

    def run(
        self,
        executors: Sequence[Executor],
        plan: Plan,
        world: World,
        call: Call,
        inputs: Mapping[str, Any],
        streams: Streams,
        trusted: int = 0,
    ) -> Finished:
        specs = _storage(plan)
        n = self.mesh.size
        slots: list[dict[str, Tensor]] = [{} for _ in range(n)]
        adopt = [_adopter(tiers, plan, self.ranks.device) for tiers in self.tiers]
        for path, ref in world.slots.items():
            if n == 1:
                adopt[0](path, ref.get())
            for k, part in enumerate(split(ref.get(), specs[path], self.mesh)):
                if n > 1:
                    adopt[k](path, part)
                slots[k][path] = part
        given: list[dict[str, Any]] = [{} for _ in range(n)]
        wanted = _input_specs(plan)
        for path, value in inputs.items():
            parts = (
                _input_parts(value, wanted[path], self.mesh, self.ranks.device)
                if path in wanted and isinstance(value, Tensor)
                else [value] * n
            )
            for mine, part in zip(given, parts, strict=True):
                mine[path] = part
        outcomes = simulate(executors, slots, given, [streams.make() for _ in range(n)], trusted)
        if outcomes[0].failed is not None:
            return Finished([], {}, set(), {}, [o.stats for o in outcomes], outcomes[0].failed)
        created: dict[str, Tensor] = {}
        for path in outcomes[0].written:
            known = world.slots.get(path)
            parts = [verified(o.written[path]) for o in outcomes] if n > 1 else [outcomes[0].written[path]]
            if known is None:
                created[path] = assemble(parts, specs[path], self.mesh)
            elif n > 1:
                assemble(parts, specs[path], self.mesh, out=known.get().detach())
        results = [
            assemble([o.results[k] for o in outcomes], spec, self.mesh)
            if spec is not None and isinstance(outcomes[0].results[k], Tensor)
            else outcomes[0].results[k]
            for k, spec in enumerate(_result_specs(plan))
        ]
        return Finished(results, created, set(outcomes[0].deleted), outcomes[0].numbers, [o.stats for o in outcomes])


class ProcessHost:
    """One rank of a process group. Parameters, gradients and optimizer state are DTensors over this rank's parts."""

    def __init__(self, ranks: Ranks, options: Options) -> None:
        self.ranks, self.mesh = ranks, ranks.mesh
        self.local = options.inputs_are != "global"
        self.communicator = ProcessGroupCommunicator(self.mesh, ranks.coord, ranks.group)
        self.tiers = Tiers(Offload.of(options.offload).folder, ranks.rank)

    def meet(self, world: World, options: Options, signature: str, static: Callable[[], str]) -> Call:
        first = {path: t.shape[0] if t.dim() else -1 for path, t in world.inputs.items()}
        rows = exchange(
            self.ranks, digest(signature), list(first.values()), lambda: {"call": signature, "static values": static()}
        )
        table = {path: [row[k] for row in rows] for k, path in enumerate(first)}
        types, split_by_rows = {}, {}
        for path, t in world.inputs.items():
            mine = TensorType.of(t)
            axes = row_axes(path, t, options)
            if axes and self.local:
                total = global_rows(self.ranks, table[path], axes, where=path)
                types[path] = TensorType((total, *mine.shape[1:]), mine.dtype)
                split_by_rows[path] = table[path]
            else:
                odd = next((r for r, n in enumerate(table[path]) if n != table[path][0]), None)
                if odd is not None:
                    raise InputError(
                        f"{path} is the same on all ranks, but dim 0 is {table[path][0]} on rank 0 "
                        f"and {table[path][odd]} on rank {odd}",
                        where=path, hint="pass the same tensor on all ranks, or split it over the batch axis with inputs={...}",
                    )  # fmt: skip
                types[path] = mine
        check_rows(types, options)
        return Call(types, split_by_rows)

    def agree(self, what: Mapping[str, str]) -> None:
        agree(self.ranks, what)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, (AgreementError, RuntimeFailure)):  # those were raised on all ranks
                with contextlib.suppress(AgreementError, RuntimeFailure):
                    agree(self.ranks, {what: f"failed: {type(error).__name__}: {error}"})
            raise

    def place(self, world: World, plan: Plan, owners: Sequence[object], values: Values | None = None) -> bool:
        adopt = _adopter(self.tiers, plan, self.ranks.device)
        return shard_module_state(world.slots.values(), _storage(plan), self.ranks, owners, values=values, adopt=adopt)

    def executors(self, plan: Plan) -> list[Executor]:
        return [Executor(plan.instructions, self.mesh, self.ranks.coord, self.ranks.device, tiers=self.tiers)]

    def run(
        self,
        executors: Sequence[Executor],
        plan: Plan,
        world: World,
        call: Call,
        inputs: Mapping[str, Any],
        streams: Streams,
        trusted: int = 0,
    ) -> Finished:
        specs = _storage(plan)
        slots = take_up(world.slots.values(), specs, {p: s.type for p, s in plan.slots.items()}, self.ranks)
        adopt = _adopter(self.tiers, plan, self.ranks.device)
        for path, ref in world.slots.items():
            if adopt(path, own_part(ref.get())):
                slots[path] = to_local(ref.get())
        wanted = _input_specs(plan)
        given = {
            path: self._input(path, value, wanted[path], call) if path in wanted and isinstance(value, Tensor) else value
            for path, value in inputs.items()
        }
        outcome: Outcome = self.communicator.drive(executors[0], executors[0].run(slots, given, streams.make(), trusted))
        if outcome.failed is not None:
            return Finished([], {}, set(), {}, [outcome.stats], outcome.failed)
        created = {}
        for path, t in outcome.written.items():
            if path not in world.slots:
                slot = plan.slots[path]
                created[path] = rest(t, slot.kind, slot.of, specs[path], slot.type, self.ranks, path)
        results = [self._result(value, spec, call) for value, spec in zip(outcome.results, _result_specs(plan), strict=True)]
        return Finished(results, created, set(outcome.deleted), outcome.numbers, [outcome.stats])

    def _input(self, path: str, value: Tensor, spec: ShardSpec, call: Call) -> Tensor:
        value = value.detach().to(self.ranks.device)
        if path not in call.rows:
            return cut(value, spec, self.mesh, self.ranks.coord, self.ranks.device)
        first = spec.dims[0][0]
        value = chunk_rows(self.ranks, value, call.rows[path], first.axes)
        return (
            cut(value, _rest_of(spec, value), self.mesh, self.ranks.coord, self.ranks.device)
            if len(spec.axes) > len(first.axes)
            else value
        )

    def _result(self, value: Any, spec: ShardSpec | None, call: Call) -> Any:
        if not isinstance(value, Tensor) or spec is None or not spec.axes or not call.rows:
            return value
        first = spec.dims[0][0]
        rows = next((r for path, r in call.rows.items() if call.types[path].shape[0] == first.size), None)
        if rows is None:
            return value
        return unchunk_rows(self.ranks, value, rows, first.axes, inner=spec.shape[0] // first.size)


def _rest_of(spec: ShardSpec, value: Tensor) -> ShardSpec:
    """`spec` for a tensor whose rows are already cut."""
    return ShardSpec(((Factor(value.shape[0]),), *spec.dims[1:]))


def _input_parts(value: Tensor, spec: ShardSpec, mesh: Any, device: torch.device) -> list[Tensor]:
    value = value.detach().to(device)
    return split(value, spec, mesh)


def _adopter(tiers: Tiers, plan: Plan, device: torch.device) -> Callable[[str, Tensor], bool]:
    """Puts a rank's part of a slot where it rests; False where that is the device."""

    def adopt(path: str, t: Tensor) -> bool:
        tier = plan.slots[path].tier
        tiers.adopt(path, t, tier, device)
        return tier != DEVICE

    return adopt


def _storage(plan: Plan) -> dict[str, ShardSpec]:
    return {path: slot.storage for path, slot in plan.slots.items() if slot.storage is not None}


def _input_specs(plan: Plan) -> dict[str, ShardSpec]:
    return {i.path: i.out.spec for i in plan.instructions if isinstance(i, Input) and i.out.spec is not None}


def _result_specs(plan: Plan) -> tuple[ShardSpec | None, ...]:
    end = plan.instructions[-1]
    assert isinstance(end, Return)
    return end.specs
