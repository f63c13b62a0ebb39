"""The example runs: plainly, and on two ranks under torchrun, checked against one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "train_gpt.py")
SMALL = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "32", "--steps", "8", "--check", "--sample", "20"]


def run(command: list[str], out: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*command, EXAMPLE, *SMALL, "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "loss.png").stat().st_size > 1000
    assert "zero 3" in done.stdout and "check: 5 steps on one device differ by at most" in done.stdout
    return done.stdout


def test_on_one_device(tmp_path: Path) -> None:
    run([sys.executable], tmp_path)


@pytest.mark.processes
def test_on_two_ranks(tmp_path: Path) -> None:
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    out = run([sys.executable, *launch], tmp_path)
    assert "dp=2" in out and "2 rank(s)" in out
