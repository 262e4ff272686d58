"""Calls whose arguments are a JSON object: with the name in an object around it, or before it.

As soon as the name and the start of the arguments are there, a call is certain and its arguments
are told as the model writes them: like OpenAI's, they may end early, or be no JSON, if the model
ends early or errs after that. An object with its members in another order is told when it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.server.chat.calls.forms import Form, call_tag, json_of
from paceline.server.chat.calls.kind import NAME, Brackets, Call, Nesting, Schema, Tools, find_head
from paceline.server.chat.calls.written_json import values_of


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A call is an object: ``{"name": NAME, "arguments": {...}}``.

    Attributes:
        begin: what a forced call is written with up to its arguments, see :func:`call_tag`.
        end: and behind the arguments.
        name_key: of the name; None where the name itself is the key of the arguments.
        is_listed: a bracket that begins a list may come first.
    """

    begin: str
    end: str = "}"
    name_key: str | None = "name"
    is_listed: bool = False

    @property
    def lead(self) -> str:
        """The pattern of what may come before the object."""
        return r"\s*(?:\[\s*)?" if self.is_listed else r"\s*"

    @property
    def head(self) -> str:
        """The pattern of what comes before the arguments, where their order is the usual one."""
        if self.name_key is None:
            return rf'{self.lead}\{{\s*"{NAME}"\s*:\s*(?=\{{)'
        number = r'(?:"tool_call_id"\s*:\s*"[^"\\]{0,64}"\s*,\s*)?'
        key = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
        return rf'{self.lead}\{{\s*{number}"{self.name_key}"\s*:\s*"{NAME}"\s*,\s*{key}'

    def reader(self, tools: Tools) -> JsonText:
        return JsonText(self, tools)

    def tag(self, name: str, schema: Schema) -> Form:
        return call_tag(self.begin, name, json_of(schema), self.end)

    def unenforced(self, schema: Schema) -> frozenset[str]:
        return frozenset()

    def parsed(self, text: str, tools: Tools) -> tuple[str, str]:
        """Name and arguments of a whole call; no name if it is none."""
        try:
            call = values_of(text)
        except (ValueError, RecursionError):
            return "", ""
        if self.name_key is None:
            name, arguments = next(iter(call.items())) if len(call) == 1 else (None, None)
        else:
            name = call.get(self.name_key)
            arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
            return "", ""
        return name, json.dumps(arguments, ensure_ascii=False)


class JsonText:
    """See :class:`~paceline.server.chat.calls.kind.CallText`."""

    def __init__(self, kind: JsonCalls, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._brackets: dict[int, Brackets] = {}

    def read(self, text: str) -> Call | None:
        lead = re.match(self._kind.lead, text)
        begin = lead.end() if lead else 0
        head = re.match(self._kind.head, text)
        if head is not None and head["name"] in self._tools:
            found = arguments = self._nested(text, head.end())
            if found.nesting is Nesting.CLOSED:  # other members may follow
                found = self._nested(text, begin)
            end = None if found.nesting is Nesting.OPEN else found.end
            told = len(text) if arguments.nesting is Nesting.OPEN else arguments.end
            return Call(head["name"], text[head.end() : told], end)
        if text[begin : begin + 1] not in ("", "{"):
            return Call()
        whole = self._nested(text, begin)
        if whole.nesting is Nesting.CLOSED:
            return Call(*self._kind.parsed(text[begin : whole.end], self._tools), whole.end)
        return None if whole.nesting is Nesting.OPEN else Call()

    def _nested(self, text: str, start: int) -> Brackets:
        return self._brackets.setdefault(start, Brackets(start)).read(text)


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A call is a name, a mark, and the object of its arguments.

    Attributes:
        head: the pattern of what comes before the object.
        begin: what a forced call is written with up to the object, see :func:`call_tag`.
        end: and behind it.
        named_by: the tool that is meant by what the head has as the name; "" for none.
    """

    head: str
    begin: str
    end: str
    named_by: Callable[[str, Tools], str] = lambda name, tools: name if name in tools else ""

    def reader(self, tools: Tools) -> NamedText:
        return NamedText(self, tools)

    def tag(self, name: str, schema: Schema) -> Form:
        return call_tag(self.begin, name, json_of(schema), self.end)

    def unenforced(self, schema: Schema) -> frozenset[str]:
        return frozenset()


class NamedText:
    """See :class:`~paceline.server.chat.calls.kind.CallText`."""

    def __init__(self, kind: NamedJson, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._arguments: Brackets | None = None

    def read(self, text: str) -> Call | None:
        head = find_head(self._kind.head, "{", text)
        if head is None:
            return None
        name = self._kind.named_by(head.name, self._tools)
        if not name:
            return Call()
        if self._arguments is None:
            self._arguments = Brackets(head.end)
        found = self._arguments.read(text)
        is_open = found.nesting is Nesting.OPEN
        told = len(text) if is_open else found.end
        return Call(name, text[head.end : told], None if is_open else told)
