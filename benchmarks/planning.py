"""How long planning takes and what it needs: AdamW steps of Llama-3-8B's shape on meta tensors, mesh dp=64, zero 3.

    python benchmarks/planning.py [--layers 8 16 32]
    python benchmarks/planning.py --gpt --budget 0.5 --layers 12 24 48 96    # GPT-2's shape, held to half of its activations

Prints for each depth: nodes, seconds to lower, seconds for the memory prediction, the process's peak memory, and the ratio of
the time to that of the depth before.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardc


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gpt(layers: int) -> nn.Module:
    config = GPT2Config(n_layer=layers, n_positions=2048, use_cache=False)
    return GPT2LMHeadModel(config)


def llama(layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lower(model: nn.Module, ranks: int, **options: Any) -> tuple[shardc.Plan, float]:
    tokens = torch.empty(1, 2048, dtype=torch.int64, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = shardc.compile(train_step, mesh={"dp": ranks}, zero=3, **options)
    begin = time.perf_counter()
    plan = step.lower(model, optimizer, tokens)
    return plan, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--gpt", action="store_true")
    parser.add_argument("--budget", type=float, help="share of the activations that a second plan may hold")
    args = parser.parse_args()
    before = None
    for layers in args.layers:
        with torch.device("meta"):
            model = (gpt if args.gpt else llama)(layers)
        plan, seconds = lower(model, args.ranks)
        begin = time.perf_counter()
        peak = plan.memory.peak_bytes
        memory = time.perf_counter() - begin
        first = plan.time.predicted_s
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        ratio = "" if before is None else f" · {(seconds + memory) / before:.2f} times the one before"
        print(
            f"{layers} layers · {len(plan.instructions)} instructions · lower {seconds:.1f} s · memory {memory:.1f} s · "
            f"process {resident:.2f} GiB · peak per rank {peak / 2**30:.1f} GiB{ratio}",
            flush=True,
        )
        before = seconds + memory
        if args.budget:
            budget = int(peak - (1 - args.budget) * plan.memory.by_category["activations"])
            plan, seconds = lower(model, args.ranks, memory_budget=budget)
            print(
                f"  memory_budget={budget:,} of {peak:,}: lower {seconds:.1f} s, {seconds / layers:.3f} s a layer; "
                f"{plan.time.predicted_s / first - 1:+.1%} time · {next((n for n in plan.notes if 'recomputed' in n), '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()
