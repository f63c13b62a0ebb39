"""Sequence parallelism between the blocks of a decoder, and heads that an axis does not divide: what is sent, and equality."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from test_vocabulary import LAYERS, LENGTH, MEGATRON, ROWS, WIDTH, WORDS, batches, llama, steps, train
from torch import Tensor, nn

import shardc
from shardc import P, recipes
from shardc.errors import OptionError, SpecError
from shardc.testing import check, check_all

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as tf

STREAM = (ROWS, LENGTH, WIDTH)
FLAT = (ROWS * LENGTH, WIDTH)


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


def options(mesh: dict[str, int], zero: int = 0, **more: Any) -> dict[str, Any]:
    batch, sequence = "dp" if "dp" in mesh else None, ("sp",) if "sp" in mesh else ()
    if sequence:
        more["inputs"] = {"tokens": P(batch, "sp"), "targets": P(batch, "sp")}
    pins = recipes.sequence_parallel(llama()[0], batch=batch, sequence=sequence)
    return {"mesh": mesh, "zero": zero, "params": MEGATRON, "activations": pins, **more}


def moved(plan: shardc.Plan, kind: str, phase: str) -> tuple[int, int]:
    """Number and bytes of the collectives of activation size over tp."""
    program = plan.stages["partition"]
    assert not isinstance(program, str) and program.mesh is not None
    found = steps(program, kind, "tp", STREAM, phase) + steps(program, kind, "tp", FLAT, phase)
    return len(found), sum(n.args[1].nbytes(program.type(n).dtype, program.mesh) for n in found)


@pytest.mark.parametrize("tp", [2, 4])
def test_each_all_reduce_becomes_a_scatter_and_a_gather_of_the_same_bytes(tp: int) -> None:
    """9 tokens over 2 and over 4 ranks. The embedding is scattered in the forward and gathered in the backward, the head's
    input the other way round, so that the sum over both is that of the all-reduces, and of each in a layer."""
    mesh = shardc.Mesh(dp=1, tp=tp, simulated=True)
    arguments = (*llama(), *batches()[0])
    given = {**options({"dp": 1, "tp": tp}), "mesh": mesh}
    whole = shardc.compile(train, **{**given, "activations": {}}).lower(*arguments)
    cut = shardc.compile(train, **given).lower(*arguments)
    blocks = 2 * LAYERS + 1
    for phase in ("forward", "backward"):
        assert moved(whole, "all_reduce", phase)[0] == blocks and moved(cut, "all_reduce", phase) == (0, 0)
        scattered, gathered = moved(cut, "reduce_scatter", phase), moved(cut, "all_gather", phase)
        assert scattered[0] == gathered[0] == blocks
        assert scattered[1] + gathered[1] == moved(whole, "all_reduce", phase)[1]
        assert moved(whole, "all_gather", phase) == moved(whole, "reduce_scatter", phase) == (0, 0)
    norms = [row for row in cut.communication if row.group == "gradients"]
    assert [(r.kind, r.axis, r.count) for r in norms] == [("all_reduce", "tp", 2 * LAYERS + 1)]  # each norm's weight, once
    held = [plan.memory.by_category["activations"] for plan in (whole, cut)]
    assert held[1] < held[0] and cut.memory.peak_bytes < whole.memory.peak_bytes


def test_llama_equals_one_device() -> None:
    report = check(train, llama, batches(5), **options({"dp": 2, "tp": 2}, 3))
    assert report.steps == 2


@pytest.mark.long
def test_llama_equals_one_device_on_more_meshes() -> None:
    meshes = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 2, "sp": 2, "tp": 2}]
    many = [options(mesh, zero) for mesh in meshes for zero in range(4)]
    many += [options({"tp": 2}), options({"tp": 4}), options({"sp": 2, "tp": 2})]
    many += [options({"dp": 2, "tp": 2}, zero, microbatches=2) for zero in (1, 3)]
    many += [options({"dp": 2, "tp": 2}, 3, recompute="full")]
    for report in check_all(train, llama, batches(5), many):
        assert report.steps == 2


def gpt2() -> tuple[nn.Module, torch.optim.Optimizer]:
    config = tf.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=LAYERS, n_head=4, bos_token_id=1, eos_token_id=2,
        use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tf.GPT2LMHeadModel(config).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.long
def test_biases_dropout_and_positions_between_the_blocks() -> None:
    model = gpt2()[0]
    pins = {"params": recipes.megatron(model), "activations": recipes.sequence_parallel(model)}
    for report in check_all(train, gpt2, batches(3), [{"mesh": {"dp": 2, "tp": 2}, "zero": zero, **pins} for zero in (0, 3)]):
        assert report.steps == 2
        for phase in ("forward", "backward"):
            assert moved(report.plan, "all_reduce", phase) == (0, 0)


# -- heads -------------------------------------------------------------------------------------------------------------------


def grouped(heads: int, shared: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = tf.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=56, num_hidden_layers=LAYERS, num_attention_heads=heads,
        head_dim=6, num_key_value_heads=shared, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tf.LlamaForCausalLM(config).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(("heads", "shared", "tp", "note"), [
    (3, 3, 2, "uneven: 18@tp seen as [3, 6] in model.model.layers.{0,1}.self_attn: 3@tp, parts of 2, 1; "
     "105 kB sent in a step, 114 kB if it were gathered"),
    (6, 2, 4, "gathered: 36@tp seen as [6, 6] in model.model.layers.{0,1}.self_attn; "
     "184 kB sent in a step, 210 kB if split as 6@tp, parts of 2, 2, 2, 0"),
])  # fmt: skip
def test_heads_that_the_axis_does_not_divide(heads: int, shared: int, tp: int, note: str) -> None:
    report = check(train, partial(grouped, heads, shared), batches(5), mesh={"dp": 1, "tp": tp}, params=MEGATRON)
    assert note in report.plan.notes and note in str(report.plan)


@pytest.mark.long
def test_more_heads_that_the_axis_does_not_divide() -> None:
    for heads, shared, tp in [(3, 1, 2), (6, 2, 4), (4, 2, 3), (6, 3, 4)]:
        make = partial(grouped, heads, shared)
        pins = {"params": MEGATRON, "activations": recipes.sequence_parallel(make()[0])}
        check(train, make, batches(5), mesh={"dp": 2, "tp": tp}, zero=3, **pins)


# -- pins of activations -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.relu(self.up(x))))


def block() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Block()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_block(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


PINS = {"up.weight": P("tp", None), "down.weight": P(None, "tp")}


def block_plan(**more: Any) -> shardc.Plan:
    given: dict[str, Any] = {"params": PINS, "activations": {"down": P("dp", "tp")}, **more}
    mesh = shardc.Mesh(dp=1, tp=2, simulated=True)
    return shardc.compile(train_block, mesh=mesh, **given).lower(*block(), torch.randn(2, 5, 4))  # type: ignore[no-any-return]


def test_what_is_wrong_with_a_pin() -> None:
    with pytest.raises(OptionError, match=r"'dwn' matches no module's result.*\n.*model.up, model.down, model.norm, model"):
        block_plan(activations={"dwn": P()})
    with pytest.raises(SpecError, match="contradicting pins"):
        block_plan(activations={"down": P("dp", "tp"), "d*": P()})
    with pytest.raises(SpecError, match="has 4 entries"):
        block_plan(activations={"down": P(None, None, None, "tp")})
    with pytest.raises(OptionError, match="activations"):
        shardc.compile(train_block, mesh={"dp": 1}, activations=["down"])


def explained(plan: shardc.Plan, name: str) -> str:
    return re.sub(r"test_sequence.py:\d+", "model.py", plan.explain(name))


def test_explained() -> None:
    """Which annotation reached a value through which operators, what was moved, why, and what that costs."""
    plan = block_plan()
    assert_expected_inline(explained(plan, "add_tensor"), """\
