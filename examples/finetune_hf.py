"""Fine-tune a language model of transformers, sharded: its tokenizer, collator and scheduler, in bfloat16, with evaluation.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/finetune_hf.py --checkpoint out/finetune
    torchrun --nproc-per-node 3 examples/finetune_hf.py --checkpoint out/finetune --steps 120   # later, on more ranks
    python examples/finetune_hf.py --pretrained /path/to/a/model                                # one that lies on disk

Nothing is downloaded: without `--pretrained` the model is a small GPT-2 made from a config, and the text is the docstrings of
Python's standard library, byte by byte. `--die STEP` kills a rank in front of that step in the first attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    get_scheduler,
)

import shardc

# ---------------------------------------------------------------------------------------------------------------------
# The two steps
# ---------------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, batch: dict[str, Tensor], clip: float) -> Tensor:
    loss: Tensor = model(**batch).loss  # the mean over the tokens of the global batch that are no padding
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss


@torch.no_grad()
def evaluate(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the losses of a batch, and the number of tokens."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch).loss * count, count


# ---------------------------------------------------------------------------------------------------------------------
# The model and the data
# ---------------------------------------------------------------------------------------------------------------------


def make_model(args: argparse.Namespace, words: int) -> nn.Module:
    if args.pretrained is not None:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(args.pretrained, dtype=torch.float32)
        return model
    config = GPT2Config(
        vocab_size=words, n_embd=args.width, n_layer=args.layers, n_head=4, n_positions=args.longest, use_cache=False,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=lr)


class Docstrings:
    """The docstrings of the standard library, tokenized and cut to `longest` tokens; every tenth is held out."""

    def __init__(self, tokenizer: Any, longest: int, limit: int = 4000) -> None:
        texts: list[str] = []
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            texts += re.findall(r'"""(\w.+?)"""', path.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
            if len(texts) > limit:
                break
        rows = [{"input_ids": tokenizer(" ".join(text.split()))["input_ids"][:longest]} for text in texts]
        self.train = [row for i, row in enumerate(rows) if i % 10 != 3]
        self.held_out = rows[3::10]


def part(batch: Any) -> dict[str, Tensor]:
    """This rank's rows of a global batch. It was padded as a whole: the sequences of all ranks are of one length."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return {name: t.tensor_split(world)[rank] for name, t in batch.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="folder of a causal language model, with its tokenizer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedule-steps", type=int, default=200, help="length of the learning rate's schedule")
    parser.add_argument("--rows", type=int, default=8, help="of the global batch")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--longest", type=int, default=128, help="tokens of a row at most")
    parser.add_argument("--multiple", type=int, default=32, help="rows are padded to a multiple: each length is a variant")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp16", "none"))
    parser.add_argument("--checkpoint", type=Path, default=Path("out/finetune"))
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints, with an evaluation at each")
    parser.add_argument("--losses", type=Path, help="where rank 0 appends a line for each step and each evaluation")
    parser.add_argument("--die", type=int, help="kill a rank in front of this step, in the first attempt")
    return parser.parse_args()


def main() -> None:
    args = parse()
    rank, attempt = int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    tokenizer = ByT5Tokenizer() if args.pretrained is None else AutoTokenizer.from_pretrained(args.pretrained)
    data = Docstrings(tokenizer, args.longest)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=args.multiple)

    options = {"zero": args.zero, "precision": None if args.precision == "none" else args.precision}
    train_step = shardc.compile(train, **options)
    eval_step = shardc.compile(evaluate, **options | ({"precision": "bf16"} if args.precision == "fp16" else {}))
    torch.manual_seed(0)
    model = make_model(args, len(tokenizer))
    optimizer = make_optimizer(model, args.lr)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=args.schedule_steps)
    start = shardc.load(args.checkpoint, train_step, missing_ok=True)

    def report(**row: float) -> None:
        if rank == 0:
            print(" · ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            if args.losses is not None:
                with args.losses.open("a") as f:
                    f.write(json.dumps(row) + "\n")

    if rank == 0:
        print(f"attempt {attempt}: from step {start}", flush=True)
    for i in range(start, args.steps):
        if args.die == i and attempt == 0 and rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        chosen = torch.randint(len(data.train), (args.rows,), generator=torch.Generator().manual_seed(i))
        batch = collate([data.train[k] for k in chosen.tolist()])
        report(step=i, loss=train_step(model, optimizer, schedule, part(batch), args.clip).item())
        if (i + 1) % args.every == 0 or i + 1 == args.steps:
            model.eval()
            batches = (collate(data.held_out[k : k + args.rows]) for k in range(0, 4 * args.rows, args.rows))
            found = [eval_step(model, part(batch)) for batch in batches]
            model.train()
            report(evaluated=i, held_out=sum(x.item() for x, _ in found) / sum(n.item() for _, n in found))
            shardc.save(args.checkpoint, train_step)
    if rank == 0:
        for step in (train_step, eval_step):
            print(f"{step.__name__}: {', '.join(f'{v.calls} calls ({v.reason})' for v in step.variants)}")
        print(f"done: {args.steps} steps", flush=True)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
