"""examples/finetune_hf.py under torchrun: interrupted and resumed it has the losses of an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_restarts import run

EXAMPLE = Path(__file__).parent.parent / "examples" / "finetune_hf.py"
SMALL = ["--width", "16", "--layers", "1", "--longest", "32", "--every", "3", "--rows", "5", "--lr", "1e-2"]


def finetune(folder: Path, ranks: int, *options: str) -> tuple[str, dict[tuple[str, int], list[float]]]:
    """The example's output, and the losses that it has computed so far: ("loss" or "held_out", step) -> in order."""
    folder.mkdir(exist_ok=True)
    out = run(folder, ranks, *SMALL, *options, example=EXAMPLE)
    found: dict[tuple[str, int], list[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        row = json.loads(line)
        key = ("loss", row["step"]) if "loss" in row else ("held_out", row["evaluated"])
        found.setdefault(key, []).append(row.get("loss", row.get("held_out")))
    return out, found


def check_curve(folder: Path, precision: str, rtol: float, other: int) -> None:
    """Two ranks lose one in front of step 5 and go on from step 3; a third joins at step 6 (at stage 1)."""
    _, want = finetune(folder / "whole", 1, "--steps", "9", "--precision", precision)
    out, _ = finetune(folder / "parts", 2, "--steps", "6", "--precision", precision, "--die", "5")
    assert "attempt 1: from step 3" in out
    out, found = finetune(folder / "parts", other, "--steps", "9", "--precision", precision, "--zero", "1")
    assert "attempt 0: from step 6" in out
    assert found.keys() == want.keys() and len(found) == 9 + 3
    assert len(found["loss", 3]) == len(found["loss", 4]) == 2
    for key, values in found.items():
        assert len(set(values)) == 1, f"{key}: computed again from the checkpoint on the same ranks: {values}"
        assert values[0] == pytest.approx(want[key][0], rel=rtol), key
    first, last = want["loss", 0][0], want["loss", 8][0]
    assert last < first - 20 * rtol * first, "what a lost checkpoint would change is far above the tolerance"


@pytest.mark.processes
def test_bfloat16(tmp_path: Path) -> None:
    check_curve(tmp_path, "bf16", 2e-3, 1)


@pytest.mark.long
@pytest.mark.processes
def test_float32_on_three_ranks(tmp_path: Path) -> None:
    check_curve(tmp_path, "none", 2e-5, 3)
