"""The command line's reference page, from its own help: ``python -m paceline.commands.reference``.

Prints what ``docs/cli.md`` must hold. The same whatever the terminal and the environment.
"""

from __future__ import annotations

from typing import Any

import typer

from paceline.cli import HELP_WIDTH, app

HEADER = """# The command line

Every command and option, as `--help` prints them. This page is written by
`python -m paceline.commands.reference > docs/cli.md`.

Every option also reads an environment variable, named after its long name: `--max-tokens` reads
`PACELINE_MAX_TOKENS`, and the argument MODEL reads `PACELINE_MODEL`. Switches take 1 or 0.
A variable that is set and empty is an error, not a default.

Commands that build an engine take `--config FILE`: a JSON file, or a YAML file where PyYAML is
installed, whose keys are the long names of options and arguments, with dashes or underscores:

```
{"model": "models/target", "speculative_config": [{"method": "suffix"}], "threads": 4}
```

One file serves several commands, and each takes what it has an option for. Paths are relative to
the working directory. The command line comes before the environment, that before the file, and the
file before the defaults. What says the same differently is replaced as well: `--method` on the
command line replaces the `speculative_config` of a file.
"""


def reference() -> str:
    """The page as Markdown."""
    sections = [_section(names, each) for names, each in all_commands()]
    return "\n".join([HEADER, *sections])


def all_commands() -> list[tuple[tuple[str, ...], Any]]:
    """Every command with the words that lead to it, a group before what is below it."""
    return _commands(("paceline",), typer.main.get_command(app))


def _commands(names: tuple[str, ...], command: Any) -> list[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    found = [(names, command)]
    for name, child in children.items():
        found += _commands((*names, name), child)
    return found


def _section(names: tuple[str, ...], command: Any) -> str:
    path = " ".join(names)
    context = command.make_context(path, [], resilient_parsing=True)
    context.terminal_width = HELP_WIDTH
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"## {path}\n\n```\n{text}\n```\n"


if __name__ == "__main__":
    print(reference(), end="")
