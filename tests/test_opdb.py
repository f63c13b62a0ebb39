"""The measure of the rule book: what holds in truth, torch's op_db, the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shardc import _torch
from shardc.cli import main
from shardc.rules import opdb, register, unregister
from shardc.rules.opdb_entries import COMMON, EXCLUDED, REACHABLE
from shardc.rules.record import calls_of
from shardc.rules.sample import ints
from shardc.rules.truth import true_layouts

aten: Any = torch.ops.aten


def layouts(op: Any, *args: Any) -> set[str]:
    return {str(found) for found in true_layouts(op, args, {})}


def test_what_holds_is_found() -> None:
    assert layouts(aten.relu.default, ints(4, 6)) == {"0 -> 0", "1 -> 1", "max -> max", "min -> min"}
    assert layouts(aten.neg.default, ints(5)) == {"0 -> 0", "sum -> sum", "max -> min", "min -> max"}
    assert layouts(aten.amax.default, ints(4, 6), [0]) == {"0 -> max", "1 -> 0", "max -> max"}
    assert layouts(aten.mm.default, ints(4, 6), ints(6, 5)) == {
        "0, whole -> 0", "1, 0 -> sum", "whole, 1 -> 1", "sum, whole -> sum", "whole, sum -> sum",
    }  # fmt: skip


def test_chance_is_not_taken_for_truth() -> None:
    """A product with positive numbers, a choice that is always the same, and values that are all equal."""
    assert "max, whole -> max" not in layouts(aten.mul.Tensor, ints(4, 6), ints(4, 6, lo=1))
    assert "whole, max, whole -> whole" not in layouts(aten.where.self, torch.zeros(4, 6) > 0, ints(4, 6), ints(4, 6, hi=9))
    assert layouts(aten.mul.Scalar, ints(4, 6), 0) == set()


def test_calls_are_recorded_functional_and_decomposed() -> None:
    x = torch.ones(4, 3)
    names = [str(c.op) for c in calls_of(lambda: x.add(1).mul_(2).mean())]
    assert names == ["aten.add.Tensor", "aten.mul.Tensor", "aten.sum.dim_IntList", "aten.div.Scalar"]


def test_the_lists_are_those_of_this_torch() -> None:
    names = sorted({opdb.full_name(entry) for entry in _torch.operator_database() if opdb.reachable(entry)})
    assert names == sorted(REACHABLE)
    assert len(COMMON) == len(set(COMMON)) == 60 and set(COMMON) <= set(REACHABLE) and set(EXCLUDED) <= set(REACHABLE)


def test_a_false_rule_is_found_and_fails() -> None:
    entry = next(e for e in _torch.operator_database() if opdb.full_name(e) == "cumsum")
    register(aten.cumsum.default, "[a]->[a]")
    try:
        found = opdb.check_entry(entry)
        assert found.false or found.unruled
        assert not opdb.Report((found,)).holds
    finally:
        unregister(aten.cumsum.default)
    assert opdb.Report((opdb.check_entry(entry),), selected=True).holds


@pytest.mark.filterwarnings("ignore")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--check", "--op", "tril", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data)[-1] == "summary"
    assert set(data["summary"]) == {"ops", "false", "true", "known", "entries", "reachable"}
    assert data["summary"]["false"] == 0 and data["summary"]["known"] == data["summary"]["true"] > 0
    assert main(["rules", "--check", "--op", "no.such.entry"]) == 1


@pytest.mark.long
def test_the_bounds() -> None:
    report = opdb.check()
    assert report.holds, str(report)
