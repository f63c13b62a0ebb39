"""Recipes: `params` found by the structure of a model."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_vocabulary import LAYERS, LENGTH, MEGATRON, ROWS, WIDTH, WORDS, batches, llama, steps, train
from torch import nn

import shardc
from shardc import P
from shardc.errors import OptionError
from shardc.passes.annotate import _matches
from shardc.testing import check

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as tf

SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}


def neox() -> nn.Module:
    config = tf.GPTNeoXConfig(
        **SIZES, intermediate_size=56, max_position_embeddings=32, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False
    )
    return tf.GPTNeoXForCausalLM(config).double()


def qwen() -> nn.Module:
    config = tf.Qwen3Config(
        **SIZES, intermediate_size=56, num_key_value_heads=2, head_dim=6, max_position_embeddings=32, use_cache=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    return tf.Qwen3ForCausalLM(config).double()


def test_llama_by_structure_is_llama_by_names() -> None:
    model = llama()[0]
    names = [name for name, _ in model.named_parameters()]
    by_names = {name: p for name in names for pattern, p in MEGATRON.items() if _matches("model." + name, pattern)}
    assert shardc.recipes.megatron(model) == by_names


def test_fused_projections_and_biases() -> None:
    params = shardc.recipes.megatron(neox())
    layer = "gpt_neox.layers.1."
    assert {k.removeprefix(layer): p for k, p in params.items() if k.startswith(layer)} == {
        "attention.query_key_value.weight": P("tp", None),
        "attention.query_key_value.bias": P("tp"),
        "attention.dense.weight": P(None, "tp"),
        "mlp.dense_h_to_4h.weight": P("tp", None),
        "mlp.dense_h_to_4h.bias": P("tp"),
        "mlp.dense_4h_to_h.weight": P(None, "tp"),
    }
    outside = [p for name, p in params.items() if ".layers." not in name]
    assert outside == [P("tp", None)] * 2  # the embedding and the head


def test_transposed_weights() -> None:
    config = tf.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    params = shardc.recipes.megatron(tf.GPT2LMHeadModel(config))
    assert params["transformer.h.0.attn.c_attn.weight"] == P(None, "tp")
    assert params["transformer.h.0.mlp.c_proj.weight"] == P("tp", None)
    assert "lm_head.weight" not in params and params["transformer.wte.weight"] == P("tp", None)  # tied


def test_state_space_layers() -> None:
    """Inner channels are split: the convolution of each, and what the layer holds for each of them."""
    config = tf.MambaConfig(vocab_size=WORDS, hidden_size=WIDTH, state_size=3, num_hidden_layers=1, time_step_rank=2)
    params = shardc.recipes.megatron(tf.MambaForCausalLM(config))
    layer = "backbone.layers.0.mixer."
    assert {k.removeprefix(layer): p for k, p in params.items() if k.startswith(layer)} == {
        "in_proj.weight": P("tp", None),
        "conv1d.weight": P("tp"),
        "conv1d.bias": P("tp"),
        "A_log": P("tp"),
        "D": P("tp"),
        "x_proj.weight": P(None, "tp"),
        "dt_proj.weight": P("tp", None),
        "dt_proj.bias": P("tp"),
        "out_proj.weight": P(None, "tp"),
    }
    assert [p for k, p in params.items() if not k.startswith(layer)] == [P("tp", None)]  # the embedding, tied to the head


def test_low_rank_projections_that_do_not_fit_stay_whole() -> None:
    """Multi-head latent attention: what leads to the keys and values is neither from nor onto the inner width."""

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, 12)
            self.kv_down, self.kv_up = nn.Linear(WIDTH, 5), nn.Linear(5, 20)
            self.out = nn.Linear(12, WIDTH)

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

    layers = nn.ModuleList([nn.ModuleDict({"attention": Latent(), "mlp": Mlp()})])
    params = shardc.recipes.megatron(nn.ModuleDict({"table": nn.Embedding(WORDS, WIDTH), "layers": layers}))
    assert set(params) == {"table.weight", "layers.0.mlp.up.weight", "layers.0.mlp.up.bias", "layers.0.mlp.down.weight"}


@pytest.mark.parametrize("make", [neox, qwen])
def test_equal_to_one_device(make: object) -> None:
    def state() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()  # type: ignore[operator]
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    report = check(train, state, batches(), mesh={"dp": 2, "tp": 2}, zero=3, params=shardc.recipes.megatron(make()))  # type: ignore[operator]
    program = report.plan.stages["partition"]
    each = steps(program, "all_reduce", "tp", (ROWS, LENGTH, WIDTH), "forward")
    assert len(each) <= 2 * LAYERS + 1


def test_no_decoder() -> None:
    with pytest.raises(OptionError, match="no nn.Embedding"):
        shardc.recipes.megatron(nn.Linear(3, 4))
    with pytest.raises(OptionError, match="no layer with a group"):
        shardc.recipes.megatron(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)))
