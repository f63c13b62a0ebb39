"""recompute: activations that the backward computes again instead of keeping.

Before: a backward node may use any forward value. After: it uses only values that are kept; of the others it has a copy of
phase backward, computed from kept ones just before its first use. Random operators draw the same numbers again; parameters are
gathered anew, as any read of the backward; updates of buffers are not repeated.

``recompute="full"`` keeps the values at the waists of the forward: those points where a single activation is alive, such as the
residual stream between two blocks, and what lives through most of the forward (a mask, an encoder's output).
``recompute={"save": ["attn_out"]}`` keeps the values that model code named with `shardc.save_name`.

Example: ``h = gelu(up(x)); y = down(h)`` with ``x`` and ``y`` kept: the backward of ``down`` has its own ``gelu(up(x))``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from shardc.errors import OptionError
from shardc.options import Options
from shardc.passes.graphs import Rewriter, is_getitem, is_op, kept
from shardc.program import Phase, Program

LONG = 0.5
"""Values that live through more than this share of the forward are kept."""

WORTH = 4
"""A waist is kept where it stands for at least so many times its bytes of activations."""

SAVE = torch.ops.shardc.save_name.default


def recompute(program: Program, options: Options) -> Program:
    policy = options.recompute
    if policy is None or policy == "auto":  # see the ladder
        return program
    saved = _waists(program) if policy == "full" else _named(program, policy)
    saved |= kept(program) | set(program.versions)
    dropped = {n for n in _activations(program) if (is_op(n) or is_getitem(n)) and n not in saved}
    return repeat(program, dict.fromkeys(dropped, 0), {})


def repeat(program: Program, dropped: Mapping[fx.Node, int], twins: Mapping[fx.Node, fx.Node]) -> Program:
    """The backward computes its own copies of `dropped` nodes of the forward, each just before its first use.

    Args:
        dropped: operators, steps and their getitems, none of which changes state; each with the place in the program of the
            first node that sees the copy (0: all of the backward).
        twins: nodes of the forward -> nodes of the backward that make the same from state alone: these come early instead.
    """
    return _Recomputation(program, dropped, twins).run()


def _forward(program: Program) -> list[fx.Node]:
    return [n for n in program.compute_nodes() if program.info[n].phase == Phase.FORWARD]


def _activations(program: Program) -> set[fx.Node]:
    """Forward tensors that depend on an input."""
    out: set[fx.Node] = set()
    inputs = set(program.inputs.values())
    for node in _forward(program):
        if any(n in out or n in inputs for n in node.all_input_nodes):
            out.add(node)
    return out


def _waists(program: Program) -> set[fx.Node]:
    """Values that are alone at some point of the forward, and long-lived ones."""
    nodes = _forward(program)
    place = {n: k for k, n in enumerate(nodes)}
    activations = _activations(program)
    last = {n: max((place[u] for u in n.users if u in place), default=place[n]) for n in nodes if n in activations}
    saved = {n for n, end in last.items() if end - place[n] > LONG * len(nodes)}
    alive: set[fx.Node] = set()
    since = 0  # bytes of activations since the last waist that is kept
    for k, node in enumerate(nodes):
        alive = {n for n in alive if last[n] > k}
        if node in last and node not in saved and last[node] > k:
            alive.add(node)
        if node not in last or node in saved or not program.is_tensor(node):
            continue
        since += program.type(node).nbytes
        if alive == {node} and not is_getitem(node) and since >= WORTH * program.type(node).nbytes:
            saved.add(node)
            since = 0
    return saved


def _named(program: Program, policy: Mapping[str, list[str]]) -> set[fx.Node]:
    found = {node: str(node.args[1]) for node in program.compute_nodes() if node.target is SAVE}
    unknown = [name for name in policy["save"] if name not in found.values()]
    if unknown:
        names = ", ".join(sorted(set(found.values()))) or "none"
        raise OptionError(
            f"recompute saves {unknown[0]!r}, but no value has that name",
            hint=f"shardc.save_name(x, {unknown[0]!r}) in model code; the names are {names}",
        )
    return {node for node, name in found.items() if name in policy["save"]}


class _Recomputation(Rewriter):
    def __init__(self, program: Program, dropped: Mapping[fx.Node, int], twins: Mapping[fx.Node, fx.Node]) -> None:
        super().__init__(program)
        self.dropped, self.twins, self.now = dropped, twins, 0
        self.again: dict[fx.Node, fx.Node] = {}  # forward node -> its copy in the backward

    def run(self) -> Program:
        draws = {}
        for place, node in enumerate(self.old.nodes):
            if node.op == "output":
                break
            self.now = place
            if node in self.env:  # a twin that was needed early
                continue
            if node.op == "call_function" and self.old.info[node].phase == Phase.BACKWARD:
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.value)
                self.env[node] = self.call(node.target, args, kwargs, self.old.info[node], node.name)  # type: ignore[arg-type]
            else:
                self.copy(node)
        for old, draw in self.old.draws.items():
            draws[self.env[old]] = draw
            if old in self.again:
                draws[self.again[old]] = draw
        outputs = {path: self.copies_of(nodes) for path, nodes in self.old.outputs.items()}
        return self.finish(draws=draws, outputs=outputs)

    def copies_of(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """What modules return, and return again."""
        return tuple(table[n] for n in nodes for table in (self.env, self.again) if n in table)

    def value(self, node: fx.Node) -> fx.Node:
        """What the backward node at hand sees of `node`: itself if it is kept, else its copy."""
        stack = [node]
        while stack:
            top = stack[-1]
            if not self.gone(top) or top in self.again:
                stack.pop()
                continue
            if top in self.twins:
                self.again[top] = self.early(self.twins[top])
                stack.pop()
                continue
            todo = [n for n in top.all_input_nodes if self.gone(n) and n not in self.again]
            if todo:
                stack.extend(todo)
                continue
            args, kwargs = fx.node.map_arg((top.args, dict(top.kwargs)), self.seen)
            info = self.old.info[top].but(phase=Phase.BACKWARD)
            self.again[top] = self.call(top.target, args, kwargs, info)  # type: ignore[arg-type]
            stack.pop()
        return self.seen(node)

    def gone(self, node: fx.Node) -> bool:
        return node in self.dropped and self.dropped[node] <= self.now

    def seen(self, node: fx.Node) -> fx.Node:
        return self.again[node] if self.gone(node) else self.env[node]

    def early(self, node: fx.Node) -> fx.Node:
        """A node of the backward, and what it needs, here."""
        stack = [node]
        while stack:
            todo = [n for n in stack[-1].all_input_nodes if n not in self.env]
            if todo:
                stack.extend(todo)
            else:
                top = stack.pop()
                if top not in self.env:
                    self.copy(top)
        return self.env[node]
