"""What each pass makes of small steps: the program before in words, the program after as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor

import shardc
from shardc.program import Program


def stage(name: str, fn: Callable[..., Any], *args: Any, zero: int = 0, dp: int = 2, **options: Any) -> str:
    """The program after a pass, without owners and lines."""
    torch.manual_seed(0)
    compiled = shardc.compile(fn, mesh=shardc.Mesh(dp=dp, simulated=True), zero=zero, **options)
    program = compiled.lower(*args).stages[name]
    assert isinstance(program, Program)
    return "\n".join(line.partition("  # ")[0] for line in str(program).splitlines())


def linear() -> tuple[nn.Linear, torch.optim.SGD, Tensor]:
    model = nn.Linear(4, 6, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(8, 4)


def sgd(model: nn.Linear, optimizer: torch.optim.SGD, x: Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Passes(TestCase):
    def test_normalize_divides_by_global_counts(self) -> None:
        self.assertExpectedInline(stage("normalize", lambda x: x.mean(), torch.zeros(8, 4)), """\
%x: f32[8, 4] = x
%sum_dim_int_list: f32[] = aten.sum.dim_IntList(%x, [0, 1])
%div_scalar: f32[] = aten.div.Scalar(%sum_dim_int_list, 32)
return %div_scalar""")

    def test_annotate_pins_slots_inputs_and_gradients(self) -> None:
        self.assertExpectedInline(stage("annotate", sgd, *linear(), zero=3), """\
%model_weight: f32[6@dp, 4] = model.weight
%x: f32[8@dp, 4] = x
%optimizer_param_groups_0__lr: num = optimizer.param_groups[0].lr
%full_default: f32[] = aten.full([], 1, dtype=f32, device=cpu)
%expand_default: f32[8, 6] = aten.expand(%full_default, [8, 6])
%t_default_1: f32[6, 8] = aten.t(%expand_default)
%mm_default_1: f32[6, 4] = aten.mm(%t_default_1, %x)
%t_default_2: f32[4, 6] = aten.t(%mm_default_1)
%t_default_3: f32[6@dp, 4] = aten.t(%t_default_2) -> model.weight.grad
%sgd_default: f32[6@dp, 4] = shardc.sgd(%model_weight, %t_default_3, %optimizer_param_groups_0__lr, 0, False) -> model.weight
return model.weight = %sgd_default""")

    def test_rebuild_gives_the_backward_its_own_views(self) -> None:
        def two(model: nn.Linear, x: Tensor) -> Tensor:
            y = model(torch.tanh(model(x)))
            y.sum().backward()
            model.weight.grad = None
            return y.sum()

        self.assertExpectedInline(stage("rebuild", two, nn.Linear(4, 4, bias=False), torch.zeros(8, 4), zero=3), """\
%model_weight: f32[4@dp, 4] = model.weight
%x: f32[8@dp, 4] = x
%t_default: f32[4, 4] = aten.t(%model_weight)
%mm_default: f32[8, 4] = aten.mm(%x, %t_default)
%tanh_default: f32[8, 4] = aten.tanh(%mm_default)
%mm_default_1: f32[8, 4] = aten.mm(%tanh_default, %t_default)
%sum_default_1: f32[] = aten.sum(%mm_default_1)
return %sum_default_1, model.weight = %model_weight""")

    def test_propagate_reads_the_compute_spec_and_reduces_to_the_pin(self) -> None:
        self.assertExpectedInline(stage("propagate", sgd, *linear(), zero=3), """\
%model_weight: f32[6@dp, 4] = model.weight
%x: f32[8@dp, 4] = x
%optimizer_param_groups_0__lr: num = optimizer.param_groups[0].lr
%full_default: f32[] = aten.full([], 1, dtype=f32, device=cpu)
%expand_default: f32[8@dp, 6] = aten.expand(%full_default, [8, 6])
%t_default_1: f32[6, 8@dp] = aten.t(%expand_default)
%mm_default_1: f32[6, 4] +sum@dp = aten.mm(%t_default_1, %x)
%t_default_2: f32[4, 6] +sum@dp = aten.t(%mm_default_1)
%t_default_3: f32[6, 4] +sum@dp = aten.t(%t_default_2)
%reshard_1: f32[6@dp, 4] = reshard(%t_default_3) -> model.weight.grad
%sgd_default: f32[6@dp, 4] = shardc.sgd(%model_weight, %reshard_1, %optimizer_param_groups_0__lr, 0, False) -> model.weight
return model.weight = %sgd_default""")

    def test_sink_draws_only_the_slice(self) -> None:
        def noise(x: Tensor) -> Tensor:
            return (x + torch.rand(8, 4).exp()).sum()

        self.assertExpectedInline(stage("propagate", noise, torch.zeros(8, 4)), """\
