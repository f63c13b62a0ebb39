"""`shardc.compile`: the decorator, and the object that it makes of a training step."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from shardc import passes
from shardc.arguments import has_state, static_values, tier_now
from shardc.capture import OVERFLOW, Captured, InputsChanged, Scaled, SlotRef, World, capture, observe
from shardc.checkpoint.restore import Loading
from shardc.checkpoint.steps import Checkpoints
from shardc.decide import PlaceFirst, decider, dry
from shardc.errors import CaptureError, OptionError, PlanError, ShardcError, StateError
from shardc.hosts import Call, Finished, Host, LocalHost, ProcessHost, Streams, check_rows, row_axes
from shardc.instructions import Guard
from shardc.mesh import Mesh
from shardc.options import Options
from shardc.plan import Plan, build
from shardc.plan.garbage import rarely_collected
from shardc.program import Program, TensorType
from shardc.runtime.disk import disk_note
from shardc.runtime.state import Watch
from shardc.runtime.whole import full_state_dict
from shardc.runtime.world import setup
from shardc.sizes import Sizes
from shardc.tiers import DISK, Offload
from shardc.variants import StepStats, Variant, Variants, same_key

DryRun = Callable[["CompiledStep", tuple[Any, ...], dict[str, Any]], None]
_dry_run: contextvars.ContextVar[DryRun | None] = contextvars.ContextVar("shardc_dry_run", default=None)


SHOWN = (
    "zero", "batch", "params", "activations", "microbatches", "recompute", "offload", "memory_budget", "precision", "rng",
    "seed", "inputs_are",
)  # fmt: skip
"""Options that a plan remembers and prints."""


@contextlib.contextmanager
def dry_run(instead: DryRun) -> Iterator[None]:
    """While inside, calling a compiled step calls ``instead(step, args, kwargs)`` first."""
    token = _dry_run.set(instead)
    try:
        yield
    finally:
        _dry_run.reset(token)


def compile(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile an ordinary single-device training step into a sharded one.

    Args:
        fn: the step. Modules and optimizers among its arguments are state, tensors are inputs, all else is static.
        mesh: ``{"dp": 2, "tp": 2}`` or `shardc.Mesh`; one axis may be -1. Default ``{"dp": -1}``.
        batch: axis name(s) over which dim 0 of every input tensor is split; default "dp".
        inputs: ``{"mask": P()}``: specs of single inputs by pytree path (fnmatch patterns).
        inputs_are: "local" (each rank passes its own part; default under process groups) or "global".
        zero: 0 replicates, 1 shards optimizer state, 2 also gradients while they accumulate, 3 also parameters.
        params: ``{"*.qkv.weight": P("tp", None)}``: specs of parameters by name pattern.
        activations: ``{"*.mlp": P("dp", "tp")}``: specs of what modules return, by the name pattern of the module.
        microbatches: how many parts of the batch are computed one after another; the result is that of the whole batch.
        recompute: activations that the backward computes again: "full" (all but the waists), "auto" (what is worth its time,
            or what the budget needs), or all but ``{"save": [names]}`` of `shardc.save_name`.
        offload: ``{"optimizer": "host", "params": "disk", "gradients": "host", "activations": "host"}``, any of them: what
            rests in host memory or on disk between its uses; also "staging" (a bound in bytes), "folder" (of the disk's files).
        memory_budget: bytes, or "16GiB": the most that a rank may hold. The fastest plan that fits is taken, else it is an
            error that says what would fit. Leaves `recompute` at "auto" where it is not given.
        precision: "bf16" or "fp16": what forward and backward compute in; weights and optimizer state keep their dtype.
            "fp16" scales the loss dynamically, inside the step.
        plan: path of a saved plan to run.
        seed, rng: of the random stream: "counter" (default; no dependence on the mesh) or "torch" (torch's own numbers).
        max_variants: bound on captured variants.

    Returns:
        A `CompiledStep`, called like `fn`; without `fn` a decorator.

    Raises:
        OptionError, MeshError: options that do not hold.

    Example::

        @shardc.compile(mesh={"dp": 2}, zero=3)
        def train_step(model, optimizer, x, y): ...
    """
    if fn is None:
        parsed = Options.of(options)
        return lambda f: CompiledStep(f, parsed)
    if not callable(fn):
        raise OptionError(f"shardc.compile takes a function, not {type(fn).__name__}", hint="@shardc.compile(mesh=...)")
    return CompiledStep(fn, Options.of(options))


