"""Random programs of the rule book, with layouts pinned at random, do what they do on one device (docs/random.md)."""

from __future__ import annotations

import pytest
import torch

import shardc
from shardc.testing import Mismatch
from shardc.testing.campaign import check_draws
from shardc.testing.pinned import pinned_cases


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


@pytest.mark.parametrize("piece", range(6))
def test_pinned_programs_equal_one_device(piece: int) -> None:
    assert check_draws(pinned_cases(), 50, piece) > 25


@pytest.mark.long
@pytest.mark.parametrize("piece", range(100, 110))
def test_many_pinned_programs_equal_one_device(piece: int) -> None:
    assert check_draws(pinned_cases(), 100, piece) > 50


def test_a_rule_that_does_not_hold_is_found() -> None:
    """That nothing is pending where a product is split along the dim that it sums over."""
    product = torch.ops.aten.mm.default
    shardc.rules.register(product, "[a,b],[b,c]->[a,c]; b: pass")
    try:
        with pytest.raises(Mismatch):
            check_draws(pinned_cases(among=("matmul", "linear", "permute")), 100, 0, shrink=False)
    finally:
        shardc.rules.unregister(product)
    assert check_draws(pinned_cases(among=("matmul", "linear", "permute")), 20, 0) > 10
