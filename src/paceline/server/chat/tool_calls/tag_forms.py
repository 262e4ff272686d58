"""Formats of structural tags, of which the grammars of calls and answers are composed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.request.structural_tags import MAX_PARTS

Form = dict[str, Any]
"""A format of a structural tag."""

ANY_TEXT: Form = {"type": "any_text"}


def const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def text_of(patterns: Iterable[str]) -> Form:
    """Free text that matches each of the patterns as a whole."""
    listed = list(patterns)
    return {**ANY_TEXT, "patterns": listed} if listed else ANY_TEXT


def regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def json_of(schema: Mapping[str, Any] | bool) -> Form:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Form) -> Form:
    return _grouped("sequence", list(elements)) if elements else const("")


def one_of(elements: Iterable[Form]) -> Form:
    return _grouped("or", list(elements))


def _grouped(kind: str, elements: list[Form]) -> Form:
    """A format of any number of elements, of which one may have no more than so many."""
    if len(elements) <= MAX_PARTS:
        return {"type": kind, "elements": elements}
    groups = [elements[i : i + MAX_PARTS] for i in range(0, len(elements), MAX_PARTS)]
    return _grouped(kind, [_grouped(kind, group) for group in groups])


def optional(content: Form) -> Form:
    return {"type": "optional", "content": content}


def star(content: Form) -> Form:
    return {"type": "star", "content": content}


def separated(
    elements: Sequence[Form], separator: str, at_least_one: bool = False, only_one: bool = False
) -> Form:
    """Any number of the elements, in any order."""
    if len(elements) > MAX_PARTS:
        elements = [one_of(elements)]
    return {
        "type": "tags_with_separator",
        "tags": [each if each["type"] == "tag" else tag("", each, "") for each in elements],
        "separator": separator,
        "at_least_one": at_least_one,
        "stop_after_first": only_one,
    }


def call_tag(begin: str, name: str, content: Form, end: str) -> Form:
    """A call that begins with a text in which ``%s`` is its name and ``#`` is any number."""
    begin, has_number, middle = (begin.replace("%s", name)).partition("#")
    if has_number:
        content = sequence(regex("[0-9]{1,3}"), const(middle), content)
    return tag(begin, content, end)
