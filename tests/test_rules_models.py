"""Every operator of real training steps has a rule that fits its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from shardc.capture import capture, observe
from shardc.options import Options
from shardc.passes.factors import rule_of
from shardc.passes.graphs import is_op
from shardc.passes.normalize import normalize
from shardc.program import TensorType
from shardc.rules.rule import PASS

WORDS, LENGTH = 37, 7
Made = tuple[nn.Module, dict[str, Tensor]]


def words() -> Tensor:
    return torch.randint(3, WORDS, (2, LENGTH))


def gpt2() -> Made:
    config = tf.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=12,
        n_layer=1,
        n_head=3,
        bos_token_id=1,
        eos_token_id=2,
        loss_type="ForCausalLM",
    )
    return tf.GPT2LMHeadModel(config), {"input_ids": words(), "labels": words()}


def llama() -> Made:
    config = tf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return tf.LlamaForCausalLM(config), {"input_ids": words(), "labels": words()}


def bert() -> Made:
    config = tf.BertConfig(
        vocab_size=WORDS, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=3, num_labels=5
    )
    return tf.BertForSequenceClassification(config), {"input_ids": words(), "labels": torch.tensor([1, 4])}


def t5() -> Made:
    config = tf.T5Config(vocab_size=WORDS, d_model=12, d_kv=4, d_ff=20, num_layers=1, num_heads=3, decoder_start_token_id=0)
    return tf.T5ForConditionalGeneration(config), {"input_ids": words(), "labels": words()}


def vit() -> Made:
    config = tf.ViTConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=3,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return tf.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([1, 2])}


def resnet() -> Made:
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    return tf.ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "optimizer", "half"),
    [(gpt2, "adamw", False), (llama, "sgd", True), (bert, "rmsprop", False), (t5, "adagrad", False), (vit, "nadam", True),
     (resnet, "adadelta", False)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)  # fmt: skip
def test_operators_of_a_step(make: Callable[[], Made], optimizer: str, half: bool) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.train()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    args = (model, OPTIMIZERS[optimizer](model.parameters()), batch)
    program = normalize(capture(step, args, {}, observe(step, args, {})).program, Options())
    calls = free = 0
    for node in program.nodes:
        if is_op(node) and program.info[node].type is not None:
            rule = rule_of(program, node)  # raises where there is none
            calls += 1
            batched = [t for t in rule.operands if t and t[0] and rule.sizes[t[0][0]] == 2]
            free += bool(batched) and any(rule.kind(t[0][0]) == PASS for t in batched)
            for made, kind in zip(rule.results, (program.info[node].type,), strict=False):
                assert made is None or not isinstance(kind, TensorType) or len(made) == len(kind.shape)
    assert calls > 100 and free > 20
