"""Memory on one CUDA device: predicted against measured, and the largest GPT that trains without and with offload.

    python benchmarks/gpu_memory.py                               # within ten minutes
    python benchmarks/gpu_memory.py --device cpu --limit 200MiB --host 1GiB --width 64 --largest-width 128    # a rehearsal

1. For each setting: the plan's peak, ``torch.cuda.max_memory_allocated`` of a step, their ratio. On a CPU what the executor
   counted stands for the latter.
2. The most layers whose predicted peak fits the device (and, with offload, the host), found from plans on meta tensors; then
   that model is made and trained for three steps. Exit code 1 if it does not fit after all.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import gpu as bench
import torch
from torch import Tensor, nn

import shardc
from shardc.options import bytes_of

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "auto"},
    "optimizer on host": {"offload": {"optimizer": "host"}},
    "activations on host": {"offload": {"activations": "host"}},
    "all on host": {"offload": {"optimizer": "host", "params": "host", "activations": "host"}},
    "4 microbatches": {"microbatches": 4},
}

LARGEST: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "auto"},
    "optimizer on host": {"recompute": "auto", "offload": {"optimizer": "host"}},
    "state on host": {"recompute": "auto", "offload": {"optimizer": "host", "params": "host"}},
}

ROOM = 0.92
"""Share of the memory that a plan may fill: CUDA's context, cuBLAS's workspace and the allocator's rounding need the rest."""

VOCABULARY, SHAPE = 2048, (8, 512)
"""Of the model; rows and length of a batch."""


def objects(device: str, layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    with torch.device(device):
        model = bench.GPT(VOCABULARY, width, layers)
        tokens = torch.zeros(SHAPE, dtype=torch.int64) if device == "meta" else torch.randint(VOCABULARY, SHAPE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens


def compiled(device: str, **options: Any) -> Any:
    return shardc.compile(bench.train, mesh=shardc.Mesh(dp=1, device=device, simulated=device == "cpu"), **options)


def peaks(device: str, layers: int, width: int, **options: Any) -> tuple[int, int, float]:
    """Predicted and measured bytes of a step, and its seconds."""
    model, optimizer, tokens = objects(device, layers, width)
    step = compiled(device, **options)
    for _ in range(2):
        step(model, optimizer, tokens, tokens)
    begin = time.perf_counter()
    if device == "cpu":
        step(model, optimizer, tokens, tokens)
        measured = step.stats.peak_bytes
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, tokens, tokens)
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated()
    return step.plan.memory.peak_bytes, measured, time.perf_counter() - begin


def largest(device: str, width: int, limit: int, host: int, **options: Any) -> int:
    """The most layers of which a plan fits."""

    def fits(layers: int) -> bool:
        step = compiled(device, **options)
        memory = step.lower(*(o := objects("meta", layers, width)), o[2]).memory
        return bool(memory.peak_bytes <= ROOM * limit and memory.tiers.get("host", 0) <= host)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", help="memory of the device; by default all of it")
    parser.add_argument("--host", default="96GiB", help="memory of the host that offload may use")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--largest-width", type=int, default=4096)
    options = parser.parse_args()
    device, host = options.device, bytes_of(options.host, "--host")
    limit = bytes_of(options.limit, "--limit") if options.limit else torch.cuda.get_device_properties(0).total_memory
    print(f"{'setting':20} {'predicted':>14} {'measured':>14} {'ratio':>7} {'s a step':>9}")
    for name, more in SETTINGS.items():
        predicted, measured, seconds = peaks(device, options.layers, options.width, **more)
        print(f"{name:20} {predicted:14,} {measured:14,} {measured / predicted:7.4f} {seconds:9.3f}", flush=True)
    print(f"\nlargest GPT of width {options.largest_width} on {limit:,} bytes, with {host:,} of the host")
    bad = 0
    for name, more in LARGEST.items():
        layers = largest(device, options.largest_width, limit, host, **more)
        if not layers:
            print(f"{name:20} none")
            continue
        predicted, measured, seconds = peaks(device, layers, options.largest_width, **more)
        bad += measured > limit
        count = sum(p.numel() for p in objects("meta", layers, options.largest_width)[0].parameters())
        row = f"{name:20} {layers:4} layers, {count / 1e9:.3f} G parameters, predicted {predicted:,}, measured {measured:,}"
        print(f"{row}, {seconds:.3f} s a step", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
