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
from paceline.json_schema.resolver import Resolver
from paceline.server.chat.tool_calls.format import (
    LIST_END,
    NAME,
    ForcedCall,
    Schema,
    ToolCall,
    ToolFormat,
    Tools,
)
from paceline.server.chat.tool_calls.json_calls import LIST, NamedText, offered
from paceline.server.chat.tool_calls.parameters import (
    STRING,
    Parameter,
    parameters,
    text_rules,
)
from paceline.server.chat.tool_calls.tag_forms import (
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
from paceline.server.chat.tool_calls.values import (
    PYTHON,
    Literals,
    MalformedError,
    Syntax,
    json_of_arguments,
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
        arguments = _Arguments(self)
        content = arguments.of(schema)
        begin = self.begin.replace("%s", name) + opening
        return ForcedCall(tag(begin, content, closing + self.after), frozenset(arguments.left))


class _Arguments:
    """The arguments of forced calls; ``left`` collects the keywords that they are not held to."""

    def __init__(self, calls: LiteralCalls) -> None:
        self._calls = calls
        self.left = set[str]()

    def of(self, schema: Schema) -> Form:
        resolver = Resolver(schema)
        members = resolver.members(schema)
        self.left |= members.unenforced
        named = parameters(members, resolver)
        if named is not None:
            return self._members(named, self._calls.mark, ())
        value = json_of(Parameter("", members.others, resolver).whole)
        any_key = sequence(regex(r"[A-Za-z_]\w{0,63}"), const(self._calls.mark), value)
        return separated([any_key], self._calls.separator)

    def _members(self, named: Sequence[Parameter], mark: str, inside: Inside) -> Form:
        """Required ones first and in order; of the others any."""
        needed = [self._member(each, mark, inside) for each in named if each.is_required]
        others = [self._member(each, mark, inside) for each in named if not each.is_required]
        separator = self._calls.separator
        if not needed:
            return separated(others, separator) if others else const("")
        comma = const(separator)
        parts = [part for each in needed for part in (comma, each)][1:]
        if others:
            parts.append(star(sequence(comma, one_of(others))))
        return sequence(*parts)

    def _member(self, each: Parameter, mark: str, inside: Inside) -> Form:
        key, value = each.key, self._value(each, inside)
        if mark == "=" and not key.isidentifier():  # Python has no other way to name these
            return sequence(const(f"**{{{_dumped(key)}: "), value, const("}"))
        written = key if mark == "=" or _PLAIN_KEY.fullmatch(key) else self._quoted(key)
        return sequence(const(written + mark), value)

    def _quoted(self, text: str) -> str:
        """A string as it is between the quotes of the model, or where it has these, as in JSON."""
        quote = self._calls.quote
        return _dumped(text) if quote in text else f"{quote}{text}{quote}"

    def _value(self, each: Parameter, inside: Inside) -> Form:
        """A value in the syntax of the model, or in JSON, which is understood as well."""
        allowed, quote = each.kinds, self._calls.quote
        if not quote:
            is_truth = allowed == {"boolean"} and not each.narrowing
            return one_of(map(const, ("True", "False"))) if is_truth else json_of(each.whole)
        texts = each.values if allowed == STRING else None
        if texts is not None:
            return one_of(const(self._quoted(text)) for text in texts)
        if allowed == STRING:
            rules = text_rules(each)
            self.left |= rules.unenforced
            return tag(quote, text_of(rules.patterns), quote)
        place = each.resolver.place(each.schema)
        if len(inside) < _DEEPEST and place not in inside:
            inside = (*inside, place)
            if _is_list(each):
                return self._list(each, inside)
            members = each.members() if allowed == {"object"} else None
            named = None if members is None else parameters(members, each.resolver)
            if members is not None and named is not None:
                self.left |= members.unenforced
                return sequence(const("{"), self._members(named, ":", inside), const("}"))
        return json_of(each.whole)

    def _list(self, each: Parameter, inside: Inside) -> Form:
        (node,) = each.resolver.conjuncts(each.schema)
        least = node.get("minItems")
        least = least if isinstance(least, int) else 0
        self.left |= {"minItems", "maxItems"} & node.keys() - (
            {"minItems"} if least <= 1 else set()
        )
        element = self._value(each.items(), inside)
        elements = separated([element], self._calls.separator, at_least_one=True)
        return sequence(const("["), elements if least else optional(elements), const("]"))


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_list(each: Parameter) -> bool:
    """Whether it is a list, of which no more is known than what its elements have to be."""
    others = NARROWING - {"items", "minItems", "maxItems"} | {"anyOf", "oneOf"}
    nodes = each.resolver.conjuncts(each.schema)
    return each.kinds == {"array"} and len(nodes) == 1 and not others & nodes[0].keys()


def _names(schema: Schema) -> list[str]:
    """Of the parameters; none where the schema, which did not have to hold, says too much."""
    try:
        return list(Resolver(schema).members(schema).named)
    except RequestError:
        return []


class LiteralText(NamedText):
    """See :class:`~paceline.server.chat.tool_calls.format.CallReader`; a call comes whole."""

    def __init__(self, calls: LiteralCalls, tools: Tools) -> None:
        super().__init__(calls.head, tools, offered, calls.literals.syntax, calls.brackets[0])
        self._calls = calls

    def _call(self, name: str, arguments: str, end: int | None) -> ToolCall | None:
        if end is None:
            return None
        calls, names = self._calls, _names(self._tools[name])
        try:
            inner = json_of_arguments(arguments[1:-1], calls.literals, calls.mark, names)
        except MalformedError:
            return ToolCall()
        return ToolCall(name, inner, end)


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
    _PYTHON,
    opening=("<|tool_call_start|>",),
    closing=(*LIST_END, "<|tool_call_end|>"),
    again=_IN_NAMES + "[{",
    before="<|tool_call_start|>[",
    after="]<|tool_call_end|>",
    separator=", ",
    other_call=LIST,
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
