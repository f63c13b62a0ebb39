"""Where the update of offloaded state runs: on the device, after moving the state there and back, or on the host, where the
gradient goes instead (ZeRO-Offload, Ren et al. 2021); whichever the cost model says is faster."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from shardc.cost import profile_of
from shardc.passes.graphs import STEPS, is_getitem, is_op, is_random
from shardc.passes.storages import Storages
from shardc.program import Phase, Program
from shardc.tiers import DEVICE


def on_host(program: Program, tiers: Mapping[str, str], storages: Storages) -> set[fx.Node]:
    """The operators of the update that run on the host.

    Args:
        tiers: slot path -> where it rests.

    Candidates read offloaded state, or what a candidate makes; those that depend on each other go together.
    """
    resting = {n for path, n in program.entry.items() if tiers[path] != DEVICE}
    reads = _candidates(program, storages, resting)
    out: set[fx.Node] = set()
    for together in _components(reads):
        given = program, tiers, storages, resting, together
        if _host_seconds(*given) <= _device_seconds(*given):
            out |= together
    return out


def _candidates(program: Program, storages: Storages, resting: set[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Operator -> the offloaded slots and the candidates whose values it reads."""
    out: dict[fx.Node, set[fx.Node]] = {}
    for node in program.compute_nodes():
        if program.info[node].phase != Phase.UPDATE or storages.is_link(node) or node.target in STEPS:
            continue
        if is_getitem(node):
            source = node.args[0]
            if source in out:
                out[node] = {source}  # type: ignore[arg-type]
            continue
        roots = storages.read_by(node)
        whole = all(program.is_tensor(n) or program.info[n].type is None for n in node.all_input_nodes)
        held = {r for r in roots if r in resting or r in out}
        if held and whole and is_op(node) and not is_random(node):
            out[node] = held
    return out


def _components(reads: Mapping[fx.Node, set[fx.Node]]) -> list[set[fx.Node]]:
    leader: dict[fx.Node, fx.Node] = {}

    def find(n: fx.Node) -> fx.Node:
        leader.setdefault(n, n)
        while leader[n] is not n:
            leader[n] = leader[leader[n]]
            n = leader[n]
        return n

    for node, roots in reads.items():
        for root in roots:
            leader[find(root)] = find(node)
    out: dict[fx.Node, set[fx.Node]] = {}
    for node in reads:
        out.setdefault(find(node), set()).add(node)
    return list(out.values())


def _traffic(storages: Storages, together: set[fx.Node]) -> int:
    """Bytes that the operators read and write."""
    made = sum(storages.nbytes(n) for n in together if not is_getitem(n))
    return made + sum(storages.nbytes(n) for node in together if not is_getitem(node) for n in node.all_input_nodes)


def _device_seconds(
    program: Program, tiers: Mapping[str, str], storages: Storages, resting: set[fx.Node], together: set[fx.Node]
) -> float:
    assert program.mesh is not None
    device = profile_of(program.mesh)
    moved = sum(storages.nbytes(r) for r in {r for n in together for r in storages.read_by(n)} & resting)
    moved += sum(
        storages.nbytes(n) for path, n in program.exit.items() if tiers[path] != DEVICE and storages.root(n) in together
    )
    return moved / device.host_link + _traffic(storages, together) / (device.memory_bandwidth * device.memory_efficiency)


def _host_seconds(
    program: Program, tiers: Mapping[str, str], storages: Storages, resting: set[fx.Node], together: set[fx.Node]
) -> float:
    assert program.mesh is not None
    device = profile_of(program.mesh)
    down = {r for n in together for r in storages.read_by(n)} - resting - together
    up = {n for n in together if any(user not in together for user in storages.readers(n))}
    up |= {storages.root(n) for n in program.results if storages.root(n) in together}
    up |= {storages.root(n) for path, n in program.exit.items() if tiers[path] == DEVICE and storages.root(n) in together}
    moved = sum(storages.nbytes(n) for n in (*down, *up))
    return moved / device.host_link + _traffic(storages, together) / (device.host_bandwidth * device.memory_efficiency)
