"""``docs/results/features.md`` against the tests: what it names exists, and nothing is left out."""

from __future__ import annotations

import importlib
import itertools
import re
from functools import cache

import pytest

from tests.conftest import REPOSITORY
from tests.server.bodies import FEATURES
from tests.server.test_identity import SPECULATION

PAGE = (REPOSITORY / "docs" / "results" / "features.md").read_text(encoding="utf-8")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]*)\])?")
NAMES = dict(re.findall(r"^\| `([a-z-]+)` \| `(tests/\S+)` \|$", PAGE, re.MULTILINE))
CELL = re.compile(r"`([a-z-]+)(\[[^\]]*\])?`")
HTTP = "tests/server/test_identity.py::test_a_feature"


def rows(width: int) -> list[list[str]]:
    """The cells of all tables of features with so many columns, without their headings."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if "---" not in line]
    return [line for line in lines if len(line) == width and line[0] != "feature"]


def http_features() -> list[str]:
    """The names of the features that are tested through HTTP with every proposer."""
    return [name.strip("`") for _, _, name in rows(3)]


def cells() -> list[str]:
    """The full name of each test in the tables."""
    short = [cell for row in rows(7) for cell in row[1:] if cell != "none"]
    found = [f"{HTTP}[{who}-{name}]" for name in http_features() for who in SPECULATION]
    for cell in [*short, *(off for _, off, _ in rows(3))]:
        match = CELL.fullmatch(cell)
        assert match, cell
        found.append(NAMES[match[1]] + (match[2] or ""))
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
    named = {match[0] for match in TEST.finditer(PAGE)} | set(cells())
    assert len(named) > 200
    assert [name for name in sorted(named) if not exists(name)] == []
    assert not exists("tests/server/test_identity.py::test_a_feature[merged-unheard_of]")
    assert not exists("tests/benchmarks/test_features.py::test_that_is_not_there")


def test_every_feature_of_the_server_has_its_row() -> None:
    assert sorted(http_features()) == sorted(FEATURES)


def test_only_names_that_are_used_are_listed() -> None:
    used = {name.split("[")[0] for name in cells()} - {HTTP}
    assert set(NAMES.values()) == used
