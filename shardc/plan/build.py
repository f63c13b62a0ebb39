"""build: a scheduled, partitioned program -> the instruction list of a plan.

Graph order is execution order. On top of the lowered nodes this file decides when state is overwritten (as early as no later
instruction can see the old value), which operators work in place, where a copy is needed so that results and new state own
their storage, and where registers die.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardc.errors import PlanError
from shardc.instructions import (
    Compute,
    Delete,
    Guard,
    Input,
    Instruction,
    Out,
    Read,
    Ref,
    Reg,
    Return,
    Transfer,
    Write,
    outs_of,
    uses_of,
)
from shardc.plan.alias import Aliases, last_uses
from shardc.plan.lower import Lowered, lower
from shardc.program import Program, TensorType
from shardc.spec import ShardSpec

Pairs = tuple[tuple[int, int], ...]
"""(result, argument position) pairs of an operator with an in-place form."""


def instructions_of(program: Program, inplace: Mapping[str, Pairs]) -> tuple[Instruction, ...]:
    """The instruction list of a program.

    Args:
        program: partitioned; every tensor has a spec.
        inplace: operator name -> which results may take over the storage of which arguments.

    Raises:
        PlanError: a value that does not rest in the storage spec of its slot, or a node that a plan cannot hold.
    """
    return _Builder(program, inplace).run()


class _Builder:
    def __init__(self, program: Program, inplace: Mapping[str, Pairs]) -> None:
        self.program, self.forms = program, inplace
        self.low: Lowered = lower(program)
        self.code = self.low.instructions
        self.exits = {path: self.low.reg[node] for path, node in program.exit.items()}
        self.results = [self.low.reg[node] for node in program.results]
        self.numbers = tuple((path, self.low.reg[node]) for path, node in program.number_exit.items())
        self.names = {i.name for i in self.code}
        self.aliases = Aliases(self.code)
        self.maker: dict[Reg, Instruction] = {o.reg: i for i in self.code for o in outs_of(i)}
        self.copies: dict[str, list[Compute]] = {}

    def run(self) -> tuple[Instruction, ...]:
        self._check_exits()
        self._guards()
        self._own_results()
        self._in_place()
        self._own_results()  # a result may by now lie in a slot's storage
        self._own_created()
        self._writes()
        self.code.append(self._return())
        self._check_moves()
        return tuple(_with_frees(self.code))

    # -- values that leave the step ----------------------------------------------------------------------------------

    def _check_exits(self) -> None:
        mesh = self.program.mesh
        assert mesh is not None, "a partitioned program has a mesh"
        for path, node in self.program.exit.items():
            slot, spec = self.program.slots.get(path), self.program.info[node].spec
            if slot is None:
                raise PlanError(f"the step writes {path}, which is no slot of the program")
            if slot.storage is None or not isinstance(spec, ShardSpec) or not spec.same(slot.storage, mesh):
                raise PlanError(
                    f"the new value of {path} is {spec}, its storage is {slot.storage}",
                    where=self.program.info[node].where, hint="the partition pass reshards exits to the storage spec",
                )  # fmt: skip

    def _own_results(self) -> None:
        """What the step returns never shares storage with state: the next step would change it under the user."""
        for k, reg in enumerate(self.results):
            if self.aliases.out[reg].dtype is not None and self.aliases.owner(reg) is not None:
                self.results[k] = self._clone(reg, "returned")
        self._flush()

    def _own_created(self) -> None:
        """A slot that the step creates takes a tensor that nothing else owns, whole and in the slot's layout."""
        taken = [self.aliases.root[r] for r in self.exits.values()]
        given = {self.aliases.root[r] for r in self.results}
        for path, reg in self.exits.items():
            if path in self.program.entry:
                continue
            root = self.aliases.root[reg]
            shared = root in self.aliases.slot or root in self.aliases.input or root in given or taken.count(root) > 1
            if shared or not self._fits(reg, root, self.program.slots[path].type):
                form = _format(self.program.slots[path].type)
                self.exits[path] = self._clone(reg, "kept", form)
        self._flush()

    def _fits(self, reg: Reg, root: Reg, slot: TensorType) -> bool:
        mine, base = self.low.types.get(reg), self.low.types.get(root)
        if mine is None or base is None or mine.numel != base.numel:
            return False
        return not slot.stride or not mine.stride or _stride(slot) == _stride(mine)

    def _clone(self, reg: Reg, suffix: str, form: torch.memory_format | None = None) -> Reg:
        """A copy of a register right after it is made; it enters the code at the next `_flush`."""
        made, old = self.maker[reg], self.aliases.out[reg]
        new = Out(self.low.next_reg, old.spec, old.dtype, old.tier)
        self.low.next_reg += 1
        kwargs: tuple[tuple[str, Any], ...] = () if form is None else (("memory_format", form),)
        copy = Compute(
            name=self._name(f"{made.name}_{suffix}"), phase=made.phase, module=made.module, line=made.line,
            op="aten.clone.default", args=(Ref(reg),), kwargs=kwargs, outs=(new,),
        )  # fmt: skip
        self.copies.setdefault(made.name, []).append(copy)
        self.maker[new.reg] = copy
        self.low.types[new.reg] = self.low.types[reg]
        self.aliases.add(copy)
        return new.reg

    def _flush(self) -> None:
        """Put pending copies where they belong: after their source, or after the placeholders where that is one of them."""
        if not self.copies:
            return
        code: list[Instruction] = []
        late: list[Compute] = []
        for i in self.code:
            if late and not isinstance(i, (Read, Input)):
                code, late = [*code, *late], []
            code.append(i)
            copies = self.copies.pop(i.name, [])
            if isinstance(i, (Read, Input)):
                late += copies
            else:
                code += copies
        self.code = [*code, *late]

    def _name(self, wish: str) -> str:
        name, k = wish, 1
        while name in self.names:
            name, k = f"{wish}_{k}", k + 1
        self.names.add(name)
        return name

    # -- guards ------------------------------------------------------------------------------------------------------

    def _guards(self) -> None:
        """Insert each guard as soon as its number is there, but not before the guards that Python asked for first."""
        made = {o.reg: k for k, i in enumerate(self.code) for o in outs_of(i)}
        after: dict[int, list[Instruction]] = {}
        at = -1
        for index, g in enumerate(self.program.guards):
            reg = self.low.reg[g.node]
            maker = self.maker[reg]
            at = max(at, made[reg])
            after.setdefault(at, []).append(
                Guard(
                    name=self._name(f"guard_{g.node.name}"), phase=maker.phase, module=maker.module, line=g.line or maker.line,
                    reg=reg, expected=g.expected, index=index, text=g.text,
                )
            )  # fmt: skip
        if after:
            first = next((k for k, i in enumerate(self.code) if not isinstance(i, (Read, Input))), len(self.code)) - 1
            early = [g for k in sorted(after) if k < first for g in after.pop(k)]  # placeholders come first
            if early:
                after[first] = [*early, *after.get(first, [])]
            self.code = [x for k, i in enumerate(self.code) for x in (i, *after.get(k, ()))]

    def _barrier(self) -> int:
        """Position of the last guard: state may be overwritten after it only. -1 without guards."""
        return max((k for k, i in enumerate(self.code) if isinstance(i, Guard)), default=-1)

    # -- in place ----------------------------------------------------------------------------------------------------

    def _in_place(self) -> None:
        """Mark operators whose result may take over the storage of an operand that dies there.

        The operand must be the whole of its storage, and no register that shares it may be read later, nor leave the step.
        Operands that live on are copied first, so that an operator is in place as a whole or not at all; if none of them
        dies, nothing is gained and it stays functional.
        """
        if not any(isinstance(i, Compute) and i.op in self.forms for i in self.code):
            return
        last = last_uses(self.code)
        for reg in (*self.exits.values(), *self.results, *(r for _, r in self.numbers)):
            last[reg] = len(self.code)
        until: dict[Reg, int] = {}
        members: dict[Reg, list[Reg]] = {}
        for reg, root in self.aliases.root.items():
            until[root] = max(until.get(root, -1), last[reg])
            members.setdefault(root, []).append(reg)
        root_of = dict(self.aliases.root)
        whole = set(self.aliases.same)
        barrier = self._barrier()
        code: list[Instruction] = []
        for k, i in enumerate(self.code):
            pairs = self.forms.get(i.op) if isinstance(i, Compute) else None
            if pairs is None:
                code.append(i)
                continue
            assert isinstance(i, Compute)
            pairs = tuple((r, a) for r, a in pairs if a < len(i.args) and isinstance(i.args[a], Ref) and i.outs[r] is not None)
            roots = [root_of[r] for r in uses_of(i) if r in root_of]
            args, copied = list(i.args), []
            for result, a in pairs:
                reg = i.args[a].reg
                root = root_of[reg]
                free = reg in whole and until[root] <= k and roots.count(root) == 1 and root not in self.aliases.input
                free = free and (k > barrier or root not in self.aliases.slot)
                if free:
                    taken = i.outs[result]
                    assert taken is not None
                    until[root] = max(until[root], until[taken.reg])  # of the result and of its views
                    for shared in members.pop(taken.reg):
                        root_of[shared] = root
                        members[root].append(shared)
                else:
                    copied.append(a)
            if pairs and len(copied) < len(pairs):
                for a in copied:
                    old = self.aliases.out[i.args[a].reg]
                    new = Out(self.low.next_reg, old.spec, old.dtype, old.tier)
                    self.low.next_reg += 1
                    self.low.types[new.reg] = self.low.types[old.reg]
                    copy = Compute(
                        name=self._name(f"{i.name}_copy"), phase=i.phase, module=i.module, line=i.line,
                        op="aten.clone.default", args=(Ref(old.reg),), outs=(new,),
                    )  # fmt: skip
                    code.append(copy)
                    self.maker[new.reg] = copy
                    args[a] = Ref(new.reg)
                i = replace(i, args=tuple(args), inplace=pairs)
            code.append(i)
        self.code = code
        self.aliases = Aliases(code)

    # -- writes and deletes ------------------------------------------------------------------------------------------

    def _writes(self) -> None:
        """Insert each write after its value exists and after the last read of anything that lies in the slot's storage."""
        real: dict[str, Reg] = {}
        done: dict[str, Reg] = {}
        for path, reg in list(self.exits.items()):
            if self.aliases.owner(reg) == path:
                if reg in self.aliases.same:
                    if reg in self.aliases.updated:
                        done[path] = reg  # updated in place: the slot's storage already holds it
                    continue
                self.exits[path] = reg = self._clone(reg, "moved")  # a write would read what it overwrites
            real[path] = reg
        order, readers = self._write_order(real)
        self._flush()
        made = {o.reg: k for k, i in enumerate(self.code) for o in outs_of(i)}
        last = last_uses(self.code)
        reads: dict[str, int] = {}
        for reg, root in self.aliases.root.items():
            if (owner := self.aliases.slot.get(root)) is not None:
                reads[owner] = max(reads.get(owner, -1), last[reg])
        at: dict[str, int] = {}
        barrier = self._barrier()
        for path in order:
            before = [at[other] for other in readers.get(path, ()) if other in at]
            at[path] = max([made[real[path]], reads.get(path, -1), barrier, *before])
        at |= {path: made[reg] for path, reg in done.items()}
        after: dict[int, list[Instruction]] = {}
        for path in [*done, *order]:
            reg = done[path] if path in done else real[path]
            maker = self.maker[reg]
            after.setdefault(at[path], []).append(
                Write(name=self._name(f"write_{path}"), phase=maker.phase, module=path, line=maker.line, slot=path, src=reg)
            )
        end = len(self.code) - 1
        for path in self.program.entry:
            if path not in self.exits:
                k = max(reads.get(path, 0), *(at[o] for o in readers.get(path, ()) if o in at), 0)
                after.setdefault(min(k, end), []).append(
                    Delete(name=self._name(f"delete_{path}"), phase="update", module=path, slot=path)
                )
        code: list[Instruction] = list(after.pop(-1, []))
        for k, i in enumerate(self.code):
            code += [i, *after.pop(k, [])]
        self.code = code

    def _write_order(self, real: dict[str, Reg]) -> tuple[list[str], dict[str, list[str]]]:
        """Slots in the order of their writes, and slot -> slots whose new value lies in its old storage (they go first)."""
        readers: dict[str, list[str]] = {}
        for path, reg in real.items():
            owner = self.aliases.owner(reg)
            if owner is not None and owner != path and (owner in real or owner not in self.exits):
                readers.setdefault(owner, []).append(path)
        order: list[str] = []
        open_: set[str] = set()
        done: set[str] = set()
        for start in real:
            stack = [start]
            while stack:
                path = stack[-1]
                if path in done:
                    stack.pop()
                    continue
                open_.add(path)
                for r in [r for r in readers.get(path, []) if r in open_ and r not in done]:
                    real[r] = self.exits[r] = self._clone(real[r], "swapped")  # state that swaps places: one is copied first
                    readers[path].remove(r)
                todo = [r for r in readers.get(path, []) if r not in done]
                if todo:
                    stack.append(todo[0])
                else:
                    done.add(path)
                    order.append(path)
                    stack.pop()
        return order, readers

    def _check_moves(self) -> None:
        """What is moved into the resting place of a slot comes after all guards, and after all that reads the old value."""
        members: dict[Reg, list[Reg]] = {}
        for reg, root in self.aliases.root.items():
            if reg not in self.aliases.updated:
                members.setdefault(root, []).append(reg)
        last, barrier = last_uses(self.code), self._barrier()
        for k, i in enumerate(self.code):
            if isinstance(i, Transfer) and i.into >= 0:
                late = [r for r in members[self.aliases.root[i.into]] if last[r] > k]
                if late or k < barrier:
                    reader = self.code[last[late[0]] if late else barrier].name
                    raise PlanError(f"{i.name} overwrites {i.module} before {reader} has run",
                                    where=i.line, hint="this is a bug of shardc: please report it")  # fmt: skip

    def _return(self) -> Return:
        specs = tuple(self.aliases.out[r].spec for r in self.results)
        return Return(name=self._name("return"), phase="update", results=tuple(self.results), specs=specs, numbers=self.numbers)


def _with_frees(code: Sequence[Instruction]) -> list[Instruction]:
    """Each register is freed by the last instruction that reads it; results that nothing reads, where they are made."""
    dead: dict[int, list[Reg]] = {}
    for reg, k in last_uses(code).items():
        dead.setdefault(k, []).append(reg)
    return [i if isinstance(i, Return) else replace(i, frees=tuple(sorted(dead.get(k, ())))) for k, i in enumerate(code)]


def _stride(t: TensorType) -> tuple[int, ...]:
    """Strides that matter: those of dims of more than one element."""
    return tuple(s for n, s in zip(t.shape, t.stride, strict=True) if n > 1)


def _format(t: TensorType) -> torch.memory_format:
    """The memory format in which a copy has the strides of `t`."""
    contiguous: list[int] = []
    n = 1
    for size in reversed(t.shape):
        contiguous.insert(0, n)
        n *= max(size, 1)
    if not t.stride or _stride(t) == tuple(s for k, s in zip(t.shape, contiguous, strict=True) if k > 1):
        return torch.contiguous_format
    if len(t.shape) == 4:
        return torch.channels_last
    return torch.channels_last_3d if len(t.shape) == 5 else torch.preserve_format
