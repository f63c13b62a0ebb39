"""Train a byte-level GPT on the source text of Python's own standard library, sharded by shardc.

    torchrun --nproc-per-node 2 examples/train_gpt.py --zero 3 --check
    python examples/train_gpt.py                                        # the same program on one device

The step is ordinary PyTorch; the decorator is all there is to it. See README.md for what the printed plan says.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(c, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, next-byte logits out."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.wte = nn.Embedding(256, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = 1 / math.sqrt(2 * layers) if name.endswith(("proj.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.1 if name == "wte.weight" else 0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64[b, t], t <= context -> logits float[b, t, 256]"""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------------------------------------------------------
# The steps: plain functions, compiled below
# ---------------------------------------------------------------------------------------------------------------------


def train(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, clip: float) -> Tensor:
    loss = loss_of(model, tokens, targets)
    loss.backward()
    if clip > 0:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    return loss_of(model, tokens, targets)


# ---------------------------------------------------------------------------------------------------------------------
# The data
# ---------------------------------------------------------------------------------------------------------------------


class Text:
    """The standard library's source files, without tests and character tables, in a fixed order; every 20th is held out.

    Args:
        limit: bytes of text to read at most.
    """

    def __init__(self, limit: int = 16 << 20) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "lib2to3"}
        files = sorted(p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts))
        parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
        for i, path in enumerate(files):
            parts[i % 20 == 7] += path.read_bytes()
            if sum(map(len, parts.values())) > limit:
                break
        self.train, self.held_out = (torch.frombuffer(parts[k], dtype=torch.uint8) for k in (False, True))

    @staticmethod
    def batch(text: Tensor, rows: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """The global batch of a seed: tokens and targets, int64[rows, context]."""
        starts = torch.randint(len(text) - context - 1, (rows,), generator=torch.Generator().manual_seed(seed))
        windows = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def my_rows(tensors: tuple[Tensor, Tensor], rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a global batch: consecutive rows, in rank order."""
    first, second = (t.tensor_split(world)[rank] for t in tensors)
    return first, second


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def make_state(args: argparse.Namespace) -> tuple[GPT, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.heads, args.context)
    decay = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    warmup = max(1, args.steps // 10)

    def factor(step: int) -> float:
        progress = min(1.0, max(0, step - warmup) / max(1, args.steps - warmup))
        return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def progress(total: int, show: bool) -> Iterator[Callable[[int, float, float], None]]:
    """A progress bar: yields `report(steps, loss, tokens_per_second)`, which does nothing unless `show`."""
    if not show:
        yield lambda steps, loss, rate: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def report(steps: int, loss: float, rate: float) -> None:
            bar.update(task, completed=steps, description=f"loss {loss:.3f} · {rate:,.0f} tokens/s")
            if not console.is_terminal and (steps % 20 == 0 or steps in (1, total)):
                print(f"step {steps:4d}/{total}  loss {loss:.3f}  {rate:,.0f} tokens/s", flush=True)

        yield report


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in the Euclidean norm."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def check(args: argparse.Namespace, text: Text, losses: list[float], trained: dict[str, Tensor]) -> float:
    """Train again on one device, uncompiled, from the same seed on the same data.

    Args:
        losses: of the sharded run's first `args.check_steps` steps.
        trained: the sharded run's whole model after them.

    Returns:
        The largest relative difference of a loss or of a tensor of the model.
    """
    model, optimizer, schedule = make_state(args)
    worst = 0.0
    for step in range(args.check_steps):
        loss = train(model, optimizer, *text.batch(text.train, args.batch, args.context, args.seed + step), args.clip)
        schedule.step()
        worst = max(worst, abs(losses[step] - loss.item()) / abs(loss.item()))
    return max(worst, *(relative(trained[name], value) for name, value in model.state_dict().items()))


@torch.no_grad()
def sample(model: GPT, prompt: str, length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([tokens[-model.context :]]))[0, -1]
        tokens.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


def save_curve(losses: list[float], held_out: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, label="training")
    axes.axhline(held_out, color="tab:orange", linestyle="--", label=f"held out, at the end: {held_out:.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3), help="what is sharded (3: everything)")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--context", type=int, default=128, help="bytes in a row")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm; 0: no clipping")
    parser.add_argument("--precision", default="none", choices=("none", "bf16", "fp16"), help="of forward and backward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with one device; exit code 1 above 1e-4")
    parser.add_argument("--check-steps", type=int, default=5)
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to write at the end")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the loss curve goes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    text = Text()
    model, optimizer, schedule = make_state(args)
    parameters = sum(p.numel() for p in model.parameters())

    train_step = shardc.compile(train, zero=args.zero, precision=None if args.precision == "none" else args.precision)
    eval_step = shardc.compile(evaluate, zero=args.zero)

    if rank == 0:
        print(f"{parameters / 1e6:.2f} M parameters · {len(text.train) / 1e6:.1f} MB of text · {world} rank(s)", flush=True)
    losses: list[float] = []
    whole: dict[str, Tensor] = {}
    tokens_per_step = args.batch * args.context
    for report in progress(args.steps, show=rank == 0):
        for step in range(args.steps):
            begin = time.perf_counter()
            batch = text.batch(text.train, args.batch, args.context, args.seed + step)
            losses.append(train_step(model, optimizer, *my_rows(batch, rank, world), args.clip).item())
            schedule.step()
            report(step + 1, losses[-1], tokens_per_step / (time.perf_counter() - begin))
            if args.check and step + 1 == args.check_steps:
                whole = train_step.full_state_dict()["model"]

    held_out = [
        eval_step(model, *my_rows(text.batch(text.held_out, args.batch, args.context, 10**6 + i), rank, world)).item()
        for i in range(4)
    ]
    loss = sum(held_out) / len(held_out)
    with shardc.gathered(model):
        written = sample(model, "def read", args.sample, args.seed) if rank == 0 else ""

    code = 0
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        save_curve(losses, loss, args.out / "loss.png")
        print(f"\n{train_step.plan}\n")
        print(f"a sample\n{'-' * 80}\n{written}\n{'-' * 80}")
        last = losses[-10:]
        print(
            f"loss {losses[0]:.3f} -> {sum(last) / len(last):.3f} nats per byte (mean of the last {len(last)} steps), "
            f"held out {loss:.3f}; curve in {args.out / 'loss.png'}"
        )
        if args.check:
            difference = check(args, text, losses, whole)
            code = int(not difference <= 1e-4)
            print(f"check: {args.check_steps} steps on one device differ by at most {difference:.1e} (relative); limit 1e-4")
    return code


if __name__ == "__main__":
    code = main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)
