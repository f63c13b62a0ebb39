"""Models of transformers: three compiled training steps leave loss and all state as eager leaves them on one device."""

from __future__ import annotations

import pytest
from model_zoo import FAMILIES

from shardc.testing import Report, check_all

SIZES, STAGES = (1, 2, 3, 4, 8), (0, 1, 2, 3)
UNEVEN, EVEN = 7, 24  # rows: no size but 1 divides 7 (on 8 ranks one has none), all divide 24

POINTS = {
    "gpt": [(3, 3), (2, 2)],
    "gpt_checkpointed": [(2, 3)],
    "llama": [(4, 3), (3, 0)],
    "bert": [(2, 3), (8, 1)],
    "t5": [(3, 2)],
    "vit": [(4, 1), (2, 3)],
    "resnet": [(3, 3), (8, 0)],
}
"""(ranks, stage) that everyone runs."""


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


def equal(name: str, rows: int, points: list[tuple[int, int]]) -> list[Report]:
    family = FAMILIES[name]
    options = [{"mesh": {"dp": dp}, "zero": zero} for dp, zero in points]
    reports = check_all(family.step, family.state, family.batches(rows), options)
    parameters = len(list(family.model().named_parameters(remove_duplicate=False)))
    for report in reports:
        assert report.steps == 3
        assert report.compared > 3 * 5 * parameters  # value, gradient, two moments and a count of steps of each, per step
        # Only biases of keys, whose true gradient is zero, may agree within their own rounding alone: AdamW steps on noise.
        noise = {r.path for r in report.rounded if r.path.startswith("model.")}
        assert all(path.endswith(("key.bias", "k_proj.bias")) for path in noise)
        assert len({r.path for r in report.rounded}) == 3 * len(noise)  # each with its two moments
    return reports


@pytest.mark.parametrize("name", FAMILIES)
def test_equal(name: str) -> None:
    equal(name, UNEVEN, POINTS[name])


@pytest.mark.long
@pytest.mark.parametrize("rows", [UNEVEN, EVEN])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_size_and_stage(name: str, rows: int) -> None:
    equal(name, rows, [(dp, zero) for dp in SIZES for zero in STAGES])


def test_every_stage_shards_what_it_says() -> None:
    """The matrix means something: plans of the same step differ in what a rank holds."""
    held = []
    for report in equal("gpt", EVEN, [(4, zero) for zero in STAGES]):
        kinds = report.plan.memory.by_category
        held.append((kinds["parameters"], kinds["optimizer"]))
    assert held[0][0] == held[1][0] == held[2][0] > 3 * held[3][0]
    assert held[0][1] > 3 * held[1][1] and held[1][1] == held[2][1] == held[3][1]
