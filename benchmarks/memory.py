"""Predicted against measured memory of training steps on gloo ranks, and what operators hold inside.

    python benchmarks/memory.py                          # all models, ZeRO 0-3, both ends of zero_grad, 2 ranks
    python benchmarks/memory.py --models gpt2,t5 --zero 3 --after --ranks 2
    python benchmarks/memory.py --models gpt2,resnet,t5 --settings all --after    # recompute, offload, microbatches too
    python benchmarks/memory.py --operators              # temporaries of operators against shardc.runtime.workspace

Measured is what torch's profiler saw allocated within a step, on top of state and inputs. Models are randomly initialised.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import PlanError
from shardc.runtime.workspace import workspace_of
from shardc.testing import run_ranks
from shardc.testing.allocations import allocations, step_memory, storage_bytes

Batch = tuple[Tensor, ...]
Model = tuple[Callable[[], nn.Module], Callable[[], Batch], Callable[..., Tensor]]


def tokens(rows: int = 8, length: int = 48, vocabulary: int = 500) -> Batch:
    return (torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)),)


def images(rows: int = 8, size: int = 64) -> Batch:
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, size, size, generator=g), torch.randint(0, 5, (rows,), generator=g)


def text_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss


def reversal_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x.flip(1)).loss


def image_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).logits, y)


def models() -> dict[str, Model]:
    import transformers as t

    text: dict[str, Any] = {"vocab_size": 500, "use_cache": False}
    gpt2 = t.GPT2Config(**text, n_positions=64, n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=1)
    llama = t.LlamaConfig(
        **text, hidden_size=96, intermediate_size=208, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    t5 = t.T5Config(**text, d_model=64, d_kv=16, d_ff=200, num_layers=2, num_heads=4, decoder_start_token_id=0)
    wide: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 200}
    bert = t.BertConfig(**wide, vocab_size=500, max_position_embeddings=64)
    vit = t.ViTConfig(**wide, image_size=64, patch_size=8, num_labels=5)
    resnet = t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=5)
    bottleneck = t.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 96], depths=[2, 2, 1], num_labels=5)
    return {
        "gpt2": (lambda: t.GPT2LMHeadModel(gpt2), tokens, text_loss),
        "gpt2 of few tokens": (lambda: t.GPT2LMHeadModel(gpt2), lambda: tokens(2, 4), text_loss),
        "llama": (lambda: t.LlamaForCausalLM(llama), tokens, text_loss),
        "t5": (lambda: t.T5ForConditionalGeneration(t5), tokens, reversal_loss),
        "bert": (lambda: t.BertForMaskedLM(bert), tokens, text_loss),
        "vit": (lambda: t.ViTForImageClassification(vit), images, image_loss),
        "resnet": (lambda: t.ResNetForImageClassification(resnet), images, image_loss),
        "bottleneck": (lambda: t.ResNetForImageClassification(bottleneck), images, image_loss),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "auto"},
    "recompute full": {"recompute": "full"},
    "optimizer on host": {"offload": {"optimizer": "host"}},
    "all on host": {"offload": {"optimizer": "host", "params": "host", "gradients": "host", "activations": "host"}},
    "optimizer on disk": {"offload": {"optimizer": "disk"}},
    **{f"{n} microbatches": {"microbatches": n} for n in (2, 3, 4, 8)},
    "all three": {"recompute": "auto", "offload": {"optimizer": "host"}, "microbatches": 2},
}
"""Options of `shardc.compile` by name."""


def train_step(before: bool, loss_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A step whose gradients survive it (`before`: they are cleared at the start of the next), or do not."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
        if before:
            optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        if not before:
            optimizer.zero_grad()
        return loss

    return step


@dataclass(frozen=True)
class Measured:
    """On one rank: the plan's peak, the executor's and the profiler's, in bytes; and where the plan has it."""

    predicted: int
    executor: int
    measured: int
    peak_at: str


