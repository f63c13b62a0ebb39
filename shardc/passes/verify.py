"""What holds between passes. A violation is a bug of shardc, found at the pass that made it."""

from __future__ import annotations

from torch import fx

from shardc.errors import VerifyError
from shardc.mesh import Mesh
from shardc.passes.factors import choose, made_factors, required, result_specs, rule_of
from shardc.passes.graphs import STEPS, is_op, is_random, operands, reshard
from shardc.program import Program
from shardc.reshard import Step
from shardc.spec import ShardSpec
from shardc.tiers import MOVES, arrive, hops


def verify(program: Program, stage: str) -> None:
    """Check a program after the pass `stage`.

    Raises:
        VerifyError: naming the pass, the node and what is wrong.
    """
    try:
        program.graph.lint()
    except RuntimeError as e:
        raise VerifyError(f"after {stage}: the graph is malformed: {e}") from e
    split = stage in ("propagate", "partition", "accumulate", "schedule", "offload")
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node not in program.info:
            raise VerifyError(f"after {stage}: %{node.name} is in no table")
        if node.op == "placeholder":
            if split:
                _need(
                    program,
                    node,
                    stage,
                    isinstance(program.info[node].spec, ShardSpec) or program.info[node].type is None,
                    "has no spec",
                )
            continue
        drawn = node in program.draws
        _need(program, node, stage, is_random(node) == drawn, "is no random operator, but a draw" if drawn else "is no draw")
        if is_op(node) and split and program.info[node].type is not None:
            _operator(program, node, stage)
        if node.target in STEPS:
            _step(program, node, stage)
        _tiers(program, node, stage)
        if stage in ("partition", "accumulate", "schedule", "offload"):
            _need(program, node, stage, node.target is not reshard, "is a reshard that was not lowered")
    for path, slot in program.slots.items():
        end = program.exit.get(path)
        if split and end is not None and slot.storage is not None and not program.spec(end).same(slot.storage, program.mesh):  # type: ignore[arg-type]
            raise VerifyError(
                f"after {stage}: slot {path} rests in {slot.storage}, its final value %{end.name} lies in {program.spec(end)}"
            )


def _need(program: Program, node: fx.Node, stage: str, ok: bool, what: str) -> None:
    if not ok:
        raise VerifyError(f"after {stage}: %{node.name} {what}\n  {program.line_of(node)}", where=program.info[node].where)


def _alike(a: ShardSpec | None, b: ShardSpec | None, mesh: Mesh) -> bool:
    """Whether each rank holds the same elements: where it holds none, dims may be cut in other places."""
    if a is None or b is None or a.partial != b.partial:
        return False
    for coord in mesh.coords():
        empty = [0 in s.local_shape(mesh, coord) for s in (a, b)]
        if empty[0] is not empty[1] or not empty[0] and a.indices(mesh, coord) != b.indices(mesh, coord):
            return False
    return True


def _tiers(program: Program, node: fx.Node, stage: str) -> None:
    """Operands lie where the result does; a move goes one tier on."""
    tier, sources = program.info[node].tier, [n for n in node.all_input_nodes if program.info[n].type is not None]
    if node.target in MOVES:
        into = node.args[2]
        here = program.info[sources[0]].tier
        ok = node.args[1] == tier and hops(here, tier) == [tier] and (into is None or program.info[into].tier == tier)  # type: ignore[index]
        _need(program, node, stage, ok, "is no move to the next tier")
    elif node.target is arrive:
        _need(program, node, stage, program.info[sources[0]].tier == tier, "does not lie where its move went")
    elif program.info[node].type is not None:
        _need(program, node, stage, all(program.info[n].tier == tier for n in sources), "has an operand on another tier")


def _step(program: Program, node: fx.Node, stage: str) -> None:
    step = node.args[1]
    source = node.args[0]
    ok = isinstance(step, Step) and isinstance(source, fx.Node)
    _need(program, node, stage, ok, "is a step without a Step")
    assert isinstance(step, Step) and isinstance(source, fx.Node)
    _need(
        program,
        node,
        stage,
        program.spec(source) == step.src and program.spec(node) == step.dst,
        f"does not fit its step {step}",
    )


def _operator(program: Program, node: fx.Node, stage: str) -> None:
    """Operands lie as the rule wants for one split of its factors, and the results as it then gives."""
    mesh = program.mesh
    assert mesh is not None
    if stage != "propagate":
        return  # size arguments are local now; specs were checked after propagate and are not changed since
    rule = rule_of(program, node)
    specs = [program.spec(n) for n in operands(program, node)]
    partial = {p for s in specs for p in s.partial}
    pending: set[tuple[str, str]] = set()
    for axis, op in partial:
        held = frozenset(k for k, s in enumerate(specs) if s.reduction(axis) == op)
        after = rule.through(held, op)
        _need(
            program,
            node,
            stage,
            after is not None,
            f"lets a partial {op} over {axis} of operands {sorted(held)} through, its rule {rule} does not",
        )
        pending |= {(axis, after)} if after is not None else set()
    split, _ = choose(rule, specs, {a for a, _ in partial}, mesh)
    results = program.info[node].spec
    got = results if isinstance(results, tuple) else (results,)
    split = {**made_factors(rule, got, mesh), **split}
    for spec, factors in zip(specs, rule.operands, strict=True):
        want = required(factors, rule, split, mesh)
        _need(program, node, stage, spec.with_partial(()) == want, f"has an operand in {spec}, its rule {rule} wants {want}")
    want_results = result_specs(rule, split, pending, mesh)
    same = all(a == b or _alike(a, b, mesh) for a, b in zip(got, want_results, strict=True))
    _need(
        program,
        node,
        stage,
        same,
        f"has results in {[str(s) for s in got]}, its rule {rule} gives {[str(s) for s in want_results]}",
    )
