"""offload: state and activations rest on other tiers between their uses.

Before: a scheduled local program, everything on the device. After: a slot rests where the options say; before each of its uses,
or a few uses that lie close together, a copy is made on the tier where it is used, and its new value goes back into the memory
where the old one rested. What the forward leaves for the backward goes away after its last use in the forward. Views, and casts
of state, are made again from the copy. The order of all else stays.

An update that reads offloaded state runs on the host where that is faster (`updates`). A move that runs beside the computation
(from and to disk; on cuda all) is started ahead, in the order of need, as long as all that is under way fits the bound on
staging; what goes out is waited for when the bound is met, or at the end.

Example (optimizer on host, update on the device)::

    %m: f32[4] on host = optimizer.state[0].momentum_buffer
    %m_to_device: f32[4] = from_tier(%m, device, None, True)
    %sgd: (f32[4], f32[4]) = shardc.sgd_momentum(%w, %g, %m_to_device, ...)
    %getitem_1: f32[4] = getitem(%sgd, 1)
    %m_to_host: f32[4] on host = to_tier(%getitem_1, host, %m, True) -> optimizer.state[0].momentum_buffer
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from shardc.passes.graphs import Rewriter, is_getitem
from shardc.passes.stays import Away, Exit, Needs, Stay
from shardc.passes.storages import Storages
from shardc.passes.updates import on_host
from shardc.plan.text import size
from shardc.program import Phase, Program, SlotKind, TensorType
from shardc.spec import ShardSpec
from shardc.tiers import DEVICE, DISK, HOST, SECTOR, TIERS, Offload, arrive, from_tier, hops, to_tier

NOUNS = {
    SlotKind.OPTIMIZER: ("optimizer", "tensors of optimizer state"),
    SlotKind.PARAMETER: ("params", "parameters"),
    SlotKind.GRADIENT: ("gradients", "gradients"),
}


def offload(program: Program, options: Offload) -> Program:
    """See the module docstring."""
    if options == Offload() and all(slot.tier == DEVICE for slot in program.slots.values()):
        return program
    tiers = resting(program, options)
    if options.activations in (None, DEVICE) and all(tier == DEVICE for tier in tiers.values()):
        if all(slot.tier == DEVICE for slot in program.slots.values()):
            return program
        return replace(program, slots={path: replace(slot, tier=DEVICE) for path, slot in program.slots.items()})
    return _Offloading(program, options, tiers).run()


def resting(program: Program, options: Offload) -> dict[str, str]:
    """Slot path -> the tier where it rests."""
    storages, out = Storages(program), {}
    for path, slot in program.slots.items():
        key = NOUNS[slot.kind][0] if slot.kind in NOUNS else ""
        asked = getattr(options, key, None) or slot.tier
        node = program.entry.get(path) or program.exit.get(path)
        n = 0 if node is None else storages.nbytes(node)
        out[path] = DEVICE if not n else HOST if asked == DISK and n < SECTOR else asked
    return out | dict.fromkeys(_bound_to_device(program, out), DEVICE)


def _bound_to_device(program: Program, tiers: Mapping[str, str]) -> list[str]:
    """Gradients that torch wants on the device, since their parameter is there: on CUDA."""
    if not _on_cuda(program):
        return []
    grads = [s for s in program.slots.values() if s.kind == SlotKind.GRADIENT and tiers[s.path] != DEVICE]
    return [s.path for s in grads if tiers.get(s.of, DEVICE) == DEVICE]


def _on_cuda(program: Program) -> bool:
    assert program.mesh is not None
    device = program.mesh.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return device.startswith("cuda")


class _Offloading(Rewriter):
    def __init__(self, program: Program, options: Offload, tiers: Mapping[str, str]) -> None:
        super().__init__(program)
        self.cuda = _on_cuda(program)
        self.asked = options
        self.tiers = tiers
        recast = {n for path, n in program.entry.items() if tiers[path] != DEVICE}
        self.storages = Storages(program, recast)
        self.host = on_host(program, tiers, self.storages)
        self.needs = Needs(program, self.storages, tiers, self.host)
        self.away = self.needs.away(options.activations or DEVICE)
        self.handles: dict[fx.Node, fx.Node] = {}  # storage that went away -> its value where it rests
        self.exits: dict[str, fx.Node] = {}
        self.coming: dict[int, tuple[fx.Node, fx.Node]] = {}  # id of a stay -> its copy under way, and what is copied
        self.going: deque[tuple[fx.Node, fx.Node, int, Callable[[fx.Node], None]]] = deque()
        self.after: dict[int, list[Callable[[], None]]] = {}
        self.moved: dict[tuple[str, str], int] = {}
        self.phase = Phase.FORWARD
        self.bound = self._bound(options.staging)
        self.starts = self._prefetched()

    # -- when moves start ----------------------------------------------------------------------------------------------

    def _aside(self, here: str, there: str) -> bool:
        """Whether a move runs beside the computation."""
        return self.cuda or DISK in (here, there)

    def _source(self, away: Away) -> str:
        return away.home if away.rests == away.home else away.rests

    def _bound(self, given: int | None) -> int:
        """The bound on staging, in bytes."""
        aside = [root for root, a in self.away.items() if self.cuda or DISK in (a.home, a.rests)]
        exits = [p for p, x in self.needs.exits.items() if DISK in x.hops or self.cuda and x.hops]
        out = [self.storages.nbytes(self.old.exit[p]) for p in exits]
        largest = max([*map(self.storages.nbytes, aside), *out], default=0)
        return 2 * largest if given is None else given

    def _prefetched(self) -> dict[int, list[tuple[Stay, Away]]]:
        """Position -> the copies that are started before it: in the order of need, as early as the bound allows."""
        wanted: list[tuple[Stay, Away, int]] = []
        for away in self.away.values():
            for stay in away.stays:
                path = hops(self._source(away), stay.tier)
                early = self.needs.begin if away.leaves is None else away.leaves + 1
                if stay.fetched and self._aside(self._source(away), path[0]) and stay.first >= max(early, self.needs.begin):
                    wanted.append((stay, away, early))
        queue = deque(sorted(wanted, key=lambda w: w[0].first))
        under_way: deque[tuple[int, int]] = deque()  # position of need, bytes
        out: dict[int, list[tuple[Stay, Away]]] = {}
        total = 0
        for k in range(self.needs.begin, self.needs.end + 1):
            while under_way and under_way[0][0] < k:
                total -= under_way.popleft()[1]
            while queue:
                stay, away, early = queue[0]
                n = self.storages.nbytes(stay.root)
                if early > k or (stay.first > k and total + n > self.bound):
                    break
                queue.popleft()
                under_way.append((stay.first, n))
                total += n
                out.setdefault(k, []).append((stay, away))
        return out

    # -- the rewrite ---------------------------------------------------------------------------------------------------

    def run(self) -> Program:
        needs = self.needs
        for path, way in needs.exits.items():
            self._then(way.at, lambda path=path, way=way: self._exit(path, way))  # type: ignore[misc]
        for root, away in self.away.items():
            if away.leaves is not None:
                self._then(away.leaves, lambda root=root, away=away: self._leave(root, away))  # type: ignore[misc]
        for k, node in enumerate(needs.nodes):
            self.phase = self.old.info[node].phase
            self._start(k)
            self._node(k, node)
            if k >= needs.begin - 1:
                self._act(k)
        self.phase = Phase.UPDATE
        self._start(needs.end)
        results = [self.value(n, DEVICE, needs.end) for n in self.old.results]
        while self.going:
            self._settle()
        for path, node in self.old.exit.items():
            self.exits.setdefault(path, self.env[node])
        slots = {path: replace(slot, tier=self.tiers[path]) for path, slot in self.old.slots.items()}
        out = self.finish(results=results, slots=slots, notes=[*self.old.notes, *self._notes()])
        out.exit = {path: self.exits[path] for path in self.old.exit}
        out.versions |= {node: path for path, node in out.exit.items()}
        out.set_output()
        return out

    def _then(self, k: int, action: Callable[[], None]) -> None:
        """Do something after the node at position `k`."""
        self.after.setdefault(k, []).append(action)

    def _act(self, k: int) -> None:
        due = self.after.get(k, [])
        while due:  # what is done may add to it
            due.pop(0)()

    def _node(self, k: int, node: fx.Node) -> None:
        info = self.old.info[node]
        if node.op == "placeholder":
            self.info[self.copy(node)] = info.but(tier=self.needs.home(node))
            return
        root = self.storages.root(node)
        if root is not node and root in self.away:
            return  # made where it is needed
        tier = self.needs.home(root)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.value(n, tier, k))
        self.env[node] = self.call(node.target, args, kwargs, info.but(tier=tier), node.name)  # type: ignore[arg-type]

    def value(self, node: fx.Node, tier: str, k: int) -> fx.Node:
        """What stands for `node` on a tier at position `k`."""
        root = self.storages.root(node) if self.old.info[node].type is not None else None
        away = self.away.get(root) if root is not None else None
        if away is None:
            return self.env[node]
        stay = away.at(tier, k)
        chain = []
        while node not in stay.values and node is not stay.root:
            chain.append(node)
            node = next(n for n in node.all_input_nodes if self.old.info[n].type is not None)
        if node not in stay.values:
            self._arrived(stay, away)
        for link in reversed(chain):
            args, kwargs = fx.node.map_arg(
                (link.args, dict(link.kwargs)), lambda n: stay.values[n] if n in stay.values else self.env[n]
            )
            info = self.old.info[link]
            phase = info.phase if link not in self.env else self.phase
            made = self.call(link.target, args, kwargs, info.but(tier=tier, phase=phase))  # type: ignore[arg-type]
            stay.values[link] = made
            self.env.setdefault(link, made)
        return stay.values[chain[0]] if chain else stay.values[node]

    # -- coming --------------------------------------------------------------------------------------------------------

    def _start(self, k: int) -> None:
        for stay, away in self.starts.get(k, ()):
            source = self._rest(stay.root, away)
            first = hops(self._source(away), stay.tier)[0]
            self.coming[id(stay)] = self._move(source, stay.root, first), source

    def _rest(self, root: fx.Node, away: Away) -> fx.Node:
        """The value of a storage where it rests."""
        if away.leaves is None:
            return self.env[root]
        while root not in self.handles:
            self._settle()
        return self.handles[root]

    def _arrived(self, stay: Stay, away: Away) -> None:
        """The storage is there for a stay."""
        if stay.fetched:
            path = hops(self._source(away), stay.tier)
            if id(stay) in self.coming:
                value = self._wait(*self.coming.pop(id(stay)))
                path = path[1:]
            else:
                value = self._rest(stay.root, away)
            for tier in path:
                value = self._at_once(value, stay.root, tier)
        else:
            value = self.env[stay.root]
        stay.values[stay.root] = value
        self.env.setdefault(stay.root, value)

    # -- going ---------------------------------------------------------------------------------------------------------

    def _leave(self, root: fx.Node, away: Away) -> None:
        """After its first stay a value goes to where it rests."""
        value = away.stays[0].values.get(root) or self.env[root]
        *before, last = hops(away.home, away.rests)
        for tier in before:
            value = self._at_once(value, root, tier)
        self._go(value, root, last, None, lambda node: self.handles.__setitem__(root, node))

    def _exit(self, path: str, way: Exit) -> None:
        """The new value of a slot goes to where it rests."""
        node = self.old.exit[path]
        value = self.value(node, way.tier, way.at)
        if way.copied:
            value = self.call(torch.ops.aten.clone.default, (value,), {}, self.info[value])
        if not way.hops:
            self.exits[path] = value
            return
        *before, last = way.hops
        for tier in before:
            value = self._at_once(value, node, tier)
        into = self.env[self.old.entry[path]] if path in self.old.entry else None
        at = way.at if into is None else max(way.at, self.needs.overwritten_after(path))

        def go() -> None:
            self._go(value, node, last, path, lambda moved: self.exits.__setitem__(path, moved))
            away = self.away.get(self.storages.root(node))
            if path in self.exits and away is not None:  # what needs it there reads it where it rests
                for stay in away.stays:
                    if stay.tier == last and stay.fetched and stay.first > at:
                        stay.values.setdefault(node, self.exits[path])

        go() if at == way.at else self._then(at, go)

    def _go(self, value: fx.Node, node: fx.Node, tier: str, path: str | None, done: Callable[[fx.Node], None]) -> None:
        """The last hop of what goes away; `done` is given its value there."""
        here = self.info[value].tier
        if not self._aside(here, tier):
            done(self._move(value, node, tier, path))
            return
        n = self.storages.nbytes(node)
        while self.going and sum(g[2] for g in self.going) + n > self.bound:
            self._settle()
        self.going.append((self._move(value, node, tier, path), value, n, done))
        if n > self.bound:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest of what goes away."""
        moved, source, _, done = self.going.popleft()
        done(self._wait(moved, source))

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _move(self, value: fx.Node, node: fx.Node, tier: str, path: str | None = None) -> fx.Node:
        """Start a copy of `value`, which stands for `node`, on the next tier; with a path: into where that slot rests."""
        here, info = self.info[value].tier, self.info[value]
        kind, into = info.type, None
        assert isinstance(kind, TensorType)
        if path is not None:
            into = self.env[self.old.entry[path]] if path in self.old.entry else None
            info = info.but(module=path)
            if into is None:  # a slot is made: in its own layout
                kind = replace(kind, stride=self.old.slots[path].type.stride)
        n = self.storages.nbytes(node)
        self.moved[here, tier] = self.moved.get((here, tier), 0) + n
        target = to_tier if TIERS.index(tier) > TIERS.index(here) else from_tier
        info = info.but(type=kind, tier=tier, phase=self.phase)
        args = (value, tier, into, not self._aside(here, tier))
        return self.call(target, args, {}, info, f"{node.name}_to_{tier}")

    def _wait(self, moved: fx.Node, source: fx.Node) -> fx.Node:
        return self.call(arrive, (moved, source), {}, self.info[moved].but(phase=self.phase))

    def _at_once(self, value: fx.Node, node: fx.Node, tier: str) -> fx.Node:
        aside = self._aside(self.info[value].tier, tier)
        moved = self._move(value, node, tier)
        return self._wait(moved, value) if aside else moved

    # -- what it says --------------------------------------------------------------------------------------------------

    def _notes(self) -> list[str]:
        out = []
        for kind, (_, noun) in NOUNS.items():
            for tier in (HOST, DISK):
                paths = [p for p, s in self.old.slots.items() if s.kind == kind and self.tiers[p] == tier]
                n = sum(self._bytes(self.old.slots[p].storage, self.old.slots[p].type.dtype) for p in paths)
                if paths:
                    out.append(f"offload: {len(paths)} {noun} on {tier}, {size(n)} a rank")
        for tier in (HOST, DISK):
            gone = [self.storages.nbytes(root) for root, a in self.away.items() if a.leaves is not None and a.rests == tier]
            if gone:
                out.append(f"offload: {len(gone)} activations on {tier} till the backward, {size(sum(gone))}")
        grads = [s for s in self.old.slots.values() if s.kind == SlotKind.GRADIENT and self.tiers[s.path] == DEVICE]
        if self.cuda and grads and self.asked.gradients not in (None, DEVICE):
            out.append(f"offload: {len(grads)} gradients stay on the device, as their parameters do: torch wants them together")
        calls = [n for n in self.host if not is_getitem(n)]
        if calls:
            out.append(f"offload: {len(calls)} operators of the update run on the host")
        if self.moved:
            ways = [f"{size(n)} {here} to {there}" for (here, there), n in self.moved.items()]
            staged = f"; staging up to {size(self.bound)} each way" if self.bound else ""
            out.append(f"offload: a rank moves per step {', '.join(ways)}{staged}")
        return out

    def _bytes(self, spec: ShardSpec | None, dtype: torch.dtype) -> int:
        assert spec is not None
        return self.storages.numel(spec) * dtype.itemsize
