"""Calls as source code has them: Python's ``name(key=value)``, Gemma's ``call:name{key:value}``.

A call is told when it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.server.chat.calls.forms import (
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
    text_of,
)
from paceline.server.chat.calls.kind import (
    Brackets,
    Call,
    Nesting,
    Schema,
    Tools,
    find_head,
)
from paceline.server.chat.calls.literals import (
    PYTHON,
    Literals,
    MalformedError,
    json_of_arguments,
)
from paceline.server.chat.calls.parameters import (
    SCALARS,
    STRING,
    Parameter,
    other,
    parameters,
)
from paceline.server.chat.calls.texts import of_object, text_rules

_DEEPEST = 6
_PLAIN_KEY = re.compile(r"\w(?:[\w .-]*\w)?")


@dataclass(frozen=True, slots=True)
class LiteralCalls:
    """A call is a name and its arguments between brackets.

    Attributes:
        head: the pattern of what comes before the bracket that opens the arguments.
        begin: what a forced call is written with up to that bracket; ``%s`` is the name.
        after: and behind the bracket that closes them.
        literals: how their values are written.
        brackets: the two of them.
        mark: what stands between key and value.
        separator: and between two arguments.
        quote: what forced strings are written between as they are; "" writes them as JSON does.
    """

    head: str
    begin: str
    after: str
    literals: Literals = PYTHON
    brackets: str = "()"
    mark: str = "="
    separator: str = ", "
    quote: str = ""

    def reader(self, tools: Tools) -> LiteralText:
        return LiteralText(self, tools)

    def tag(self, name: str, schema: Schema) -> Form:
        opening, closing = self.brackets[0], self.brackets[1]
        begin = self.begin.replace("%s", name) + opening
        found = parameters(schema)
        if found is None:
            value = json_of(other(schema).whole)
            any_key = sequence(regex(r"[A-Za-z_]\w{0,63}"), const(self.mark), value)
            content = separated([any_key], self.separator)
        else:
            content = self._members(found, self.mark, _DEEPEST)
        return tag(begin, content, closing + self.after)

    def unenforced(self, schema: Schema) -> frozenset[str]:
        return self._left_of(parameters(schema), schema, schema, _DEEPEST)

    def _left_of(
        self, found: Sequence[Parameter] | None, schema: Schema, root: Schema, depth: int
    ) -> frozenset[str]:
        names = None if found is None else sum(each.is_required for each in found)
        left = (self._left(each, depth) for each in found or ())
        return of_object(schema, root, names).union(*left)

    def _left(self, each: Parameter, depth: int) -> frozenset[str]:
        """What :meth:`_value` does not hold a value to."""
        if not self.quote or each.texts is not None:
            return frozenset()
        if each.kinds == STRING:
            return text_rules(each).unenforced
        if _is_list(each) and depth:
            counts = {"minItems", "maxItems"} & each.schema.keys()
            counts -= {"minItems"} if each.schema.get("minItems") in (0, 1) else set()
            return self._left(each.items(), depth - 1) | counts
        members = parameters(each.schema, each.root) if each.kinds == {"object"} and depth else None
        if members is None:
            return frozenset()
        return self._left_of(members, each.schema, each.root, depth - 1)

    def _members(self, found: Sequence[Parameter], mark: str, depth: int) -> Form:
        """Required ones first and in order; of the others any."""
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
        value = self._value(each, depth)
        if mark == "=" and not each.key.isidentifier():  # Python has no other way to name these
            return sequence(const(f"**{{{_dumped(each.key)}: "), value, const("}"))
        return sequence(const(self._key(each.key, mark) + mark), value)

    def _key(self, key: str, mark: str) -> str:
        return key if mark == "=" or _PLAIN_KEY.fullmatch(key) else self._quoted(key)

    def _quoted(self, text: str) -> str:
        """A string as it is between the quotes of the model, or where it has these, as in JSON."""
        return _dumped(text) if self.quote in text else f"{self.quote}{text}{self.quote}"

    def _value(self, each: Parameter, depth: int) -> Form:
        """A value in the syntax of the model, or in JSON, which is understood as well."""
        allowed, texts, quote = each.kinds, each.texts, self.quote
        if not quote:
            is_bool = allowed == {"boolean"}
            return one_of(map(const, ("True", "False"))) if is_bool else json_of(each.whole)
        if texts is not None:
            return one_of(const(self._quoted(text)) for text in texts)
        if allowed == STRING:
            return tag(quote, text_of(text_rules(each).patterns), quote)
        if _is_list(each) and depth:
            element = self._value(each.items(), depth - 1)
            elements = separated([element], self.separator, at_least_one=True)
            if not each.schema.get("minItems"):
                elements = optional(elements)
            return sequence(const("["), elements, const("]"))
        members = parameters(each.schema, each.root) if allowed == {"object"} and depth else None
        if allowed <= SCALARS or members is None:
            return json_of(each.whole)
        return sequence(const("{"), self._members(members, ":", depth - 1), const("}"))


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_list(each: Parameter) -> bool:
    """Whether it is a list, of which no more is known than what its elements have to be."""
    others = {"prefixItems", "allOf", "anyOf", "oneOf", "enum", "const"}
    return each.kinds == {"array"} and not others & each.schema.keys()


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
            self._arguments = Brackets(head.end, kind.literals.syntax)
        found = self._arguments.read(text)
        if found.nesting is Nesting.OPEN:
            return None
        try:
            inner = text[head.end + 1 : found.end - 1]
            names = [each.key for each in parameters(self._tools[head.name]) or ()]
            arguments = json_of_arguments(inner, kind.literals, kind.mark, names)
        except MalformedError:
            return Call()
        return Call(head.name, arguments, found.end)
