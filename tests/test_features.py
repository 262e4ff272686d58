"""``docs/features.md`` against the tests: what it names exists, and nothing is left out."""

from __future__ import annotations

import importlib
import itertools
import re
from functools import cache

import pytest

from tests.conftest import REPOSITORY
from tests.server.bodies import FEATURES
from tests.server.test_identity import SPECULATION

PAGE = (REPOSITORY / "docs" / "features.md").read_text(encoding="utf-8")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]*)\])?")
NAMES = dict(re.findall(r"^\| `([a-z-]+)` \| `(tests/\S+)` \|$", PAGE, re.MULTILINE))
CELL = re.compile(r"`([a-z-]+)(\[[^\]]*\])?`")


def cells() -> list[tuple[int, str]]:
    """Column and full name of each test in the matrices."""
    found = []
    for line in PAGE.splitlines():
        parts = line.strip("| ").split(" | ")
        if len(parts) == 7 and parts[0] != "feature" and "---" not in line:
            for column, cell in enumerate(parts[1:]):
                if cell != "none":
                    match = CELL.fullmatch(cell)
                    assert match, line
                    found.append((column, NAMES[match[1]] + (match[2] or "")))
    return found


@cache
def variants(path: str, function: str) -> frozenset[str]:
    """The names that a test's parameters make, as pytest puts them together."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    marks = getattr(getattr(module, function), "pytestmark", [])
    values = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    told = [[_spelled(value) for value in each] for each in values]
    return frozenset("-".join(each) for each in itertools.product(*told))


def _spelled(value: object) -> str:
    if isinstance(value, type(pytest.param())):
        value = value.values
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def exists(name: str) -> bool:
    match = TEST.fullmatch(name)
    assert match, name
    path, function, variant = match.groups()
    if variant is None:
        return f"\ndef {function}(" in (REPOSITORY / path).read_text(encoding="utf-8")
    return variant in variants(path, function)


def test_every_named_test_exists() -> None:
    pytest.importorskip("llguidance")
    named = {match[0] for match in TEST.finditer(PAGE)} | {name for _, name in cells()}
    assert len(named) > 200
    assert [name for name in sorted(named) if not exists(name)] == []
    assert not exists("tests/server/test_identity.py::test_a_feature[merged-unheard_of]")
    assert not exists("tests/test_features.py::test_that_is_not_there")


def test_every_feature_of_the_server_has_its_cells() -> None:
    told = {(column, name) for column, name in cells() if "server/test_identity" in name}
    prefix = "tests/server/test_identity.py::test_a_feature"
    assert told == {
        (column, f"{prefix}[{speculation}-{feature}]")
        for column, speculation in enumerate(SPECULATION, 1)
        for feature in FEATURES
    }


def test_only_names_that_are_used_are_listed() -> None:
    used = {name.split("[")[0] for _, name in cells()}
    assert set(NAMES.values()) == used
