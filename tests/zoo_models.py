"""Sixteen families of transformers' models, as small as they come, each with an ordinary training step.

Dropout is at the family's default. Sizes do not divide one another where the family allows it, so that shards are uneven.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from model_zoo import (
    CLASSES,
    LENGTH,
    WORDS,
    Batch,
    Family,
    images,
    masked_words,
    train_causal,
    train_images,
    train_masked,
    train_pairs,
    words,
)
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as tf

WIDTH, INNER, FRAMES, MELS = 20, 33, 18, 5
DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 5,
    "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip


# -- decoders ----------------------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    config = tf.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=1, n_head=5, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER | {"num_attention_heads": 4}, num_key_value_heads=2, head_dim=6))


def qwen3() -> nn.Module:
    """Norms of queries and keys; heads that are not the width's share; a tied head."""
    return tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**DECODER | {"num_attention_heads": 6}, num_key_value_heads=3, head_dim=6, tie_word_embeddings=True)
    )


def gemma2() -> nn.Module:
    """A layer with a window and one without, bounded attention and logits."""
    return tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **DECODER | {"num_attention_heads": 4, "num_hidden_layers": 2}, num_key_value_heads=2, head_dim=6, sliding_window=4
        )
    )


def neox() -> nn.Module:
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**DECODER, rotary_pct=0.5))


def falcon() -> nn.Module:
    """Many queries for one key: queries, keys and values are one projection."""
    return tf.FalconForCausalLM(
        tf.FalconConfig(vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=5, use_cache=False)
    )


def mamba() -> nn.Module:
    return tf.MambaForCausalLM(
        tf.MambaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, state_size=3, num_hidden_layers=1, time_step_rank=2, use_cache=False
        )
    )


# -- encoders, and both ------------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=WORDS, **ENCODER, max_position_embeddings=16))


def deberta() -> nn.Module:
    """Attention to relative positions, both ways."""
    config = tf.DebertaV2Config(
        vocab_size=WORDS, **ENCODER, max_position_embeddings=16, type_vocab_size=0, relative_attention=True,
        position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
    )  # fmt: skip
    return tf.DebertaV2ForMaskedLM(config)


def t5() -> nn.Module:
    config = tf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=5, d_ff=INNER, num_layers=1, num_heads=4, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    config = tf.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=MELS, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, max_source_positions=FRAMES // 2,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, use_cache=False,
    )  # fmt: skip
    return tf.WhisperForConditionalGeneration(config)


# -- images ------------------------------------------------------------------------------------------------------------------


def vit() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**ENCODER, image_size=16, patch_size=8, num_labels=CLASSES))


def swin() -> nn.Module:
    """Windows that are shifted in the second layer, and merged patches."""
    config = tf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 4], window_size=4, num_labels=CLASSES,
        drop_path_rate=0.1,
    )  # fmt: skip
    return tf.SwinForImageClassification(config)


def convnext() -> nn.Module:
    config = tf.ConvNextConfig(hidden_sizes=[6, 10], depths=[1, 1], num_stages=2, num_labels=CLASSES, drop_path_rate=0.1)
    return tf.ConvNextForImageClassification(config)


def resnet() -> nn.Module:
    config = tf.ResNetConfig(embedding_size=7, hidden_sizes=[8, 12], depths=[1, 1], num_labels=CLASSES)
    return tf.ResNetForImageClassification(config)


def clip() -> nn.Module:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**ENCODER, "vocab_size": WORDS, "max_position_embeddings": 16, **special}
    vision = {**ENCODER, "image_size": 16, "patch_size": 8}
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=11))


# -- steps and batches of their own ------------------------------------------------------------------------------------------


def train_contrast(model: nn.Module, optimizer: torch.optim.Optimizer, pixels: Tensor, tokens: Tensor) -> Tensor:
    """Each row's image against every row's text."""
    loss: Tensor = model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_speech(model: nn.Module, optimizer: torch.optim.Optimizer, sound: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(input_features=sound, labels=targets).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def captions(rows: int, g: torch.Generator) -> Batch:
    tokens = torch.randint(3, WORDS, (rows, LENGTH), generator=g)
    tokens[torch.arange(rows), torch.randint(1, LENGTH, (rows,), generator=g)] = 2  # the end, where the text is pooled
    return torch.randn(rows, 3, 16, 16, generator=g), tokens


def speech(rows: int, g: torch.Generator) -> Batch:
    return torch.randn(rows, MELS, FRAMES, generator=g), words(rows, g)[1]


# -- families ----------------------------------------------------------------------------------------------------------------

DECODERS = {
    "gpt2": Family(gpt2, train_causal, words),
    "llama": Family(llama, train_causal, words, dropout=False),
    "qwen3": Family(qwen3, train_causal, words, dropout=False),
    "gemma2": Family(gemma2, train_causal, words, dropout=False),
    "neox": Family(neox, train_causal, words, dropout=False),
    "falcon": Family(falcon, train_causal, words, dropout=False),
    "mamba": Family(mamba, train_causal, words, dropout=False),
}
OTHERS = {
    "bert": Family(bert, train_masked, masked_words),
    "deberta": Family(deberta, train_masked, masked_words),
    "t5": Family(t5, train_pairs, words),
    "whisper": Family(whisper, train_speech, speech, dropout=False),
    "vit": Family(vit, train_images, functools.partial(images, 16), dropout=False),
    "swin": Family(swin, train_images, functools.partial(images, 16)),
    "convnext": Family(convnext, train_images, functools.partial(images, 32)),
    "resnet": Family(resnet, train_images, functools.partial(images, 32), dropout=False),
    "clip": Family(clip, train_contrast, captions, dropout=False),
}
