"""Numbers and tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def size(n: float) -> str:
    """Bytes in decimal units, three digits: ``19.3 MB``, ``0``."""
    if n == 0:
        return "0"
    value, unit = float(n), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"


def amount(n: float) -> str:
    """A count: ``124.4 M``, ``2,131``."""
    if n < 100_000:
        return f"{n:,.0f}"
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n:.0f}"  # pragma: no cover


def seconds(s: float) -> str:
    if s == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if s >= scale:
            return f"{s / scale:.1f} {unit}"
    return f"{s / 1e-6:.0f} us"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), gap: int = 2) -> list[str]:
    """Aligned columns; `right` lists the columns that are aligned to the right. Lines have no trailing space."""
    if not rows:
        return []
    widths = [max(len(r[k]) for r in rows) for k in range(len(rows[0]))]
    lines = []
    for r in rows:
        cells = [c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(r, widths, strict=True))]
        lines.append((" " * gap).join(cells).rstrip())
    return lines
