"""Six families of transformers' models in small configurations, each with an ordinary training step.

Sizes are odd or do not divide one another wherever the family allows it, so that shards are uneven. Every family that has
dropout uses it, also in its attention.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as tf

WORDS, LENGTH, CLASSES = 61, 9, 5
Batch = tuple[Tensor, ...]
TrainStep = Callable[..., Tensor]


# -- models ------------------------------------------------------------------------------------------------------------------


def gpt() -> nn.Module:
    config = tf.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=24, n_layer=2, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config)


def gpt_checkpointed() -> nn.Module:
    """Activations are recomputed in the backward by the user's own choice, dropout masks included."""
    model: Any = gpt()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def llama() -> nn.Module:
    config = tf.LlamaConfig(
        vocab_size=WORDS, hidden_size=24, intermediate_size=53, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = tf.BertConfig(
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=53,
        max_position_embeddings=16,
    )  # fmt: skip
    return tf.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = tf.T5Config(
        vocab_size=WORDS, d_model=24, d_kv=5, d_ff=53, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False
    )
    return tf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = tf.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=53, image_size=24, patch_size=8,
        num_labels=CLASSES, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return tf.ViTForImageClassification(config)


def resnet() -> nn.Module:
    """Its normalisation takes the statistics of the whole batch, and keeps running ones."""
    config = tf.ResNetConfig(
        embedding_size=7, hidden_sizes=[7, 12], depths=[1, 2], layer_type="basic", num_labels=CLASSES,
        downsample_in_first_stage=True,
    )  # fmt: skip
    return tf.ResNetForImageClassification(config)


# -- training steps ----------------------------------------------------------------------------------------------------------


def _update(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_causal(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss is written out: the models' own one is computed in float32."""
    logits = model(input_ids=tokens).logits
    return _update(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), optimizer)


def train_masked(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, mask: Tensor
) -> Tensor:  # fmt: skip
    """Rows of different lengths; the loss counts some of the words only."""
    return _update(model(input_ids=tokens, attention_mask=mask, labels=targets).loss, optimizer)


def train_pairs(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    return _update(model(input_ids=tokens, labels=targets).loss, optimizer)


def train_images(model: nn.Module, optimizer: torch.optim.Optimizer, pixels: Tensor, labels: Tensor) -> Tensor:
    return _update(F.cross_entropy(model(pixel_values=pixels).logits, labels), optimizer)


# -- batches -----------------------------------------------------------------------------------------------------------------


def words(rows: int, g: torch.Generator) -> Batch:
    tokens = torch.randint(3, WORDS, (rows, LENGTH), generator=g)
    targets = tokens.roll(-1, 1)
    targets[torch.rand(targets.shape, generator=g) < 0.3] = -100  # not counted, another share in every row
    return tokens, targets


def masked_words(rows: int, g: torch.Generator) -> Batch:
    tokens, targets = words(rows, g)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (rows, 1), generator=g)
    return tokens, targets.masked_fill(~mask, -100), mask.long()


def images(size: int, rows: int, g: torch.Generator) -> Batch:
    return torch.randn(rows, 3, size, size, generator=g), torch.randint(CLASSES, (rows,), generator=g)


# -- families ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A model and its training step; `batch(rows, generator)` makes the arguments after the model and the optimizer."""

    model: Callable[[], nn.Module]
    step: TrainStep
    batch: Callable[[int, torch.Generator], Batch]
    dropout: bool = True

    def state(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model in training mode, always with the same values, and AdamW."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model().train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batches(self, rows: int, count: int = 3) -> list[Batch]:
        g = torch.Generator().manual_seed(7)
        return [self.batch(rows, g) for _ in range(count)]


FAMILIES = {
    "gpt": Family(gpt, train_causal, words),
    "gpt_checkpointed": Family(gpt_checkpointed, train_causal, words),
    "llama": Family(llama, train_causal, words),
    "bert": Family(bert, train_masked, masked_words),
    "t5": Family(t5, train_pairs, words),
    "vit": Family(vit, train_images, functools.partial(images, 24)),
    "resnet": Family(resnet, train_images, functools.partial(images, 32), dropout=False),
}
