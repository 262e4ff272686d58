"""Commands of other packages, such as the laboratory, and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import registry
from paceline.cli.registry import ENTRY_POINTS, LABORATORY, ROOT, UNUSABLE, commands_of
from tests.cli.conftest import Result
from tests.proposers.plugins import installer

Cli = Callable[..., Result]
SOURCE = """
from dataclasses import dataclass

from paceline.cli.registry import CHECK, Command


@dataclass(frozen=True)
class GreetOptions:
    pass


def greet(options):
    print("good morning")
    return 0


GREET = Command("greet", "some_plugin:GreetOptions", "some_plugin:greet", "Greet.", section=CHECK)
"""


def test_another_package_adds_a_command(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer(tmp_path, monkeypatch, ENTRY_POINTS)(SOURCE, {"greet": "some_plugin:GREET"})
    names = [command.name for command in commands_of(ROOT)]
    assert names[-1] == "greet"
    assert names.count("run") == 1


def test_one_that_cannot_be_loaded_says_why_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer(tmp_path, monkeypatch, ENTRY_POINTS)("GREET = 1", {"greet": "some_plugin:GREET"})
    *others, greet = commands_of(ROOT)
    assert greet.options == UNUSABLE
    assert "cannot be loaded: TypeError: some_plugin:GREET is no" in greet.help
    assert all(command.options != UNUSABLE for command in others)


def test_commands_of_a_missing_laboratory_are_listed_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = {group: [command.name for command in commands_of(group)] for group in LABORATORY}
    monkeypatch.setattr(registry, "plugins_of", lambda group: ())
    for group, names in present.items():
        found = commands_of(group)
        assert [command.name for command in found] == names
        for command in found:
            missing = command.name in LABORATORY[group]
            assert (command.options == UNUSABLE) == missing
            assert ("belongs to the laboratory" in command.help) == missing


@pytest.mark.parametrize("arguments", [(), ("model", "--traces", "x"), ("--unknown",)])
def test_a_missing_command_ends_with_its_reason_whatever_is_asked(
    arguments: tuple[str, ...],
) -> None:
    missing = registry.LazyCommand(registry.Command("tune", UNUSABLE, UNUSABLE, "(missing: x)"))
    with pytest.raises(registry.ConfigError, match=r"tune cannot be run \(missing: x\)"):
        missing.main(list(arguments), standalone_mode=False)
