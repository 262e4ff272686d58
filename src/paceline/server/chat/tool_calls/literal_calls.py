"""Calls as source code has them: Python's ``name(key=value)``, Gemma's ``call:name{key:value}``.

A call is told when it is whole.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import RequestError
from paceline.json_schema.keywords import NARROWING
from paceline.json_schema.resolver import Members, Resolver
from paceline.server.chat.tool_calls.json_calls import LIST
from paceline.server.chat.tool_calls.kind import (
    LIST_END,
    NAME,
    Brackets,
    EitherKind,
    ForcedCall,
    Form,
    Nesting,
    Schema,
    Syntax,
    ToolCall,
    ToolFormat,
    Tools,
    const,
    find_head,
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
from paceline.server.chat.tool_calls.literals import (
    PYTHON,
    Literals,
    MalformedError,
    json_of_arguments,
)
from paceline.server.chat.tool_calls.parameters import (
    STRING,
    Parameter,
    parameters,
    text_rules,
)

_PLAIN_KEY = re.compile(r"\w(?:[\w .-]*\w)?")
_DEEPEST = 4
"""Lists and objects within each other that are written as the model does; deeper ones are JSON."""

Inside = tuple[int, ...]
"""The schemas that a value stands in, so that none is gone into again."""


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

    def forced(self, name: str, schema: Schema) -> ForcedCall:
        opening, closing = self.brackets[0], self.brackets[1]
        begin = self.begin.replace("%s", name) + opening
        resolver = Resolver(schema)
        members = resolver.members(schema)
        named = parameters(members, resolver)
        if named is None:
            value = json_of(Parameter("", members.others, resolver).whole)
            any_key = sequence(regex(r"[A-Za-z_]\w{0,63}"), const(self.mark), value)
            content = separated([any_key], self.separator)
        else:
            content = self._members(named, self.mark, ())
        left = self._left_of(members, resolver, ())
        return ForcedCall(tag(begin, content, closing + self.after), left)

    def _left_of(self, members: Members, resolver: Resolver, inside: Inside) -> frozenset[str]:
        left = (self._left(each, inside) for each in parameters(members, resolver) or ())
        return members.unenforced.union(*left)

    def _left(self, each: Parameter, inside: Inside) -> frozenset[str]:
        """What :meth:`_value` does not hold a value to."""
        if not self.quote or _listed_texts(each) is not None:
            return frozenset()
        if each.kinds == STRING:
            return text_rules(each).unenforced
        goes_in, inside = _within(each, inside)
        if _is_list(each) and goes_in:
            nodes = each.resolver.conjuncts(each.schema)
            counts = {"minItems", "maxItems"}.intersection(*map(frozenset, nodes))
            counts -= {"minItems"} if _least(each) <= 1 else set()
            return self._left(each.items(), inside) | counts
        members = each.members() if each.kinds == {"object"} and goes_in else None
        if members is None or members.takes_others:
            return frozenset()
        return self._left_of(members, each.resolver, inside)

    def _members(self, named: Sequence[Parameter], mark: str, inside: Inside) -> Form:
        """Required ones first and in order; of the others any."""
        needed = [self._member(each, mark, inside) for each in named if each.is_required]
        others = [self._member(each, mark, inside) for each in named if not each.is_required]
        if not needed:
            return separated(others, self.separator) if others else const("")
        comma = const(self.separator)
        parts = [part for each in needed for part in (comma, each)][1:]
        if others:
            parts.append(star(sequence(comma, one_of(others))))
        return sequence(*parts)

    def _member(self, each: Parameter, mark: str, inside: Inside) -> Form:
        value = self._value(each, inside)
        if mark == "=" and not each.key.isidentifier():  # Python has no other way to name these
            return sequence(const(f"**{{{_dumped(each.key)}: "), value, const("}"))
        return sequence(const(self._key(each.key, mark) + mark), value)

    def _key(self, key: str, mark: str) -> str:
        return key if mark == "=" or _PLAIN_KEY.fullmatch(key) else self._quoted(key)

    def _quoted(self, text: str) -> str:
        """A string as it is between the quotes of the model, or where it has these, as in JSON."""
        return _dumped(text) if self.quote in text else f"{self.quote}{text}{self.quote}"

    def _value(self, each: Parameter, inside: Inside) -> Form:
        """A value in the syntax of the model, or in JSON, which is understood as well."""
        allowed, quote = each.kinds, self.quote
        if not quote:
            is_truth = allowed == {"boolean"} and not each.narrowing
            return one_of(map(const, ("True", "False"))) if is_truth else json_of(each.whole)
        texts = _listed_texts(each)
        if texts is not None:
            return one_of(const(self._quoted(text)) for text in texts)
        if allowed == STRING:
            return tag(quote, text_of(text_rules(each).patterns), quote)
        goes_in, inside = _within(each, inside)
        if _is_list(each) and goes_in:
            element = self._value(each.items(), inside)
            elements = separated([element], self.separator, at_least_one=True)
            if not _least(each):
                elements = optional(elements)
            return sequence(const("["), elements, const("]"))
        members = each.members() if allowed == {"object"} and goes_in else None
        named = parameters(members, each.resolver) if members is not None else None
        if named is None:
            return json_of(each.whole)
        return sequence(const("{"), self._members(named, ":", inside), const("}"))


def _within(each: Parameter, inside: Inside) -> tuple[bool, Inside]:
    """Whether a value is written as the model does, and what those in it stand in."""
    place = each.resolver.place(each.schema)
    return len(inside) < _DEEPEST and place not in inside, (*inside, place)


def _listed_texts(each: Parameter) -> list[str] | None:
    """The strings that alone are allowed; None where other values are."""
    return each.values if each.kinds == STRING else None


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_list(each: Parameter) -> bool:
    """Whether it is a list, of which no more is known than what its elements have to be."""
    others = NARROWING - {"items", "minItems", "maxItems"} | {"anyOf", "oneOf"}
    nodes = each.resolver.conjuncts(each.schema)
    return each.kinds == {"array"} and len(nodes) == 1 and not others & nodes[0].keys()


def _least(each: Parameter) -> int:
    """How many elements a list has at least."""
    counts = [node.get("minItems") for node in each.resolver.conjuncts(each.schema)]
    return max((each for each in counts if isinstance(each, int)), default=0)


def _names(schema: Schema) -> list[str]:
    """Of the parameters; none where the schema, which did not have to hold, says too much."""
    try:
        return list(Resolver(schema).members(schema).named)
    except RequestError:
        return []


class LiteralText:
    """See :class:`~paceline.server.chat.tool_calls.kind.CallText`."""

    def __init__(self, kind: LiteralCalls, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._arguments: Brackets | None = None

    def read(self, text: str) -> ToolCall | None:
        kind = self._kind
        head = find_head(kind.head, kind.brackets[0], text)
        if head is None:
            return None
        if head.name not in self._tools:
            return ToolCall()
        if self._arguments is None:
            self._arguments = Brackets(head.end, kind.literals.syntax)
        found = self._arguments.read(text)
        if found.nesting is Nesting.OPEN:
            return None
        try:
            inner = text[head.end + 1 : found.end - 1]
            names = _names(self._tools[head.name])
            arguments = json_of_arguments(inner, kind.literals, kind.mark, names)
        except MalformedError:
            return ToolCall()
        return ToolCall(head.name, arguments, found.end)


_IN_NAMES = f"{string.ascii_letters}{string.digits}_.-"
_PYTHON = LiteralCalls(rf"\s*(?:\[\s*)?{NAME}\s*(?=\()", "%s", "")
PYTHONIC = ToolFormat(
    "pythonic",
    _PYTHON,
    opening=("<|python_start|>",),
    closing=(*LIST_END, "<|python_end|>"),
    start="[",
    again=_IN_NAMES + "[",
    before="[",
    after="]",
    separator=", ",
)
OLMO3 = ToolFormat(
    "olmo3",
    _PYTHON,
    opening=("<function_calls>",),
    closing=("</function_calls>",),
    again=_IN_NAMES + "[",
    before="<function_calls>\n",
    after="\n</function_calls>",
    separator="\n",
)
LFM2 = ToolFormat(
    "lfm2",
    EitherKind((_PYTHON, LIST)),
    opening=("<|tool_call_start|>",),
    closing=(*LIST_END, "<|tool_call_end|>"),
    again=_IN_NAMES + "[{",
    before="<|tool_call_start|>[",
    after="]<|tool_call_end|>",
    separator=", ",
)


def _gemma(name: str, begin: str, end: str, quote: str) -> ToolFormat:
    literals = Literals(
        # Models write quotation marks too; as apostrophes they begin nothing.
        Syntax((quote, '"', "'"), "{}[]", before=":,{["),
        key=re.compile(r"[^:,{}\[\]]+"),
        word=re.compile(rf"(?:(?!{re.escape(quote)})[^,{{}}\[\]])+"),
        is_python=False,
    )
    call = LiteralCalls(
        rf"\s*call:\s*{NAME}\s*(?=\{{)", f"{begin}call:%s", end, literals, "{}", ":", ",", quote
    )
    return ToolFormat(name, call, opening=(begin,), closing=(end,))


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
