"""``paceline doctor``: the page and the JSON document."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.doctor import streaming_rows
from paceline.loading.catalogue import embedded_model, embedded_ngram_model
from paceline.profiling.doctor import ModelFacts
from tests.cli.conftest import Result
from tests.proposers.heads import embedded_head, head_config, head_tensors, write_head

Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.profiling.machine.READ_BYTES", 1 << 20)
    monkeypatch.setattr("paceline.profiling.machine.GEMM_WIDTH", 64)


def test_the_page(cli: Cli) -> None:
    result = cli("doctor")
    assert result.code == 0, result.err
    for shown in ("processor", "cores", "memory", "GB/s read", "kernels", "embedded: int8"):
        assert shown in result.out
    assert "profile         none" in result.out
    assert "paceline profile" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_the_document_and_a_model_that_is_not_there(cli: Cli) -> None:
    result = cli("doctor", "no/such/model", "--backend", "reference", "--json")
    assert result.code == 0, result.err
    document = result.document
    assert len(result.out.splitlines()) == 1
    assert document["model"]["name"] == "no/such/model"
    assert "no model" in document["model"]["problem"]
    assert document["roofs"]["read_gb_per_s"] > 0
    assert {part["extra"] for part in document["parts"]} >= {"server", "grammar"}


def test_drafts_beside_a_model_are_used_or_say_why_not(tmp_path: Path, cli: Cli) -> None:
    model = tmp_path / "m"
    place = model / "speculators"
    shutil.copytree(embedded_model("target"), model)
    embedded_head(place / "fits")
    write_head(place / "other", head_config(), head_tensors())
    shutil.copytree(embedded_model("draft"), place / "small")
    shutil.copy(embedded_ngram_model(), place / "own.ngram")
    (place / "odd").mkdir()
    (place / "odd" / "config.json").write_text(json.dumps({"speculators_model_type": "medusa"}))
    result = cli("doctor", str(model), "--json")
    found = {Path(draft["place"]).name: draft for draft in result.document["model"]["drafts"]}
    used = {name: draft["method"] for name, draft in found.items() if not draft["problem"]}
    assert used == {"own.ngram": "ngram_model", "fits": "eagle3", "small": "draft_model"}
    assert found["other"]["problem"].startswith("other was made for another target: it reads 48")
    assert "of type 'medusa'" in found["config.json"]["problem"]
    page = " ".join(cli("doctor", str(model)).out.split())
    assert f"eagle3 in {place / 'fits'}: used" in page
    assert f"eagle3 in {place / 'other'}: not used, other was made for another target" in page


def test_what_comes_from_disk() -> None:
    """Layers in every step; of experts those that its rows choose."""
    placed = {"layers": 30, "streamed_layers": 27, "streamed_bytes": 2_000_000_000}
    dense = dict(streaming_rows(ModelFacts("m", resident_bytes=480_000_000, **placed), 3.0))
    assert dense["in memory"] == "0.48 GB: 3 of 30 layers, and all but layers"
    assert dense["from disk"] == "2.00 GB at 3.00 GB/s in every step, 27 layers"
    assert dense["plain"] == "1.5 tok/s at most"
    assert dense["drafts"].endswith(": 4.5 with 3, 7.5 with 5, 12.0 with 8")
    mixture = ModelFacts("m", experts=64, kept_experts=16, layers=4, streamed_bytes=10**9)
    experts = dict(streaming_rows(mixture, 1.0))
    assert experts["in memory"].endswith("16 of 64 experts, and all but experts")
    assert experts["from disk"].endswith("if it chooses among all alike")
    assert "up to 3.0 with 3" in experts["drafts"]
