"""Features together: guards, microbatches, recompute, tensor parallel and vocabularies that are split, several batch axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_recompute import GPT, train
from torch import Tensor, nn

import shardc
from shardc import P
from shardc.testing import check

VOCABULARY = {
    "*.head.weight": P("tp", None),
    "*.head.bias": P("tp"),
    "*.emb.weight": P("tp", None),
    "*.up.weight": P("tp", None),
    "*.up.bias": P("tp"),
    "*.down.weight": P(None, "tp"),
}
BATCHES = [(torch.randint(31, (9, 6), generator=torch.Generator().manual_seed(i)),) for i in range(2)]


def make() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def guarded(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm) and loss < 1e3:
        optimizer.step()
    optimizer.zero_grad()
    return loss


TP = {"mesh": {"dp": 2, "tp": 2}, "params": VOCABULARY}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "guards, microbatches": (guarded, {"mesh": {"dp": 2}, "zero": 3, "microbatches": 2}),
    "guards, both": (guarded, {"mesh": {"dp": 3}, "zero": 1, "microbatches": 3, "recompute": "full"}),
    "tp, microbatches": (train, {**TP, "zero": 3, "microbatches": 2}),
    "tp, recompute": (train, {**TP, "zero": 1, "recompute": "full"}),
    "tp, both": (train, {**TP, "zero": 3, "microbatches": 2, "recompute": {"save": ["attn_out"]}}),
    "two batch axes": (train, {"mesh": {"a": 2, "b": 2}, "batch": ("a", "b"), "zero": 3, "microbatches": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_together_equal_one_device(name: str) -> None:
    step, options = CASES[name]
    assert check(step, make, BATCHES, **options).steps == 2


def test_a_plan_with_all_of_them_survives_its_file(tmp_path: Path) -> None:
    mesh = shardc.Mesh(dp=2, tp=2, simulated=True)
    step = shardc.compile(train, mesh=mesh, zero=3, params=VOCABULARY, microbatches=2, recompute="full")
    plan = step.lower(*make(), *BATCHES[0])
    plan.save(tmp_path / "plan.json")
    again = shardc.Plan.load(tmp_path / "plan.json")
    assert again.hash == plan.hash and str(again) == str(plan)
