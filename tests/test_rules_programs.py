"""Operators inside whole steps: small models and losses on three ranks, uneven batch, equal one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

D = torch.float64
ROWS = 5  # over three ranks: 2, 2, 1
Made = tuple[Any, ...]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D)


def labels(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(0, below, shape)


class Squared(nn.Module):
    """The mean square of what a module returns."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = modules[0] if len(modules) == 1 else nn.Sequential(*modules)

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.inner(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        return out.square().mean()  # type: ignore[no-any-return]


class Loss(nn.Module):
    """A function of a weight of shape [3, 7] and the inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(3, 7))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.weight, *inputs)


def moments(w: Tensor, x: Tensor) -> Tensor:
    y = x @ w
    return y.var(0).sum() + y.std() + y.norm() + y.norm(dim=1).mean() + y.logsumexp(0).sum() + y.abs().max() + y.norm(1)


def over_the_batch(w: Tensor, x: Tensor) -> Tensor:
    y = x @ w
    return (y - y.mean(0, keepdim=True)).pow(2).mean() + (y / y.sum(0)).mean() + y.softmax(0).pow(2).sum() + y.cumsum(0).mean()


def picked(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
    y = x @ w
    out = y.gather(1, t).mean() + y[torch.arange(ROWS), t[:, 0]].sum() + y.index_select(1, t[0]).sum()
    return out + y.scatter(1, y.topk(2, 1).indices, 0.0).pow(2).mean() + y.sort(1).values[:, 0].sum() + y.max(1).values.sum()


def added(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
    y = x @ w
    rows = torch.zeros(7, 7, dtype=D).index_add(0, t, y).pow(2).mean()
    return rows + torch.zeros(ROWS, 7, dtype=D).scatter_add(1, t[:, None].expand(ROWS, 7), y).pow(2).mean()


def rearranged(w: Tensor, x: Tensor) -> Tensor:
    y = x @ w
    out = torch.cat([y, y * 2], 0).pow(2).mean() + torch.stack([y, y * 2], 1).mean() + y.repeat(2, 3).pow(2).mean()
    out = out + (y[1:] - y[:-1]).pow(2).mean() + y[::2].sum() + y.flip(0)[0].sum() + y.roll(1, 0)[1].sum() + y.tril().sum()
    out = out + sum(c.sum() * (k + 1) for k, c in enumerate(y.split(2, 0))) + sum(c.square().sum() for c in y.chunk(2, 1))
    return out + y.repeat_interleave(2, 0).mean() + torch.cat([y, w[:1].expand(ROWS, -1)], 1).square().mean()


def contrastive(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(x @ w, dim=1) @ F.normalize(y @ w, dim=1).t(), torch.arange(ROWS))


def masked(w: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return ((x @ w) * mask[:, None]).sum() / mask.sum().clamp(min=1) + (x @ w).masked_fill(x[:, :1] > 0, 0).mean()


def regressions(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
    y = x @ w
    out = F.smooth_l1_loss(y, t, beta=0.7) + F.huber_loss(y, t, delta=0.7) + F.l1_loss(y, t) + F.mse_loss(y, t)
    out = out + F.soft_margin_loss(y, t.sign()) + F.poisson_nll_loss(y, t.abs()) + F.cosine_similarity(y, t).mean()
    out = out + F.binary_cross_entropy(y.sigmoid(), t.sigmoid())
    out = out + F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    return out + F.binary_cross_entropy_with_logits(y, t.sigmoid(), weight=x[:, :1].abs(), pos_weight=t[0].abs() + 1)


def entropies(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
    y, weight = x @ w, torch.arange(1.0, 8, dtype=D)
    out = F.cross_entropy(y, t, ignore_index=2) + F.cross_entropy(y, t, weight=weight, label_smoothing=0.1)
    each = F.cross_entropy(y, t, reduction="none")
    return out + (each * x[:, 0]).sum() / x[:, 0].abs().sum() + F.cross_entropy(y, x @ w.detach().softmax(-1), reduction="sum")


CASES: dict[str, Callable[[], Made]] = {
    "convolutions": lambda: (
        Squared(nn.Conv2d(4, 8, 3, groups=4), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3, stride=2), nn.Conv2d(3, 2, 2, bias=False)),
        randn(ROWS, 4, 8, 9),
    ),
    "batch_norm": lambda: (
        Squared(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6, affine=False)),
        randn(ROWS, 3, 8),
    ),
    "instance_and_group_norm": lambda: (Squared(nn.Conv1d(3, 6, 1), nn.InstanceNorm1d(6, affine=True), nn.GroupNorm(3, 6)),
                                        randn(ROWS, 3, 8)),
    "activations": lambda: (
        Squared(nn.Linear(3, 6), nn.RMSNorm(6), nn.ELU(), nn.Softplus(), nn.Mish(), nn.Hardswish(), nn.LogSigmoid(),
                nn.PReLU(4), nn.Hardtanh(), nn.GLU()),
        randn(ROWS, 4, 3),
    ),
    "pooling": lambda: (
        Squared(nn.Conv2d(3, 8, 1), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(3)),
        randn(ROWS, 3, 16, 16),
    ),
    "resizing": lambda: (
        Squared(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReflectionPad2d(1),
                nn.ReplicationPad2d(1), nn.ZeroPad2d(1), nn.Unfold(2)),
        randn(ROWS, 3, 4, 4),
    ),
    "lstm": lambda: (Squared(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)), randn(ROWS, 4, 3)),
    "gru_time_first": lambda: (Squared(nn.GRU(3, 4, batch_first=True)), randn(ROWS, 4, 3)),
    "encoder": lambda: (Squared(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)), randn(ROWS, 6, 8)),
    "embedding": lambda: (Squared(nn.Embedding(7, 4, padding_idx=0, scale_grad_by_freq=True)), labels(ROWS, 3)),
    "embedding_bag": lambda: (Squared(nn.EmbeddingBag(7, 4, mode="mean")), labels(ROWS, 3)),
    "bilinear": lambda: (Squared(nn.Bilinear(3, 4, 5)), randn(ROWS, 3), randn(ROWS, 4)),
    "weight_norm": lambda: (Squared(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))), randn(ROWS, 3)),
    "moments": lambda: (Loss(moments), randn(ROWS, 3)),
    "over_the_batch": lambda: (Loss(over_the_batch), randn(ROWS, 3)),
    "picked": lambda: (Loss(picked), randn(ROWS, 3), labels(ROWS, 2)),
    "added": lambda: (Loss(added), randn(ROWS, 3), labels(ROWS)),
    "rearranged": lambda: (Loss(rearranged), randn(ROWS, 3)),
    "contrastive": lambda: (Loss(contrastive), randn(ROWS, 3), randn(ROWS, 3)),
    "masked": lambda: (Loss(masked), randn(ROWS, 3), (torch.rand(ROWS) > 0.5).to(D)),
    "regressions": lambda: (Loss(regressions), randn(ROWS, 3), randn(ROWS, 7)),
    "entropies": lambda: (Loss(entropies), randn(ROWS, 3), labels(ROWS)),
    "fourier_and_distances": lambda: (
        Loss(lambda w, x: torch.fft.rfft(x @ w).abs().mean() + torch.cdist(x @ w, x @ w + 1).mean()), randn(ROWS, 3)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "zero"), [(name, k % 2 * 3) for k, name in enumerate(CASES)])
def test_a_step_equals_one_device(name: str, zero: int) -> None:
    torch.manual_seed(0)
    model, *batch = CASES[name]()
    model = model.double()
    plain = copy.deepcopy(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    compiled = shardc.compile(step, mesh=shardc.Mesh(dp=3, simulated=True), zero=zero)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model)]
    for _ in range(2):
        want = step(plain, optimizers[0], *batch).detach()
        torch.testing.assert_close(compiled(model, optimizers[1], *batch), want, rtol=1e-10, atol=1e-12)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")
