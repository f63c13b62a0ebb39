"""Compare two runs leaf by leaf, with the tolerance of the one rule: exact for integers, rounding alone for floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.testing.oracle import Oracle, Step

RTOL = 1e-10
"""Of the largest entry of the reference, in float64."""

ROUNDING = 10.0
"""How many times further than its own rounding a tensor may be from the reference."""

EPSILONS = 8.0
"""Allowed difference of values in a type narrower than float64, in units of its machine epsilon."""

FLOOR = 8 * torch.finfo(torch.float64).eps
"""Allowed difference in units of the largest value of the step: what is zero because terms cancel may round to as much."""


@dataclass(frozen=True)
class Difference:
    """A leaf that is not what it should be.

    Args:
        step: number of the call, from 0.
        path: ``result``, ``model.h.0.attn.weight``, ``optimizer.state[3].exp_avg``, ``model.wte.weight.grad``.
        what: in words, with the numbers.
    """

    step: int
    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path} after step {self.step}: {self.what}"


@dataclass(frozen=True)
class Rounded:
    """A tensor that is further than the first term of the tolerance, but within its own rounding."""

    step: int
    path: str
    difference: float
    own: float

    def __str__(self) -> str:
        return f"{self.path} after step {self.step}: differs by {self.difference:.1e}, rounding alone by {self.own:.1e}"


@dataclass
class Tally:
    """What a comparison has seen so far; `worst` is the largest relative difference within the first term of the tolerance."""

    oracle: Oracle
    rtol: float = RTOL
    compared: int = 0
    worst: float = 0.0
    worst_path: str = ""
    floor: float = 0.0

    def step(self, index: int, got: Step) -> tuple[list[Difference], list[Rounded]]:
        """Compare what one call returned and left behind with the oracle's same call."""
        want = self.oracle.plain.steps[index]
        real = [t for t in (*want.results.values(), *want.state.values()) if _real(t)]
        self.floor = FLOOR * max(map(magnitude, real), default=0.0)
        bad: list[Difference] = []
        rounded: list[Rounded] = []
        for part in ("results", "state"):
            ours, theirs = getattr(got, part), getattr(want, part)
            for path in [*theirs, *(p for p in ours if p not in theirs)]:
                if path not in ours:
                    bad.append(Difference(index, path, f"is absent, should be {describe(theirs[path])}"))
                elif path not in theirs:
                    bad.append(Difference(index, path, f"is {describe(ours[path])}, should be absent"))
                else:
                    for found in self._leaf(index, part, path, ours[path], theirs[path]):
                        (bad if isinstance(found, Difference) else rounded).append(found)  # type: ignore[arg-type]
        return bad, rounded

    def _leaf(self, index: int, part: str, path: str, got: Any, want: Any) -> Iterator[Difference | Rounded]:
        self.compared += 1
        if not isinstance(want, Tensor) or not isinstance(got, Tensor):
            if isinstance(want, float) and isinstance(got, float) and not isinstance(want, Tensor):
                if abs(got - want) > self.rtol * abs(want) and not (got != got and want != want):
                    yield Difference(index, path, f"is {got!r}, should be {want!r}")
            elif isinstance(want, Tensor) or isinstance(got, Tensor) or type(got) is not type(want) or got != want:
                yield Difference(index, path, f"is {describe(got)}, should be {describe(want)}")
            return
        if got.shape != want.shape or got.dtype != want.dtype:
            yield Difference(index, path, f"is {describe(got)}, should be {describe(want)}")
            return
        if part == "state" and strides(got) != strides(want):
            yield Difference(index, path, f"has strides {tuple(got.stride())}, should have {tuple(want.stride())}")
        got, want = got.to(want.device), want
        if not (want.is_floating_point() or want.is_complex()):
            if not torch.equal(got, want):
                yield Difference(
                    index, path, f"differs in {int((got != want).sum())} of {want.numel()} entries (exact: {want.dtype})"
                )
            return
        if not want.numel():
            return
        gap, scale = distance(got, want), magnitude(want)
        # what a model keeps in a narrow type rounds there
        rtol = max(self.rtol, EPSILONS * torch.finfo(want.dtype).eps) if self.rtol else 0.0
        if gap <= rtol * scale:
            if scale and gap / scale > self.worst:
                self.worst, self.worst_path = gap / scale, path
            return
        if rtol and gap <= self.floor:
            yield Rounded(index, path, gap, self.floor / ROUNDING)
            return
        own = 0.0
        for run in self.oracle.others() if self.rtol else ():
            other = getattr(run.steps[index], part).get(path)
            if isinstance(other, Tensor) and other.shape == want.shape:
                own = max(own, distance(other, want))
            if gap <= ROUNDING * own:
                yield Rounded(index, path, gap, own)
                return
        at = _where(got, want)
        allowed, relative = max(rtol * scale, ROUNDING * own), gap / scale if scale else float("inf")
        text = f"differs by {gap:.3e} (largest entry {scale:.3e}, relative {relative:.1e}; allowed {allowed:.1e})"
        yield Difference(index, path, f"{text}; at {list(at)}: {got[at].item():.6g}, should be {want[at].item():.6g}")


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tensors; equal infinities and NaNs in the same place do not differ, others do infinitely."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs())
    return float(gap.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if gap.numel() else 0.0


def magnitude(t: Tensor) -> float:
    """Largest finite entry by absolute value."""
    size = t.abs().double()
    return float(torch.where(size.isfinite(), size, torch.zeros((), dtype=torch.float64)).max()) if t.numel() else 0.0


def strides(t: Tensor) -> tuple[int, ...]:
    """Strides of the dims that have more than one element."""
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()


def describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    return f"{x!r} ({type(x).__name__})" if x is not None else "None"


def _where(got: Tensor, want: Tensor) -> tuple[int, ...]:
    gap = (got - want).abs().double().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return tuple(int(i) for i in torch.unravel_index(gap.argmax(), want.shape))


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
