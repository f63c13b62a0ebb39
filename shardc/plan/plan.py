"""The plan: what every rank will do, and everything that can be said about it before it runs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardc.errors import PlanError
from shardc.instructions import Guard, Input, Instruction, Reg, Return, outs_of
from shardc.mesh import Mesh
from shardc.ops import INPLACE
from shardc.options import bytes_of
from shardc.plan import printing
from shardc.plan.alias import Aliases
from shardc.plan.build import instructions_of
from shardc.plan.communication import Communication, tally
from shardc.plan.diff import difference
from shardc.plan.explain import explain
from shardc.plan.garbage import rarely_collected
from shardc.plan.memory import Memory, Sizes, predict_memory
from shardc.plan.replicated import Replicated, find_replicated
from shardc.plan.roles import Roles
from shardc.plan.serialize import FORMAT, Decoder, Encoder, decode_mesh, digest, encode_mesh, plain
from shardc.plan.sizing import Again, formula, largest_batch
from shardc.plan.timing import Time, predict
from shardc.plan.uneven import Uneven, find_uneven
from shardc.program import Program, Slot, TensorType, alike


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled step. Made by `build` or `Plan.load`; `str` is the one-page printout.

    Args:
        instructions: one list for all ranks, ending in a `Return`.
        mesh: the device mesh.
        slots: path -> slot, storage and compute specs filled in.
        entry: paths of the slots that exist when the step starts.
        kept: paths of those that exist when it ends.
        inputs: path -> global type of the tensor inputs.
        options: the options of `shardc.compile` as plain data, for printing.
        why: node name -> the reason for its spec, where one is recorded.
        notes: lines for the end of the printout.
        stages: name of a pass -> the program after it (its text, in a plan that was loaded).
        replicated: what is held or computed whole on every rank, by choice or for want of a rule.
        again: how the step is planned at other sizes, in a plan that `step.lower` returned.
    """

    instructions: tuple[Instruction, ...]
    mesh: Mesh
    slots: Mapping[str, Slot]
    entry: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    inputs: Mapping[str, TensorType] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stages: Mapping[str, Program | str] = field(default_factory=dict)
    replicated: tuple[Replicated, ...] = ()
    again: Again | None = None

    def with_again(self, again: Again) -> Plan:
        """The same plan, its predictions included, which knows how it is made at other sizes."""
        out = replace(self, again=again)
        out.__dict__.update({k: v for k, v in self.__dict__.items() if k not in {f.name for f in fields(self)}})
        return out

    # -- predictions -------------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Sizes:
        """Local shapes at the coordinate with the largest parts."""
        return Sizes(self.mesh)

    @cached_property
    def aliases(self) -> Aliases:
        return Aliases(self.instructions)

    @cached_property
    def roles(self) -> Roles:
        return Roles(self.instructions, self.slots, self.aliases, self.batch)

    @cached_property
    def memory(self) -> Memory:
        """Predicted memory of the worst rank."""
        with rarely_collected():
            return predict_memory(self.instructions, self.slots, self.entry, self.mesh, self.aliases, self.roles)

    @cached_property
    def _timing(self) -> tuple[Time, dict[str, float]]:
        return predict(self.instructions, self.mesh, self.sizes, self.aliases)

    @property
    def time(self) -> Time:
        """Predicted time of a step on the mesh's hardware profile."""
        return self._timing[0]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Predicted seconds of each instruction, by name."""
        return self._timing[1]

    @cached_property
    def communication(self) -> Communication:
        """Collectives of a step by kind, axis, phase and what they move."""
        return tally(self.instructions, self.mesh, self.roles, self._timing[1])

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes over which the batch is split."""
        given = self.options.get("batch", ("dp",))
        return (given,) if isinstance(given, str) else tuple(given or ())

    def largest_batch(self, budget: int | str) -> int:
        """The most rows of the global batch (the same number on each rank that shares it) whose predicted peak fits.

        With ``recompute="auto"`` the plan that needs least memory counts. The step is planned anew at several sizes.

        Args:
            budget: bytes, or text like ``"80GiB"``.

        Returns:
            0 if one row a rank does not fit.

        Raises:
            PlanError: a plan that `step.lower` did not return.
        """
        unit = 1
        for axis in self.batch:
            unit *= self.mesh.axes[axis]
        return largest_batch(self._again(), bytes_of(budget, "budget"), unit)

    def peak_formula(self, *sizes: str) -> Any:
        """The predicted peak as a sympy expression: the maximum of polynomials, exact where ranks share evenly.

        Args:
            *sizes: what to vary, each a symbol of the expression: "batch" (rows of the global batch), "length" (dim 1 of the
                inputs), names of mesh axes. The step is planned anew at several sizes of each.

        Raises:
            PlanError: a plan that `step.lower` did not return; a peak that is no such expression.
        """
        return formula(self._again(), self.mesh, sizes or ("batch",))

    def _again(self) -> Again:
        if self.again is None:
            raise PlanError("this plan does not know its step at other sizes", hint="plan = step.lower(*args)")
        return self.again

    @cached_property
    def uneven(self) -> tuple[Uneven, ...]:
        """State and inputs whose split is uneven, with what that costs."""
        return find_uneven(self.slots, self.instructions, self.mesh)

    @property
    def gathers_in_backward(self) -> int:
        """Gathers of parameters that the backward repeats instead of keeping the forward's result."""
        return sum(
            r.count for r in self.communication if r.group == "parameters" and r.phase == "backward" and r.kind == "all_gather"
        )

    @cached_property
    def guards(self) -> tuple[Guard, ...]:
        """The decisions on values that this plan is right for, in order."""
        return tuple(i for i in self.instructions if isinstance(i, Guard))

    # -- identity ----------------------------------------------------------------------------------------------------

    @cached_property
    def hash(self) -> str:
        """sha256 of what the plan does: mesh, state, inputs, instructions. The same on all ranks and in all processes; source
        lines, options and notes are not part of it."""
        encode = Encoder()
        code = [encode.instruction(i) for i in self.instructions]
        for i in code:
            i.pop("line", None)
            i.pop("module", None)
            i.pop("text", None)
        slots = [{k: v for k, v in encode.slot(s).items() if k != "aliases"} for s in self.slots.values()]
        inputs = [[path, encode.type(t)] for path, t in self.inputs.items()]
        return digest([FORMAT, [[n, s] for n, s in self.mesh.axes.items()], slots, list(self.entry), inputs, code])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    # -- reading -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return printing.render(self)

    def __repr__(self) -> str:
        return f"<Plan {self.hash[:6]}: {len(self.instructions)} instructions, mesh {self.mesh}>"

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def makers(self) -> Mapping[Reg, str]:
        """Register -> name of the instruction that makes it."""
        return {o.reg: i.name for i in self.instructions for o in outs_of(i)}

    def explain(self, name: str) -> str:
        """Everything about one slot (by path, alias, or path within its module) or one node (by name).

        Raises:
            PlanError: nothing of that name.
        """
        return explain(self, name)

    def diff(self, other: Plan) -> str:
        """What differs from this plan to another, as text."""
        return difference(self, other)

    # -- JSON --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        encode = Encoder()
        return {
            "format": FORMAT,
            "hash": self.hash,
            "mesh": encode_mesh(self.mesh),
            "options": plain(self.options),
            "slots": [encode.slot(s) for s in self.slots.values()],
            "entry": list(self.entry),
            "kept": list(self.kept),
            "inputs": [[path, encode.type(t)] for path, t in self.inputs.items()],
            "notes": list(self.notes),
            "why": dict(self.why),
            "replicated": [[r.name, r.bytes, r.reason, r.where] for r in self.replicated],
            "instructions": [encode.instruction(i) for i in self.instructions],
            "stages": {name: str(program) for name, program in self.stages.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=None, allow_nan=False))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """Raises:
        PlanError: another format version, malformed data, or content that does not match its hash.
        """
        if data.get("format") != FORMAT:
            raise PlanError(
                f"this plan has format {data.get('format')!r}, this version of shardc reads format {FORMAT}",
                hint="make the plan again",
            )
        decode = Decoder()
        try:
            plan = Plan(
                instructions=tuple(decode.instruction(i) for i in data["instructions"]),
                mesh=decode_mesh(data["mesh"]),
                slots={s["path"]: decode.slot(s) for s in data["slots"]},
                entry=tuple(data["entry"]),
                kept=tuple(data["kept"]),
                inputs={path: decode.type(t) for path, t in data["inputs"]},
                options=data["options"],
                why=data["why"],
                notes=tuple(data["notes"]),
                stages=data["stages"],
                replicated=tuple(Replicated(*r) for r in data["replicated"]),
            )
            found = data["hash"]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise PlanError(f"this is not a saved plan: {type(e).__name__}: {e}", hint="plan.save(path) writes one") from e
        if plan.hash != found:
            raise PlanError(f"the saved plan was changed: its content has hash {plan.hash[:12]}, it says {str(found)[:12]}")
        return plan

    @staticmethod
    def load(path: str | Path) -> Plan:
        """A plan that `save` wrote.

        Raises:
            PlanError: no such file, not JSON, or see `from_json`.
        """
        try:
            data = json.loads(Path(path).read_text())
        except OSError as e:
            raise PlanError(f"cannot read a plan: {e}", where=str(path)) from e
        except ValueError as e:
            raise PlanError(f"a saved plan is JSON: {e}", where=str(path)) from e
        if not isinstance(data, dict):
            raise PlanError("a saved plan is a JSON object", where=str(path))
        return Plan.from_json(data)

    def check_fits(self, slots: Mapping[str, Slot], inputs: Mapping[str, TensorType], mesh: Mesh) -> None:
        """Whether the plan is one for this model, these inputs and this mesh.

        Args:
            slots: path -> slot; storage specs are compared where they are known.
            inputs: path -> global type.

        Raises:
            PlanError: the first difference, by name, with both sides.
        """
        if mesh != self.mesh:
            raise PlanError(f"this plan is for mesh {self.mesh}, the mesh here is {mesh}", hint="make a plan for this mesh")
        _same("state", {p: s.type for p, s in self.slots.items()}, {p: s.type for p, s in slots.items()})
        _same("input", self.inputs, inputs)
        for path, slot in slots.items():
            mine = self.slots[path].storage
            if slot.storage is not None and mine is not None and not slot.storage.same(mine, mesh):
                raise PlanError(
                    f"{path} rests as {mine} in this plan, as {slot.storage} with the options here",
                    where=path, hint=f"compile with the options of the plan: {self._own_options()}",
                )  # fmt: skip

    def check_budget(self, budget: int | None) -> None:
        """Whether the plan keeps a memory budget, in bytes.

        Raises:
            PlanError: it does not; names both numbers and where the plan's peak is.
        """
        if budget is not None and self.memory.peak_bytes > budget:
            raise PlanError(
                f"this plan needs {self.memory.peak_bytes:,} bytes, memory_budget is {budget:,}",
                where=str(self.memory.peak_at), hint="leave plan= out, so that one that fits is sought",
            )  # fmt: skip

    def _own_options(self) -> str:
        given = {k: v for k, v in self.options.items() if v not in (None, {}, []) and k != "mesh"}
        return ", ".join(f"{k}={v!r}" for k, v in given.items()) or "none are recorded"

    def mismatch(self, program: Program) -> str | None:
        """Why this plan does not serve a program of the same model: another variant of the step (for example the first call,
        which creates optimizer state), or another step. None if it does."""
        mine: dict[str, Any] = {"state on entry": set(self.entry), "state after the step": set(self.kept)}
        mine["inputs"] = {i.path for i in self.instructions if isinstance(i, Input)}
        theirs: dict[str, Any] = {"state on entry": set(program.entry), "state after the step": set(program.exit)}
        theirs["inputs"] = {*program.inputs, *program.numbers}
        for what, names in mine.items():
            if names != theirs[what]:
                only = sorted(names ^ theirs[what])
                side = "plan" if only[0] in names else "program"
                return f"{what}: {only[0]} is in the {side} only ({len(only)} such)"
        decided = [i.expected for i in self.guards]
        if len(decided) != len(program.guards) or not all(map(alike, decided, (g.expected for g in program.guards))):
            return f"guards: {decided}, the program has {[g.expected for g in program.guards]}"
        end = self.instructions[-1]
        assert isinstance(end, Return), "a plan ends with a Return"
        counts = (len(end.results), [path for path, _ in end.numbers])
        wanted = (len(program.results), list(program.number_exit))
        if counts != wanted:
            return f"results: {counts[0]} and numbers {counts[1]}, the program has {wanted[0]} and {wanted[1]}"
        return None


