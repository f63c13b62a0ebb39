"""Memory budgets from the peak without recomputation down to the floor, planned and measured on gloo ranks.

    python benchmarks/budget.py                                # all models, zero 3, 10 budgets, 2 ranks
    python benchmarks/budget.py --models gpt --budgets 5
    python benchmarks/budget.py --equal                        # results against one device, in float64, simulated ranks
    python benchmarks/budget.py --models gpt --torch           # what torch's own activation budget does, on one device

For each budget: the predicted peak, what torch's profiler measured within a step, and the predicted time. Exit code 1 where a
measured peak is above its budget, a smaller budget is predicted to be faster, or a result differs. Models are randomly
initialised.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import memory as bench
import torch

import shardc
from shardc.passes.ladder import Ladder, Rung
from shardc.program import Program
from shardc.testing import Mismatch, check_all, run_ranks
from shardc.testing.allocations import allocations, step_memory

TRIES = 3
"""Steps measured for each budget; the least counts, since the profiler does not see what gloo's threads free (the vectors in
which the ranks compare their calls, 768 bytes)."""


def models() -> dict[str, bench.Model]:
    import transformers as t

    text: dict[str, Any] = {"vocab_size": 200, "use_cache": False}
    gpt = t.GPT2Config(**text, n_positions=64, n_embd=48, n_layer=12, n_head=4, bos_token_id=0, eos_token_id=1)
    t5 = t.T5Config(**text, d_model=48, d_kv=12, d_ff=128, num_layers=3, num_heads=4, decoder_start_token_id=0)
    mamba = t.MambaConfig(**text, hidden_size=32, state_size=4, num_hidden_layers=3, use_mambapy=False)
    resnet = t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 48, 64], depths=[3, 4, 6, 3], num_labels=5)

    def tokens() -> bench.Batch:
        return bench.tokens(8, 48, 200)

    return {
        "gpt": (lambda: t.GPT2LMHeadModel(gpt), tokens, bench.text_loss),
        "resnet50": (lambda: t.ResNetForImageClassification(resnet), bench.images, bench.image_loss),
        "t5": (lambda: t.T5ForConditionalGeneration(t5), tokens, bench.reversal_loss),
        "mamba": (lambda: t.MambaForCausalLM(mamba), lambda: bench.tokens(8, 12, 200), bench.text_loss),
    }


def objects(name: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer, bench.Batch, Any]:
    warnings.simplefilter("ignore")  # of the model library
    make, batch, loss_of = models()[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    rows = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), rows, bench.train_step(False, loss_of)


def ladder(name: str, zero: int, ranks: int, dtype: torch.dtype = torch.float32, **more: Any) -> Ladder:
    model, optimizer, batch, train = objects(name, dtype)
    step = shardc.compile(train, mesh=shardc.Mesh(dp=ranks, simulated=True), zero=zero, **more)
    program = step.lower(model, optimizer, *batch).stages["accumulate"]
    assert isinstance(program, Program)
    return Ladder.of(program, True)


def budgets_of(rungs: Sequence[Rung], count: int) -> tuple[list[float], list[int]]:
    """Shares of what can be saved that may still be used, from 1 to 0, and the budgets."""
    top, floor = rungs[0].peak, rungs[-1].peak
    shares = [1 - k / count for k in range(count + 1)]
    return shares, [int(floor + (top - floor) * s) for s in shares]


def equal(name: str, zero: int, ranks: int, count: int) -> int:
    """Print how far the results of two steps are from one device's, for each budget; 1 where one differs."""
    rungs = ladder(name, zero, ranks, torch.float64, rng="torch").rungs
    _, _, batch, train = objects(name, torch.float64)
    shares, budgets = budgets_of(rungs, count)
    options = [{"mesh": {"dp": ranks}, "zero": zero, "memory_budget": b} for b in budgets]
    try:
        reports = check_all(train, lambda: objects(name, torch.float64)[:2], [batch, batch], options, dtype=None)
    except Mismatch as e:
        print(f"{name}: {e}")
        return 1
    for share, budget, r in zip(shares, budgets, reports, strict=True):
        peak = r.plan.memory.peak_bytes
        rounded = len({x.path for x in r.rounded})
        print(f"{name:9} {share:6.0%} {budget:12,} {peak:12,} {r.compared:9} {r.worst:12.1e} {rounded:11}", flush=True)
    return 0


