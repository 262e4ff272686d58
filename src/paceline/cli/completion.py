"""``paceline completion``: scripts by which shells complete commands and options.

Owns what the scripts look like. They hold all words themselves, so that no Python starts while
somebody types; after an upgrade they have to be written again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.cli.options.options import argument
from paceline.cli.terminal.display import Screen
from paceline.core.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
_BASH = """# Completes paceline in bash.
_paceline() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} path=paceline i words=
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$path ${{COMP_WORDS[i]}}" in
      {paths}) path="$path ${{COMP_WORDS[i]}}" ;;
    esac
  done
  case $path in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _paceline paceline
"""
_ZSH = (
    "autoload -U +X compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompletionOptions:
    """Options of ``paceline completion``."""

    shell: str = argument(..., f"One of {', '.join(SHELLS)}.")


def completion_command(options: CompletionOptions) -> int:
    """The work of ``paceline completion``."""
    from paceline.cli.reference import all_commands

    if options.shell not in SHELLS:
        raise ConfigError(f"shell {options.shell!r} is not one of {', '.join(SHELLS)}")
    Screen().say(script(options.shell, all_commands()).rstrip())
    return 0


def script(shell: str, commands: list[tuple[tuple[str, ...], Any]]) -> str:
    """The script for a shell; each command has the words that lead to it, the root first."""
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(commands))
    cases = "\n".join(
        f"    {shlex.quote(' '.join(path))}) words={shlex.quote(' '.join(_words(command)))} ;;"
        for path, command in commands
    )
    paths = "|".join(shlex.quote(" ".join(path)) for path, _ in commands[1:])
    bash = _BASH.format(cases=cases, paths=paths)
    return bash if shell == "bash" else _ZSH + bash.replace("in bash", "in zsh")


def _words(command: Any) -> list[str]:
    """What may follow a command: commands below it, and options."""
    return [*getattr(command, "commands", {}), *(flag for flag, _ in _flags(command))]


def _flags(command: Any) -> Iterator[tuple[str, Any]]:
    """Long and short options, each with its parameter, as help has them."""
    context = command.make_context("paceline", [], resilient_parsing=True)
    for parameter in command.get_params(context):
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("-"):
                yield flag, parameter


def _fish(commands: list[tuple[tuple[str, ...], Any]]) -> Iterator[str]:
    yield "# Completes paceline in fish."
    for path, command in commands:
        children = list(getattr(command, "commands", {}).items())
        seen = [f"__fish_seen_subcommand_from {word}" for word in path[1:]]
        if children:
            below = " ".join(name for name, _ in children)
            seen.append(f"not __fish_seen_subcommand_from {below}")
        when = shlex.quote("; and ".join(seen))
        for name, child in children:
            about = shlex.quote(child.get_short_help_str(100))
            yield f"complete -c paceline -n {when} -f -a {name} -d {about}"
        for flag, parameter in _flags(command):
            form = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            about = shlex.quote(getattr(parameter, "help", None) or "Show the help.")
            yield f"complete -c paceline -n {when} {form} -d {about}"