def _same(what: str, mine: Mapping[str, TensorType], theirs: Mapping[str, TensorType]) -> None:
    for path, t in mine.items():
        if path not in theirs:
            near = difflib.get_close_matches(path, [p for p in theirs if p not in mine], 1)
            missing = sum(p not in theirs for p in mine)
            raise PlanError(
                f"this plan is for another model: its {what} {path} ({t}) is not here ({missing} missing of {len(mine)})",
                where=path, hint=f"is it {near[0]}?" if near else "make a plan for this model",
            )  # fmt: skip
        if (theirs[path].shape, theirs[path].dtype) != (t.shape, t.dtype):
            raise PlanError(f"this plan is for another model: {what} {path} is {t} there, {theirs[path]} here", where=path,
                            hint="make a plan for this model and these inputs: step.lower(...).save(path)")  # fmt: skip
    extra = [p for p in theirs if p not in mine]
    if extra:
        raise PlanError(
            f"this plan is for another model: {what} {extra[0]} ({theirs[extra[0]]}) is not in it ({len(extra)} such)",
            where=extra[0],
            hint="make a plan for this model: step.lower(...).save(path)",
        )


def build(program: Program, *, options: Mapping[str, Any], stages: Mapping[str, Program]) -> Plan:
    """The plan of a scheduled, partitioned program; graph order is execution order.

    Args:
        options: the options of `shardc.compile`; printed, and read for `batch`, `zero`, `memory_budget`.
        stages: name of a pass -> the program after it.

    Raises:
        PlanError: a program that is not fully partitioned.
    """
    assert program.mesh is not None, "a partitioned program has a mesh"
    code = instructions_of(program, {op: form.aliases for op, form in INPLACE.items()})
    why = {n.name: info.why for n, info in program.info.items() if info.why}
    return Plan(
        instructions=code,
        mesh=program.mesh,
        slots=dict(program.slots),
        entry=tuple(program.entry),
        kept=tuple(program.exit),
        inputs={path: program.type(node) for path, node in program.inputs.items()},
        options=plain(options),
        why=why,
        notes=tuple(program.notes),
        stages=dict(stages),
        replicated=find_replicated(program, code, options),
    )
