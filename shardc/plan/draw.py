"""A picture of the memory of a step, as SVG: categories stacked over the instructions, the peak marked."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardc.errors import PlanError
from shardc.plan.roles import CATEGORIES
from shardc.plan.text import size

if TYPE_CHECKING:
    from shardc.plan.memory import Memory

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 960, 420, 80, 30, 150, 40
COLOURS = {
    "parameters": "#4477aa", "gradients": "#ee6677", "optimizer": "#228833", "activations": "#ccbb44", "gathered": "#66ccee",
    "other": "#bbbbbb",
}  # fmt: skip


def draw(memory: Memory, path: str | Path) -> None:
    """Write the picture.

    Raises:
        PlanError: a name that does not end in ``.svg``.
    """
    if Path(path).suffix != ".svg":
        raise PlanError(f"the picture of a plan's memory is SVG, {str(path)!r} is not", hint='plan.memory.plot("memory.svg")')
    Path(path).write_text(svg(memory))


def svg(memory: Memory) -> str:
    """The picture as text. Each moment is a step of its own width; levels are exact."""
    moments = memory.timeline
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    top = max(memory.peak_bytes, 1)
    n = max(len(moments), 1)

    def x(k: float) -> str:
        return f"{LEFT + across * k / n:.1f}"

    def y(b: float) -> str:
        return f"{TOP + down * (1 - b / top):.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    below = [0] * len(moments)
    used = [c for c in CATEGORIES if any(m.by_category.get(c, 0) for m in moments)]
    for category in used:
        above = [b + m.by_category.get(category, 0) for b, m in zip(below, moments, strict=True)]
        line = [f"{x(k + d)},{y(b)}" for k, b in enumerate(above) for d in (0, 1)]
        back = [f"{x(k + d)},{y(below[k])}" for k in reversed(range(len(below))) for d in (1, 0)]
        points = " ".join([*line, *back])
        out.append(f'<polygon fill="{COLOURS[category]}" points="{points}"><title>{category}</title></polygon>')
        below = above
    for k, category in enumerate(reversed(used)):
        at = TOP + 20 * k
        out.append(f'<rect x="{WIDTH - RIGHT + 15}" y="{at}" width="12" height="12" fill="{COLOURS[category]}"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 33}" y="{at + 11}">{category}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        out.append(f'<line x1="{LEFT}" x2="{x(n)}" y1="{y(share * top)}" y2="{y(share * top)}" stroke="#00000022"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(share * top)}" text-anchor="end" dy="4">{size(share * top)}</text>')
    peak = next((k for k, m in enumerate(moments) if m.bytes == memory.peak_bytes), None)
    if peak is not None:
        at_peak = f'x1="{x(peak + 0.5)}" x2="{x(peak + 0.5)}" y1="{TOP}" y2="{TOP + down}"'
        out.append(f'<line {at_peak} stroke="black" stroke-dasharray="3"/>')
    out.append(f'<text x="{LEFT}" y="18">peak {size(memory.peak_bytes)} at {escape(str(memory.peak_at))}</text>')
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 12}">{len(moments):,} instructions</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
