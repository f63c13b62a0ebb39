"""A small training step as a value: its source text, from which the functions are made."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class TrainingProgram:
    """A training step that can be printed, compared, sent to another process and run.

    Args:
        source: Python text that defines ``make_state()``, ``train_step(model, optimizer, *batch)`` and ``make_batches()``.
            It imports all it needs: pasted into a file, it is the same program.

    The functions are made when first used and belong to this object; a copy in another process makes its own.
    """

    source: str

    @functools.cached_property
    def _namespace(self) -> dict[str, Any]:
        name = f"program_{hashlib.sha256(self.source.encode()).hexdigest()[:8]}"
        space: dict[str, Any] = {"__name__": name}
        # tracebacks, and whatever reports a line of the program, find its text there
        linecache.cache[f"{name}.py"] = (len(self.source), None, self.source.splitlines(keepends=True), f"{name}.py")
        exec(compile(self.source, f"{name}.py", "exec"), space)
        return space

    def make_state(self) -> tuple[nn.Module, optim.Optimizer]:
        """A fresh model (float32, CPU) and its optimizer; always the same."""
        model, optimizer = self._namespace["make_state"]()
        return model, optimizer

    @property
    def train_step(self) -> Callable[..., Any]:
        """``train_step(model, optimizer, *batch)``; returns its loss (0-d), alone or with other tensors."""
        step: Callable[..., Any] = self._namespace["train_step"]
        return step

    @property
    def batches(self) -> list[Batch]:
        """Fresh copies of the batches; dim 0 of every tensor is the batch, one row or more."""
        out: list[Batch] = self._namespace["make_batches"]()
        return out

    def __getstate__(self) -> dict[str, str]:
        return {"source": self.source}

    def __repr__(self) -> str:
        """The source, so that a failing example can be pasted into a file."""
        return f"TrainingProgram('''\\\n{self.source}''')"
