"""The Python API's reference page, from signatures and docstrings.

``python -m paceline.cli.api_reference`` prints what ``docs/api.md`` must hold. Owns which
classes are public, and how docstrings become Markdown.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, get_overloads

from paceline import (
    LLM,
    AsyncLLM,
    GenerationOutput,
    SamplingParams,
    SpeculativeParams,
    StructuredOutputs,
    ThoughtMarks,
)
from paceline.api.outputs import Completion
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core import errors
from paceline.request.engine_stats import SpeculationCounters
from paceline.request.request import StepOutput, TokenLogprobs

HEADER = """# The Python API

What can be imported from `paceline` or the modules named here, and what it takes and raises.
Everything else is internal and may change. This page is written by
`python -m paceline.cli.api_reference > docs/api.md`.

```python
from paceline import LLM, SamplingParams

with LLM("smollm2") as llm:
    result = llm.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(result.outputs[0].text)
    for step in llm.stream("Once upon a time", SamplingParams(max_tokens=32)):
        print(step.text, end="")
```
"""
CHAPTERS: dict[str, tuple[type[Any], ...]] = {
    "Generating": (LLM, AsyncLLM),
    "Parameters of a request": (
        SamplingParams,
        SpeculativeParams,
        StructuredOutputs,
        ThoughtMarks,
    ),
    "Results": (GenerationOutput, Completion, StepOutput, TokenLogprobs, SpeculationCounters),
    "Configuration": (EngineConfig, SpeculativeConfig),
}
_ROLE = re.compile(r":\w+:`(~?)([\w.]+)`")
_LITERAL = re.compile(r"``(.+?)``")
_ITEM = re.compile(r"([\w*, ]+): (.*)")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns):")


def api_reference() -> str:
    """The page as Markdown."""
    parts = [HEADER]
    for title, classes in CHAPTERS.items():
        parts += [f"## {title}\n", *map(_class, classes)]
    return "\n".join([*parts, _errors()])


def _class(cls: type[Any]) -> str:
    """A class with its own public methods and properties, in the order of its source."""
    parts = [f"### {cls.__name__}\n", f"`from {_home(cls)} import {cls.__name__}`\n"]
    made_by = cls.__new__ if issubclass(cls, tuple) else cls.__init__
    parts += [_code(_signature(cls.__name__, made_by)), markdown(cls.__doc__ or "")]
    parts += _settings(cls)
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            value = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
            shown = f"`{value}`\n"
        elif inspect.isfunction(member):
            overloads = get_overloads(member) or [member]
            shown = _code("\n".join(_signature(name, overload) for overload in overloads))
        else:
            continue
        parts.append(f"#### {cls.__name__}.{name}\n\n{shown}\n{markdown(member.__doc__ or '')}")
    return "\n".join(parts)


def _settings(cls: type[Any]) -> Iterator[str]:
    """What the fields of a configuration mean, where they say it themselves."""
    shown = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    items = [f"- `{each.name}`: {each.metadata['help']}" for each in shown if each.metadata]
    if items:
        yield "\n".join(["**Attributes**", "", *items, ""])


def _home(cls: type[Any]) -> str:
    import paceline

    return "paceline" if cls.__name__ in paceline.__all__ else cls.__module__


def _signature(name: str, function: Callable[..., Any]) -> str:
    """A call as Python writes it, one parameter a line where it is long."""
    signature = inspect.signature(function)
    shown, star = [], False
    for each in list(signature.parameters.values())[1:]:  # without self
        if each.kind is each.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        shown.append(_parameter(each))
    result = signature.return_annotation
    tail = f" -> {result}" if result not in (None, "None", inspect.Signature.empty) else ""
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    line = f"{prefix}{name}({', '.join(shown)}){tail}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{prefix}{name}(", *(f"    {each}," for each in shown), f"){tail}"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    text = f"{stars}{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    default = parameter.default
    if type(default).__module__.startswith("paceline") and dataclasses.is_dataclass(default):
        return f"{text} = {type(default).__name__}()"
    # A dataclass has a value that stands for what is made anew for each object.
    return f"{text} = {'...' if 'factory' in repr(default) else repr(default)}"


def _code(lines: str) -> str:
    return f"```python\n{lines}\n```\n"


def _errors() -> str:
    """The tree of errors, each below the one that it is a kind of."""
    lines = ["## Errors\n", f"{_inline(inspect.getdoc(errors) or '')}\n", *_subtree(errors, 0)]
    return "\n".join(lines) + "\n"


def _subtree(home: Any, depth: int, base: type[Exception] | None = None) -> Iterator[str]:
    base = base or home.PacelineError
    yield f"{'  ' * depth}- `{base.__name__}`: {_inline(inspect.getdoc(base) or '')}"
    for child in vars(home).values():
        if isinstance(child, type) and child.__bases__[0] is base:
            yield from _subtree(home, depth + 1, child)


def _name_of(role: re.Match[str]) -> str:
    """What a cross-reference shows: the last part of its name where it begins with ``~``."""
    name = role[2].rpartition(".")[2] if role[1] else role[2].removeprefix("paceline.")
    return f"`{name}`"


def markdown(docstring: str) -> str:
    """A docstring of this project as Markdown: its sections, lists, examples and names."""
    lines = inspect.cleandoc(docstring).split("\n")
    shown: list[str] = []
    while lines:
        if _SECTION.fullmatch(lines[0]):
            title = lines.pop(0).rstrip(":")
            shown += [f"**{title}**", "", *_items(_taken(lines, lambda line: line[:1] != "")), ""]
        elif lines[0].startswith((">>> ", "... ")):
            example = _taken(lines, bool)
            shown += ["```python", *example, "```", ""]
        else:
            paragraph = _taken(lines, lambda line: bool(line) and not line.startswith(">>> "))
            shown += [_inline(" ".join(paragraph)), ""] if paragraph else []
            lines[:] = lines[1:] if lines and not lines[0] else lines
    return "\n".join(shown)


def _taken(lines: list[str], wanted: Callable[[str], bool]) -> list[str]:
    """The first lines as long as they are wanted, which are taken away."""
    count = next((i for i, line in enumerate(lines) if not wanted(line)), len(lines))
    taken, lines[:] = lines[:count], lines[count:]
    return taken


def _items(lines: list[str]) -> Iterator[str]:
    """Entries of a section, ``name: what it is`` with further lines indented, as a list."""
    entries: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).split("\n"):
        if entries and (not line or line.startswith(" ")):
            entries[-1] = f"{entries[-1]} {line.strip()}".rstrip()
        else:
            entries.append(line)
    for entry in entries:
        item = _ITEM.fullmatch(entry)
        yield f"- `{item[1]}`: {_inline(item[2])}" if item else f"- {_inline(entry)}"


def _inline(text: str) -> str:
    """Names and literals in single backquotes, as Markdown has them."""
    named = _ROLE.sub(_name_of, text)
    return _LITERAL.sub(r"`\1`", " ".join(named.split()))


if __name__ == "__main__":
    print(api_reference(), end="")
