"""The benchmark of expert prices: its mixtures, and that both arms run."""

from __future__ import annotations

import random

import pytest

from tests.programs import module


def test_a_text_whose_rows_are_alike_reads_as_many_experts_as_one_row() -> None:
    bench, draw = module("research.expert_prices"), random.Random(0)
    least = bench.EXPERTS.least
    assert bench.experts_read(draw, 9, 1, bench.EXPERTS.per_token) == least
    assert least < bench.experts_read(draw, 9, 1, 8) <= 4 * 8
    assert bench.experts_read(draw, 4, 4, bench.EXPERTS.per_token) > least


@pytest.mark.parametrize("has_profile", [True, False])
def test_a_row_compares_both_arms(monkeypatch: pytest.MonkeyPatch, has_profile: bool) -> None:
    bench = module("research.expert_prices")
    monkeypatch.setattr(bench, "STEPS", 60)
    assert bench.profile(True).experts == bench.EXPERTS
    assert bench.profile(False).experts is None
    found = bench.row(bench.Cell("4 and 64 in turn", 0.7, 4, has_profile), 1)
    assert found["ratio"] == pytest.approx(found["priced"] / found["unpriced"])
    assert found["priced"] > 1.0
