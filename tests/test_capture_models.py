"""Small configurations of transformers' models: what is captured is what eager computes, bit for bit."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from capture_replay import check
from torch import Tensor

from shardc import ops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as tf

TEXT = {"vocab_size": 19, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
MODELS: dict[str, Any] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=19, n_embd=8, n_layer=2, n_head=2, n_positions=16)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, num_hidden_layers=2, num_key_value_heads=1)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**TEXT, num_hidden_layers=2)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=19, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
        )
    ),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TEXT, num_hidden_layers=2, num_key_value_heads=2)),
    "vit": lambda: tf.ViTForImageClassification(
        tf.ViTConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=8,
            patch_size=4,
            num_labels=3,
        )
    ),
    "resnet": lambda: tf.ResNetForImageClassification(
        tf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3, layer_type="basic")
    ),
}


def batch(name: str, g: torch.Generator) -> dict[str, Tensor]:
    if name in ("vit", "resnet"):
        size = 8 if name == "vit" else 16
        return {"pixel_values": torch.randn(2, 3, size, size, generator=g), "labels": torch.randint(0, 3, (2,), generator=g)}
    ids = torch.randint(1, 19, (2, 7), generator=g)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0  # right padding; without any, eager leaves the mask out and the kernel sums in another order
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("name", MODELS)
def test_bitwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "sdpa_mode", contextlib.nullcontext)
    monkeypatch.setattr(ops, "optimizer_kernels", contextlib.nullcontext)

    def make() -> tuple[Any, ...]:
        model = MODELS[name]()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    g = torch.Generator().manual_seed(3)
    check(step, make, [(batch(name, g),) for _ in range(2)], captures=2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_with_operators_of_shardc(name: str) -> None:
    def make() -> tuple[Any, ...]:
        model = MODELS[name]().double().eval()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    g = torch.Generator().manual_seed(3)
    found = check(step, make, [(batch(name, g),) for _ in range(2)], exact=False, captures=2)
    program = found[-1].program
    assert any("shardc.sdpa" in str(n.target) for n in program.compute_nodes())
    assert len(list(program.compute_nodes())) < 1200
