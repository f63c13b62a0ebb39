"""What a run costs: bytes of the storages that are alive, as registers come and go, and what is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shardc import _torch
from shardc.tiers import DEVICE


@dataclass
class Stats:
    """Measured on one rank.

    Args:
        peak_bytes: storages alive at the start of the step, plus the largest sum of allocations minus frees within it.
        peak_at: name of the instruction that reached it.
        comm_bytes: bytes sent, in the ring convention (`Step.nbytes`).
        collectives: number of collectives.
        seconds: by category: "compute", "communication", "host".
        tiers: the most bytes that were alive on each other tier ("host", "disk"); none of them count in `peak_bytes`.
    """

    peak_bytes: int = 0
    peak_at: str = ""
    comm_bytes: int = 0
    collectives: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "communication": 0.0, "host": 0.0})
    tiers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes alive over the instructions of one rank.

    Args:
        base: bytes alive before the first instruction (state and inputs).
        timeline: (instruction name, bytes alive when it has its results and has freed nothing yet, with what its kernel holds
            inside), in order.
        peak_bytes, peak_at: the largest of them (or the base), and its instruction.
        by_category: bytes alive at the peak, by category.
        categories: for each entry of the timeline the bytes by category.
        tiers: the most bytes alive on each other tier.
    """

    base: int
    timeline: tuple[tuple[str, int], ...]
    peak_bytes: int
    peak_at: str
    by_category: Mapping[str, int]
    categories: tuple[Mapping[str, int], ...]
    tiers: Mapping[str, int] = field(default_factory=dict)


class Tracker:
    """Counts the bytes of distinct storages by holder: registers (numbers), and what is pinned for the whole step.

    A storage counts once, from its first holder to its last, under the category that the first one gave. Sizes are those
    requested (`untyped_storage().nbytes()`); meta tensors count as the real ones would. What lies on the host or disk tier is
    counted apart.
    """

    def __init__(self, timeline: bool = False) -> None:
        self.live = self.peak = self.base = 0
        self.peak_at = ""
        self.by_category: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self.timeline: list[tuple[str, int]] | None = [] if timeline else None
        self.categories: list[Mapping[str, int]] = []
        self._storages: dict[int, list[int]] = {}  # storage -> [holders, bytes]
        self._category: dict[int, str] = {}
        self._held: dict[int, int] = {}  # register -> storage
        self._tier: dict[int, str] = {}  # storages on other tiers
        self._away: dict[str, int] = {}
        self.away_peak: dict[str, int] = {}

    def pin(self, tensor: Tensor, category: str = "other", tier: str = DEVICE) -> None:
        """Hold a tensor to the end of the step (state, inputs, what the step creates)."""
        self._hold(tensor, category, tier)

    def begin(self) -> None:
        """What is pinned so far was there before the step."""
        self.base = self.peak = self.live
        self.at_peak = dict(self.by_category)

    def _hold(self, tensor: Tensor, category: str, tier: str) -> int:
        key = _torch.storage_id(tensor)
        entry = self._storages.get(key)
        if entry is not None:
            entry[0] += 1
            return key
        n = tensor.untyped_storage().nbytes()
        self._storages[key] = [1, n]
        if tier != DEVICE:
            self._tier[key] = tier
            self._away[tier] = now = self._away.get(tier, 0) + n
            self.away_peak[tier] = max(now, self.away_peak.get(tier, 0))
            return key
        self._category[key] = category
        self.live += n
        self.by_category[category] = self.by_category.get(category, 0) + n
        return key

    def add(self, register: int, tensor: Tensor, category: str = "other", tier: str = DEVICE) -> None:
        self._held[register] = self._hold(tensor, category, tier)

    def drop(self, registers: Iterable[int]) -> None:
        """Registers that die; those that hold no tensor are ignored."""
        for register in registers:
            key = self._held.pop(register, None)
            if key is None:
                continue
            entry = self._storages[key]
            entry[0] -= 1
            if not entry[0]:
                del self._storages[key]
                if key in self._tier:
                    self._away[self._tier.pop(key)] -= entry[1]
                    continue
                self.live -= entry[1]
                self.by_category[self._category.pop(key)] -= entry[1]

    def mark(self, name: str, inside: int = 0) -> None:
        """All that lives at this point of the instruction `name` has been added.

        Args:
            inside: bytes of temporaries that its kernel held besides (they count as "other").
        """
        total = self.live + inside
        if self.timeline is None and total <= self.peak:
            return
        made = {k: n for k, n in self.by_category.items() if n}
        if inside:
            made["other"] = made.get("other", 0) + inside
        if self.timeline is not None:
            self.timeline.append((name, total))
            self.categories.append(made)
        if total > self.peak:
            self.peak, self.peak_at, self.at_peak = total, name, made

    def profile(self) -> MemoryProfile:
        return MemoryProfile(
            self.base,
            tuple(self.timeline or ()),
            self.peak,
            self.peak_at,
            dict(self.at_peak),
            tuple(self.categories),
            dict(self.away_peak),
        )
