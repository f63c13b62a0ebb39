"""The example under torchrun: a killed rank leads to a restart from the last checkpoint, with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "resume.py"


def run(folder: Path, ranks: int, *options: str, example: Path = EXAMPLE) -> str:
    """An example on `ranks` ranks (1: without torchrun); what it printed."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "3", "--rdzv-backend", "c10d",
              "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.2"]  # fmt: skip
    command = [sys.executable, *(launch if ranks > 1 else []), str(example)]
    command += ["--checkpoint", str(folder / "ckpt"), "--losses", str(folder / "losses"), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> dict[int, list[float]]:
    """Step -> the losses that were computed for it, in order."""
    out: dict[int, list[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        row = json.loads(line)
        out.setdefault(row["step"], []).append(row["loss"])
    return out


def reference(folder: Path, steps: int) -> list[float]:
    folder.mkdir()
    run(folder, 1, "--steps", str(steps))
    return [row[0] for _, row in sorted(losses(folder).items())]


def check_restart(folder: Path, want: list[float], ranks: int, die: int, rank: int, steps: int) -> int:
    """Kill a rank once; returns the step from which the run went on."""
    out = run(folder, ranks, "--steps", str(steps), "--die", str(die), "--die-rank", str(rank))
    line = next(x for x in out.splitlines() if x.startswith("attempt 1: from step"))
    found = losses(folder)
    assert sorted(found) == list(range(steps))
    for i, values in found.items():
        assert all(abs(v - want[i]) <= 1e-10 * max(1.0, abs(want[i])) for v in values), (i, values, want[i])
    return int(line.rsplit(" ", 1)[1])


@pytest.mark.processes
def test_a_killed_rank_changes_nothing(tmp_path: Path) -> None:
    want = reference(tmp_path / "one", 16)
    (tmp_path / "two").mkdir()
    start = check_restart(tmp_path / "two", want, 2, 8, 1, 12)
    assert start == 5
    out = run(tmp_path / "two", 3, "--steps", "16", "--zero", "1")  # and on at another world size and stage
    assert "attempt 0: from step 12" in out
    found = losses(tmp_path / "two")
    assert all(abs(found[i][0] - want[i]) <= 1e-10 * max(1.0, abs(want[i])) for i in range(12, 16))
