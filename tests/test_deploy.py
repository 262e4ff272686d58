"""The files of ``deploy/`` name options and probes that the server has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.cli.serve import ServeOptions
from paceline.server.http.config import OPEN_PATHS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_options_exist(name: str) -> None:
    named = set(re.findall(r"(?<!\S)--([a-z][a-z-]+)", (ROOT / "deploy" / name).read_text()))
    assert "host" in named
    assert named <= {field.name.replace("_", "-") for field in fields(ServeOptions)}


def test_probes_ask_what_is_answered_without_a_key() -> None:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text() + (ROOT / "Dockerfile").read_text()
    asked = set(re.findall(r"/\w+z\b", text))
    assert asked == {"/livez", "/readyz"}
    assert asked <= set(OPEN_PATHS)
