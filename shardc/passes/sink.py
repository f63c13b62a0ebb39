"""sink: move slices towards the producers.

Before: a value may be computed whole on every rank although all its uses take the same slice of it. After: such a value is
computed in that slice, and so on through its operands, as long as no collective is added; and a value that was reduced or
gathered to be cut goes into its slice at once.

Example (dp=2): ``rand([8, 4]) -> [8, 4]; reshard -> [8@dp, 4]`` becomes ``rand([8, 4]) -> [8@dp, 4]``.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from shardc.options import TIME
from shardc.passes.factors import is_free, required, result_specs, rule_of, split_of_result
from shardc.passes.graphs import is_op, kept, operands, reshard
from shardc.passes.inline import Tracer
from shardc.passes.split import write_out
from shardc.program import Program
from shardc.reshard import reshard as steps
from shardc.rules import split_forms
from shardc.spec import ShardSpec

SCATTERS = (torch.ops.aten.scatter.src, torch.ops.aten.scatter_add.default)
"""Operators whose dim is whole, but of whose result a part can be made alone."""


def sink(program: Program, undivided: Collection[fx.Node] = ()) -> Program:
    """Works on the program in place (it is propagate's own); `undivided` nodes are computed as they stand."""
    keep = {*kept(program), *undivided}
    table = split_forms(of_result=True)
    forms = Tracer({op: table[op] for op in SCATTERS})
    for node in reversed(program.nodes):
        if is_op(node) and node not in keep and node not in program.versions and program.is_tensor(node):
            spec = _common_slice(program, node)
            if spec is not None:
                _respec(program, node, spec, forms)
        elif node.target is reshard and node not in keep and node not in program.versions:
            _join(program, node)
    return program


def _join(program: Program, node: fx.Node) -> None:
    """A change of layout of which only one slice is used goes there at once, where that sends no more: an all-reduce becomes a
    reduce-scatter. Microbatches are cut as they were."""
    mesh, spec = program.mesh, _common_slice(program, node)
    assert mesh is not None
    if spec is None or TIME in mesh.axes and TIME in {*spec.axes} - {*program.spec(node).axes}:
        return
    (source,) = node.all_input_nodes
    dtype = program.type(node).dtype
    now, then = (sum(s.nbytes(dtype, mesh) for s in steps(program.spec(source), to, mesh)) for to in (program.spec(node), spec))
    if then <= now:
        program.info[node] = program.info[node].but(spec=spec, why=next(iter(program.info[u].why for u in node.users)))
        for user in list(node.users):
            if user in program.versions:
                program.versions[node] = program.versions.pop(user)
            _replace(program, user, node)


def _common_slice(program: Program, node: fx.Node) -> ShardSpec | None:
    mesh = program.mesh
    assert mesh is not None
    users = list(node.users)
    if not users or any(u.target is not reshard for u in users):
        return None
    specs = {program.spec(u) for u in users}
    if len(specs) != 1:
        return None
    (spec,) = specs
    return spec if is_free(program.spec(node), spec, mesh) else None


def _respec(program: Program, node: fx.Node, spec: ShardSpec, forms: Tracer) -> None:
    mesh = program.mesh
    assert mesh is not None
    rule = rule_of(program, node)
    split = split_of_result(rule, spec, mesh)
    if split is None and node.target in forms:  # written so that each rank takes what falls into its part
        (node,) = write_out(program, node, forms)
        rule = rule_of(program, node)
        split = split_of_result(rule, spec, mesh)
    if split is None or result_specs(rule, split, set(), mesh) != [spec]:
        return
    values = operands(program, node)
    wanted = [required(f, rule, split, mesh) for f in rule.operands]
    if not all(is_free(program.spec(v), w, mesh) for v, w in zip(values, wanted, strict=True)):
        return
    fresh: dict[tuple[fx.Node, ShardSpec], fx.Node] = {}
    feed = []
    for value, want in zip(values, wanted, strict=True):
        if program.spec(value) == want:
            feed.append(value)
            continue
        if (value, want) not in fresh:
            with program.graph.inserting_before(node):
                new = program.graph.create_node("call_function", reshard, (value,))
            program.info[new] = program.info[value].but(spec=want, why=f"{node.name} is needed in this slice")
            fresh[value, want] = new
        feed.append(fresh[value, want])
    it = iter(feed)
    swap = lambda n: next(it) if program.is_tensor(n) else n  # noqa: E731
    node.args, node.kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), swap)
    program.info[node] = program.info[node].but(spec=spec, why="all uses take this slice")
    for user in list(node.users):
        if user.target is reshard:
            if user in program.versions:
                program.versions[node] = program.versions.pop(user)
            _replace(program, user, node)


def _replace(program: Program, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    for table in (program.exit, program.number_exit):
        for key, node in table.items():
            if node is old:
                table[key] = new
    program.results[:] = [new if n is old else n for n in program.results]
    program.info.pop(old)
    program.graph.erase_node(old)
