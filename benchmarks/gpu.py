"""Prove shardc on one CUDA device, in minutes: python benchmarks/gpu.py

1. Equality: a GPT with attention and clipping, and a convolutional net with batch statistics, trained for three steps in
   float64 on a simulated mesh of 1 and 2 ranks on the device, at zero 0 and 3, against the plain function there.
2. Attention kernels: `shardc.sdpa` against torch's own in bfloat16 and float32, causal, masked and with grouped heads.
3. Memory: the predicted peak beside `torch.cuda.max_memory_allocated`.
4. Two ranks of one device are not nccl; a group of one rank is: the same step under torchrun --nproc-per-node 1.

Prints one line for each, and exits with 1 if an equality fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import shardc
from shardc.ops import sdpa_mode


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class GPT(nn.Module):
    def __init__(self, vocab: int = 61, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.attention = nn.ModuleList(Attention(width, 4) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for norm, attention, mlp in zip(self.norms, self.attention, self.mlp, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(x)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make().to("cuda", dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(make: Callable[[], nn.Module], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    if make is GPT:
        return [(x := torch.randint(61, (6, 16), device="cuda"), x.roll(1, 1)) for _ in range(3)]
    return [(torch.randn(6, 3, 16, 16, device="cuda", dtype=dtype), torch.randint(5, (6,), device="cuda")) for _ in range(3)]


def equality(make: Callable[[], nn.Module], ranks: int, zero: int) -> float:
    """Largest relative difference of parameters after three steps in float64."""

    def run(step: Callable[..., Any]) -> list[Tensor]:
        model, optimizer = state(make, torch.float64)
        for batch in batches(make, torch.float64):
            step(model, optimizer, *batch)
        return [p.detach().clone() for p in model.parameters()]

    mesh = shardc.Mesh(dp=ranks, simulated=True, device="cuda")
    ours, plain = run(shardc.compile(train, mesh=mesh, zero=zero)), run(train)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True))


def attention(dtype: torch.dtype, kind: str) -> float:
    """Largest difference of output and gradients from torch's own attention."""
    torch.manual_seed(0)
    heads = 2 if kind == "grouped" else 8
    mask = torch.rand(4, 1, 96, 96, device="cuda") > 0.3 if kind == "mask" else None

    def run(shardcs: bool) -> list[Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(4, h, 96, 64, device="cuda", dtype=dtype, requires_grad=True) for h in (8, heads, heads))
        options = {"attn_mask": mask, "is_causal": kind != "mask", "enable_gqa": kind == "grouped"}
        if shardcs:
            with sdpa_mode():
                out = F.scaled_dot_product_attention(q, k, v, **options)
        else:
            out = F.scaled_dot_product_attention(q, k, v, **options)
        out.square().sum().backward()
        return [out, *(t.grad for t in (q, k, v) if t.grad is not None)]

    return max(float((a - b).abs().max()) for a, b in zip(run(True), run(False), strict=True))


def memory(zero: int) -> tuple[int, int]:
    model, optimizer = state(lambda: GPT(8000, 512, 6), torch.float32)
    tokens = torch.randint(8000, (8, 256), device="cuda")
    step = shardc.compile(train, mesh=shardc.Mesh(dp=1, device="cuda"), zero=zero)
    for _ in range(3):
        step(model, optimizer, tokens, tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(model, optimizer, tokens, tokens)
    torch.cuda.synchronize()
    return step.plan.memory.peak_bytes, torch.cuda.max_memory_allocated()


def nccl() -> None:
    """One rank of a process group on nccl."""
    model, optimizer = state(GPT, torch.float32)
    step = shardc.compile(train, zero=3)
    for batch in batches(GPT, torch.float32):
        loss = step(model, optimizer, *batch)
    print(f"nccl, one rank: loss {loss.item():.4f}, parameters are {type(next(model.parameters())).__name__}")


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was run")
        return 2
    if "RANK" in os.environ:
        nccl()
        return 0
    bad = 0
    for make in (GPT, Conv):
        for ranks in (1, 2):
            for zero in (0, 3):
                gap = equality(make, ranks, zero)
                bad += gap > 1e-9
                print(f"{make.__name__}, {ranks} rank(s), zero {zero}: differs by {gap:.1e} (limit 1e-9)", flush=True)
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.25)):
        for kind in ("causal", "mask", "grouped"):
            gap = attention(dtype, kind)
            bad += gap > limit
            print(f"attention {dtype}, {kind}: differs by {gap:.1e} (limit {limit})", flush=True)
    for zero in (0, 3):
        predicted, measured = memory(zero)
        print(
            f"memory, zero {zero}: predicted {predicted:,}, allocated {measured:,} ({measured / predicted - 1:+.2%})",
            flush=True,
        )
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", __file__]
    bad += subprocess.run(run, check=False).returncode != 0
    print("all equal" if not bad else f"{bad} of the checks failed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
