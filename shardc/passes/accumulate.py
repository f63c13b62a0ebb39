"""accumulate: run the step in microbatches, one after another, with the result of the whole batch.

Before: a local program over the device axes and the time axis `mb`; a value is split over `mb`, partial over it, or neither.
After: no `mb` is left. What was split or partial is there once for each microbatch, with the sizes of its rows; a reduction
over `mb` is a running sum; what does not depend on `mb` is there once. Constants (the count in a mean) are those of the whole
batch already, since the step was captured on it.

A reduction over `mb` that the body needs (``n = mask.sum()`` in ``loss = (l * mask).sum() / n``) splits the loop: a first loop
computes what it needs, the next one the rest. What is cheap is computed again in the later loop: rows of inputs and of random
numbers, and what pointwise operators make of them (a dropout mask). What else crosses from one loop to a later one is kept for
all microbatches; where that is a good part of the activations (batch normalisation, contrastive losses), microbatches save no
memory: refused.

Parameters are gathered anew in each microbatch, for forward and backward. Random numbers are drawn for all rows of the rank,
and each microbatch takes its own.

Example (mb=2): ``g: [4, 4] +sum@mb; all_reduce@mb`` becomes ``g0; g1; accumulate(g0, g1)``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import fx

from shardc.errors import PlanError
from shardc.instructions import Local, LocalDim, LocalStart
from shardc.mesh import Mesh
from shardc.options import TIME, Options
from shardc.passes.graphs import STEPS, Rewriter, is_cast, is_getitem, is_op, is_random, is_view
from shardc.program import Info, Phase, Program, TensorType, op_name
from shardc.reshard import STEP_OPS, Step
from shardc.spec import Dim, Factor, ShardSpec, canonical_dim, dim_axes

aten = torch.ops.aten
CROSSING = 0.25
"""Share of the saved activations that may be kept between loops."""


def accumulate(program: Program, options: Options) -> Program:
    return _Accumulation(program, options).run() if program.mesh is not None and TIME in program.mesh.axes else program


class _Accumulation(Rewriter):
    def __init__(self, program: Program, options: Options) -> None:
        super().__init__(program)
        assert program.mesh is not None
        self.count = program.mesh.axes[TIME]
        self.batch = tuple(a for a in options.batch if program.mesh.axes[a] > 1)
        self.timed = program.mesh
        self.mesh: Mesh = program.mesh.like({a: n for a, n in program.mesh.axes.items() if a != TIME})
        self.ordered = options.rng == "torch"
        self.total = self._batch_rows()
        self.rows, self.chunk = self._microbatches()
        self.gathered: set[fx.Node] = set()
        self.body = self._body()
        self.loop, self.before = self._loops()
        self.repeated = self._repeated()
        self.copies: dict[tuple[fx.Node, int], fx.Node] = {}
        self._refuse_crossing()

    # -- the shape of the loops ----------------------------------------------------------------------------------------

    def _batch_rows(self) -> int:
        sizes = {self.old.type(self.old.inputs[path]).shape[0]: path for path in reversed(self.old.batched)}
        if len(sizes) != 1:
            raise PlanError(
                f"microbatches={self.count} need inputs of one batch size, these have {sizes or 'none'}",
                hint="give inputs={...: P()} to those that are not split into rows",
            )
        return next(iter(sizes))

    def _microbatches(self) -> tuple[list[int], int]:
        """Global rows of each microbatch, and the rows that a rank with a full part gives to one."""
        held = [Factor(self.total, self.batch).interval(self.mesh, c) for c in self.mesh.coords()]
        parts = [hi - lo for lo, hi in held]
        chunk = -(-max(parts) // self.count)
        replicas = self.mesh.size // math.prod(self.mesh.axes[a] for a in self.batch)
        rows = []
        for i in range(self.count):
            mine = [min(chunk, max(0, n - i * chunk)) for n in parts]
            rows.append(sum(mine) // replicas)
            factor = Factor(rows[-1], self.batch)
            fits = all(
                (hi - lo) == n
                for n, (lo, hi) in zip(mine, (factor.interval(self.mesh, c) for c in self.mesh.coords()), strict=True)
            )
            if rows[-1] and not fits:
                raise PlanError(f"{self.total} rows over {self.mesh} do not cut into {self.count} microbatches",
                                hint="a batch that the batch axes divide")  # fmt: skip
        return [n for n in rows if n], chunk

    def _body(self) -> set[fx.Node]:
        """Nodes of which each microbatch has its own."""
        body: set[fx.Node] = set()
        for node in self.old.nodes:
            if node.op != "call_function":
                continue
            info = self.old.info[node]
            specs = info.spec if isinstance(info.spec, tuple) else (info.spec,)
            split = any(s is not None and (TIME in s.axes or TIME in s.partial_axes) for s in specs)
            if _time_step(node):
                if node.target is STEP_OPS["slice"]:
                    body.add(node)
            elif split or (is_getitem(node) and node.all_input_nodes[0] in body):
                body.add(node)
            elif info.phase != Phase.UPDATE and self._regathered(node):
                self.gathered.add(node)
                body.add(node)
            elif any(n in body and n not in self.gathered for n in node.all_input_nodes):
                raise self._refuse(node, "a number or a whole value of each microbatch")
        return body

    def _regathered(self, node: fx.Node) -> bool:
        """Gathers of parameters, and the views and casts of them. (What is no part of a loop has a gather of its own.)"""
        sources = node.all_input_nodes
        if node.target is STEP_OPS["all_gather"] and (sources[0].op == "placeholder" or is_cast(sources[0])):
            return True
        follows = node.target in STEPS or is_view(node) or is_cast(node)
        return follows and bool(sources) and all(n in self.gathered for n in sources)

    def _loops(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """Body node -> its loop, counted from the last one (0); other node -> the loop before which it has to be there."""
        loop: dict[fx.Node, int] = {}
        before: dict[fx.Node, int] = {}
        for node in reversed(self.old.nodes):
            users = [u for u in node.users if u.op == "call_function"]
            if node in self.body:
                loop[node] = max((loop[u] if u in self.body else before[u] for u in users), default=0)
            else:
                before[node] = max((loop[u] + 1 if u in self.body else before[u] for u in users), default=0)
        return loop, before

    def _repeated(self) -> dict[fx.Node, set[int]]:
        """Cheap body nodes -> the later loops that compute them again."""
        cheap: set[fx.Node] = set()
        for node in self.old.nodes:
            if node not in self.body or node in self.gathered:
                continue
            made_of = [n for n in node.all_input_nodes if n in self.body and n not in self.gathered]
            pointwise = is_op(node) and torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
            light = pointwise or is_cast(node) or is_view(node) or is_getitem(node)
            if _time_step(node) or is_random(node) or (light and all(n in cheap for n in made_of)):
                cheap.add(node)
        out: dict[fx.Node, set[int]] = {}
        for node in reversed(self.old.nodes):
            if node in cheap:
                loops = {loop for u in node.users if u in self.body for loop in (self.loop[u], *out.get(u, ()))}
                if later := {loop for loop in loops if loop < self.loop[node]}:
                    out[node] = later
        return out

    def _refuse_crossing(self) -> None:
        kept = saved = 0
        worst: tuple[int, fx.Node] | None = None
        for node in self.body:
            kind = self.old.info[node].type
            if not isinstance(kind, TensorType) or _time_step(node) or node in self.repeated:
                continue
            users = [u for u in node.users if u in self.body]
            if self.old.info[node].phase == Phase.FORWARD and any(self.old.info[u].phase == Phase.BACKWARD for u in users):
                saved += kind.nbytes
            if any(self.loop[u] < self.loop[node] for u in users):
                kept += kind.nbytes
                if worst is None or kind.nbytes > worst[0]:
                    worst = kind.nbytes, node
        if worst is not None and kept > CROSSING * saved:
            raise self._refuse(worst[1], f"{kept:,} bytes of all microbatches at once (activations: {saved:,} bytes)")

    def _refuse(self, node: fx.Node, what: str) -> PlanError:
        return PlanError(
            f"microbatches={self.count}: {op_name(node.target)} needs {what}, so that splitting the batch would save no memory",
            where=self.old.info[node].where,
            hint="microbatches=1; or a model whose rows do not depend on each other (GroupNorm instead of BatchNorm)",
        )

    # -- the new program -----------------------------------------------------------------------------------------------

    def run(self) -> Program:
        for node in self.old.nodes:
            if node.op == "placeholder":
                self.copy(node)
        order = [n for n in self.old.nodes if n in self.body]
        for loop in range(max(self.loop.values(), default=0), -1, -1):
            for i in range(len(self.rows)):
                for node in order:
                    if self.loop[node] == loop:
                        self.microbatch(node, i)
                    elif loop in self.repeated.get(node, ()):
                        self.microbatch(node, i, again=True)
        for node in self.old.nodes:
            if node.op == "call_function" and node not in self.body:
                self.once(node)
        return self.finish(mesh=self.mesh)

    def once(self, node: fx.Node) -> fx.Node:
        """A node outside of the loops (and what it needs), or the end of a reduction over them."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.env:
                stack.pop()
                continue
            todo = [n for n in top.all_input_nodes if (n not in self.body or n in self.gathered) and n not in self.env]
            if todo:
                stack.extend(reversed(todo))
                continue
            if _time_step(top):
                self.env[top] = self._reduced(top)
            else:
                self._draw_earlier(top)
                self.copy(top)
            stack.pop()
        return self.env[node]

    def microbatch(self, node: fx.Node, i: int, again: bool = False) -> None:
        info = self.old.info[node]
        if _time_step(node):
            self.copies[node, i] = self._rows_of(node, i)
        elif is_random(node):
            self.copies[node, i] = self._cut(self._drawn(node), self.old.spec(node), i, info)
        else:
            args, kwargs = self._args(node, i)
            types = info.type
            specs = info.spec
            if isinstance(types, tuple):
                assert isinstance(specs, tuple)
                pairs = [(t, s if s is None else self._at(s, i, node)) for t, s in zip(types, specs, strict=True)]
                new = info.but(type=tuple(t and _sized(t, s) for t, s in pairs), spec=tuple(s for _, s in pairs))
            else:
                assert isinstance(types, TensorType) and isinstance(specs, ShardSpec)
                spec = self._at(specs, i, node)
                new = info.but(type=_sized(types, spec), spec=spec)
            self.copies[node, i] = self.call(node.target, args, kwargs, new)  # type: ignore[arg-type]
        for user in node.users:
            if _time_step(user) and user not in self.body and not again:
                self._add(user, node, i)

    def _args(self, node: fx.Node, i: int) -> Any:
        def back(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return self.copies[arg, i] if arg in self.body else self.once(arg)
            if isinstance(arg, Local):
                return Local(self._at(arg.spec, i))
            if isinstance(arg, LocalDim):
                return LocalDim(self._dim(arg.dim, i))
            if isinstance(arg, LocalStart) and TIME in dim_axes(arg.dim):
                raise self._refuse(node, "places among the rows of the batch")
            if isinstance(arg, Step):
                return Step(arg.kind, arg.axis, self._at(arg.src, i), self._at(arg.dst, i), arg.op)
            return arg

        return fx.node.map_aggregate((node.args, dict(node.kwargs)), back)

    # -- specs of one microbatch -----------------------------------------------------------------------------------------

    def _at(self, spec: ShardSpec, i: int, node: fx.Node | None = None) -> ShardSpec:
        """The spec of microbatch `i`: its rows in place of those of the batch."""
        dims = tuple(self._dim(d, i, node) for d in spec.dims)
        return ShardSpec(dims, tuple(p for p in spec.partial if p[0] != TIME))

    def _dim(self, dim: Dim, i: int, node: fx.Node | None = None) -> Dim:
        return canonical_dim(tuple(self._factor(f, i, node) for f in self._by_rows(dim)), self.mesh)

    def _by_rows(self, dim: Dim) -> Dim:
        """The same dim with all rows of the batch in one factor: with 8 rows for 2 ranks and 3 microbatches, two rows always go
        together, and ``8@(dp,mb)·48`` is ``4@(dp,mb)·96`` as well."""
        for j, (f, after) in enumerate(itertools.pairwise(dim)):
            together = self.total // math.gcd(f.size, self.total)
            if TIME in f.axes and not after.axes and after.size % together == 0:
                rows = Factor(f.size * together, f.axes), Factor(after.size // together)
                out = (*dim[:j], *rows, *dim[j + 2 :])
                return out if canonical_dim(out, self.timed) == canonical_dim(dim, self.timed) else dim
        return dim

    def _factor(self, f: Factor, i: int, node: fx.Node | None = None) -> Factor:
        if TIME not in f.axes:
            return f
        if f.axes != (*self.batch, TIME) or f.size % self.total:
            where = self.old.info[node].where if node is not None else ""
            raise PlanError(f"microbatches={self.count}: rows of the batch are mixed with another dim in {f}", where=where,
                            hint="microbatches=1, or keep the batch dim apart in reshapes")  # fmt: skip
        return Factor(f.size // self.total * self.rows[i], self.batch)

    # -- rows, draws, sums -------------------------------------------------------------------------------------------------

    def _rows_of(self, node: fx.Node, i: int) -> fx.Node:
        """slice@mb: the rows of a microbatch, of a value that has all rows of the rank."""
        (source,) = node.all_input_nodes
        return self._cut(self.once(source), self.old.spec(node), i, self.old.info[node])

    def _cut(self, whole: fx.Node, spec: ShardSpec, i: int, info: Info) -> fx.Node:
        dim, each = self._time_dim(spec)
        now = self._at(spec, i)
        assert isinstance(info.type, TensorType)
        lo, hi = i * self.chunk * each, (i + 1) * self.chunk * each
        return self.call(aten.slice.Tensor, (whole, dim, lo, hi), {}, info.but(type=_sized(info.type, now), spec=now))

    def _time_dim(self, spec: ShardSpec) -> tuple[int, int]:
        """The dim that is split over time, and its elements for each row."""
        for k, dim in enumerate(map(self._by_rows, spec.dims)):
            for j, f in enumerate(dim):
                if TIME in f.axes:
                    if j:
                        raise PlanError(f"microbatches={self.count}: rows are not the outermost factor of a dim in {spec}")
                    inner = math.prod(g.size for g in dim[1:])
                    return k, f.size // self.total * inner
        raise AssertionError(f"{spec} is not split over {TIME}")

    def _drawn(self, node: fx.Node) -> fx.Node:
        """The random numbers of all rows of the rank, drawn once; the layout donor of the operator is an empty tensor."""
        if node not in self.env:
            self._draw_earlier(node)
            info, spec = self.old.info[node], self._whole(self.old.spec(node))
            assert isinstance(info.type, TensorType)
            donors = [n for n in node.all_input_nodes if self.old.is_tensor(n)]
            if donors and f"{node.target}" not in _LAYOUT_ONLY:
                raise self._refuse(node, "random numbers that depend on a tensor, for all rows at once")
            empty: dict[fx.Node, fx.Node] = {}
            for donor in donors:
                kind = self.old.type(donor)
                made = self._whole(self.old.spec(donor))
                target = info.but(type=kind, spec=made)
                empty[donor] = self.call(
                    aten.empty.memory_format, (Local(made),), {"dtype": kind.dtype, "device": torch.device("cpu")}, target
                )
            whole = {Local: lambda a: Local(self._whole(a.spec))}
            args, kwargs = fx.node.map_aggregate(
                (node.args, dict(node.kwargs)),
                lambda a: (
                    empty.get(a) or self.once(a) if isinstance(a, fx.Node) else whole[Local](a) if isinstance(a, Local) else a
                ),
            )
            self.env[node] = self.call(node.target, args, kwargs, info.but(spec=spec), node.name)  # type: ignore[arg-type]
        return self.env[node]

    def _draw_earlier(self, node: fx.Node) -> None:
        """With torch's generator draws come in order, also where a loop that comes first needs a late one."""
        if not self.ordered or node not in self.old.draws:
            return
        index = self.old.draws[node].index
        before = [n for n in self.body if n in self.old.draws and n not in self.env and self.old.draws[n].index < index]
        for other in sorted(before, key=lambda n: self.old.draws[n].index):
            self._drawn(other)

    def _whole(self, spec: ShardSpec) -> ShardSpec:
        return spec.without(TIME).canonical(self.mesh)

    def _add(self, step: fx.Node, source: fx.Node, i: int) -> None:
        """The running result of a reduction over time."""
        value = self.copies[source, i]
        kind = step.target.__name__  # type: ignore[union-attr]
        if kind == "all_gather":
            return
        if i == 0:
            self.copies[step, 0] = value
            return
        op = step.args[1].op  # type: ignore[union-attr]
        target = {"sum": torch.ops.shardc.accumulate.default, "max": aten.maximum.default, "min": aten.minimum.default}[op]
        self.copies[step, 0] = self.call(
            target, (self.copies[step, 0], value), {}, self.info[value].but(why="over microbatches")
        )

    def _reduced(self, step: fx.Node) -> fx.Node:
        (source,) = step.all_input_nodes
        info = self.old.info[step]
        kind = step.target.__name__  # type: ignore[union-attr]
        if kind == "all_gather":
            dim, _ = self._time_dim(self.old.spec(source))
            parts = [self.copies[source, i] for i in range(len(self.rows))]
            return self.call(aten.cat.default, (parts, dim), {}, info)
        if kind != "all_reduce":
            raise self._refuse(step, f"a {kind} over microbatches")
        return self.copies[step, 0]


_LAYOUT_ONLY = ("aten.bernoulli.p", "aten.rand_like.default", "aten.randn_like.default", "aten.randint_like.default")
"""Random operators that take no more than their layout from their operand."""


def _time_step(node: fx.Node) -> bool:
    return node.target in STEPS and isinstance(node.args[1], Step) and node.args[1].axis == TIME


def _sized(kind: TensorType, spec: ShardSpec | None) -> TensorType:
    """The type at the shape of `spec`, dims in memory in the same order."""
    if spec is None or spec.shape == kind.shape:
        return kind
    stride, step = [0] * len(kind.shape), 1
    for d in sorted(range(len(kind.shape)), key=lambda d: (kind.stride[d], -d)):
        stride[d] = step
        step *= max(spec.shape[d], 1)
    return TensorType(spec.shape, kind.dtype, tuple(stride))
