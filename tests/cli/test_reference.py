"""Completion scripts, man pages and the greeting: what a shell and ``man`` make of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.main import GREETING, main
from paceline.cli.reference import SHELLS, all_commands, script, write_manual
from tests.cli.conftest import Result

Cli = Callable[..., Result]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", {"run", "serve", "train", "--version"}),
        ("tra", {"trace", "train"}),
        ("train he", {"head"}),
        ("run model --max-t", {"--max-tokens"}),
        ("bench serve --compare-w", {"--compare-with"}),
        ("train head --kin", {"--kind"}),
    ],
)
def test_bash_completes(line: str, wanted: set[str]) -> None:
    words = ["paceline", *line.split(" ")]
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _paceline; echo ${{COMPREPLY[@]}}"
    program = f"{script('bash', all_commands())}\n{ask}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = set(done.stdout.split())
    assert wanted <= found if not line else found == wanted


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_in_each_script(cli: Cli, shell: str) -> None:
    out = cli("completion", shell).out
    for words, _ in all_commands():
        assert words[-1] in out
    assert "max-tokens" in out


def test_an_unknown_shell_is_told(cli: Cli) -> None:
    result = cli("completion", "tcsh")
    assert result.code == 2
    assert "'tcsh' is not one of bash, zsh, fish" in result.err


def test_each_command_has_a_man_page(tmp_path: Path) -> None:
    pages = write_manual(tmp_path / "man1")
    assert {page.name for page in pages} >= {"paceline.1", "paceline-run.1", "paceline-train-lm.1"}
    assert len(pages) == len(all_commands())
    run = (tmp_path / "man1" / "paceline-run.1").read_text()
    assert "\\-\\-max\\-tokens" in run
    assert "paceline\\-run \\- Chat with a model, or answer prompts." in run


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
def test_groff_reads_the_pages_without_a_warning(tmp_path: Path) -> None:
    pages = map(str, write_manual(tmp_path))
    command = ["groff", "-man", "-Tascii", "-ww", *pages]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "--max-tokens" in re.sub(".\x08", "", done.stdout)  # what is bold is struck twice


def test_paceline_alone_greets_a_person(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main([])
    assert capsys.readouterr().out == GREETING + "\n"
    tried = [line.split() for line in GREETING.splitlines() if line.startswith("  ")]
    names = {words[1] for words, _ in all_commands() if len(words) > 1}
    assert len(tried) == 3
    assert all(words[0] == "paceline" and words[1] in names for words in tried)


def test_paceline_alone_prints_its_help_to_a_program(cli: Cli) -> None:
    result = cli()
    assert "Usage: paceline" in result.out + result.err
