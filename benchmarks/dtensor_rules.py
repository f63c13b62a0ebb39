"""How many one-axis layouts of sixty common operators DTensor's rules know, by torch's own count.

    python benchmarks/dtensor_rules.py [--samples 6]

shardc's figures on the same entries: ``python benchmarks/dtensor_rules.py --shardc``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings

import torch
import torch.distributed as dist
import torch.testing._internal.common_methods_invocations as common_ops
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.opinfo import core as opinfo_core

from shardc.rules import opdb
from shardc.rules.opdb_entries import COMMON


def dtensor(samples: int) -> None:
    from torch.distributed.tensor._ops import strategy_validation

    for owner in (opinfo_core, common_ops):  # even sizes, as the tool's own command line does: DTensor's rules are for those
        owner.L, owner.M, owner.S, owner.XS = 24, 12, 4, 2
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    known = false = missing = entries = 0
    for name in COMMON:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                found = strategy_validation.compare_operator(
                    name.split(".decomposed")[0], "cpu", torch.float64, 2, samples, allow_composite=True
                )
            except Exception as e:
                print(f"{name}: {type(e).__name__}: {e}")
                continue
        entries += found.true_positives > 0
        known += found.true_positives
        false += len(found.false_positives)
        missing += len(found.false_negatives)
    share = known / max(known + missing, 1)
    print(f"DTensor, torch {torch.__version__}: {known} of {known + missing} true layouts known ({share:.1%}), "
          f"{false} false, {entries} of {len(COMMON)} entries")  # fmt: skip


def shardc() -> None:
    print("shardc:", str(opdb.check(among=COMMON)).splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--shardc", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.shardc:
        shardc()
    else:
        dtensor(args.samples)
