"""``paceline train draft`` and its neighbours: the model that is drafted for comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline_lab.train import draft
from paceline_lab.train.heads import train as heads
from paceline_lab.train.ngram import train as ngram
from tests.cli.conftest import Result

Cli = Callable[..., Result]


class ReachedError(Exception):
    """The training was called."""


@pytest.mark.parametrize(
    ("kind", "module", "function", "more"),
    [
        ("draft", draft, "train_draft", ("--stdlib", "--steps", "1")),
        ("head", heads, "train_head", ("--traces", "traces", "--steps", "1")),
        ("ngram", ngram, "train_ngram", ("--stdlib",)),
    ],
)
def test_the_target_comes_first_or_is_an_option(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    module: Any,
    function: str,
    more: tuple[str, ...],
) -> None:
    seen: list[str] = []

    def reached(config: Any) -> Any:
        seen.append(str(config.target))
        raise ReachedError

    monkeypatch.setattr(module, function, reached)
    for named in (("big",), ("--target", "big"), ("big", "--target", "other")):
        with pytest.raises(ReachedError):
            cli("train", kind, *named, *more, "-o", "out")
    assert seen == ["big"] * 3


@pytest.mark.parametrize("kind", ["draft", "head"])
def test_a_target_is_needed(cli: Cli, kind: str) -> None:
    result = cli("train", kind, "--traces", "traces", "-o", "out")
    assert result.code == 2
    assert "name the model to draft for, as MODEL or with --target" in result.err
