"""The strategies draw what they promise; the programs run, are reproducible, and the exact ones are exact."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from shardc.testing import strategies as sh
from shardc.testing.expressions import ACROSS, ROWWISE
from shardc.testing.training_program import TrainingProgram

FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def run(program: TrainingProgram, dtype: torch.dtype = torch.float32, reverse: bool = False) -> dict[str, torch.Tensor]:
    """Losses, final state and optimizer state of an eager run; `reverse` turns the rows of each batch around."""
    model, optimizer = program.make_state()
    model.to(dtype)
    out: dict[str, torch.Tensor] = {}
    for k, batch in enumerate(program.batches):
        torch.manual_seed(k)
        rows = [(t.flip(0) if reverse else t) for t in batch]
        result = program.train_step(model, optimizer, *(t.to(dtype) if t.is_floating_point() else t for t in rows))
        out |= {f"result{k}.{i}": t for i, t in enumerate(tree_leaves(result)) if t.dim() == 0 or not reverse}
    out |= {k: v.detach().clone() for k, v in model.state_dict().items()}
    for k, state in optimizer.state_dict()["state"].items():
        out |= {f"{k}.{name}": torch.as_tensor(v) for name, v in state.items() if v is not None}
    return out


@FEW
@given(sh.programs(dropout=True))
def test_programs_run_and_are_reproducible(program: TrainingProgram) -> None:
    first, second = run(program), run(copy.deepcopy(program))
    assert all(torch.isfinite(t).all() for t in first.values())
    assert all(torch.equal(first[k], second[k]) for k in first | second)
    assert any(not torch.equal(v, first[k]) for k, v in program.make_state()[0].state_dict().items())


@FEW
@given(sh.programs(exact=True))
def test_exact_programs_do_not_depend_on_the_order_of_summation(program: TrainingProgram) -> None:
    first, second = run(program, torch.float64), run(program, torch.float64, reverse=True)
    assert all(torch.equal(first[k], second[k]) for k in second)


@FEW
@given(sh.programs())
def test_a_program_is_its_source(program: TrainingProgram) -> None:
    program.make_state()
    again = pickle.loads(pickle.dumps(program))
    assert again == program and vars(again) == {"source": program.source}
    assert eval(repr(program), {"TrainingProgram": TrainingProgram}) == program
    line = program.train_step.__code__.co_firstlineno
    assert program.source.splitlines()[line - 1].startswith("def train_step(model, optimizer, x, y)")


@FEW
@given(st.data(), sh.meshes(max_ranks=8))
def test_meshes_specs_and_options_are_legal(data: st.DataObject, mesh: sh.Mesh) -> None:
    assert "dp" in mesh.axes and mesh.size <= 8 and mesh.simulated
    shape = data.draw(sh.shapes())
    spec = data.draw(sh.specs(shape, mesh))
    assert spec.shape == shape and {*spec.axes, *spec.partial_axes} <= set(mesh.names)
    assert all(len(d) == 1 for d in data.draw(sh.specs(shape, mesh, partial=False, products=False)).dims)
    given_ = data.draw(sh.options(mesh, data.draw(sh.programs(max_layers=1))))
    assert given_["mesh"] is mesh and given_.get("zero", 0) in range(4)
    pinned = {a for p in given_.get("params", {}).values() for a in p if a}
    assert not pinned & set(given_.get("batch", ("dp",)))


@pytest.mark.parametrize("word", [
    "BatchNorm", "LayerNorm", "Conv2d", "Embedding", "scaled_dot_product", "head.weight = ", "requires_grad_(False)", "unused",
    "register_buffer", "= -100", "mask.sum()", "clip_grad_norm_", "fused=True", "foreach=True", "RMSprop", "Adagrad",
    "F.dropout", "RMSNorm", "cumsum", "pool2d", "z @ z.t()", "x.mean(0)", "NAdam", "(groups(model), ", "label_smoothing",
    "nn.GRU", "nn.LSTM", "TransformerEncoderLayer", "Conv1d", "PReLU", "Bilinear", "checkpoint(", "create_graph",
    "retain_graph", "ASGD", "RAdam", "maximize", 'group["lr"] *=', "return loss, out", "clip_grad_value_", "inf",
])  # fmt: skip
def test_every_ingredient_is_drawn(word: str, sources: list[str]) -> None:
    assert any(word in s for s in sources)


@pytest.mark.parametrize("expression", [*ROWWISE, *ACROSS])
def test_expressions_keep_the_shape_and_have_a_gradient(expression: str) -> None:
    for shape in ((3, 5), (1, 4, 2), (4, 2, 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = eval(expression, {"torch": torch, "F": F, "x": x})
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert out.shape == x.shape and torch.isfinite(grad).all()


@pytest.fixture(scope="module")
def sources() -> list[str]:
    out: list[str] = []

    @settings(max_examples=1000, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(sh.programs(dropout=True))
    def collect(program: TrainingProgram) -> None:
        out.append(program.source)

    collect()
    return out
