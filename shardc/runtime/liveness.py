"""Which registers may share a storage, and which of them still live, at each instruction of a list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardc.instructions import (
    Arrive,
    Collective,
    Compute,
    Input,
    Instruction,
    Read,
    Reg,
    Return,
    Transfer,
    Write,
    outs_of,
    refs,
    uses_of,
)
from shardc.mesh import Mesh
from shardc.runtime import kernels

Root = tuple[str, object]
"""Where a storage comes from: ("slot", path), ("input", path), or ("new", register)."""


class Liveness:
    """Answers about aliases, by position in the list. Operators may alias as their schemas say; the answers err on the side
    of sharing.

    Args:
        instructions: the list, with its frees.
        mesh: steps over axes of one rank pass their operand on.
    """

    def __init__(self, instructions: Sequence[Instruction], mesh: Mesh) -> None:
        self._roots: dict[Reg, frozenset[Root]] = {}
        self._live: defaultdict[Root, set[Reg]] = defaultdict(set)
        self._kernels: dict[str, kernels.Kernel] = {}
        self._outlive: set[Root] = set()  # storages that something outside the registers holds
        self.holders: dict[int, tuple[Reg, ...]] = {}
        """Write -> the registers that live on and may hold the slot's old value in the slot's storage."""
        self.taken: dict[int, bool] = {}
        """Write -> whether state, an input or a result may hold the storage of the register that is written."""
        self.last: dict[int, bool] = {}
        """Collective -> whether the storage of its operand dies with it."""
        self.shared: dict[int, frozenset[Reg]] = {}
        """Return -> the results that may share a storage with state or inputs."""
        for k, i in enumerate(instructions):
            self._answer(k, i)
            self._define(i, mesh)
            for reg in i.frees:
                for root in self._roots.get(reg, ()):
                    self._live[root].discard(reg)

    def _answer(self, k: int, i: Instruction) -> None:
        if isinstance(i, Write):
            roots = self._roots.get(i.src, frozenset())
            held = self._live[("slot", i.slot)] - {i.src, *i.frees}
            self.holders[k] = tuple(sorted(held))
            self.taken[k] = bool(roots & self._outlive)
            self._outlive |= roots
        elif isinstance(i, Collective):
            roots = self._roots.get(i.src, frozenset())
            alone = all(self._live[root] == {i.src} for root in roots)
            self.last[k] = i.src in i.frees and alone and not roots & self._outlive
        elif isinstance(i, Return):
            self.shared[k] = frozenset(r for r in i.results if self._roots.get(r, frozenset()) & self._outlive)

    def _define(self, i: Instruction, mesh: Mesh) -> None:
        for n, out in enumerate(i.outs if isinstance(i, Compute) else outs_of(i)):
            if out is None or out.dtype is None:
                continue
            roots: frozenset[Root] = frozenset([("new", out.reg)])
            if isinstance(i, (Read, Input)):
                roots = frozenset([("slot", i.slot) if isinstance(i, Read) else ("input", i.path)])
                self._outlive |= roots
            elif isinstance(i, (Transfer, Arrive)):
                of = i.into if isinstance(i, Transfer) else i.moved
                roots = self._roots.get(of, roots)
            elif isinstance(i, Collective):
                if i.step.kind == "slice" or mesh.axes[i.step.axis] == 1:
                    roots = self._roots.get(i.src, frozenset())
            elif isinstance(i, Compute):
                taken = [arg for result, arg in i.inplace if result == n]
                sources = list(refs(i.args[taken[0]])) if taken else uses_of(i) if self._may_alias(i) else []
                roots = roots | frozenset(root for reg in sources for root in self._roots.get(reg, ()))
            self._roots[out.reg] = roots
            for root in roots:
                self._live[root].add(out.reg)

    def _may_alias(self, i: Compute) -> bool:
        return i.draw is None and self.kernel(i.op).aliases

    def kernel(self, op: str) -> kernels.Kernel:
        """`kernels.resolve`, once for each operator."""
        if op not in self._kernels:
            self._kernels[op] = kernels.resolve(op)
        return self._kernels[op]
