"""Run a folder of single-device training steps through shardc and count how many give the plain function's result.

python benchmarks/cases.py FOLDER [NAME ...] [--dp 2,3,4] [--zero 0,3] [--steps 3]

Each file ``NNN_name.py`` has ``make() -> (model, optimizer or list, batch)``, ``batch(seed) -> tuple of tensors`` (the global
batch) and ``train_step(model, optimizer, *batch) -> loss``. Every step is run in float64 on a simulated mesh with rng="torch"
and compared with the plain function on one device (`shardc.testing.check`); in its own dtypes where it runs in no other.
Exit code 1 if one differs or is refused.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import sys
import time
from types import ModuleType
from typing import Any

import torch

from shardc.errors import ShardcError
from shardc.testing import Mismatch, check_all

LONGER = {"014": 5, "054": 4}
"""Cases that change their ways after some steps need more of them."""


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("case_" + os.path.basename(path)[:3], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plain_runs(train_step: Any, state: tuple[Any, ...], batch: tuple[Any, ...]) -> bool:
    """Whether the plain step works in float64 (a file may mix dtypes on purpose)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        state[0].double()
        train_step(*state, *(t.double() if t.is_floating_point() else t for t in batch))
    except RuntimeError:
        return False
    finally:
        torch.set_default_dtype(before)
    return True


def run(path: str, dps: list[int], zeros: list[int], steps: int) -> str:
    """ "" if all options give the plain result, else what went wrong."""
    module = load(path)
    batch = module.make()[2]
    batches = [batch(seed) for seed in range(steps)]

    def make_state() -> tuple[Any, ...]:
        model, optimizer, _ = module.make()
        return model, optimizer

    dtype = torch.float64 if plain_runs(module.train_step, make_state(), batches[0]) else None
    options = [{"mesh": {"dp": dp}, "zero": zero, "rng": "torch"} for dp in dps for zero in zeros]
    try:
        check_all(module.train_step, make_state, batches, options, dtype=dtype)
    except (ShardcError, Mismatch) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("names", nargs="*", help="only files that begin with one of these")
    parser.add_argument("--dp", default="2,3,4")
    parser.add_argument("--zero", default="0,3")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dps, zeros = ([int(x) for x in text.split(",")] for text in (args.dp, args.zero))
    good = total = 0
    for path in sorted(glob.glob(os.path.join(args.folder, "[0-9][0-9][0-9]_*.py"))):
        name = os.path.basename(path)[:-3]
        if args.names and not any(name.startswith(n) for n in args.names):
            continue
        begun = time.perf_counter()
        try:
            said = run(path, dps, zeros, LONGER.get(name[:3], args.steps))
        except Exception as error:  # an internal error that leaks is a finding
            said = f"LEAKED {type(error).__name__}: {error}"
        total += 1
        good += not said
        print(f"{'ok  ' if not said else 'FAIL'} {name:34s} {time.perf_counter() - begun:6.1f} s  {said}", flush=True)
    print(f"{good} of {total} equal to one device (dp {args.dp}, zero {args.zero})")
    return int(good != total)


if __name__ == "__main__":
    sys.exit(main())
