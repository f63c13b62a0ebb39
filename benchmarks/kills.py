"""Kill saves, and ranks, at random moments, and count what can be resumed.

    python benchmarks/kills.py saves 100       # SIGKILL while a checkpoint is being written; the last one loads each time
    python benchmarks/kills.py ranks 50        # SIGKILL one of two ranks under torchrun; the losses are those of one device
    python benchmarks/kills.py offload 100     # SIGKILL while state and activations move to and from disk; resumed bit for bit
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_checkpoint import kill_during_saves
from test_offload import kill_during_offload
from test_restarts import check_restart, reference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("saves", "ranks", "offload"))
    parser.add_argument("count", type=int)
    args = parser.parse_args()
    kind, count = args.kind, args.count
    good, begin, draw = 0, time.monotonic(), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        want = reference(folder / "one", 12) if kind == "ranks" else []
        for k in range(count):
            where = folder / f"{kind}{k % 10 if kind == 'saves' else k}"
            where.mkdir(exist_ok=kind == "saves")
            try:
                if kind == "saves":
                    kill_during_saves(where / "ckpt", 1, k)
                elif kind == "offload":
                    kill_during_offload(where / "run", k)
                else:
                    check_restart(where, want, 2, draw.randrange(1, 12), draw.randrange(2), 12)
                good += 1
            except Exception as error:  # counted and named: the run goes on
                print(f"{k}: {type(error).__name__}: {error}", flush=True)
    print(f"{good} of {count} {kind} killed and resumed ({time.monotonic() - begin:.0f} s)")
    return int(good != count)


if __name__ == "__main__":
    sys.exit(main())
