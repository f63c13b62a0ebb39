"""Steps that all ranks of a checkpoint do at once: each gives a value, all get all of them, and where one fails all raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shardc.errors import ShardcError, StateError
from shardc.runtime.world import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Together:
    """Args:
    rank, world: this process among those that save or load.
    group: of processes; None: the default one.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(ranks: Ranks | None, group: dist.ProcessGroup | None = None) -> Together:
        return Together(ranks.rank, ranks.world, group) if ranks is not None and ranks.distributed else Together(0, 1)

    def all(self, what: str, work: Callable[[], T]) -> list[T]:
        """The result of `work` on each rank, in rank order (by pickle).

        Raises:
            ShardcError: `work` raised on some rank; on all ranks, named. Alone, its own error.
        """
        if self.world == 1:
            return [work()]
        mine: tuple[str, Any]
        failed: Exception | None = None
        try:
            mine = ("", work())
        except Exception as error:  # told to the others before it is raised
            failed, mine = error, (f"{type(error).__name__}: {error}", None)
        rows: list[Any] = [None] * self.world
        dist.all_gather_object(rows, mine, group=self.group)
        if isinstance(failed, ShardcError):
            raise failed
        for rank, (error_text, _) in enumerate(rows):
            if error_text:
                raise StateError(f"{what} failed on rank {rank}: {error_text}", where=f"rank {rank}",
                                 hint="nothing was changed; see that rank's error")  # fmt: skip
        return [value for _, value in rows]

    def all_own(self, what: str, work: Callable[[], T]) -> T:
        """The own result of `work`, which need not be picklable; raises on all ranks if one fails."""
        kept: list[T] = []
        self.all(what, lambda: kept.append(work()))
        return kept[0]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work`, done by rank 0 alone."""
        rows: list[T | None] = self.all(what, lambda: work() if self.rank == 0 else None)
        return rows[0]  # type: ignore[return-value]
