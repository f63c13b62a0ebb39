"""What capture refuses: each error names the thing and the user's line, and the user's objects are as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.capture import capture, observe
from shardc.errors import CaptureError

HISTORY: list[Any] = []
COUNT = 0


def world() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 3), torch.randn(5, 1)


def refuse(step: Any, match: str, *args: Any, line: bool = True) -> str:
    """Capture must fail with a message that matches and names a line of this file; nothing may have changed."""
    args = args or world()
    before = observe(step, args, {})
    state = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    values = {p: s.get().clone() for p, s in before.slots.items()}
    with pytest.raises(CaptureError, match=match) as caught:
        capture(step, args, {}, before)
    now = observe(step, args, {})
    assert now.key == before.key and all(v.is_meta or torch.equal(now.slots[p].get(), v) for p, v in values.items())
    assert random.getstate() == state[0] and numpy.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])
    if line:
        first = step.__code__.co_firstlineno
        lines = [f"test_capture_errors.py:{n}" for n in range(first, first + 15)]
        assert any(x in str(caught.value) for x in lines), str(caught.value)
    return str(caught.value)


def finish(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_branch_on_a_value() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        if loss > 1:
            loss = loss * 2
        return loss

    refuse(step, "Python needs the value of a tensor")


def test_int_of_a_tensor() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
        return int(finish(model, optimizer, x, y))

    refuse(step, "Python needs the value of a tensor")


def test_data_dependent_size() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(x).sum() * torch.arange((y > 0).nonzero().shape[0]).sum()

    refuse(step, "arange over a number of rows that depends on data")


@pytest.mark.parametrize("how", ["print", "item", "format", "percent", "repr"])
def test_printing(how: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = finish(model, optimizer, x, y)
        if how == "print":
            print("loss", loss)
        elif how == "item":
            print(loss.item())
        elif how == "format":
            print(f"{loss.item():.3f}")
        elif how == "percent":
            print("%.3f" % loss.item())  # noqa: UP031
        else:
            str(loss.detach())
        return loss

    refuse(step, "printed or formatted|plain number|needs the value")


def test_history_grows() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = finish(model, optimizer, x, y)
        HISTORY.append(loss.item())
        return loss

    assert "HISTORY" in refuse(step, "escapes into it", line=False)
    assert HISTORY == []


def test_list_argument_grows() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor, log: list[Any]) -> Tensor:
        loss = finish(model, optimizer, x, y)
        log.append(loss.detach())
        return loss

    assert "log" in refuse(step, "escapes into", *world(), [], line=False)


def test_number_kept_as_attribute() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = finish(model, optimizer, x, y)
        model.last = loss.item()
        return loss

    model, *rest = world()
    model.last = None
    assert "model.last" in refuse(step, "every later call", model, *rest, line=False)


def test_global_assigned() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        global COUNT
        COUNT = COUNT + 1
        return finish(model, optimizer, x, y)

    observe(step, world(), {})
    args = world()
    found = capture(step, args, {}, observe(step, args, {}))
    assert found.carried == {"COUNT"} and COUNT == 0
    after = observe(step, args, {})
    after.carry(found.carried)
    found.effects.commit(after, {p: torch.empty(0) for p in found.program.exit}, None, {"COUNT": 1})
    assert COUNT == 1


def test_python_and_numpy_random() -> None:
    def python(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(model, optimizer, x * random.random(), y)

    def numpys(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(model, optimizer, x * float(numpy.random.rand()), y)

    refuse(python, "Python's random", line=False)
    refuse(numpys, "numpy.random", line=False)


def test_own_generator() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        return finish(model, optimizer, x + torch.rand(x.shape, generator=generator), y)

    refuse(step, "generator of its own", *world(), torch.Generator())


def test_input_changed_in_place() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return finish(model, optimizer, x, y)

    refuse(step, "changes the input x in place", line=False)


def test_parameter_returned() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        return {"loss": finish(model, optimizer, x, y), "w": model[0].weight}

    refuse(step, "returns the parameter model.0.weight", line=False)


def test_parameter_replaced() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = finish(model, optimizer, x, y)
        model[0].weight = nn.Parameter(model[0].weight * 0.5)
        return loss

    refuse(step, "replaces a parameter", line=False)


def test_unreachable_model() -> None:
    class Hidden:
        __slots__ = ()

        def __call__(self, x: Tensor) -> Tensor:
            return TABLE["model"](x)

    hidden = Hidden()

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(model, optimizer, hidden(x), y)

    message = refuse(step, "neither reached from the arguments", line=False)
    assert f"test_capture_errors.py:{Hidden.__call__.__code__.co_firstlineno + 1}" in message


TABLE = {"model": nn.Linear(3, 3)}


def test_views_of_one_memory() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(model, optimizer, x, y)

    model, optimizer, x, y = world()
    model.register_buffer("base", torch.zeros(4))
    model.register_buffer("part", model.base[1:3])
    refuse(step, "model.part and model.base are views of the same memory", model, optimizer, x, y, line=False)


def test_mixed_devices() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(model, optimizer, x, y)

    model, optimizer, x, y = world()
    model.extra = nn.Linear(2, 2, device="meta")
    refuse(step, "several devices: model.0.weight on cpu, model.extra.weight on meta", model, optimizer, x, y, line=False)


def test_sparse_gradients_from_before() -> None:
    """Those of the step itself are dense in the program (test_sparse_gradients.py)."""

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    table, ids = nn.Embedding(5, 3, sparse=True), torch.tensor([1, 2])
    step(table, ids)
    with pytest.raises(CaptureError, match="model.weight has layout torch.sparse_coo"):
        observe(step, (table, ids), {})


def test_numpy_of_a_tensor() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        return finish(model, optimizer, x, y).detach().numpy()

    refuse(step, "cannot be traced|needs the value")


def test_users_own_errors_pass_unchanged() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        raise KeyError("mine")

    args = world()
    with pytest.raises(KeyError, match="mine"):
        capture(step, args, {}, observe(step, args, {}))


def test_wrong_arguments() -> None:
    def step(model: Any, x: Tensor) -> Any: ...

    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        observe(step, (nn.Linear(1, 1),), {})


def test_two_optimizers_for_one_parameter() -> None:
    def step(model: Any, one: Any, two: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(model, one, x, y)

    model, one, x, y = world()
    refuse(step, "two optimizers", model, one, torch.optim.SGD(model[0].parameters(), lr=0.1), x, y, line=False)


def test_a_batch_is_no_state_wherever_it_lies() -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        batch["x"].sub_(batch["x"].mean())
        return finish(model, optimizer, batch["x"], batch["y"])

    model, optimizer, x, y = world()
    refuse(step, r"changes the input batch\.x in place", model, optimizer, {"x": x, "y": y}, line=False)
    with pytest.raises(CaptureError, match=r"changes the input batch\.x in place"):
        shardc.compile(step, mesh=shardc.Mesh(dp=2, simulated=True))(model, optimizer, {"x": x, "y": y})
