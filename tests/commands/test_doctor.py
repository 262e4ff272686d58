"""``paceline doctor``: the page and the JSON document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import Result

Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.workbench.profile_machine.READ_BYTES", 1 << 20)
    monkeypatch.setattr("paceline.workbench.profile_machine.GEMM_WIDTH", 64)


def test_the_page(cli: Cli) -> None:
    result = cli("doctor")
    assert result.code == 0, result.err
    for shown in ("processor", "cores", "memory", "GB/s read", "kernels", "the embedded model"):
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
