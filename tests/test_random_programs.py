"""Random training steps on random meshes with random options do what they do on one device (docs/random.md)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, seed, settings

from shardc.testing.campaign import Case, cases, check_draws


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_VERIFY", "1")


@pytest.mark.parametrize("piece", range(8))
def test_random_steps_equal_one_device(piece: int) -> None:
    assert check_draws(cases(), 32, piece) > 16


@pytest.mark.long
@pytest.mark.parametrize("piece", range(100, 110))
def test_many_random_steps_equal_one_device(piece: int) -> None:
    assert check_draws(cases(), 100, piece) > 50


def test_a_case_is_a_script() -> None:
    """The text of a case, run as a file, makes the same comparison."""

    @seed(0)
    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(max_layers=1, max_ranks=3))
    def draws(case: Case) -> None:
        said: list[str] = []
        script = case.whole_batch().script()
        exec(compile(script, "case.py", "exec"), {"__name__": "case", "print": lambda x: said.append(str(x))})
        assert said and said[0].startswith("equal: ")

    draws()
