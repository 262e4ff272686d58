"""The benchmark of hybrids: what its rows and targets are made of, and files of equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.loading.checkpoint import load_checkpoint
from tests.programs import module

hybrid, random_hybrid = module("hybrid"), module("research.random_hybrid")
Sample = module("harness").Sample
TINY = random_hybrid.Hybrid(256, 4, 2, 1, 128, 512, 1, 2, 128, vocab=512)


def sample(arm: str, width: int, accepted: int, seconds: float, fold: float) -> Any:
    facts = {"fold": fold, "commit": 1e-3, "rollback": 1e-3}
    return Sample(arm, (64, width, accepted), seconds=seconds, facts=facts)


def test_a_share_is_what_committing_adds_to_folding_one() -> None:
    rows = hybrid.step_rows(
        [
            sample("paceline", 1, 1, 0.1, fold=0.01),
            sample("paceline", 8, 1, 0.2, fold=0.01),
            sample("paceline", 8, 8, 0.298, fold=0.038),
        ]
    )
    assert [row["time_ratio"] for row in rows] == pytest.approx([1.0, 2.0, 2.98])
    assert [row["share"] for row in rows] == pytest.approx([2 / 102, 2 / 202, 0.1])


def test_targets_compare_with_the_dense_model() -> None:
    times = {"paceline": (0.1, 0.3), "dense": (0.1, 0.2)}
    samples = [
        sample(arm, width, 1, seconds, fold=0.0)
        for arm, pair in times.items()
        for width, seconds in zip((1, 8), pair, strict=True)
    ]
    results = [{"model": "m", **row} for row in hybrid.step_rows(samples)]
    found = {target.name: target for target in hybrid.targets(results)}
    wide = found["m: T(8)/T(1) at context 64 over the dense model's"]
    assert wide.value == pytest.approx(1.5)
    assert not wide.met
    assert not found["m: plain decoding over llama.cpp"].met  # it was not there


def test_what_a_longer_context_adds_is_attention() -> None:
    def plain(context: int, ms: float) -> dict[str, Any]:
        return {"model": "m", "arm": "paceline", "width": 1, "context": context, "ms": ms}

    first, longer = hybrid.long_rows([plain(64, 10.0), plain(8000, 25.0)])
    assert (first["longer"], longer["longer"]) == (1.0, 2.5)
    assert longer["attention"] == pytest.approx(0.6)


def test_files_load_and_the_dense_one_has_as_many_bytes(tmp_path: Path) -> None:
    paths = {"hybrid": TINY, "dense": random_hybrid.dense(TINY)}
    for name, shape in paths.items():
        random_hybrid.write(shape, tmp_path / name)
        config = load_checkpoint(tmp_path / name, with_tokenizer=False).config
        assert (config.recurrent is not None) == (name == "hybrid")
    sizes = [(tmp_path / name).stat().st_size for name in paths]
    each = sum(
        random_hybrid.num_bytes(random_hybrid.feed_forward(TINY, i)) * 256 / TINY.width
        for i in range(TINY.layers)
    )
    assert abs(sizes[0] - sizes[1]) < each  # what the next width would add
