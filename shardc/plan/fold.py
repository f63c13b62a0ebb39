"""Folding: rows that differ only in numbers within their paths become one row, ``model.h.{0..11}.attn.weight``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<=[.\[])\d+(?=[.\]]|$)|(?<=[.\[])\{[\d,.]+\}(?=[.\]]|$)")
"""A number that is a whole component of a path: ``.3.``, ``.3`` at the end, ``[3]``; or a set of them, folded before."""


@dataclass(frozen=True)
class Folded:
    """Several rows as one: the path of all, how many they are, and the index of each in the input."""

    path: str
    members: tuple[int, ...]


def fold(rows: Iterable[tuple[str, Hashable]]) -> list[Folded]:
    """Fold (path, signature) rows of equal signature, innermost numbers first; in order of first appearance."""
    keyed: list[tuple[str, Hashable, tuple[int, ...]]] = [(path, signature, (k,)) for k, (path, signature) in enumerate(rows)]
    depth = max((len(_NUMBER.findall(path)) for path, _, _ in keyed), default=0)
    for level in range(depth):
        groups: dict[Hashable, list[tuple[str, str, tuple[int, ...]]]] = {}
        for path, signature, members in keyed:
            spots = list(_NUMBER.finditer(path))
            at = len(spots) - 1 - level
            if at < 0:
                groups[(path, signature, "whole")] = [(path, "", members)]
                continue
            head, number, tail = path[: spots[at].start()], spots[at].group(), path[spots[at].end() :]
            groups.setdefault((head, tail, signature), []).append((path, number, members))
        keyed = []
        for key, items in groups.items():
            signature = key[1] if isinstance(key, tuple) and key[2] == "whole" else key[2]  # type: ignore[index]
            if len(items) == 1:
                keyed.append((items[0][0], signature, items[0][2]))
                continue
            assert isinstance(key, tuple)
            members = tuple(m for _, _, group in items for m in group)
            keyed.append((f"{key[0]}{numbers(n for _, n, _ in items)}{key[1]}", signature, members))
    return [Folded(path, members) for path, _, members in sorted(keyed, key=lambda row: min(row[2]))]


def numbers(words: Iterable[str]) -> str:
    """``{0..11}``, ``{0,2,5..7}`` for the numbers given."""
    given = list(words)
    if any(not w.isdigit() for w in given):
        return "{" + ",".join(dict.fromkeys(w.strip("{}") for w in given)) + "}"
    values = sorted({int(w) for w in given})
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for v in values:
        if runs and v == runs[-1][-1] + 1:
            runs[-1].append(v)
        else:
            runs.append([v])
    parts = [f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs]
    return "{" + ",".join(parts) + "}"