%x: f32[8@dp, 4] = x
%rand_default: f32[8@dp, 4] = aten.rand([8, 4], device=cpu, pin_memory=False)
%exp_default: f32[8@dp, 4] = aten.exp(%rand_default)
%add_tensor: f32[8@dp, 4] = aten.add.Tensor(%x, %exp_default)
%sum_default: f32[] +sum@dp = aten.sum(%add_tensor)
%reshard_1: f32[] = reshard(%sum_default)
return %reshard_1""")

    def test_partition_names_collectives_and_localises_sizes(self) -> None:
        def flat(x: Tensor) -> Tensor:
            return x.view(32).sum()

        self.assertExpectedInline(stage("partition", flat, torch.zeros(8, 4)), """\
%x: f32[8@dp, 4] = x
%view_default: f32[32@dp] = aten.view(%x, local [32@dp])
%sum_default: f32[] +sum@dp = aten.sum(%view_default)
%all_reduce: f32[] = all_reduce(%sum_default, all_reduce@dp [] +sum@dp -> [])
return %all_reduce""")

    def test_partial_sums_are_added_before_they_are_reduced(self) -> None:
        def tied(model: nn.Linear, optimizer: torch.optim.SGD, x: Tensor) -> None:
            F.linear(torch.tanh(model(x)), model.weight.t()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        self.assertExpectedInline(stage("partition", tied, *linear(), zero=1), """\
%model_weight: f32[6, 4] = model.weight
%x: f32[8@dp, 4] = x
%optimizer_param_groups_0__lr: num = optimizer.param_groups[0].lr
%t_default: f32[4, 6] = aten.t(%model_weight)
%mm_default: f32[8@dp, 6] = aten.mm(%x, %t_default)
%tanh_default: f32[8@dp, 6] = aten.tanh(%mm_default)
%full_default: f32[] = aten.full([], 1, dtype=f32, device=cpu)
%expand_default: f32[8@dp, 4] = aten.expand(%full_default, local [8@dp, 4])
%t_default_3: f32[6, 8@dp] = aten.t(%tanh_default)
%mm_default_2: f32[6, 4] +sum@dp = aten.mm(%t_default_3, %expand_default)
%t_default_4: f32[4, 6] = aten.t(%model_weight)
%mm_default_3: f32[8@dp, 6] = aten.mm(%expand_default, %t_default_4)
%tanh_backward_default: f32[8@dp, 6] = aten.tanh_backward(%mm_default_3, %tanh_default)
%t_default_7: f32[6, 8@dp] = aten.t(%tanh_backward_default)
%mm_default_4: f32[6, 4] +sum@dp = aten.mm(%t_default_7, %x)
%add_tensor: f32[6, 4] +sum@dp = aten.add.Tensor(%mm_default_2, %mm_default_4)
%reduce_scatter: f32[6@dp, 4] = reduce_scatter(%add_tensor, reduce_scatter@dp [6, 4] +sum@dp -> [6@dp, 4]) -> model.weight.grad
%slice_1: f32[6@dp, 4] = slice(%model_weight, slice@dp [6, 4] -> [6@dp, 4])
%sgd_default: f32[6@dp, 4] = shardc.sgd(%slice_1, %reduce_scatter, %optimizer_param_groups_0__lr, 0, False)
%all_gather: f32[6, 4] = all_gather(%sgd_default, all_gather@dp [6@dp, 4] -> [6, 4]) -> model.weight
return model.weight = %all_gather""")

    def test_schedule_updates_each_parameter_as_soon_as_its_gradient_is_final(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        text = stage("schedule", sgd, model, optimizer, torch.zeros(8, 4), zero=3)
        wanted = (" = reduce_scatter(", " = shardc.sgd(")
        order = [line.split(" = ")[1].split("(")[0] for line in text.splitlines() if any(w in line for w in wanted)]
        self.assertEqual(order, ["reduce_scatter", "shardc.sgd", "reduce_scatter", "shardc.sgd"])
