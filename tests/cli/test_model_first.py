"""MODEL comes first, and a single argument is the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.model_argument import lasting_name, model_and_file
from paceline.loading.catalogue import embedded_model


@pytest.mark.parametrize(
    ("first", "second", "option", "found"),
    [
        ("model", "file", None, ("model", "file")),
        ("file", None, None, (None, "file")),
        ("file", None, "model", ("model", "file")),
        ("model", "file", "other", ("model", "file")),
        (None, "file", "model", ("model", "file")),
        (None, None, "model", ("model", None)),
    ],
)
def test_arguments(
    first: str | None,
    second: str | None,
    option: str | None,
    found: tuple[str | None, str | None],
) -> None:
    assert model_and_file(first, second, option) == found


def test_names_last_and_paths_are_made_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert lasting_name("here") == str(tmp_path / "here")
    assert lasting_name("smollm2") == "smollm2"
    assert lasting_name("org/name") == "org/name"
    assert lasting_name("embedded") == lasting_name(embedded_model("target")) == "embedded"