def measured(name: str, zero: int, budgets: list[int]) -> list[tuple[int, int, float]]:
    """On this rank, for each budget: predicted peak, measured peak, predicted seconds."""
    out = []
    for budget in budgets:
        model, optimizer, batch, train = objects(name)
        index, size = bench._rank()
        mine = tuple(t.tensor_split(size)[index].clone() for t in batch)
        step = shardc.compile(train, zero=zero, memory_budget=budget)
        for _ in range(2):
            step(model, optimizer, *mine)
        seen = min(step_memory(step, model, optimizer, *mine).peak for _ in range(TRIES))
        out.append((step.plan.memory.peak_bytes, seen, step.plan.time.predicted_s))
    return out


def _into(kept: list[torch.Tensor], loss_of: Any, model: torch.nn.Module, batch: bench.Batch, backward: bool = False) -> None:
    """Keep the loss of a model, and with it what its backward needs; or run that too."""
    kept[:] = [loss_of(model, *batch)]
    if backward:
        kept.pop().backward()
        model.zero_grad()


def of_torch(name: str, shares: list[float]) -> None:
    """Print, for each ``activation_memory_budget`` of torch.compile's partitioner: bytes alive when the backward begins, the
    peak of forward and backward, and floating-point operations against those without a budget."""
    from torch.utils.flop_counter import FlopCounterMode

    model, _, batch, _ = objects(name)
    loss_of = models()[name][2]
    print("model       budget  kept for the backward        peak  operations")
    first = 0
    for share in shares:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=share):
            compiled = torch.compile(loss_of, backend="aot_eager_decomp_partition")

            kept: list[torch.Tensor] = []
            forward = functools.partial(_into, kept, compiled, model, batch)
            both = functools.partial(_into, kept, compiled, model, batch, backward=True)
            both()
            begun = allocations(forward).end
            kept.clear()
            peak = allocations(both).peak
            with FlopCounterMode(display=False) as counter:
                both()
        first = first or counter.get_total_flops()
        print(f"{name:10} {share:7.1f} {begun:22,} {peak:11,} {counter.get_total_flops() / first:11.4f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,resnet50,t5,mamba")
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--equal", action="store_true", help="compare results instead")
    parser.add_argument("--torch", action="store_true", help="torch's activation budget instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.torch:
        for name in options.models.split(","):
            of_torch(name, [1 - k / options.budgets for k in range(options.budgets + 1)])
        return 0
    if options.equal:
        print("model      share       budget    predicted    values   difference  in rounding")
        return int(sum(equal(n, options.zero, options.ranks, options.budgets) for n in options.models.split(",")) > 0)
    bad = 0
    print("model      share       budget    predicted     measured  measured/budget  predicted time")
    for name in options.models.split(","):
        rungs = ladder(name, options.zero, options.ranks).rungs
        shares, budgets = budgets_of(rungs, options.budgets)
        found = run_ranks(options.ranks, measured, name, options.zero, budgets, timeout=3600)
        before = 0.0
        for k, (share, budget) in enumerate(zip(shares, budgets, strict=True)):
            predicted, _, time = found[0][k]
            seen = max(ranks[k][1] for ranks in found)
            bad += seen > budget or time < before * (1 - 1e-12)
            before = time
            row = f"{name:9} {share:6.0%} {budget:12,} {predicted:12,} {seen:12,} {seen / budget:16.4f}"
            print(f"{row} {time / rungs[0].seconds:15.4f}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
