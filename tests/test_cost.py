"""Cost tables: operations of operators, time of operators and collectives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardc.cost import PROFILES, collective_seconds, compute_seconds, flops
from shardc.cost.model import crosses_nodes
from shardc.mesh import Mesh
from shardc.reshard import reshard
from shardc.spec import ShardSpec


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("mm", [(3, 5), (5, 7)]),
        ("bmm", [(2, 3, 5), (2, 5, 7)]),
        ("addmm", [(7,), (3, 5), (5, 7)]),
        ("baddbmm", [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
    ],
)
def test_products_as_torch_counts_them(op: str, shapes: list[tuple[int, ...]]) -> None:
    call = getattr(torch.ops.aten, op).default
    operands = [torch.zeros(s, device="meta") for s in shapes]
    with FlopCounterMode(display=False) as counter:
        out = call(*operands)
    assert flops(f"aten.{op}.default", shapes, [tuple(out.shape)]) == (counter.get_total_flops(), True)


def test_convolutions_as_torch_counts_them() -> None:
    layer = nn.Conv2d(4, 6, 3, stride=2)  # torch miscounts the backward of grouped ones
    x = torch.zeros(5, 4, 9, 11, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
        ahead = counter.get_total_flops()
        y.sum().backward()
    args = (None, None, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    assert flops("aten.convolution.default", [x.shape, layer.weight.shape, (6,)], [y.shape], args)[0] == ahead
    back = (*args, [True, True, True])
    both = flops("aten.convolution_backward.default", [y.shape, x.shape, layer.weight.shape], [], back)[0]
    assert both == counter.get_total_flops() - ahead == 2 * ahead


def test_attention() -> None:
    q = (2, 3, 5, 8)
    assert flops("shardc.sdpa.default", [q, (2, 3, 7, 8), (2, 3, 7, 8)], [q]) == (4 * 2 * 3 * 5 * 7 * 8, True)


def test_other_operators_count_their_elements() -> None:
    assert flops("aten.add.Tensor", [(4, 5), (5,)], [(4, 5)]) == (20, False)
    assert flops("aten.sum.default", [(4, 5)], [()]) == (20, False)


def test_roofline() -> None:
    h = PROFILES["H100"]
    assert compute_seconds(h, 0, 0, torch.float32, False) == h.launch
    big = compute_seconds(h, 10**15, 10**6, torch.bfloat16, True)
    assert big == pytest.approx(1e15 / (989e12 * 0.7))
    assert compute_seconds(h, 1, 10**12, torch.float32, False) == pytest.approx(1e12 / (3.35e12 * 0.8))
    assert compute_seconds(h, 10**15, 0, torch.float32, True) > 10 * big


def test_alpha_beta() -> None:
    h, mesh = PROFILES["H100"], Mesh(dp=4, tp=8)
    assert not crosses_nodes(mesh, "tp", 8) and crosses_nodes(mesh, "dp", 8)
    times = {}
    for axis in mesh.names:
        (step,) = reshard(ShardSpec.parse(f"[1024] +sum@{axis}"), ShardSpec.parse("[1024]"), mesh)
        times[axis] = collective_seconds(h, step, 10**9, mesh)
    assert times["tp"] == pytest.approx(14 * h.latency + 1e9 / (h.link * h.link_efficiency))
    assert times["dp"] == pytest.approx(6 * h.far_latency + 1e9 / (h.far_link * h.link_efficiency))
