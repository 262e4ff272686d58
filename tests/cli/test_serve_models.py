"""Which models a server may load: names, sizes, and what is refused before anything is loaded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.cli import serve
from paceline.cli.serve import (
    check_is_there,
    memory_budget,
    models_on_disk,
    served_names,
    stored_bytes,
)
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.loading.catalogue import CatalogueEntry, embedded_model

TARGET, DRAFT = embedded_model("target"), embedded_model("draft")


def test_names_of_several_models() -> None:
    own = served_names(["embedded", DRAFT, "org/name"], ["small=draft", "tiny=draft"])
    assert own == {
        "embedded": ("embedded",),
        DRAFT: ("small", "tiny"),
        "org/name": ("org/name",),
    }
    assert served_names([DRAFT], ["a=b", "c"]) == {DRAFT: ("a=b", "c")}
    assert served_names(["ollama:llama3:8b"], []) == {
        "ollama:llama3:8b": ("llama3:8b", "ollama:llama3:8b")
    }


@pytest.mark.parametrize("given", ["small", "small=other", "=draft", "small="])
def test_a_name_must_say_which_of_several_models_it_means(given: str) -> None:
    with pytest.raises(ConfigError, match=r"it is NAME=MODEL, and the models are embedded, draft"):
        served_names(["embedded", DRAFT], [given])


def test_a_model_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="is named twice"):
        served_names([DRAFT, DRAFT], [])


def test_models_on_disk_are_those_that_are_here_and_not_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entries = [CatalogueEntry(name, path=path) for name, path in (("a", TARGET), ("b", DRAFT))]
    entries.append(CatalogueEntry("c", path=str(tmp_path / "missing")))
    monkeypatch.setattr(serve, "all_models", lambda: entries)
    assert models_on_disk(["x"]) == ["a", "b"]
    assert models_on_disk([TARGET]) == ["b"]


def test_what_is_not_there_is_refused() -> None:
    check_is_there(DRAFT)
    check_is_there("org/name")  # the hub may have it
    with pytest.raises(ModelLoadError, match="there is no model /none"):
        check_is_there("/none")


def test_sizes_are_those_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"a" * 10)
    (tmp_path / "b.safetensors").write_bytes(b"a" * 5)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "a.gguf"
    file.write_bytes(b"a" * 7)
    assert stored_bytes(str(file)) == 7
    assert stored_bytes(str(tmp_path)) == 22
    assert stored_bytes("org/name") == 0
    shards = [tmp_path / "split" / f"a-0000{i}-of-00002.gguf" for i in (1, 2)]
    shards[0].parent.mkdir()
    for shard in shards:
        shard.write_bytes(b"a" * 3)
    assert stored_bytes(str(shards[0])) == 6
    assert stored_bytes("embedded") == Path(TARGET, "model.safetensors").stat().st_size


def test_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "memory", lambda: (1000, 500))
    assert memory_budget("8GiB", False) == 8 << 30
    assert memory_budget("50%", False) == 500
    assert memory_budget(None, True) == 800
    assert memory_budget(None, False) == math.inf
    for wrong in ("0%", "101%", "lots", "-5%", "%"):
        with pytest.raises(ConfigError, match=r"not a share of memory|not an amount of memory"):
            memory_budget(wrong, True)
