"""When each value is needed on which tier, and so when it may be away: the decisions behind `offload`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from shardc.passes.storages import Storages
from shardc.program import Phase, Program, TensorType
from shardc.tiers import DEVICE, DISK, HOST, SECTOR, hops


@dataclass
class Stay:
    """Consecutive uses of a storage on one tier.

    Args:
        root: the storage.
        tier: where it is needed.
        first, last: positions of the first and last use.
        fetched: a copy is made for it; else it is the storage itself.
        start: position before which the copy is started.
        values: member of the storage -> the node that stands for it here, filled in by the rewrite.
    """

    root: fx.Node
    tier: str
    first: int
    last: int
    fetched: bool
    start: int = -1
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass
class Away:
    """A storage that is not always where it is needed.

    Args:
        home: where it is made, or rests.
        rests: the tier to which it goes after its first stay; `home` where it does not go.
        stays: in order, those of one tier after another.
    """

    home: str
    rests: str
    stays: list[Stay]

    def at(self, tier: str, position: int) -> Stay:
        """The stay on a tier that covers a use."""
        return next(s for s in self.stays if s.tier == tier and s.first <= position <= s.last)

    @property
    def leaves(self) -> int | None:
        """Position after which it goes to where it rests; None: it does not go."""
        return self.stays[0].last if self.rests != self.home else None


class Needs:
    """Uses of storages, by position and tier.

    Args:
        program: local, in the order of execution.
        storages: of the program.
        tiers: slot path -> where it rests.
        host: the operators that run on the host.
    """

    def __init__(self, program: Program, storages: Storages, tiers: Mapping[str, str], host: Collection[fx.Node]) -> None:
        self.program, self.storages, self.tiers, self.host = program, storages, tiers, host
        self.nodes = [n for n in program.nodes if n.op != "output"]
        self.place = {n: k for k, n in enumerate(self.nodes)}
        self.begin = sum(n.op == "placeholder" for n in self.nodes)
        self.end = len(self.nodes)
        self.slot_of = {n: path for path, n in program.entry.items()}
        made = [0 if storages.is_link(n) or n.op == "placeholder" else storages.nbytes(n) for n in self.nodes]
        self._made = list(itertools.accumulate(made, initial=0))
        self.uses: dict[fx.Node, list[tuple[int, str]]] = {}
        for node in self.nodes[self.begin :]:
            for root in storages.read_by(node) if not storages.is_link(node) else ():
                self._use(root, self.place[node], HOST if node in host else DEVICE)
        for node in program.results:
            if program.info[node].type is not None:
                self._use(storages.root(node), self.end, DEVICE)
        self.exits = {path: found for path, node in program.exit.items() if (found := self._exit(path, node)) is not None}
        self.barrier = max((self.place[g.node] for g in program.guards), default=-1)

    def _use(self, root: fx.Node, position: int, tier: str) -> None:
        self.uses.setdefault(root, []).append((position, tier))

    def home(self, root: fx.Node) -> str:
        """Where a storage is made, or rests."""
        if root in self.slot_of:
            return self.tiers[self.slot_of[root]]
        return HOST if root in self.host else DEVICE

    def _exit(self, path: str, node: fx.Node) -> Exit | None:
        """How the new value of a slot gets to where it rests; None: it is the old one."""
        if node is self.program.entry.get(path):
            return None
        root = self.storages.root(node)
        home = self.home(root)
        at = max(self.place[node], self.begin - 1)
        tier = HOST if home == DISK else home
        self._use(root, at, tier)
        # What lies in a slot at rest is taken before anything is overwritten.
        return Exit(at, tier, root in self.slot_of and home == HOST, tuple(hops(tier, self.tiers[path])))

    def overwritten_after(self, path: str) -> int:
        """The position after which the resting value of a slot may be overwritten: its last use, and the last guard."""
        entry = self.program.entry.get(path)
        last = max((k for k, _ in self.uses.get(entry, ())), default=-1) if entry is not None else -1
        return max(last, self.barrier, self.begin - 1)

    def away(self, activations: str) -> dict[fx.Node, Away]:
        """The storages that are not always where they are needed.

        Args:
            activations: the tier to which values go that the forward leaves for the backward.
        """
        out = {}
        for root, uses in self.uses.items():
            home = self.home(root)
            rests = activations if activations != DEVICE and self._left_by_forward(root, home) else home
            if rests == DISK != home and self.storages.nbytes(root) < SECTOR:
                rests = HOST
            uses = sorted(uses)
            if rests == home and all(tier == home for _, tier in uses):
                continue
            stays = [s for tier in dict.fromkeys(t for _, t in uses) for s in self._stays(root, tier, uses, home, rests)]
            if rests != home and len(stays) < 2:
                continue
            out[root] = Away(home, rests, stays)
        return out

    def _left_by_forward(self, root: fx.Node, home: str) -> bool:
        """Whether a value is made by the forward, on the device, and may be read by the backward alone after a while."""
        info = self.program.info[root]
        made = root.op == "call_function" and info.phase == Phase.FORWARD and isinstance(info.type, TensorType)
        return made and home == DEVICE and all(tier == DEVICE for _, tier in self.uses[root]) and self.storages.nbytes(root) > 0

    def _stays(self, root: fx.Node, tier: str, uses: list[tuple[int, str]], home: str, rests: str) -> list[Stay]:
        places = [k for k, t in uses if t == tier]
        fresh = root not in self.slot_of
        if fresh and tier == home and rests != home:
            places = [self.place[root], *places]
        out = [Stay(root, tier, places[0], places[0], fetched=tier != home)]
        for k in places[1:]:
            before = out[-1]
            resting = tier != home or rests != home  # between two stays it may be away
            apart = resting and not (fresh and rests == home) and self._worth(root, before.last, k)
            if apart and rests != home and len(out) == 1:
                apart = k == self.end or self.program.info[self.nodes[k]].phase != Phase.FORWARD
            if apart:
                out.append(Stay(root, tier, k, k, fetched=True))
            else:
                before.last = k
        return out

    def _worth(self, root: fx.Node, last: int, following: int) -> bool:
        """Whether more bytes are made between two uses than the storage has."""
        return self._made[following] - self._made[last + 1] > self.storages.nbytes(root) if following > last + 1 else False


@dataclass(frozen=True)
class Exit:
    """How the new value of a slot gets to where it rests.

    Args:
        at: position after which it is there.
        tier: where it is then.
        copied: it lies in another slot, or is a part of one: a copy is taken.
        hops: the tiers that it passes on its way.
    """

    at: int
    tier: str
    copied: bool
    hops: tuple[str, ...]