def rank(name: str, zero: int, before: bool, setting: str) -> Measured:
    """Train two steps on this rank of the process group, and measure some more."""
    warnings.simplefilter("ignore")  # of the model library
    make, batch, loss_of = models()[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = shardc.compile(train_step(before, loss_of), zero=zero, **SETTINGS[setting])
    index, size = _rank()
    mine = tuple(t.tensor_split(size)[index].clone() for t in batch())
    for _ in range(2):
        step(model, optimizer, *mine)
    seen = step_memory(step, model, optimizer, *mine)
    plan = step.plan.memory
    return Measured(plan.peak_bytes, step.stats.peak_bytes, seen.peak, str(plan.peak_at))


def _rank() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


Row = tuple[int, bool, str, Measured | str]


def several(name: str, zeros: list[int], befores: list[bool], settings: list[str]) -> list[Row]:
    """`rank` for each of them, in one process; or why a setting is refused (microbatches with batch statistics)."""
    rows: list[Row] = []
    for s, z, b in itertools.product(settings, zeros, befores):
        try:
            rows.append((z, b, s, rank(name, z, b, s)))
        except PlanError as error:
            rows.append((z, b, s, str(error).splitlines()[0]))
    return rows


# -- operators -------------------------------------------------------------------------------------------------------------


def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operators that hold temporaries, on shapes that tell the formulas apart."""
    r = torch.randn
    for n, ci, h, co, k, s, groups, bias in [
        (4, 3, 64, 16, 7, 2, 1, False), (4, 3, 64, 96, 8, 8, 1, True), (4, 16, 16, 16, 3, 1, 1, False),
        (4, 16, 16, 32, 3, 2, 1, False), (4, 16, 16, 32, 1, 2, 1, False), (4, 16, 16, 32, 1, 1, 1, False),
        (16, 16, 16, 32, 1, 1, 1, False), (4, 8, 16, 8, 3, 1, 1, False), (4, 24, 8, 24, 3, 1, 1, True),
        (4, 24, 8, 24, 3, 2, 1, False), (4, 10, 9, 13, 3, 1, 1, True), (4, 32, 9, 32, 3, 1, 32, False),
        (4, 32, 9, 32, 3, 1, 4, False), (1, 32, 9, 64, 3, 1, 1, False), (1, 32, 40, 64, 3, 1, 1, False),
        (4, 64, 14, 128, 1, 2, 1, False), (4, 64, 14, 128, 3, 2, 1, True), (32, 64, 14, 64, 3, 1, 1, True),
    ]:  # fmt: skip
        x, w, b = r(n, ci, h, h), r(co, ci // groups, k, k), r(co) if bias else None
        pad = 0 if k == s else k // 2
        given = [s, s], [pad, pad], [1, 1], False, [0, 0], groups
        yield "aten.convolution.default", (x, w, b, *given)
        y = torch.ops.aten.convolution(x, w, b, *given)
        for mask in ([True, True, bias], [False, True, bias]):
            yield "aten.convolution_backward.default", (r(y.shape), x, w, [co] if bias else None, *given, mask)
    for heads, t, d, masked in [(4, 65, 24, False), (2, 48, 16, True), (2, 200, 16, False), (1, 800, 32, True)]:
        q, k, v = (r(2, heads, t, d) for _ in range(3))
        mask = torch.rand(2, 1, t, t) > 0.1 if masked else None
        yield "shardc.sdpa.default", (q, k, v, mask, False, None, False)
        out, lse = torch.ops.shardc.sdpa(q, k, v, mask, False, None, False)
        yield "shardc.sdpa_backward.default", (r(q.shape), q, k, v, mask, out, lse, False, None, False)
    q, k, v = r(2, 6, 48, 16), r(2, 2, 48, 16), r(2, 2, 48, 16)
    yield "shardc.sdpa.default", (q, k, v, None, True, None, True)
    out, lse = torch.ops.shardc.sdpa(q, k, v, None, True, None, True)
    yield "shardc.sdpa_backward.default", (r(q.shape), q, k, v, None, out, lse, True, None, True)
    x, w = r(64, 96), r(96)
    out, mean, rstd = torch.ops.aten.native_layer_norm(x, [96], w, w, 1e-5)
    yield "aten.native_layer_norm_backward.default", (x, out, [96], mean, rstd, w, w, [True, True, True])
    image, w = r(4, 16, 12, 12), r(16)
    out, mean, rstd = torch.ops.aten.native_group_norm(image, w, w, 4, 16, 144, 4, 1e-5)
    yield "aten.native_group_norm_backward.default", (image, out, mean, rstd, w, 4, 16, 144, 4, [True, True, True])
    yield "aten._safe_softmax.default", (r(4, 4, 48, 48), -1)
    index = torch.randint(0, 96, (1, 48)).expand(4, 48)
    yield "aten.embedding.default", (x.t().contiguous(), index)
    yield "aten.embedding_dense_backward.default", (r(4, 64, 48).transpose(1, 2), index, 96, -1, False)
    yield "shardc.index_rows.default", (r(40, 30, 50), [None, torch.randint(30, (40,))], [0, -1, -1], 1)
    yield "shardc.index_rows.default", (r(40, 30), [], [0, 3], 4)
    yield "shardc.index_sum.default", (r(40, 50), [None, torch.randint(30, (40,))], [0, -1, -1], 1, [40, 30, 50])
    yield "shardc.index_sum.default", (r(7, 9, 20), [torch.randint(61, (7, 9))], [-1, -1], 2, [61, 20])
    yield "aten.mul.Tensor", (x, x.bfloat16())
    yield "aten.add.Tensor", (x, torch.ones(64, 96, dtype=torch.int64))
    yield "aten.lt.Tensor", (x, x.double())
    yield "aten.where.self", (x > 0, x, x.double())
    yield "aten.sum.dim_IntList", (x > 0, [1])
    yield "aten.cumsum.default", (x > 0, 1)
    yield "aten.mm.default", (r(20, 60)[:, ::2], r(30, 20))
    yield "aten.mm.default", (r(1, 30).expand(20, 30), r(20, 30).t())


@dataclass(frozen=True)
class Kernel:
    """Bytes that one call held beyond its results, and the formula's."""

    op: str
    shapes: str
    measured: int
    formula: int


def kernel(op: str, args: tuple[Any, ...]) -> Kernel:
    function = functools.reduce(getattr, op.split("."), torch.ops)
    results: list[Any] = []

    def call() -> None:
        made = function(*args)
        results[:] = made if isinstance(made, (tuple, list)) else [made]

    call()
    results.clear()
    seen = allocations(call)
    kept = storage_bytes([t for t in results if isinstance(t, Tensor)])
    formula = workspace_of(op, function, "cpu")
    shapes = " ".join(str(list(a.shape)) for a in args if isinstance(a, Tensor))
    return Kernel(op, shapes, seen.peak - kept, formula(args, results) if formula else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,t5,bert,vit,resnet,bottleneck")
    parser.add_argument("--zero", default="0,1,2,3")
    parser.add_argument("--after", action="store_true", help="zero_grad after the step only")
    parser.add_argument("--settings", default="plain", help=f"of {', '.join(SETTINGS)}; or all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--operators", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.operators:
        print(f"{'held inside':>12} {'formula':>12}  operator, operands")
        for op, args in calls():
            k = kernel(op, args)
            print(f"{k.measured:12} {k.formula:12}  {k.op.removesuffix('.default')} {k.shapes}")
        return
    print(f"{'model':11} {'setting':17} zero  gradients    predicted     measured    error  of the executor  peak at")
    befores = [False] if options.after else [False, True]
    settings = [*SETTINGS] if options.settings == "all" else options.settings.split(",")
    zeros = [int(z) for z in options.zero.split(",")]
    for name in options.models.split(","):
        found = run_ranks(options.ranks, several, name, zeros, befores, settings, timeout=3000)
        for zero, before, setting, m in found[0]:
            kept = "survive" if before else "do not"
            if isinstance(m, str):
                print(f"{name:11} {setting:17} {zero:4}  {kept:9} refused: {m}", flush=True)
                continue
            error, executor = m.measured / m.predicted - 1, m.executor / m.predicted - 1
            row = f"{name:11} {setting:17} {zero:4}  {kept:9} {m.predicted:12} {m.measured:12} {error:+8.3%} {executor:+16.3%}"
            print(f"{row}  {m.peak_at}", flush=True)


if __name__ == "__main__":
    main()
