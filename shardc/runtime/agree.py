"""Ranks agree or stop: what each is about to run is compared before the first collective of it.

Everything starts with one all-gather of a vector of fixed size, whatever the caller: ranks that do different things meet
there, see it, and all raise. Hashes are made by `digest`, since Python's `hash` of text differs between processes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.errors import AgreementError
from shardc.runtime.failure import wait
from shardc.runtime.world import Ranks

WIDTH = 32
"""Entries of the vector: hash, number of sizes, sizes (the rest of them follows once the hashes agree)."""


def digest(text: str) -> int:
    """A hash that is the same in all processes; fits an int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def exchange(
    ranks: Ranks,
    signature_hash: int,
    sizes: Sequence[int],
    what: Callable[[], Mapping[str, str]] | None = None,
) -> list[list[int]]:
    """Each rank's `sizes`, in rank order; called at the start of every step.

    Args:
        signature_hash: `digest` of what must be equal (function, shapes beyond dim 0, dtypes, static values).
        sizes: what may differ: dim 0 of the inputs. Also the place for a flag such as "this variant is new to me".
        what: makes the texts behind the hash; called only if a rank differs, to name the difference.

    Raises:
        AgreementError: on all ranks, if the hashes (or the numbers of sizes) differ.
    """
    if not ranks.distributed:
        return [list(sizes)]
    rows = _all_gather(ranks, [signature_hash, len(sizes), *sizes[: WIDTH - 2]], WIDTH)
    if any(row[:2] != rows[0][:2] for row in rows):
        _differ(ranks, what() if what is not None else {"call": f"a call with {len(sizes)} tensors (hash {signature_hash})"})
    n = len(sizes)
    out = [row[2 : 2 + n] for row in rows]
    if n > WIDTH - 2:
        rest = _all_gather(ranks, sizes[WIDTH - 2 :], n - (WIDTH - 2))
        out = [a + b for a, b in zip(out, rest, strict=True)]
    return out


def agree(ranks: Ranks, what: Mapping[str, str]) -> None:
    """Compare texts (``{"plan": hash, "signature": ..., "code": ...}``) before the first collective of a new variant.

    Raises:
        AgreementError: on all ranks, naming the rank that differs and the first difference.
    """
    exchange(ranks, digest(json.dumps(dict(what))), (), lambda: what)


def agree_values(ranks: Ranks, names: Sequence[str], values: Sequence[int], subject: str) -> None:
    """Compare one number for each name (a digest of a tensor).

    Raises:
        AgreementError: on all ranks, naming the first name whose value differs, and the ranks.
    """
    if not ranks.distributed:
        return
    agree(ranks, {subject: "\n".join(names)})
    rows = _all_gather(ranks, list(values), len(values)) if values else []
    for k, name in enumerate(names):
        odd = _odd({r: row[k] for r, row in enumerate(rows)})
        if odd:
            raise AgreementError(
                f"{subject}: {name} has other values on rank {', '.join(map(str, odd))} than on the other ranks",
                where=name,
                hint="build the model from the same seed (torch.manual_seed) or the same checkpoint on each rank",
            )


def _all_gather(ranks: Ranks, row: Sequence[int], width: int) -> list[list[int]]:
    mine = torch.zeros(width, dtype=torch.int64)
    mine[: len(row)] = torch.tensor(list(row), dtype=torch.int64)
    mine = mine.to(ranks.host_device)
    parts = [torch.empty_like(mine) for _ in range(ranks.world)]
    gather(parts, mine)
    return [[int(x) for x in part.tolist()] for part in parts]


def gather(parts: list[Tensor], mine: Tensor) -> None:
    """all_gather over the default group, that ends when another rank has failed."""
    work = dist.all_gather(parts, mine, async_op=True)
    if mine.device.type == "cpu":
        wait(work, "the exchange of signatures", "before a step")
    else:
        work.wait()


def _differ(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Every rank comes here once any has seen a difference; exchange the texts and raise."""
    raw = json.dumps(dict(mine)).encode()
    lengths = [row[0] for row in _all_gather(ranks, [len(raw)], 1)]
    sent = torch.zeros(max(lengths), dtype=torch.uint8)
    sent[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    sent = sent.to(ranks.host_device)
    parts = [torch.empty_like(sent) for _ in lengths]
    gather(parts, sent)
    texts = [dict(json.loads(bytes(p[:n].tolist()))) for p, n in zip(parts, lengths, strict=True)]
    raise AgreementError(
        _first_difference(texts), hint="run the same code and options on all ranks; only dim 0 of the inputs may differ"
    )


def _first_difference(texts: list[dict[str, str]]) -> str:
    keys = list(dict.fromkeys(k for text in texts for k in text))
    for key in keys:
        values = {r: text.get(key, "nothing of the kind") for r, text in enumerate(texts)}
        odd = _odd(values)
        if not odd:
            continue
        rest = next(r for r in values if r not in odd)
        a, b = values[odd[0]].splitlines(), values[rest].splitlines()
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        x, y = (lines[at] if at < len(lines) else "nothing" for lines in (a, b))
        which = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
        line = f", line {at + 1}" if max(len(a), len(b)) > 1 else ""
        return f"the ranks differ in {key}{line}: {which}: {x.strip()}; rank {rest}: {y.strip()}"
    return "the ranks differ, though what they say of themselves is equal: their hashes are not made of the same text"


def _odd(values: Mapping[int, object]) -> list[int]:
    """The ranks that are not with the majority (ties: the side of the lowest rank is the majority)."""
    count = Counter(values.values())
    usual = max(count.items(), key=lambda item: item[1])[0]  # the first among equals
    return [r for r, v in values.items() if v != usual]
