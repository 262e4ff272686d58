"""Calls as source code has them: Python's ``name(key=value)``, Gemma's ``call:name{key:value}``.

A call is told when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.server.chat.calls.forms import (
    ANY_TEXT,
    Form,
    const,
    json_of,
    one_of,
    optional,
    regex,
    separated,
    sequence,
    star,
    tag,
)
from paceline.server.chat.calls.kind import (
    Brackets,
    Call,
    Nesting,
    Schema,
    Syntax,
    Tools,
    find_head,
)
from paceline.server.chat.calls.literals import PYTHON, MalformedError, arguments_of
from paceline.server.chat.calls.parameters import SCALARS, STRING, Parameter, parameters

_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class LiteralCalls:
    """A call is a name and its arguments between brackets.

    Attributes:
        head: the pattern of what comes before the bracket that opens the arguments.
        begin: what a forced call is written with up to that bracket; ``%s`` is the name.
        after: and behind the bracket that closes them.
        brackets: the two of them.
        mark: what stands between key and value.
        separator: and between two arguments.
        quote: what forced strings are written between as they are; "" writes them as JSON does.
    """

    head: str
    begin: str
    after: str
    syntax: Syntax = field(default=PYTHON)
    brackets: str = "()"
    mark: str = "="
    separator: str = ", "
    quote: str = ""

    def reader(self, tools: Tools) -> LiteralText:
        return LiteralText(self, tools)

    def tag(self, name: str, schema: Schema) -> Form:
        opening, closing = self.brackets[0], self.brackets[1]
        begin = self.begin.replace("%s", name) + opening
        content = self._members(parameters(schema), self.mark, _DEEPEST)
        return tag(begin, content, closing + self.after)

    def _members(self, found: Sequence[Parameter] | None, mark: str, depth: int) -> Form:
        """Required ones first and in order; of the others any."""
        if found is None:
            any_key = sequence(regex(r"[A-Za-z_]\w{0,63}"), const(mark), json_of(True))
            return separated([any_key], self.separator)
        needed = [self._member(each, mark, depth) for each in found if each.is_required]
        others = [self._member(each, mark, depth) for each in found if not each.is_required]
        if not needed:
            return separated(others, self.separator) if others else const("")
        comma = const(self.separator)
        parts = [part for each in needed for part in (comma, each)][1:]
        if others:
            parts.append(star(sequence(comma, one_of(others))))
        return sequence(*parts)

    def _member(self, each: Parameter, mark: str, depth: int) -> Form:
        return sequence(const(each.key + mark), self._value(each, depth))

    def _value(self, each: Parameter, depth: int) -> Form:
        """A value in the syntax of the model, or in JSON, which is understood as well."""
        allowed, texts, quote = each.kinds, each.texts, self.quote
        if not quote:
            is_bool = allowed == {"boolean"}
            return one_of(map(const, ("True", "False"))) if is_bool else json_of(each.whole)
        if texts is not None:
            return one_of(const(f"{quote}{text}{quote}") for text in texts)
        if allowed == STRING:
            return tag(quote, ANY_TEXT, quote)
        if allowed == {"array"} and depth and "prefixItems" not in each.schema:
            element = self._value(each.items(), depth - 1)
            elements = optional(separated([element], self.separator, at_least_one=True))
            return sequence(const("["), elements, const("]"))
        members = parameters(each.schema, each.root) if allowed == {"object"} and depth else None
        if allowed <= SCALARS or members is None:
            return json_of(each.whole)
        return sequence(const("{"), self._members(members, ":", depth - 1), const("}"))


class LiteralText:
    """See :class:`~paceline.server.chat.calls.kind.CallText`."""

    def __init__(self, kind: LiteralCalls, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._arguments: Brackets | None = None

    def read(self, text: str) -> Call | None:
        kind = self._kind
        head = find_head(kind.head, kind.brackets[0], text)
        if head is None:
            return None
        if head.name not in self._tools:
            return Call()
        if self._arguments is None:
            self._arguments = Brackets(head.end, kind.syntax)
        found = self._arguments.read(text)
        if found.nesting is Nesting.OPEN:
            return None
        try:
            inner = text[head.end + 1 : found.end - 1]
            arguments = arguments_of(inner, kind.syntax, kind.mark)
        except MalformedError:
            return Call()
        return Call(head.name, json.dumps(arguments, ensure_ascii=False), found.end)
