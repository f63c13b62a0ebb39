"""Fused or split: vocabulary-parallel losses and embeddings, norms over a split dim: equal to one device, nothing gathered."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from shardc import P
from shardc.program import Program, TensorType
from shardc.reshard import STEP_OPS, Step
from shardc.rules import split_forms
from shardc.rules.call import overload
from shardc.spec import ShardSpec
from shardc.testing import check, check_all

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as tf

WORDS, LENGTH, WIDTH, LAYERS, ROWS = 61, 9, 24, 2, 6
STEPS = frozenset(STEP_OPS.values())
MEGATRON = {
    **{f"*.{name}_proj.weight": P("tp", None) for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": P(None, "tp") for name in ("o", "down")},
    "*.embed_tokens.weight": P("tp", None),
    "*.lm_head.weight": P("tp", None),
}


def llama() -> tuple[nn.Module, torch.optim.Optimizer]:
    config = tf.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=56, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tf.LlamaForCausalLM(config).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(rows: int = ROWS, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(count):
        tokens = torch.randint(0, WORDS, (rows, LENGTH), generator=g)
        targets = tokens.roll(-1, 1)
        targets[:, -2:] = -100
        out.append((tokens, targets))
    return out


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


def steps(program: Program, kind: str, axis: str, shape: tuple[int, ...], phase: str) -> list[fx.Node]:
    """Collectives of one kind over one axis, of values of a shape."""
    found = []
    for node in program.compute_nodes():
        step = node.args[1] if node.target in STEPS else None
        if isinstance(step, Step) and step.kind == kind and step.axis == axis and str(program.info[node].phase) == phase:
            found += [node] if program.type(node).shape == shape else []
    return found


def largest_with(program: Program, numel: int, mesh: shardc.Mesh) -> int:
    """Elements of the largest local part of the values that have as many elements as the logits."""
    sizes = [0]
    for node in program.graph.nodes:
        kind, spec = (program.info[node].type, program.info[node].spec) if node in program.info else (None, None)
        kinds, specs = (kind, spec) if isinstance(kind, tuple) else ((kind,), (spec,))
        for one, lies in zip(kinds, specs or (), strict=False):
            if isinstance(one, TensorType) and isinstance(lies, ShardSpec) and one.numel == numel:
                sizes += [torch.Size(lies.local_shape(mesh, coord)).numel() for coord in mesh.coords()]
    return max(sizes)


@pytest.mark.parametrize("tp", [2, 4])
def test_llama_reduces_twice_each_way_per_layer_and_gathers_no_logits(tp: int) -> None:
    mesh = shardc.Mesh(dp=1, tp=tp, simulated=True)
    plan = shardc.compile(train, mesh=mesh, zero=0, params=MEGATRON).lower(*llama(), *batches()[0])
    program = plan.stages["partition"]
    for phase in ("forward", "backward"):
        each = steps(program, "all_reduce", "tp", (ROWS, LENGTH, WIDTH), phase)
        layers = [sum(f"layers.{k}." in program.info[n].module for n in each) for k in range(LAYERS)]
        assert layers == [2] * LAYERS, phase
        assert len(each) == 2 * LAYERS + 1  # the embedding forward, the head backward
    assert {r.kind for r in plan.communication} == {"all_reduce"}
    logits = ROWS * LENGTH * WORDS
    assert 0 < largest_with(program, logits, mesh) == ROWS * LENGTH * -(-WORDS // tp)
    called = {str(node.target) for node in program.graph.nodes}
    assert not called & {"aten._log_softmax.default", "aten.embedding.default", "aten.embedding_dense_backward.default"}


def test_fused_where_the_vocabulary_is_whole() -> None:
    plan = shardc.compile(train, mesh=shardc.Mesh(dp=2, simulated=True), zero=3).lower(*llama(), *batches()[0])
    targets = {node.target for node in plan.stages["partition"].graph.nodes}
    assert torch.ops.aten._log_softmax.default in targets and torch.ops.aten.embedding.default in targets


def test_llama_equals_one_device() -> None:
    meshes = [({"dp": 2, "tp": 2}, 3), ({"dp": 2, "tp": 2}, 0), ({"dp": 1, "tp": 4}, 0), ({"dp": 1, "tp": 4}, 3)]
    options = [{"mesh": mesh, "zero": zero, "params": MEGATRON} for mesh, zero in meshes]
    for report in check_all(train, llama, batches(5), options):
        assert report.steps == 2


# -- each operator -----------------------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("_log_softmax", (randn(4, 5), 1, False)),
    ("_softmax", (randn(4, 5, 3), 1, False)),
    ("_log_softmax_backward_data", (randn(4, 5), randn(4, 5).log_softmax(0), 0, torch.float64)),
    ("_softmax_backward_data", (randn(4, 5), randn(4, 5).softmax(1), 1, torch.float64)),
    ("native_layer_norm", (randn(4, 5), [5], randn(5), randn(5), 1e-5)),
    ("native_layer_norm", (randn(4, 3, 5), [3, 5], None, None, 1e-5)),
    ("native_layer_norm_backward", (randn(4, 5), randn(4, 5) * 2, [5], (randn(4, 5) * 2).mean(1, keepdim=True),
     ((randn(4, 5) * 2).var(1, correction=0, keepdim=True) + 1e-5).rsqrt(), randn(5), randn(5), [True, True, True])),
    ("embedding", (randn(7, 5), torch.tensor([[0, 6], [3, 3]]))),
    ("embedding_dense_backward", (randn(3, 5), torch.tensor([0, 6, 6]), 7, 6, False)),
    ("gather", (randn(4, 5), 1, torch.tensor([[0], [4], [2], [2]]))),
    ("scatter.src", (randn(4, 5), -1, torch.tensor([[0], [4], [2], [2]]), randn(4, 1))),
    ("scatter.value", (randn(4, 5), 1, torch.tensor([[0], [4], [2], [2]]), 3.0)),
    ("scatter_add", (randn(4, 5), 0, torch.tensor([[0, 1], [0, 1]]), randn(2, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args"), CALLS, ids=[name for name, _ in CALLS])
def test_split_forms_are_the_same_operator(name: str, args: tuple[Any, ...]) -> None:
    op = overload(f"aten.{name}" if "." in name else f"aten.{name}.default")
    assert op is not None
    form = split_forms().get(op) or split_forms(of_result=True)[op]
    want, got = op(*args), form(*args)
    for a, b in zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Head(nn.Module):
    """A norm over a split dim, an embedding with padding, and log-probabilities picked by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6, padding_idx=2, dtype=torch.float64)
        self.up = nn.Linear(6, 10, bias=False, dtype=torch.float64)
        self.norm = nn.LayerNorm(10, dtype=torch.float64)
        self.out = nn.Linear(10, 5, dtype=torch.float64)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(self.norm(self.up(self.table(words))))
        picked = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        return -(picked * logits.softmax(-1).square().sum(-1, keepdim=True)).mean()


def head() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = Head()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_head(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(words, labels)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("tp", [2, 4])
def test_norms_and_lookups_with_empty_parts(tp: int, zero: int) -> None:
    """5 classes over 4 ranks: 2, 2, 1, 0."""
    params = {"*table.weight": P("tp", None), "*up.weight": P("tp", None), "*out.weight": P("tp", None), "*out.bias": P("tp")}
    g = torch.Generator().manual_seed(3)
    data = [(torch.randint(0, 7, (5, 3), generator=g), torch.randint(0, 5, (5, 3), generator=g)) for _ in range(2)]
    report = check(train_head, head, data, mesh={"dp": 2, "tp": tp}, zero=zero, params=params)
    program = report.plan.stages["partition"]
    called = {str(node.target) for node in program.graph.nodes}
    assert {f"shardc.{name}_part.default" for name in ("embedding", "gather", "scatter_add")} <= called
    assert "aten.native_layer_norm.default" not in called