%add_tensor  aten.add.Tensor  f32[2, 5@tp, 4]    4 us  forward, model, model.py
result   f32[2, 5@tp, 4], per rank [2, 3, 4], 96 B, activations
split    over tp from %reduce_scatter (reduce_scatter): activations['down'], through aten.add.Tensor
why      factor b over tp
time     4 us (predicted)
from     %slice_1, %reduce_scatter
used by  %native_layer_norm_default, %native_layer_norm_backward_default""")
    assert_expected_inline(explained(plan, "all_gather"), """\
%all_gather  all_gather@tp  f32[10, 4]  80 B  60 us  backward, model.down, model.py
result   f32[10, 4], per rank [10, 4], 160 B, activations
why      aten.mm needs it so, with factor c over tp
step     all_gather@tp [2·5@tp, 4] -> [10, 4]
sends    80 B per rank, activations
time     60 us (predicted)
from     %view_default_2
used by  %t_default_3, %mm_default_3""")
    assert_expected_inline(explained(plan, "model.down"), """\
model.down: 13 nodes; 2 collectives: 160 B sent per rank, 120 us (predicted); 140 us in all
split    %reduce_scatter over tp from %reduce_scatter (reduce_scatter): activations['down']
%t_default_1             aten.t             f32[6@tp, 4]                 1 us  forward, model.down, model.py
%view_default_1          aten.view          f32[10, 6@tp]                1 us  forward, model.down, model.py
%mm_default_1            aten.mm            f32[10, 4] +sum@tp           4 us  forward, model.down, model.py
%_unsafe_view_default_1  aten._unsafe_view  f32[2, 5, 4] +sum@tp         1 us  forward, model.down, model.py
%reduce_scatter          reduce_scatter@tp  f32[2, 5@tp, 4]       80 B  60 us  forward, model.down, model.py
%view_default_2          aten.view          f32[2·5@tp, 4]               1 us  backward, model.down, model.py
%all_gather              all_gather@tp      f32[10, 4]            80 B  60 us  backward, model.down, model.py
%t_default_3             aten.t             f32[4, 10]                   1 us  backward, model.down, model.py
%mm_default_2            aten.mm            f32[4, 6@tp]                 4 us  backward, model.down, model.py
%t_default_4             aten.t             f32[6@tp, 4]                 1 us  backward, model.down, model.py
%mm_default_3            aten.mm            f32[10, 6@tp]                4 us  backward, model.down, model.py
%view_default_3          aten.view          f32[2, 5, 6@tp]              1 us  backward, model.down, model.py
%t_default_5             aten.t             f32[4, 6@tp]                 1 us  backward, model.down, model.py""")
    assert_expected_inline(explained(plan, "model.down.weight"), """\
model.down.weight: parameter f32[4, 6], 96 B
storage  [4, 6@tp], 48 B per rank
compute  [4, 6@tp]
why      pinned to [4, 6@tp] by params['down.weight']
life     there before and after the step
read by
  %mm_default_1   aten.mm     f32[10, 4] +sum@tp    4 us  forward, model.down, model.py
  %mm_default_3   aten.mm     f32[10, 6@tp]         4 us  backward, model.down, model.py
  %sgd_default_1  shardc.sgd  f32[4, 6@tp]          4 us  update, model.py
written in place by
  %sgd_default_1  shardc.sgd  f32[4, 6@tp]    4 us  update, model.py""")
