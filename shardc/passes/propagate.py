"""propagate: give every value a spec, from the pinned ones, by factor rules.

Before: placeholders have specs, some call nodes carry a pin (annotate). After: every tensor has a spec, the operands of every
operator fit its rule exactly, and where a value changes its spec there is a `reshard` node whose own spec is the destination.

One walk in program order decides, for each operator, how its factors are split (`choose`): a split that operands already
have is kept, the larger operand wins a conflict, and nothing is moved where a local computation with a partial result exists.
Slots rest in their storage spec; forward and backward read them in their compute spec, once per phase. A partial value is
reduced once, where it is first needed whole; it stays partial only through a joint sum or a single linear use.
A second walk, backwards, moves slices towards the producers (`sink`), so that nothing is computed whole to be cut up.

Example (dp=2): ``mm(x: [8@dp, 4], w: [4@dp, 6])`` becomes ``reshard(w) -> [4, 6]``, ``mm(...) -> [8@dp, 6]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from shardc.options import TIME, Options
from shardc.passes.borders import Crossing, crossings, notes, sent
from shardc.passes.factors import choose, is_free, made_factors, required, result_specs, rule_of, split_of_result
from shardc.passes.graphs import Rewriter, is_cast, is_getitem, is_op, is_view, kept, operands, reshard, without_dead
from shardc.passes.inline import Tracer
from shardc.passes.pending import may_wait
from shardc.passes.pins import decided, pinned_axes, wanted_result
from shardc.passes.selection import NONZERO, READS, WRITES, Selections
from shardc.passes.sink import sink
from shardc.passes.split import aligned, write_out
from shardc.passes.undivided import undivided, whole_matrices
from shardc.program import Draw, Phase, Program, SlotKind, Specs, TensorType, op_name
from shardc.rules import split_forms
from shardc.rules.rule import Rule
from shardc.spec import Dim, Factor, ShardSpec, dim_axes

aten = torch.ops.aten
ALIAS = aten.alias.default
ROWS_WHOLE = torch.ops.aten.embedding_dense_backward.default


def propagate(program: Program, options: Options) -> Program:
    first = _Propagation(program, options)
    out = first.sunk()
    if not first.crossings:
        return out
    whole = _Propagation(program, options, uneven=False).sunk()
    split, gathered = sent(out), sent(whole)
    out = out if split <= gathered else whole
    out.notes += notes(first.crossings, split <= gathered, min(split, gathered), max(split, gathered))
    return out


class _Propagation(Rewriter):
    def __init__(self, program: Program, options: Options, uneven: bool = True) -> None:
        super().__init__(program.copy())  # operators that are written out are replaced in it
        self.uneven = uneven  # a dim cut inside its elements is split unevenly, else gathered
        self.crossings: list[Crossing] = []
        program = self.old
        self.options = options
        rows = [program.type(n).shape[0] for n in program.nodes if n.target is NONZERO]
        self.forms = Tracer(split_forms(), rows)
        self.result_forms = Tracer({ROWS_WHOLE: split_forms(of_result=True)[ROWS_WHOLE]}, rows)
        assert program.mesh is not None
        self.mesh = program.mesh
        self.batch = tuple(a for a in options.batch if self.mesh.axes[a] > 1)
        self.batched = {program.inputs[path] for path in program.batched}
        self.given: dict[fx.Node, fx.Node] = {}  # placeholder -> its copy, before it is split into microbatches
        self.kept = kept(program)
        self.undivided = undivided(program)
        self.moved: dict[tuple[fx.Node, ShardSpec, Phase | None], fx.Node] = {}  # (value, spec, phase of a slot read)
        self.settled: dict[fx.Node, fx.Node] = {}  # partial value -> its reduced form
        self.resting: dict[fx.Node, ShardSpec] = {}  # value at rest in a storage spec -> spec of its forward/backward reads
        self.pinned: set[fx.Node] = set()  # parameters with axes given by the user, and views and casts of them
        self.views: dict[fx.Node, tuple[Rule, fx.Node, bool]] = {}  # view -> its rule, its source, whether others read that
        self.selections = Selections(self)
        self.drawn: dict[fx.Node, Draw] = {}  # by the operator itself, also where its value is moved at once

    def sunk(self) -> Program:
        """The program with complete specs."""
        out = self.run()
        return sink(out, {self.env[n] for n in self.undivided if n in self.env})

    def run(self) -> Program:
        for node in self.old.nodes:
            if node.op == "output":
                break
            if node in self.old.info:  # else it was a result of an operator that is written out
                self.visit(node)
        for node in self.old.results:
            if self.old.is_tensor(node):
                self.env[node] = self.returned(self.env[node], node)
        out = self.finish(draws=self.drawn, inputs={path: self.given[n] for path, n in self.old.inputs.items()})
        return without_dead(out)

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.given[node] = self.copy(node)
            if node in self.batched and TIME in self.mesh.axes:
                self.env[node] = self.rows(node)
        elif is_getitem(node):
            self.getitem(node)
        elif is_op(node):
            if self.written_out(node):
                return
            if node.target is NONZERO:
                self.selections.nonzero(node)
            else:
                if node.target in READS or node.target in WRITES:
                    self.selections.select(node)
                self.operator(node)
        else:
            self.number(node)
        if self.old.is_tensor(node):
            self.pin(node)
            self.selections.follow(node)

    # -- one node ----------------------------------------------------------------------------------------------------

    def rows(self, node: fx.Node) -> fx.Node:
        """An input whose dim 0 is the batch is further split over time."""
        value = self.env[node]
        spec = self.spec(value)
        first = Factor(spec.shape[0], (*self.batch, TIME))
        return self.move(value, spec.with_dim(0, (first,)), node, "microbatches")

    def getitem(self, node: fx.Node) -> None:
        parent = node.args[0]
        assert isinstance(parent, fx.Node) and isinstance(node.args[1], int)
        new = self.copy(node)
        specs = self.info[self.env[parent]].spec
        assert isinstance(specs, tuple)
        self.info[new] = self.info[new].but(spec=specs[node.args[1]], why=self.info[self.env[parent]].why)

    def written_out(self, node: fx.Node) -> bool:
        """Propagate the split form of a node instead, where a dim is split that its rule calls whole."""
        if node in self.old.draws or node in self.undivided:
            return False
        if node.target in self.result_forms:
            found = wanted_result(self.old, node)
            if found is None or not self.splits_result(node, *found):
                return False
            return self.in_parts(node, self.result_forms)
        if node.target not in self.forms:
            return False
        rule = rule_of(self.old, node)
        values = [self.read(n, node) for n in operands(self.old, node)]
        wanted = aligned(rule, [self.spec(v) for v in values], self.mesh)
        if wanted is None:
            return False
        replaced: dict[fx.Node, fx.Node] = {}
        for old, value, spec in zip(operands(self.old, node), values, wanted, strict=True):
            if spec != self.spec(value) and old not in replaced:  # a slice of it is all that is needed
                with self.old.graph.inserting_before(node):
                    replaced[old] = self.old.graph.call_function(ALIAS, (old,))
                self.old.info[replaced[old]] = self.old.info[old].but(spec=None)
                self.env[replaced[old]] = self.move(value, spec, node, f"{op_name(node.target)} is split so")
        if replaced:
            node.args, node.kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: replaced.get(n, n))
        return self.in_parts(node, self.forms)

    def rule(self, node: fx.Node) -> Rule:
        rule = rule_of(self.old, node)
        return whole_matrices(rule) if node in self.undivided else rule

    def splits_result(self, node: fx.Node, spec: ShardSpec, pinned: Sequence[str]) -> bool:
        """Whether a result that will rest in `spec` is wanted in parts that no operand gives. Over `pinned` axes none does."""
        given = [self.spec(self.read(n, node)) for n in operands(self.old, node)]
        taken = ({a for s in given for a in s.axes} - set(pinned)) | {a for s in given for a, _ in s.partial}
        return any(f.axes and f.axes[0] not in taken for f in spec.dims[0])

    def in_parts(self, node: fx.Node, forms: Tracer) -> bool:
        for inner in write_out(self.old, node, forms):
            self.visit(inner)
        return True

    def number(self, node: fx.Node) -> None:
        """Arithmetic on numbers, or an operator that makes a number: tensor operands are needed whole."""
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: self.whole(self.env[n], node) if self.old.is_tensor(n) else self.env[n]
        )
        self.env[node] = self.call(node.target, args, kwargs, self.old.info[node], node.name)  # type: ignore[arg-type]

    def operator(self, node: fx.Node) -> None:
        info = self.old.info[node]
        if info.type is None:
            return self.number(node)
        rule = self.rule(node)
        values = [self.read(n, node) for n in operands(self.old, node)]
        specs = [self.spec(v) for v in values]
        partial = self.partials(node, rule, values)
        split, reasons = self.split(node, rule, values, {a for a, _ in partial})
        wanted = [required(factors, rule, split, self.mesh) for factors in rule.operands]
        ready: list[fx.Node] = []
        why = f"{op_name(node.target)} needs it so" + (f", with {reasons}" if reasons else "")
        for k, (value, spec) in enumerate(zip(values, wanted, strict=True)):
            stays = [p for p in specs[k].partial if p in partial]
            ready.append(self.move(value, spec.with_partial(stays), node, why))
        feed = iter(ready)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: next(feed) if self.old.is_tensor(n) else self.env[n])
        result = result_specs(rule, split, {(a, out) for (a, _), out in partial.items()}, self.mesh)
        made: Specs = result[0] if isinstance(info.type, TensorType) else tuple(result)
        new = self.call(node.target, args, kwargs, info.but(spec=made, why=reasons or "operands are whole"), node.name)  # type: ignore[arg-type]
        self.env[node] = new
        if node in self.old.draws:
            self.drawn[new] = self.old.draws[node]
        if is_view(node) and rule.any_partial and len(ready) == 1 and ready[0].op == "call_function":
            self.views[new] = (rule, ready[0], len(operands(self.old, node)[0].users) > 1)
        if values and all(v in self.pinned for v in values) and (is_cast(node) or is_view(node)):
            self.pinned.add(new)
        if is_cast(node) and values[0] in self.resting:  # it rests too, and is gathered after the cast, in fewer bytes
            self.resting[new] = self.resting[values[0]]

    def split(self, node: fx.Node, rule: Rule, values: Sequence[fx.Node], busy: set[str]) -> tuple[dict[str, Dim], str]:
        """How the factors of an operator are split, and why."""
        specs = [self.spec(v) for v in values]
        update = self.old.info[node].phase == Phase.UPDATE
        pinned = () if update else [k for k, v in enumerate(values) if v in self.pinned]
        first = {} if update else decided(self.old, node, rule, busy)
        split, reasons = choose(rule, specs, busy, self.mesh, first, pinned, self.uneven)
        if self.uneven:
            self.crossings += crossings(self.old, self.old.info[node].module, rule, specs)
        if rule.makes and (rest := wanted_result(self.old, node)) is not None:
            taken = {a for dim in split.values() for a in dim_axes(dim)} | busy
            split |= made_factors(rule, [rest[0]], self.mesh, frozenset(taken))
        return split, reasons

    def pin(self, node: fx.Node) -> None:
        pin = self.old.info[node].spec
        new = self.env[node]
        if node.op != "placeholder" and isinstance(pin, ShardSpec):
            if node not in self.old.versions:
                pin = self.in_time(pin, self.spec(new))
            at_once = self.options.zero >= 2  # a sharded accumulator: over the ranks in each microbatch
            self.env[node] = new = self.move(new, pin, node, self.old.info[node].why, at_once=at_once)
        path = self.old.versions.get(node)
        slot = self.old.slots.get(path or "")
        if slot is not None:
            assert slot.storage is not None and slot.compute is not None
            if slot.kind != SlotKind.GRADIENT and slot.storage != slot.compute:
                self.resting[new] = slot.compute
            if slot.kind == SlotKind.PARAMETER and pinned_axes(self.old, node):
                self.pinned.add(new)

    def in_time(self, pin: ShardSpec, spec: ShardSpec) -> ShardSpec:
        """A pin of an activation, whose dims that are split over time stay so where the pin says the same of the ranks."""
        for k, (dim, same) in enumerate(zip(spec.dims, spec.without(TIME).canonical(self.mesh).dims, strict=True)):
            if TIME in dim_axes(dim) and same == pin.dims[k]:
                pin = pin.with_dim(k, dim)
        return pin

    # -- values ------------------------------------------------------------------------------------------------------

    def spec(self, value: fx.Node) -> ShardSpec:
        spec = self.info[value].spec
        assert isinstance(spec, ShardSpec)
        return spec

    def read(self, old: fx.Node, user: fx.Node) -> fx.Node:
        """The form of a value that `user` sees: slots at rest are gathered for forward and backward, once for each."""
        value = self.env[old]
        value = self.settled.get(value, value)
        phase = self.old.info[user].phase
        if value not in self.resting or phase == Phase.UPDATE:
            return value
        if is_cast(user) and self._narrows(user):
            return value
        out = self.move(value, self.resting[value], user, f"{phase} reads the compute spec", phase)
        if value in self.pinned:
            self.pinned.add(out)
        return out

    def _narrows(self, cast: fx.Node) -> bool:
        (source,) = operands(self.old, cast)
        return self.old.type(cast).dtype.itemsize <= self.old.type(source).dtype.itemsize

    def move(
        self, value: fx.Node, spec: ShardSpec, user: fx.Node, why: str, phase: Phase | None = None, at_once: bool = False
    ) -> fx.Node:
        """`value` in `spec`: itself, an earlier reshard of it, or a new one.

        Args:
            phase: of a slot's read; each phase has its own.
            at_once: reduce over the ranks in each microbatch, not once for all.
        """
        spec = spec.canonical(self.mesh)
        if self.spec(value) == spec:
            return value
        if TIME in self.spec(value).partial_axes and TIME not in spec.partial_axes and not at_once:
            late = self.spec(value).without(TIME)  # over time first, then over the ranks
            if late != spec:
                value = self.move(value, late, user, why, phase)
        if self.spec(value).partial and value in self.settled:
            return self.move(self.settled[value], spec, user, why, phase, at_once)
        key = (value, spec, phase)
        if key not in self.moved:
            old = self.old.info[user]
            info = self.info[value].but(spec=spec, why=why, phase=old.phase)
            if value.op == "placeholder":
                info = info.but(line=old.line)
            scaled, before = self._unscaled(value), self.before_view(value, spec)
            if scaled is not None:  # the quotient of a sum, as on one device, and not the sum of quotients
                whole = self.move(scaled, spec, user, why, phase, at_once)
                self.moved[key] = self.call(value.target, (whole, *value.args[1:]), {}, info)  # type: ignore[arg-type]
            elif before is not None:
                base = self.move(self.views[value][1], before, user, why, phase, at_once)
                args = (base, *value.args[1:])
                self.moved[key] = self.call(value.target, args, dict(value.kwargs), info.but(why=self.info[value].why))  # type: ignore[arg-type]
            else:
                self.moved[key] = self.call(reshard, (value,), {}, info)
            if self.spec(value).partial:
                self.settled[value] = self.moved[key]
        return self.moved[key]

    def _unscaled(self, value: fx.Node) -> fx.Node | None:
        """What a pending sum is a multiple of by a number, if it is."""
        if value.target not in (aten.div.Scalar, aten.mul.Scalar) or value.op != "call_function":
            return None
        source = value.args[0]
        assert isinstance(source, fx.Node)
        same = self.info[source].type == self.info[value].type and self.info[source].spec == self.info[value].spec
        return source if same and all(op == "sum" for _, op in self.spec(value).partial) and self.spec(value).partial else None

    def before_view(self, value: fx.Node, spec: ShardSpec) -> ShardSpec | None:
        """What a view is of, as it has to lie for the view to be `spec`; None where the view itself is better moved: it is of
        fewer elements, or nothing else is made of its source."""
        if value not in self.views or is_free(self.spec(value), spec, self.mesh):
            return None
        rule, base, shared = self.views[value]
        size, full = (math.prod(self.spec(n).shape) for n in (base, value))
        split = split_of_result(rule, spec, self.mesh) if size < full or size == full and shared else None
        if split is None or result_specs(rule, split, set(spec.partial), self.mesh) != [spec]:
            return None
        before = required(rule.operands[0], rule, split, self.mesh).with_partial(spec.partial)
        return before if set(before.partial_axes) <= set(self.spec(base).partial_axes) else None

    def whole(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """`value` on every rank."""
        return self.move(value, ShardSpec.replicated(self.spec(value).shape), user, f"{op_name(user.target)} needs it whole")

    def returned(self, value: fx.Node, old: fx.Node) -> fx.Node:
        """A result of the step: whole, but for a dim 0 that is the batch."""
        value = self.settled.get(value, value)
        spec = ShardSpec.replicated(self.spec(value).shape)
        if self.spec(value).dims:
            first, *rest = self.spec(value).dims[0]
            if first.axes and first.axes[: len(self.batch)] == self.batch and not any(f.axes for f in rest):
                spec = spec.with_dim(0, (Factor(first.size, self.batch), *rest))
        return self.move(value, spec, old, "returned")

    # -- partial values ----------------------------------------------------------------------------------------------

    def partials(self, node: fx.Node, rule: Rule, values: Sequence[fx.Node]) -> dict[tuple[str, str], str]:
        """The pending reductions that may pass through `node` unreduced, and what they are after it."""
        out: dict[tuple[str, str], str] = {}
        specs = [self.spec(v) for v in values]
        olds = operands(self.old, node)
        for axis, op in {p for s in specs for p in s.partial}:
            held = frozenset(k for k, s in enumerate(specs) if s.reduction(axis) == op)
            after = rule.through(held, op)
            clash = any(axis in s.axes or s.reduction(axis) not in (None, op) for s in specs)
            if after is not None and not clash and may_wait(self.old, node, [olds[k] for k in held], self.kept):
                out[axis, op] = after
        return out
