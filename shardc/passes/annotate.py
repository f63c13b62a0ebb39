"""annotate: pin the specs that the options decide.

Before: no node has a spec. After: every slot has a storage and a compute spec; placeholders have the spec in which they arrive;
nodes that are a pinned version of a slot carry that spec as a pin (propagate makes it so); nothing else has a spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import fx

from shardc.errors import OptionError, SpecError
from shardc.mesh import Mesh
from shardc.ops.constrain import pinned
from shardc.options import TIME, Options
from shardc.placements import to_placements
from shardc.program import Phase, Program, Slot, SlotKind
from shardc.spec import Factor, P, ShardSpec

CONSTRAIN = torch.ops.shardc.constrain.default


def annotate(program: Program, options: Options) -> Program:
    out = program.copy()
    assert out.mesh is not None
    pins = _pins(out.slots, options)
    for path, slot in out.slots.items():
        out.slots[path] = _slot_specs(slot, out.slots.get(slot.of), pins, options, out.mesh)
    for path, node in out.entry.items():
        out.info[node] = out.info[node].but(spec=out.slots[path].storage, why="storage of its slot")
    _inputs(out, options)
    for node, path in out.versions.items():
        slot = out.slots.get(path) or _passing_gradient(path, out, pins, options)
        if node.op == "call_function" and _is_pinned(out, node, slot, options):
            out.info[node] = out.info[node].but(spec=slot.storage, why=f"storage of {path}")
    for node in out.compute_nodes():
        if node.target is CONSTRAIN:
            spec = pinned(str(node.args[1])).to_spec(out.type(node).shape, out.mesh, where=out.info[node].where)
            out.info[node] = out.info[node].but(spec=spec, why="constrain")
    _activations(out, options)
    for path, node in list(out.exit.items()):
        out.exit[path] = _left_in(out, node, out.slots[path])
    if options.microbatches > 1:
        _add_time(out, options)
    return out


def _add_time(program: Program, options: Options) -> None:
    """Give the mesh its axis of microbatches; no more of them than the rank with most rows has rows."""
    mesh = program.mesh
    assert mesh is not None
    sizes = [program.type(program.inputs[path]).shape[0] for path in program.batched]
    parts = [hi - lo for n in sizes for lo, hi in (Factor(n, options.batch).interval(mesh, c) for c in mesh.coords())]
    count = max(1, min([options.microbatches, *([max(parts)] if parts else [])]))
    if count < options.microbatches:
        program.notes.append(f"microbatches: {count} of {options.microbatches}, no rank has more rows")
    if count > 1:
        program.mesh = mesh.like({**mesh.axes, TIME: count})


def _left_in(program: Program, node: fx.Node, slot: Slot) -> fx.Node:
    """A final value of a slot, pinned to its storage: `node`, or a copy of it where it lies elsewhere in another way (an
    average that starts as the parameter, say)."""
    spec = program.info[node].spec
    if node.op == "call_function" and spec is None:
        program.info[node] = program.info[node].but(spec=slot.storage, why=f"storage of {slot.path}")
    elif spec != slot.storage and node is not program.entry.get(slot.path):
        with program.graph.inserting_before(program.graph.output_node()):
            new = program.graph.call_function(torch.ops.aten.clone.default, (node,))
        program.info[new] = program.info[node].but(spec=slot.storage, why=f"storage of {slot.path}", phase=Phase.UPDATE)
        return new
    return node


def _passing_gradient(path: str, program: Program, pins: Mapping[str, P], options: Options) -> Slot:
    """A gradient that is gone by the end of the step: no slot of the program, but it lies as one would."""
    owner = program.slots[path.removesuffix(".grad")]
    slot = Slot(path, SlotKind.GRADIENT, owner.type, owner.path)
    assert program.mesh is not None
    return _slot_specs(slot, owner, pins, options, program.mesh)


def _is_pinned(program: Program, node: fx.Node, slot: Slot, options: Options) -> bool:
    """Gradients of an earlier backward that only flow into a later sum of the same slot wait for it at zero <= 1."""
    if slot.kind != SlotKind.GRADIENT or options.zero >= 2 or len(node.users) != 1:
        return True
    (user,) = node.users
    joint = user.target is torch.ops.aten.add.Tensor and program.versions.get(user) == slot.path
    return not joint


def slot_storage(slots: Iterable[Slot], options: Options, mesh: Mesh) -> dict[str, ShardSpec]:
    """How the state of a model will rest in a step with these options, before there is a program."""
    found = {slot.path: slot for slot in slots}
    pins = _pins(found, options)
    placed = {path: _slot_specs(slot, found.get(slot.of), pins, options, mesh).storage for path, slot in found.items()}
    return {path: spec for path, spec in placed.items() if spec is not None}


def _pins(slots: Mapping[str, Slot], options: Options) -> Mapping[str, P]:
    """Parameter path -> P, from patterns over `name` and `argument.name`.

    Raises:
        OptionError: a pattern that matches no parameter.
        SpecError: two patterns that give one parameter different specs.
    """
    found: dict[str, tuple[str, P]] = {}
    names = {path: slot for path, slot in slots.items() if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER)}
    for pattern, p in options.params.items():
        hits = [path for path, slot in names.items() if any(_matches(alias, pattern) for alias in (path, *slot.aliases))]
        if not hits:
            some = ", ".join(list(names)[:4])
            raise OptionError(f"params pattern {pattern!r} matches no parameter", hint=f"names look like {some}")
        for path in hits:
            before = found.get(path)
            if before is not None and before[1] != p:
                raise SpecError(
                    f"contradicting pins: {before[0]!r} says {before[1]!r}, {pattern!r} says {p!r}",
                    where=path, hint="make the patterns disjoint",
                )  # fmt: skip
            found[path] = (pattern, p)
    return {path: p for path, (_, p) in found.items()}


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path.partition(".")[2], pattern)


def _slot_specs(slot: Slot, owner: Slot | None, pins: Mapping[str, P], options: Options, mesh: Mesh) -> Slot:
    shape = slot.type.shape
    pinned = slot.path if slot.path in pins else slot.of
    whole = ShardSpec.replicated(shape).canonical(mesh)
    same_shape = owner is None or owner.type.shape == shape
    compute = pins[pinned].to_spec(shape, mesh, where=slot.path) if pinned in pins and same_shape else whole
    stage = {SlotKind.PARAMETER: 3, SlotKind.OPTIMIZER: 1, SlotKind.GRADIENT: 1, SlotKind.BUFFER: 9, SlotKind.TENSOR: 9}[
        slot.kind
    ]
    storage = zero_spec(compute, options.batch, mesh) if options.zero >= stage else compute
    return replace(slot, storage=storage, compute=compute)


def zero_spec(spec: ShardSpec, axes: tuple[str, ...], mesh: Mesh) -> ShardSpec:
    """`spec` further split over `axes`, along the dim whose largest shard is then the smallest fraction (ties: dim 0)."""
    axes = tuple(a for a in axes if mesh.axes[a] > 1 and a not in spec.axes)
    first = (0,) * len(mesh.axes)
    best: tuple[float, int] | None = None
    out = spec
    for k, dim in enumerate(spec.dims):
        if len(dim) != 1 or dim[0].size <= 1 or not axes:
            continue
        factor = Factor(dim[0].size, dim[0].axes + axes)
        lo, hi = factor.interval(mesh, first)
        rank = ((hi - lo) / factor.size, k)
        if (best is None or rank < best) and _storable(new := spec.with_dim(k, (factor,)), mesh):
            best, out = rank, new
    return out.canonical(mesh) if _storable(out.canonical(mesh), mesh) else out


def _storable(spec: ShardSpec, mesh: Mesh) -> bool:
    if len(spec.axes) <= 1:
        return True
    try:
        to_placements(spec, mesh)
    except SpecError:
        return False
    return True


def _inputs(program: Program, options: Options) -> None:
    mesh = program.mesh
    assert mesh is not None
    unused = dict.fromkeys(options.inputs)
    batched = []
    by_batch = P(options.batch) if options.batch else P()
    for path, node in program.inputs.items():
        p = by_batch
        why = f"dim 0 is the batch, over {', '.join(options.batch)}" if options.batch else "no batch axis"
        for pattern, given in options.inputs.items():
            if fnmatchcase(path, pattern):
                p, why = given, f"inputs[{pattern!r}]"
                unused.pop(pattern, None)
        shape = program.type(node).shape
        if not shape and p is by_batch:
            p, why = P(), "a scalar"
        if shape and options.batch and not path.startswith("const[") and _first_axes(p) == options.batch:
            batched.append(path)
        if path.startswith("const["):
            p, why = P(), "a constant of the step"
        program.info[node] = program.info[node].but(spec=p.to_spec(shape, mesh, where=path), why=why)
    program.batched = tuple(batched)
    if unused:
        raise OptionError(
            f"inputs pattern {next(iter(unused))!r} matches no input tensor",
            hint=f"the inputs are {', '.join(program.inputs) or 'none'}",
        )


def _activations(program: Program, options: Options) -> None:
    """Pin what modules return.

    Raises:
        OptionError: a pattern that matches no module's result.
        SpecError: a result that has another pin already, or that the module took from the step's inputs or state as it is.
    """
    mesh = program.mesh
    assert mesh is not None
    for pattern, p in options.activations.items():
        hits = [path for path in program.outputs if _matches(path, pattern)]
        if not hits:
            some = ", ".join([*program.outputs][:4]) or "none"
            raise OptionError(
                f"activations pattern {pattern!r} matches no module's result", hint=f"results are named like {some}"
            )
        why = f"activations[{pattern!r}]"
        for path in hits:
            for node in program.outputs[path]:
                info = program.info[node]
                spec = p.to_spec(program.type(node).shape, mesh, where=path)
                if node.op != "call_function":
                    raise SpecError(f"{why}: the module returns {info.module} as it is", where=path,
                                    hint="pin an input by `inputs`, a parameter by `params`")  # fmt: skip
                if info.spec not in (None, spec):
                    raise SpecError(f"contradicting pins: {info.why} says {info.spec}, {why} says {spec}", where=path,
                                    hint="make the patterns disjoint")  # fmt: skip
                program.info[node] = info.but(spec=spec, why=why)


def _first_axes(p: P) -> object:
    """The axes that split dim 0."""
    first = p[0] if len(p) else ()
    return (first,) if isinstance(first, str) else first
