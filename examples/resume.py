"""Train a small network that survives the death of a rank: torchrun starts all anew, from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --checkpoint out/resume
    torchrun --nproc-per-node 4 examples/resume.py --checkpoint out/resume --steps 80      # later, on more ranks

`--die STEP` kills a rank in front of that step in the first attempt, to see it happen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    return loss


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(33), nn.Linear(33, 3)).double()


def batch(step: int, rows: int = 13) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch of a step: a function of the step alone, so that a resumed run sees the same data."""
    x = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x.sum(1), x.prod(1), x.norm(dim=1)], 1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return x.tensor_split(world)[rank], y.tensor_split(world)[rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--checkpoint", type=Path, default=Path("out/resume"))
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--asynchronous", action="store_true", help="save while training goes on")
    parser.add_argument("--losses", type=Path, help="where rank 0 appends a line for each step")
    parser.add_argument("--die", type=int, help="kill a rank in front of this step, in the first attempt")
    parser.add_argument("--die-rank", type=int, default=1)
    args = parser.parse_args()
    rank, attempt = int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    step = shardc.compile(train, zero=args.zero)
    torch.manual_seed(0)
    model = shardc.init(make_model, step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    start = shardc.load(args.checkpoint, step, missing_ok=True)
    if rank == 0:
        print(f"attempt {attempt}: from step {start}", flush=True)

    for i in range(start, args.steps):
        if args.die == i and attempt == 0 and rank == args.die_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = step(model, optimizer, schedule, *batch(i)).item()
        if rank == 0 and args.losses is not None:
            with args.losses.open("a") as f:
                f.write(json.dumps({"step": i, "loss": loss}) + "\n")
        if (i + 1) % args.every == 0 or i + 1 == args.steps:
            shardc.save(args.checkpoint, step, asynchronous=args.asynchronous)
    if step.checkpoints.saving is not None:
        step.checkpoints.saving.result()
    if rank == 0:
        print(f"done: {args.steps} steps", flush=True)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