class CompiledStep:
    """A training step that runs sharded. Made by `shardc.compile`.

    Attributes:
        plan: the `Plan` of the variant that ran last (or was lowered last).
        stats: what the last step cost, measured.
        variants: all captured variants, each with the reason for it.
    """

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.options = fn if options.precision != "fp16" else Scaled(fn), options
        self.__name__: str = getattr(fn, "__name__", type(fn).__name__)
        self.variants = Variants()
        self.stats: StepStats | None = None
        self.step = 0
        self._host: Host | None = None
        self._plan: Plan | None = None
        self._arguments: dict[str, Any] = {}
        self._watch = Watch()
        self._poisoned: str | None = None
        self._seed: int | None = options.seed
        self._kept: frozenset[str] = frozenset()  # see `World.kept`
        self.checkpoints = Checkpoints()

    @property
    def plan(self) -> Plan:
        """Of the variant that ran last.

        Raises:
            PlanError: nothing has run yet.
        """
        if self._plan is None:
            raise PlanError(f"{self.__name__} has no plan yet", hint="call it, or step.lower(*args)")
        return self._plan

    @property
    def loss_scale(self) -> float | None:
        """The present scale of ``precision="fp16"``; None with any other precision."""
        return self.fn.loss_scale.scale.item() if isinstance(self.fn, Scaled) else None

    def replan(self, **changes: Any) -> CompiledStep:
        """The same function with other options."""
        given = {k: getattr(self.options, k) for k in self.options.__dataclass_fields__} | changes
        if changes.get("memory_budget") is not None and self.options.memory_budget is None and self.options.recompute is None:
            given = {k: v for k, v in given.items() if k != "recompute" or k in changes}
        if (
            "batch" not in changes
            and isinstance(changes.get("mesh"), Mesh)
            and not set(self.options.batch) <= set(changes["mesh"].axes)
        ):
            del given["batch"]
        return CompiledStep(inspect.unwrap(self.fn) if isinstance(self.fn, Scaled) else self.fn, Options.of(given))

    # -- running ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        instead = _dry_run.get()
        if instead is not None:
            instead(self, args, kwargs)
        if self._poisoned is not None:
            raise StateError(
                f"the state is that of half a step: {self._poisoned}", hint="shardc.load(path, step) a checkpoint, or stop"
            )
        world, host = self._seen(args, kwargs)
        loading = self.checkpoints.loading
        if loading is not None:
            with host.together("checkpoint"):
                loading.prepare(world.arguments, self.fn, host.ranks)
                self._kept |= loading.kept
                world = self._observe(args, kwargs)
        call = host.meet(world, self.options, self._signature(world), lambda: static_values(world))
        known: list[Any] = []  # decisions of this call, as far as they are known
        failed: Guard | None = None
        while True:
            variant = self.variants.find(world, call.types, known)
            new = variant is None
            if variant is None:
                try:
                    variant, world = self._new(args, kwargs, world, call, host, known, failed)
                except InputsChanged as found:
                    return self._keep(found)(*args, **kwargs)
            if new or loading is not None:
                world = self._place(args, kwargs, world, host, variant.plan)
            if loading is not None:
                self._fill(loading, world, host)
                loading, known = None, []  # what was decided on the values before does not count
            slots = {re.split(r"[.\[]", path, maxsplit=1)[0] for path in world.slots}  # EMA lists, trainers that hold the model
            self._arguments = {name: value for name, value in world.arguments.items() if name in slots or has_state(value)}
            done, streams = self._run(variant, world, call, host, len(known))
            if done.failed is None:
                break
            failed, value = done.failed
            known = [*(g.expected for g in variant.captured.program.guards[: failed.index]), value]
        out = self._commit(variant, world, done, streams)
        if variant.captured.effects.created or variant.captured.effects.deleted or variant.calls == 1:
            world = self._observe(args, kwargs)
        self._watch.remember(world.slots.values())
        return out

    def _keep(self, found: InputsChanged) -> CompiledStep:
        """Tensors in arguments that the step changes are state from here on."""
        if not found.nested or found.paths <= self._kept:
            raise found
        self._kept |= found.paths
        return self

    def _seen(self, args: Any, kwargs: Any) -> tuple[World, Host]:
        """What the call can reach, checked against what the last step left; and where the step runs."""
        if self._host is None:
            world = self._observe(args, kwargs)
            host = self._settled(world)
            if isinstance(self.fn, Scaled):  # beside the model
                self.fn.loss_scale.to(next((t.device for t in map(SlotRef.get, world.slots.values()) if not t.is_meta), "cpu"))
                world = self._observe(args, kwargs)
            return world, host
        with self._host.together("call"):
            world = self._observe(args, kwargs)
            self._watch.check(world.slots.values())
        return world, self._host

    def _place(self, args: Any, kwargs: Any, world: World, host: Host, plan: Plan) -> World:
        """Put state where plans want it; returns the world as it is then."""
        owners = [*world.arguments.values(), *(o.value for o in world.outside)]
        with host.together("state"):
            moved = host.place(world, plan, owners, self.checkpoints.loading)
        host.agree({"state": "in place"})
        return self._observe(args, kwargs) if moved else world

    def _fill(self, loading: Loading, world: World, host: Host) -> None:
        """The values of a checkpoint go into state that is in place."""
        self._poisoned = "a checkpoint was loaded in part"
        with host.together("checkpoint"):
            loading.fill(world.arguments, self.fn, host.ranks)
        self._poisoned = self.checkpoints.loading = None

    def _new(
        self, args: Any, kwargs: Any, world: World, call: Call, host: Host, known: list[Any], failed: Guard | None
    ) -> tuple[Variant, World]:
        """Capture and compile a variant for this call, whose decisions begin with `known`; those that it took are added."""
        while True:
            try:
                with host.together("program"):
                    try:
                        variant = self._compile(args, kwargs, world, call, host, known, failed)
                    except Exception as error:
                        self._changed_alone(args, kwargs, world, call, error)
                        raise
            except PlaceFirst as first:
                world = self._place(args, kwargs, world, host, first.plan)
            else:
                break
        host.agree({"plan": variant.plan.hash, "program": str(variant.captured.program)})
        self.variants.append(variant)
        known[:] = [g.expected for g in variant.captured.program.guards]
        return variant, world

    def _changed_alone(self, args: Any, kwargs: Any, world: World, call: Call, error: Exception) -> None:
        """A tensor that is state was taken for a part of the batch, and its shape did not fit: see whether it is changed.

        Raises:
            InputsChanged: it is.
        """
        own = {path: TensorType.of(t) for path, t in world.inputs.items()}
        if isinstance(error, (InputsChanged, PlaceFirst)) or own == call.types:
            return
        try:
            capture(self.fn, args, kwargs, world, own, self.options.mesh.kind, precision=self.options.precision)
        except InputsChanged as found:
            raise found from error
        except Exception:  # of any kind: the first error tells
            return

    def _run(self, variant: Variant, world: World, call: Call, host: Host, trusted: int) -> tuple[Finished, Streams]:
        inputs: dict[str, Any] = {**world.inputs, **variant.captured.constants, **world.numbers}
        streams = Streams(self.options, self._seed or 0, self.step)
        try:
            return host.run(variant.executors, variant.plan, world, call, inputs, streams, trusted), streams
        except ShardcError as e:
            if any(x.dirty for x in variant.executors) and not (isinstance(host, LocalHost) and host.mesh.size > 1):
                self._poisoned = e.what
            raise

    def _commit(self, variant: Variant, world: World, done: Finished, streams: Streams) -> Any:
        """The step has run: what it leaves beside the slots goes to the user's objects."""
        streams.commit()
        variant.captured.effects.commit(world, done.created, done.deleted, done.numbers)
        self.step += 1
        self.variants.ran(variant)
        self._plan = variant.plan
        worst = max(done.stats, key=lambda s: s.peak_bytes)
        self.stats = StepStats(
            worst.peak_bytes, worst.peak_at, max(s.comm_bytes for s in done.stats), max(s.collectives for s in done.stats),
            worst.seconds, {k: max(s.tiers.get(k, 0) for s in done.stats) for k in worst.tiers}, tuple(done.stats),
        )  # fmt: skip
        return variant.captured.rebuild(done.results)

    def _settled(self, world: World) -> Host:
        if self._host is None:
            near = [ref.get() for ref in world.slots.values()]
            ranks = setup(self.options.mesh, near)
            self.options = replace(self.options, mesh=ranks.mesh)
            self._host = ProcessHost(ranks, self.options) if ranks.distributed else LocalHost(ranks, self.options)
        if self._seed is None:
            self._seed = torch.initial_seed() & (2**63 - 1)
        return self._host

    def _signature(self, world: World) -> str:
        """What must be equal on all ranks of a call. Static values count through the variant that they select: what a program
        does not depend on (a hash that a library keeps in a config, say) may differ."""
        lines = [f"step: {self.__name__}"]
        for path, t in world.inputs.items():
            lines.append(f"{path}: {t.dtype} [*, {', '.join(map(str, t.shape[1:]))}]" if t.dim() else f"{path}: {t.dtype} []")
        known = (k for k, v in enumerate(self.variants) if same_key(v.world, world) and v.captured.admits(world.numbers))
        lines.append(f"variant by static values: {next(known, 'a new one')}")
        if self.options.rng == "torch":
            lines.append(f"random generator: {zlib.crc32(bytes(torch.default_generator.get_state().tolist()))}")
        return "\n".join(lines)

    def _observe(self, args: Any, kwargs: Any) -> World:
        return observe(self.fn, args, kwargs, {path for v in self.variants for path in v.captured.carried}, self._kept)

    @rarely_collected()
    def _compile(
        self, args: Any, kwargs: Any, world: World, call: Call, host: Host, known: list[Any], failed: Guard | None
    ) -> Variant:
        reason = f"{failed} is now {known[-1]!r}" if failed is not None else self.variants.reason(world, call.types)
        if len(self.variants) >= self.options.max_variants:
            exact = failed is not None and type(failed.expected) is not bool
            raise CaptureError(
                f"{self.__name__} needs more than max_variants={self.options.max_variants} variants; the last: {reason}",
                where=failed.line if failed is not None else "",
                hint="compare tensors, or t.item(), instead of asking for the exact number; or raise max_variants"
                if exact
                else "make what changes at every call a tensor or a number of param_groups, or raise max_variants",
            )
        decide = decider(host, world, call, Streams(self.options, self._seed or 0, self.step), self._built)
        mesh, precision = self.options.mesh, self.options.precision
        captured = capture(self.fn, args, kwargs, world, call.types, mesh.kind, decide, known, precision)
        plan = self._planned(captured, self.options.mesh, world)
        variant = Variant(f"{self.__name__}#{len(self.variants)}", reason, plan, captured, world.summary(), call.types)
        variant.executors = host.executors(plan)
        return variant

    def _planned(self, captured: Captured, mesh: Mesh, world: World) -> Plan:
        slots = {path: replace(slot, tier=tier_now(world, path)) for path, slot in captured.program.slots.items()}
        program = replace(captured.program, mesh=mesh, slots=slots)
        if self.options.plan is None:
            return self._built(program)
        stages = passes.run(program, self.options)
        final = list(stages.values())[-1]
        saved = Plan.load(self.options.plan)
        saved.check_fits(final.slots, {p: final.type(n) for p, n in final.inputs.items()}, mesh)
        reason = saved.mismatch(final)
        if reason is None:
            saved.check_budget(self.options.memory_budget)
            return saved
        final.notes.append(f"not from {self.options.plan}, which is of another variant: {reason}")
        return self._built(program, stages)

    def _built(self, program: Program, stages: dict[str, Program] | None = None) -> Plan:
        stages = stages or passes.run(program, self.options)
        shown = {k: getattr(self.options, k) for k in SHOWN}
        final = list(stages.values())[-1]
        if any(info.tier == DISK for info in final.info.values()):
            final.notes.append(disk_note(Offload.of(self.options.offload).folder))
        return build(final, options=shown, stages=stages)

    # -- planning --------------------------------------------------------------------------------------------------

    @rarely_collected()
    def lower(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of a call, without running it: no process group, no devices; works on meta tensors.

        Args:
            *args, **kwargs: as in a call: on a simulated mesh or with ``inputs_are="global"`` the full batch, else this
                rank's part.

        Returns:
            The steady-state plan, with optimizer state present, also for a fresh optimizer. Where Python decides on values, the
            plan of this very call: it needs real tensors.

        Raises:
            PlanError: a decision on values that are not here.
        """
        world = self._observe(args, kwargs)
        mesh = self.options.mesh
        if -1 in mesh.shape:
            mesh = mesh.resolve(1 if mesh.simulated else int(os.environ.get("WORLD_SIZE", 1)))
        types = self._global_types(world, mesh)
        seed = torch.initial_seed() & (2**63 - 1) if self._seed is None else self._seed
        precision = self.options.precision
        decide = dry(world, Streams(self.options, seed, self.step))
        try:
            captured = capture(self.fn, args, kwargs, world, types, mesh.kind, decide, precision=precision)
        except InputsChanged as found:
            return self._keep(found).lower(*args, **kwargs)
        with captured.effects.pretended(world, captured.program.slots):
            steady = self._observe(args, kwargs)
            later = not same_key(steady, world)
            if later and all(guard.line == OVERFLOW for guard in captured.program.guards):
                captured = capture(self.fn, args, kwargs, steady, types, mesh.kind, decide, precision=precision)
            elif later:
                captured.program.notes.append("of a first call: what later ones decide depends on the state that it leaves")
        self._plan = self._planned(captured, mesh, world)
        return self._plan.with_again(Sizes(self, self._plan, world, types, args, kwargs))

    def _global_types(self, world: World, mesh: Mesh) -> dict[str, TensorType]:
        out = {}
        local = self.options.inputs_are == "local" or (self.options.inputs_are is None and not mesh.simulated)
        for path, t in world.inputs.items():
            mine = TensorType.of(t)
            scale = 1
            for axis in row_axes(path, t, self.options) if local else ():
                scale *= mesh.axes[axis]
            out[path] = mine if scale == 1 else TensorType((mine.shape[0] * scale, *mine.shape[1:]), mine.dtype)
        check_rows(out, self.options)
        return out

    def changed_numbers(self) -> set[str]:
        """Paths of plain attributes that steps so far have changed (a counter on the model)."""
        return {p for v in self.variants for p in (*v.captured.carried, *v.captured.effects.assigned)}

    # -- state -----------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """``{argument name: its state_dict() with whole, plain tensors}``, in argument order. Collective under process groups.

        Raises:
            StateError: the step has not run yet.
        """
        if self._plan is None or not self.step:
            raise StateError(f"{self.__name__} has not run yet", hint="call it first, or use model.state_dict()")
        return full_state_dict(self._arguments)

    def __repr__(self) -> str:
        return (
            f"<shardc step {self.__name__}: mesh {self.options.mesh}, zero {self.options.zero}, {len(self.variants)} variants>"
        )
