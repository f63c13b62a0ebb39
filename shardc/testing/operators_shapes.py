"""Operators that move elements and compute nothing: views, slices, joins, tilings. See `shardc.testing.operators`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardc.testing.pinned import Writer


def dim(w: Writer, x: str) -> int:
    """A dim of a value that has one."""
    return w.number(0, w[x].dim() - 1)


def numel(w: Writer, x: str) -> int:
    return math.prod(w[x].shape)


def listed(items: object) -> str:
    return ", ".join(map(str, items))  # type: ignore[call-overload]


def view(w: Writer) -> str | None:
    """The same elements in order, in other dims."""
    x = w.pick()
    if x is None:
        return None
    sizes: list[int] = []
    rest = numel(w, x)
    while rest > 1 and len(sizes) < 4:
        sizes.append(w.choose(*(n for n in range(1, rest + 1) if rest % n == 0)))
        rest //= sizes[-1]
    if rest > 1 or not sizes:
        sizes.append(rest)
    return f"{x}.{'view' if w[x].is_contiguous() else 'reshape'}({listed(sizes)})"


def split_dim(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    n = w[x].shape[d]
    return f"{x}.unflatten({d}, (-1, {w.choose(*(k for k in range(1, n + 1) if n % k == 0))}))"


def merge_dims(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 1)
    if x is None:
        return None
    first = w.number(0, w[x].dim() - 2)
    return f"{x}.flatten({first}, {w.number(first + 1, w[x].dim() - 1)})"


def permute(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 1)
    if x is None:
        return None
    n = w[x].dim()
    order = w.draw_order(list(range(n)))
    return str(w.choose(f"{x}.permute({listed(order)})", f"{x}.transpose({order[0]}, {order[1]})",
                        f"{x}.movedim(0, {order[0]})",
                        f"{x}.transpose({order[0]}, {order[1]}).contiguous()"))  # fmt: skip


def ones(w: Writer) -> str | None:
    """Dims of size one come, go and grow."""
    x = w.pick()
    if x is None:
        return None
    n = w[x].dim()
    at = w.number(0, n)
    shape = [*w[x].shape[:at], w.size(), *w[x].shape[at:]]
    texts = [f"{x}.unsqueeze({at})", f"{x}.squeeze()", f"{x}.unsqueeze({at}).expand({listed(shape)})"]
    if at == 0:
        texts.append(f"{x}.expand({listed(shape)})")
    return str(w.choose(*texts))


def piece(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    n = w[x].shape[d]
    start = w.number(0, n - 1)
    stop = w.number(start + 1, n)
    lead = ":, " * d
    return str(
        w.choose(f"{x}[{lead}{start}:{stop}]", f"{x}[{lead}{start}]", f"{x}.narrow({d}, {start}, {stop - start})",
                 f"{x}[{lead}{start}::{w.number(2, 3)}]", f"{x}.select({d}, {start - n})", f"{x}[..., None, {w.number(0, 0)}:]")
    )  # fmt: skip


def turn(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    dims = [k for k in range(w[x].dim()) if w.number(0, 1)] or [d]
    return str(w.choose(f"{x}.flip({dims})", f"{x}.roll({w.number(-3, 4)}, {d})", f"{x}.roll({w.number(1, 9)})",
                        f"{x}.roll({[w.number(-2, 2) for _ in dims]}, {dims})"))  # fmt: skip


def pad(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    n = w[x].shape[-1]
    before = w.number(-1 if n > 2 else 0, 2)
    texts = [f"F.pad({x}, ({before}, {w.number(0, 2)}), value={w.number(0, 1)}.0)"]
    if w[x].dim() > 1:
        texts.append(f"F.pad({x}, ({w.number(0, 1)}, 0, {w.number(0, 2)}, {w.number(0, 1)}))")
    if w[x].dim() in (3, 4) and n > 1:
        rest = "" if w[x].dim() == 3 else ", 0, 0"
        texts += [f'F.pad({x}, (1, {w.number(0, 1)}{rest}), mode="{mode}")' for mode in ("circular", "reflect")]
    return str(w.choose(*texts))


def tile(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    times = [w.number(1, 2) for _ in range(w[x].dim() + w.number(0, 1))]
    d = dim(w, x)
    counts = f"torch.tensor({[w.number(1, 2) for _ in range(w[x].shape[d])]})"
    total = f", output_size={sum(eval(counts[13:-1]))}"
    return str(w.choose(f"{x}.repeat({listed(times)})", f"{x}.repeat_interleave({w.number(1, 3)}, {d})",
                        f"{x}.tile({listed(times[-1:])})", f"{x}.repeat_interleave({counts}, {d}{total})"))  # fmt: skip


def triangle(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 1)
    if x is None:
        return None
    dims = w.choose("0, 1", "1, 0", "-1, -2")
    return str(w.choose(f"{x}.tril({w.number(-1, 1)})", f"{x}.triu({w.number(-1, 1)})", f"{x}.diagonal(0, {dims})"))


def windows(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    n = w[x].shape[d]
    return str(w.choose(f"{x}.unfold({d}, {w.number(1, n)}, {w.number(1, 2)})", f"{x}.diff(dim={d})", f"torch.diag_embed({x})"))


def join(w: Writer) -> str | None:
    x = w.pick(lambda t: t.dim() > 0)
    if x is None:
        return None
    d = dim(w, x)
    other = list(w[x].shape)
    if w.number(0, 2) == 0:
        return f"torch.stack([{x}, {w.like(*other)}], {w.number(0, len(other))})"
    other[d] = w.size()
    return f"torch.cat([{x}, {w.like(*other)}{w.choose('', f', {x}')}], {w.choose(d, d - len(other))})"


def parts(w: Writer) -> str | None:
    """Several results."""
    x = w.pick(lambda t: t.dim() > 0 and max(t.shape) > 1)
    if x is None:
        return None
    d = w.choose(*(k for k, n in enumerate(w[x].shape) if n > 1))
    n = w[x].shape[d]
    first = w.number(1, n - 1)
    least = -(-n // 3)
    texts = [f"{x}.split([{first}, {n - first}], {d})", f"{x}.chunk(2, {d})", f"{x}.split({w.number(least, n)}, {d})",
             f"{x}.tensor_split(2, {d})"]  # fmt: skip
    return str(w.choose(*texts, f"{x}.unbind({d})") if n <= 3 else w.choose(*texts))


SHAPES: dict[str, Callable[[Writer], str | None]] = {
    "view": view, "split_dim": split_dim, "merge_dims": merge_dims, "permute": permute, "ones": ones, "piece": piece,
    "turn": turn,
    "pad": pad, "tile": tile, "triangle": triangle, "windows": windows, "join": join, "parts": parts,
}  # fmt: skip
