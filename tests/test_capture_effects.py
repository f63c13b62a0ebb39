"""What a step leaves behind beside tensors: schedulers, counters, hooks, flags."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from capture_replay import check, replay
from test_capture import GPT, MLP, batches, lm_step, mlp_step, plain_ops, tokens, with_optimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardc.capture import capture, observe
from shardc.errors import CaptureError

__all__ = ["plain_ops"]


@pytest.mark.parametrize("kind", ["cosine", "lambda", "onecycle", "sequential"])
def test_schedulers_inside_the_step(kind: str, plain_ops: None) -> None:
    def step(model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = mlp_step(model, optimizer, x, y)
        scheduler.step()
        return loss

    def make() -> tuple[Any, ...]:
        model = MLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        lrs = torch.optim.lr_scheduler
        made = {
            "cosine": lambda: lrs.CosineAnnealingLR(optimizer, 7),
            "lambda": lambda: lrs.LambdaLR(optimizer, lambda k: 0.5**k),
            "onecycle": lambda: lrs.OneCycleLR(optimizer, 0.2, total_steps=9),
            "sequential": lambda: lrs.SequentialLR(
                optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=2), lrs.ExponentialLR(optimizer, 0.9)], [2]
            ),
        }[kind]()
        return model, optimizer, made

    check(step, make, batches(5), captures=2)


def test_number_read_after_the_scheduler() -> None:
    def step(model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> Tensor:
        scheduler.step()
        return mlp_step(model, optimizer, x, y)

    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = (model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), *batches(1)[0])
    with pytest.raises(CaptureError, match="after scheduler.step"):
        capture(step, args, {}, observe(step, args, {}))


def test_lr_set_by_the_step(plain_ops: None) -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5 + 0.01
        loss = mlp_step(model, optimizer, x, y)
        return loss, optimizer.param_groups[0]["lr"]

    check(step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), batches(4), captures=1)


def test_training_and_requires_grad_flags(plain_ops: None) -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        model.train()
        loss = mlp_step(model, optimizer, x, y)
        model.eval()
        model.up.bias.requires_grad_(False)
        return loss

    check(step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), batches(3), captures=2)


def test_hooks(plain_ops: None) -> None:
    def make() -> tuple[Any, ...]:
        model = MLP()
        scale = torch.full((), 0.5)

        def double(p: Tensor) -> None:
            p.grad.mul_(2.0)

        model.up.weight.register_hook(lambda g: g * scale)
        model.down.weight.register_post_accumulate_grad_hook(double)
        model.up.register_forward_hook(lambda m, i, o: o + 1)
        model.down.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    check(mlp_step, make, batches(3), captures=1)


def test_optimizer_in_a_hook(plain_ops: None) -> None:
    def step(model: Any, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    def make() -> tuple[Any, ...]:
        model = MLP()
        optimizers = {n: torch.optim.SGD([p], lr=0.1, momentum=0.9) for n, p in model.named_parameters()}
        names = {p: n for n, p in model.named_parameters()}

        def update(p: Tensor) -> None:
            optimizers[names[p]].step()
            optimizers[names[p]].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        return model, optimizers

    check(step, make, batches(3), captures=2)


def test_checkpoint_autocast_and_custom_function(plain_ops: None) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 2 + x * 0

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        h = checkpoint(model.up, x, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = model.down(Double.apply(torch.tanh(h)))
        loss = F.mse_loss(h.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    check(step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), batches(3), captures=2)


def test_custom_optimizer_with_python_step(plain_ops: None) -> None:
    class Mine(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["step"], state["avg"] = 0, torch.zeros_like(p)
                    state["step"] += 1
                    state["avg"].mul_(group["betas"][0]).add_(p.grad, alpha=1 - group["betas"][0])
                    p.sub_(state["avg"] / (1 - group["betas"][0] ** state["step"]), alpha=group["lr"])

    check(mlp_step, with_optimizer(MLP, Mine, lr=0.1), batches(4), captures=2)


def test_gradient_penalty_and_data_writes(plain_ops: None) -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        out = model(x)
        (gx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + gx.square().sum()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.data.clamp_(-0.5, 0.5)
            p.data.mul_(0.99)
            p.data = p.data - 0.01 * p.grad
        optimizer.step()
        return loss

    check(step, with_optimizer(MLP, torch.optim.SGD, lr=0.1), batches(3), captures=2)


def test_sam_moves_parameters_and_back() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-9
            moved = [p.grad * (0.05 / norm) for p in model.parameters()]
            for p, e in zip(model.parameters(), moved, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        model(x, y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = check(
        step, with_optimizer(lambda: GPT(layers=1).double(), torch.optim.SGD, lr=0.1), tokens(2), exact=False, captures=1
    )
    program = found[0].program
    assert len([n for n, path in program.versions.items() if path == "model.head.weight"]) >= 3


def test_uncaptured_objects_are_the_same_after(plain_ops: None) -> None:
    make = with_optimizer(lambda: GPT(), torch.optim.AdamW, lr=0.1)
    model, optimizer = make()
    ids = [id(p) for p in model.parameters()]
    args = (model, optimizer, *tokens(1)[0])
    capture(lm_step, args, {}, observe(lm_step, args, {}))
    assert (
        ids == [id(p) for p in model.parameters()] and not optimizer.state and all(p.grad is None for p in model.parameters())
    )


def test_checkpoint_repeats_its_draws(plain_ops: None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.bn = nn.Linear(5, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
            self.b = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda t: self.bn(self.drop(torch.relu(self.a(t)))), x, use_reentrant=False)
            return self.b(self.drop(h))

    found = check(mlp_step, with_optimizer(Net, torch.optim.SGD, lr=0.1), batches(3), captures=1)
    assert len(found[0].program.draws) == 2


def test_reseeding_is_refused() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(3)
        return mlp_step(model, optimizer, x + torch.randn_like(x), y)

    args = (*with_optimizer(MLP, torch.optim.SGD, lr=0.1)(), *batches(1)[0])
    with pytest.raises(CaptureError, match="sets the seed"):
        capture(step, args, {}, observe(step, args, {}))


def test_an_error_leaves_no_flag_behind() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    args = (*with_optimizer(MLP, torch.optim.LBFGS, lr=0.1)(), *batches(1)[0])
    with pytest.raises(CaptureError, match="Python needs the value"):
        capture(step, args, {}, observe(step, args, {}))
    assert not torch.compiler.is_compiling()


def test_counters_and_kept_numbers_are_carried(plain_ops: None) -> None:
    class Counted(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.average, self.even = 0, 0.0, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = mlp_step(model, optimizer, x, y)
        model.average = 0.9 * model.average + 0.1 * loss.item()
        return loss, model.calls

    found = check(step, with_optimizer(Counted, torch.optim.SGD, lr=0.1), batches(5), captures=1)
    assert found[0].carried == {"model.calls", "model.average"}


def test_a_decision_on_a_counter_is_a_guard(plain_ops: None) -> None:
    def step(model: Any, optimizer: Any, state: dict[str, int], x: Tensor, y: Tensor) -> Tensor:
        state["step"] += 1
        if state["step"] % 2 == 0:
            x = x * 2
        return mlp_step(model, optimizer, x, y)

    def make() -> tuple[Any, ...]:
        return (*with_optimizer(MLP, torch.optim.SGD, lr=0.1)(), {"step": 0})

    check(step, make, batches(6), captures=2)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation_under_a_decorator(guard: Any) -> None:
    table = MLP()

    @guard()
    def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(model(x) + table(x), y)}

    found = check(evaluate, lambda: (MLP().eval(),), batches(2), captures=1)
    assert "table.up.weight" in found[0].program.slots


def test_a_summary_holds_none_of_the_users_tensors() -> None:
    import gc
    import weakref

    args = (*with_optimizer(MLP, torch.optim.SGD, lr=0.1)(), *batches(1)[0])
    found = observe(mlp_step, args, {})
    kept, captured = found.summary(), capture(mlp_step, args, {}, found)
    assert kept.key == found.key
    alive = [weakref.ref(t) for t in (args[2], args[0].up.weight)]
    del args, found
    gc.collect()
    assert captured.program.slots and all(r() is None for r in alive)


@pytest.mark.parametrize("named", ["cuda", "the tensor's"])
def test_autocast_for_another_device(named: str) -> None:
    def step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda" if named == "cuda" else x.device.type, dtype=torch.bfloat16):
            out = model(x)
            normal = F.layer_norm(out, (3,))
            loss = F.cross_entropy(out, y.argmax(1))
        return out, normal, loss

    args = (MLP(), *batches(1)[0])
    program = capture(step, args, {}, observe(step, args, {}), device="cuda").program
    assert [program.type(n).dtype for n in program.results] == [torch.bfloat16, torch.float32, torch.float32]
    assert torch.autocast("cpu").device == "cpu"


def test_methods_partials_and_callable_objects(plain_ops: None) -> None:
    class Trainer:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = MLP()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.steps = 0

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.steps += 1
            return mlp_step(self.model, self.optimizer, x, y)

        __call__ = step

    expected = Trainer()
    loss = expected.step(*batches(1)[0])
    for make in (lambda t: t.step, lambda t: t, lambda t: functools.partial(mlp_step, t.model, t.optimizer)):
        trainer = Trainer()
        fn = make(trainer)
        world = observe(fn, batches(1)[0], {})
        found = capture(fn, batches(1)[0], {}, world)
        assert torch.equal(replay(found, world), loss.detach())
        assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), expected.model.parameters(), strict=True))
        assert trainer.steps == (0 if isinstance(fn, functools.partial) else 1)


def test_wrapped_modules_are_refused() -> None:
    with pytest.raises(CaptureError, match="model is wrapped in DataParallel"):
        observe(mlp_step, (nn.DataParallel(MLP()), None, *batches(1)[0]), {})
