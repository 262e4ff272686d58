"""Calls that write each argument between tags: strings as they are, all else as JSON.

A call is certain with its name; strings are told as the model writes them, other values when they
are whole. The schema of the tool says which are which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.json_schema.resolver import Resolver
from paceline.server.chat.calls.forms import (
    Form,
    call_tag,
    const,
    json_of,
    one_of,
    optional,
    regex,
    sequence,
    star,
    tag,
    text_of,
)
from paceline.server.chat.calls.kind import (
    LONGEST_HEAD,
    Brackets,
    Call,
    Nesting,
    Schema,
    Tools,
    find_head,
    unfinished_tag,
)
from paceline.server.chat.calls.parameters import (
    STRING,
    Parameter,
    bare,
    parameter,
    parameters,
)
from paceline.server.chat.calls.texts import text_rules

_ANY_KEY = r'[^\s<>"&](?:[^<>"&\n]{0,62}[^\s<>"&])?'
_ROOM = 16
"""Characters of white space and longer marks of types that the head of a value may have besides."""


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """A call is a tag with its name, and tags with keys and values.

    Attributes:
        head: the pattern of what comes before the first parameter.
        begin: what a forced call is written with before the first parameter, see
            :func:`call_tag`.
        end: what ends a call.
        after: what a forced call is written with behind that.
        key: what stands before and behind a key.
        value: what stands before and behind a value.
        gap: white space between tags.
        padding: white space at both ends of a value, which is no part of it.
        types: what stands behind a key's tag where the value is a string, and where it is JSON; of
            formats that say so. ``%s`` is the name of another type.
        last: the text whose first appearance ends the head.
        escapes_keys: keys have entities for quotation marks and ampersands.
    """

    head: str
    begin: str
    end: str
    after: str
    key: tuple[str, str]
    value: tuple[str, str]
    gap: str = "\n"
    padding: str = ""
    types: tuple[str, str] = ("", "")
    last: str = ">"
    escapes_keys: bool = False

    @property
    def opening(self) -> str:
        """The pattern of what comes before a value."""
        before, behind = map(re.escape, self.key)
        value = rf"\s*{re.escape(self.value[0])}" if self.value[0] else ""
        text, other = map(re.escape, self.types)
        other = other.replace("%s", "[a-z]+")
        kind = rf"(?:(?P<text>{text})|(?P<json>{other})|>)" if text else "(?P<text>)(?P<json>)"
        return rf"{before}(?P<key>[^<\n{re.escape(self.key[1][0])}]+){behind}{kind}{value}"

    def reader(self, tools: Tools) -> XmlText:
        return XmlText(self, tools)

    def tag(self, name: str, schema: Schema) -> Form:
        resolver = Resolver(schema)
        members = resolver.members(schema)
        found = parameters(members, resolver)
        if found is None:
            name_of_any = (const(self.key[0]), regex(_ANY_KEY))
            any_value = self._value_behind(self.key[1], Parameter("", members.others, resolver))
            content = star(sequence(*name_of_any, *any_value))
        else:
            written = [each for each in found if self._is_written(each)]
            forms = ((each, sequence(*self._parameter(each))) for each in written)
            content = sequence(*(f if each.is_required else optional(f) for each, f in forms))
        return call_tag(self.begin, name, content, self.end + self.after)

    def unenforced(self, schema: Schema) -> frozenset[str]:
        resolver = Resolver(schema)
        members = resolver.members(schema)
        found = parameters(members, resolver)
        values = [Parameter("", members.others, resolver)] if found is None else found
        left = map(self._unenforced, values)
        return members.unenforced.union(*left, self._unwritten(found or ()))

    def _unwritten(self, found: Sequence[Parameter]) -> Iterator[str]:
        """Which keywords name parameters that the format cannot write."""
        for each in found:
            if not self._is_written(each):
                yield "required" if each.is_required else "properties"

    def _is_written(self, each: Parameter) -> bool:
        return self._is_read(each.key) and self._listed(each) != []

    def _listed(self, each: Parameter) -> list[str] | None:
        """The only values that are allowed, as they are written; None where others are."""
        if each.values is None or (self.types[0] and each.kinds != STRING):
            return None
        closing = self.value[1]  # what has it in it is read up to there
        return [text for text in map(bare, each.values) if closing not in text]

    def _is_read(self, key: str) -> bool:
        """Whether a key is read as what it is."""
        written = self._before_value(key) + self.types[0] + self.value[0]
        found = re.match(self.opening, written)
        is_whole = found is not None and found.end() == len(written) < LONGEST_HEAD - _ROOM
        return is_whole and self.key_of(found["key"]) == key if found else False

    def key_of(self, written: str) -> str:
        """A key by what stands between its marks."""
        key = written.strip()
        return key.replace("&quot;", '"').replace("&amp;", "&") if self.escapes_keys else key

    def _before_value(self, key: str) -> str:
        """A key between its marks."""
        if self.escapes_keys:
            key = key.replace("&", "&amp;").replace('"', "&quot;")
        return self.key[0] + key + self.key[1]

    def _unenforced(self, each: Parameter) -> frozenset[str]:
        if "string" not in each.kinds or self._listed(each) is not None:
            return frozenset()
        return text_rules(each).unenforced if self._has_rules(each) else each.narrowing

    def _has_rules(self, each: Parameter) -> bool:
        """Whether a text cannot be a value of another type, but for null."""
        return bool(self.types[0]) or each.kinds <= STRING | {"null"}

    def _parameter(self, each: Parameter) -> list[Form]:
        return self._value_behind(self._before_value(each.key), each)

    def _value_behind(self, begin: str, each: Parameter) -> list[Form]:
        """A value, whose first tag ends with this text."""
        opening, closing = self.value
        text = self.types[0]
        behind = (self.gap if opening else "") + opening + self.padding
        found, listed = list[Form](), self._listed(each)
        if listed is not None:
            values = one_of(map(const, listed))
            found.append(tag(begin + text + behind, values, self.padding + closing))
        elif "string" in each.kinds:
            # What it ends with is read as its end wherever it stands, so none may stand in it.
            found.append(tag(begin + text + behind, text_of(self._patterns(each)), closing))
        if listed is None and (each.kinds - STRING if text else "string" not in each.kinds):
            found += [
                tag(begin + other + behind, json_of(schema), self.padding + closing)
                for other, schema in self._others(each)
            ]
        return [found[0] if len(found) == 1 else one_of(found), const(self.gap)]

    def _others(self, each: Parameter) -> list[tuple[str, Schema]]:
        """What stands behind the keys of values that are no strings, and schemas of these."""
        mark = self.types[1]
        if "%s" in mark:
            return [(mark.replace("%s", kind), schema) for kind, schema in each.by_type().items()]
        return [(mark, each.without_strings if "string" in each.kinds else each.whole)]

    def _patterns(self, each: Parameter) -> list[str]:
        """That a text matches, with the white space behind it."""
        if not self._has_rules(each):
            return []
        null = "|null" if "null" in each.kinds and not self.types[0] else ""
        behind = self.padding.replace("\n", r"\n")
        return [f"(?:{pattern}{null}){behind}" for pattern in text_rules(each).patterns]


class XmlText:
    """See :class:`~paceline.server.chat.calls.kind.CallText`."""

    def __init__(self, kind: XmlCalls, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._name = ""
        self._at = 0  # how far the text has been read
        self._arguments = ""
        self._parameter: Parameter | None = None  # that whose value is being read
        self._is_string = False
        self._is_json = False  # the value is, as the format says or the schema
        self._has_begun = False  # the value has, behind its padding
        self._json: Brackets | None = None  # of the value, if it begins with one
        self._searched = 0  # up to where the value's end has been looked for
        self._end: int | None = None

    def read(self, text: str) -> Call | None:
        if not self._name:
            head = find_head(self._kind.head, self._kind.last, text)
            if head is None:
                return None
            if head.name not in self._tools:
                return Call()
            self._name, self._at, self._arguments = head.name, head.end, "{"
        while self._end is None and self._step(text):
            pass
        return Call(self._name, self._arguments, self._end)

    def _step(self, text: str) -> bool:
        """One tag or value on; False where more is needed."""
        if self._parameter is None:
            return self._read_tag(text)
        return self._read_string(text) if self._is_string else self._read_other(text)

    def _read_tag(self, text: str) -> bool:
        kind = self._kind
        rest = text[self._at : self._at + LONGEST_HEAD].lstrip()
        at = self._at + len(text[self._at : self._at + LONGEST_HEAD]) - len(rest)
        found = re.match(kind.opening, rest)
        if found is not None:
            key = kind.key_of(found["key"])
            self._begin(key, bool(found["text"]), bool(found["json"]), at + found.end())
        elif rest.startswith(kind.end):
            self._arguments, self._end = self._arguments + "}", at + len(kind.end)
        elif self._may_be_tag(rest) and len(text) - self._at < LONGEST_HEAD:
            return False
        else:  # the call ends without its end
            self._arguments, self._end = self._arguments + "}", self._at
        return True

    def _may_be_tag(self, rest: str) -> bool:
        marks = self._kind.end, self._kind.key[0]
        return rest.startswith(marks[1]) or any(each.startswith(rest) for each in marks)

    def _begin(self, key: str, is_text: bool, is_json: bool, at: int) -> None:
        self._parameter = parameter(self._tools[self._name], key)
        allowed = self._parameter.kinds
        self._is_string = allowed == STRING or (is_text and "string" in allowed)
        self._has_begun = False
        self._is_json = is_json or "string" not in allowed
        separator = "" if self._arguments == "{" else ", "
        self._arguments += f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        self._arguments += '"' if self._is_string else ""
        self._at, self._searched, self._json = at, at, None

    def _read_string(self, text: str) -> bool:
        """A string is told as far as it is certain."""
        kind = self._kind
        closing = kind.value[1]
        if not self._has_begun:
            if len(text) < self._at + len(kind.padding):
                return False
            self._at += len(kind.padding) if text.startswith(kind.padding, self._at) else 0
            self._has_begun = True
        end = text.find(closing, self._at)
        held = 0 if end >= 0 else unfinished_tag(text, (kind.padding + closing, closing))
        stop = max(self._at, len(text) - held) if end < 0 else end
        if end >= 0 and kind.padding and text.endswith(kind.padding, self._at, end):
            stop -= len(kind.padding)
        self._arguments += json.dumps(text[self._at : stop], ensure_ascii=False)[1:-1]
        self._at = stop
        if end >= 0:
            self._finish('"', end)
        return end >= 0

    def _read_other(self, text: str) -> bool:
        closing, padding = self._kind.value[1], self._kind.padding
        if not self._skip_json(text):
            return False
        end = text.find(closing, self._searched)
        if end < 0:
            self._searched = max(self._at, len(text) - len(closing) + 1)
            return False
        value = text[self._at : end]
        if padding:
            value = value.removeprefix(padding).removesuffix(padding)
        assert self._parameter is not None
        self._finish(self._parameter.as_json(value), end)
        return True

    def _skip_json(self, text: str) -> bool:
        """Past the brackets of a list or an object, whose strings may hold what ends a value."""
        if self._json is None and self._is_json:
            begin = self._at + len(text[self._at :]) - len(text[self._at :].lstrip())
            if begin == len(text):
                return False
            self._json = Brackets(begin) if text[begin] in "[{" else None
        if self._json is None:
            return True
        found = self._json.read(text)
        self._searched = max(self._searched, found.end)
        return found.nesting is not Nesting.OPEN

    def _finish(self, told: str, end: int) -> None:
        self._arguments += told
        self._at, self._parameter = end + len(self._kind.value[1]), None
