"""Calls whose arguments are a JSON object, and the formats of models that write such calls.

The name stands in an object around the arguments, or before them. As soon as the name and the start
of the arguments are there, a call is certain and its arguments are told as the model writes them:
like OpenAI's, they may end early, or be no JSON, if the model ends early or errs after that. An
object with its members in another order is told when it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from paceline.server.chat.tool_calls.format import (
    LIST_END,
    NAME,
    CallSyntax,
    ForcedCall,
    Schema,
    ToolCall,
    ToolFormat,
    Tools,
    find_head,
)
from paceline.server.chat.tool_calls.tag_forms import call_tag, json_of
from paceline.server.chat.tool_calls.values import JSON, Brackets, Nesting, Syntax, values_of


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A call is an object: ``{"name": NAME, "arguments": {...}}``.

    Attributes:
        begin, end: what a forced call is written with around its arguments, see :func:`call_tag`.
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

    def forced(self, name: str, schema: Schema) -> ForcedCall:
        return ForcedCall(call_tag(self.begin, name, json_of(schema), self.end))

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
    """See :class:`~paceline.server.chat.tool_calls.format.CallReader`."""

    def __init__(self, kind: JsonCalls, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._brackets: dict[int, Brackets] = {}

    def read(self, text: str) -> ToolCall | None:
        lead = re.match(self._kind.lead, text)
        begin = lead.end() if lead else 0
        head = re.match(self._kind.head, text)
        if head is not None and head["name"] in self._tools:
            whole_call = arguments = self._nested(text, head.end())
            if whole_call.nesting is Nesting.CLOSED:  # other members may follow
                whole_call = self._nested(text, begin)
            end = None if whole_call.nesting is Nesting.OPEN else whole_call.end
            certain = len(text) if arguments.nesting is Nesting.OPEN else arguments.end
            return ToolCall(head["name"], text[head.end() : certain], end)
        if text[begin : begin + 1] not in ("", "{"):
            return ToolCall()
        whole = self._nested(text, begin)
        if whole.nesting is Nesting.CLOSED:
            return ToolCall(*self._kind.parsed(text[begin : whole.end], self._tools), whole.end)
        return None if whole.nesting is Nesting.OPEN else ToolCall()

    def _nested(self, text: str, start: int) -> Brackets:
        return self._brackets.setdefault(start, Brackets(start)).read(text)


def offered(name: str, tools: Tools) -> str:
    """The name, if it is one of a tool that was offered."""
    return name if name in tools else ""


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A call is a name, a mark, and the object of its arguments.

    Attributes:
        head: the pattern of what comes before the object.
        begin, end: what a forced call is written with around it, see :func:`call_tag`.
        named_by: the tool that is meant by what the head has as the name; "" for none.
    """

    head: str
    begin: str
    end: str
    named_by: Callable[[str, Tools], str] = offered

    def reader(self, tools: Tools) -> NamedText:
        return NamedText(self.head, tools, self.named_by)

    def forced(self, name: str, schema: Schema) -> ForcedCall:
        return ForcedCall(call_tag(self.begin, name, json_of(schema), self.end))


class NamedText:
    """Reads a call whose ``head``, a pattern, comes before the ``bracket`` that opens its
    arguments. They end where that is closed in their syntax.
    """

    def __init__(
        self,
        head: str,
        tools: Tools,
        named_by: Callable[[str, Tools], str],
        syntax: Syntax = JSON,
        bracket: str = "{",
    ) -> None:
        self._head = head
        self._tools = tools
        self._named_by = named_by
        self._syntax = syntax
        self._bracket = bracket
        self._arguments: Brackets | None = None

    def read(self, text: str) -> ToolCall | None:
        head = find_head(self._head, self._bracket, text)
        if head is None:
            return None
        name = self._named_by(head.name, self._tools)
        if not name:
            return ToolCall()
        if self._arguments is None:
            self._arguments = Brackets(head.end, self._syntax)
        arguments = self._arguments.read(text)
        end = None if arguments.nesting is Nesting.OPEN else arguments.end
        return self._call(name, text[head.end : end], end)

    def _call(self, name: str, arguments: str, end: int | None) -> ToolCall | None:
        return ToolCall(name, arguments, end)


_CANONICAL = re.compile(r"functions\.(.+):\d+", re.DOTALL)
_PREFIX = r"(?:[\w-]*functions[._:-]|tools?[.:])*"
_OPAQUE = re.compile(r"(?:call|toolu|chatcmpl-tool)[_-][A-Za-z0-9]+")
"""Ids of other APIs, which say nothing of the tool."""


def tool_of_id(call_id: str, names: Collection[str]) -> str:
    """The name of the offered tool that an id means; "" for none.

    Models are taught ``functions.NAME:INDEX``, but they imitate the ids of earlier messages:
    without prefix or index, with another prefix, or with only letters, digits and ``_-``. An id
    that says nothing means the only tool that was offered.

    >>> [tool_of_id(i, ["get", "set"]) for i in ("functions.get:0", "functions_set_1", "put:0")]
    ['get', 'set', '']
    """
    canonical = _CANONICAL.fullmatch(call_id)
    if canonical and canonical[1] in names:
        return canonical[1]
    for name in sorted(names, key=len, reverse=True):
        written = "[._-]".join(map(re.escape, re.split("[._-]", name)))
        if re.fullmatch(rf"{_PREFIX}{written}(?::\w*|[._-]\d+)?", call_id):
            return name
    if len(names) == 1 and _OPAQUE.fullmatch(call_id):
        return next(iter(names))
    return ""


OBJECT = '{"name": "%s", "arguments": '
LIST = JsonCalls(OBJECT, is_listed=True)


def _hermes(name: str, mark: str) -> ToolFormat:
    return ToolFormat(
        name,
        JsonCalls(f"<{mark}>\n{OBJECT}", f"}}\n</{mark}>"),
        opening=(f"<{mark}>",),
        closing=(f"</{mark}>",),
        separator="\n",
    )


HERMES = _hermes("hermes", "tool_call")
LONGCAT = _hermes("longcat", "longcat_tool_call")
LLAMA = ToolFormat(
    "llama",
    JsonCalls('{"name": "%s", "parameters": '),
    opening=("<|python_tag|>", "<|python_start|>"),
    closing=(";", "<|python_end|>"),
    start="{",
    again="{",
    separator="; ",
)
INTERNLM = ToolFormat(
    "internlm",
    JsonCalls(
        '<|action_start|><|plugin|>\n{"name": "%s", "parameters": ',
        "}<|action_end|>",
    ),
    opening=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
    closing=("<|action_end|>",),
)


def _listed(
    name: str,
    before: str,
    after: str,
    opening: tuple[str, ...],
    call: CallSyntax = LIST,
    drops: str = "",
) -> ToolFormat:
    """Calls in a JSON list between two marks; ``drops`` is dropped behind them as well."""
    return ToolFormat(
        name,
        call,
        opening,
        closing=(*LIST_END, *filter(None, [after, drops])),
        again="{[",
        before=f"{before}[",
        after=f"]{after}",
        separator=", ",
    )


GIGACHAT3 = ToolFormat(
    "gigachat3",
    JsonCalls(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}"),
    # The mark of the message's end is taken off with the words; the later models need none.
    opening=(
        "<|message_sep|>\n\nfunction call<|role_sep|>",
        "function call<|role_sep|>",
        "<|function_call|>",
    ),
    closing=("<|message_sep|>",),
)
GIGACHAT31 = ToolFormat(
    "gigachat3",
    JsonCalls(f"<|function_call|>{OBJECT}"),
    opening=("<|function_call|>", "function call<|role_sep|>"),
    closing=("<|message_sep|>",),
)
"""As the template of GigaChat 3.1 has it."""
XLAM = ToolFormat(
    "xlam", LIST, (), LIST_END, start="[", again="{[", before="[", after="]", separator=", "
)
GRANITE = _listed("granite", "<|tool_call|>", "", ("<|tool_call|>",))
PHI4_MARKS = ("<|tool_call|>", "<|/tool_call|>")
PHI4 = _listed("phi4_mini_json", "functools", "", ("functools", PHI4_MARKS[0]), drops=PHI4_MARKS[1])
PHI4_MARKED = _listed("phi4_mini_json", *PHI4_MARKS, PHI4.opening)
"""As the model's own template has it."""
NEMOTRON = _listed("nemotron_json", "<TOOLCALL>", "</TOOLCALL>", ("<TOOLCALL>",))
HUNYUAN = _listed("hunyuan_a13b", "<tool_calls>", "</tool_calls>", ("<tool_calls>",))
COHERE = _listed(
    "cohere_command3",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    ("<|START_ACTION|>",),
    JsonCalls(
        '{"tool_call_id": "#", "tool_name": "%s", "parameters": ',
        name_key="tool_name",
        is_listed=True,
    ),
)
APERTUS = _listed(
    "apertus",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    ("<|tools_prefix|>",),
    JsonCalls('{"%s": ', name_key=None, is_listed=True),
)

_MISTRAL_NAMED = NamedJson(
    rf"\s*{NAME}(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{{)", "[TOOL_CALLS]%s[ARGS]", ""
)
MISTRAL = ToolFormat(
    "mistral",
    _MISTRAL_NAMED,
    opening=("[TOOL_CALLS]",),
    closing=LIST_END,
    again="{",
    other_call=LIST,
)
MISTRAL_LIST = replace(
    MISTRAL,
    call=LIST,
    other_call=_MISTRAL_NAMED,
    before="[TOOL_CALLS][",
    after="]",
    separator=", ",
)

FUNCTIONARY31 = ToolFormat(
    "functionary_v31",
    NamedJson(rf"\s*{NAME}\s*>\s*(?=\{{)", "<function=%s>", "</function>"),
    opening=("<function=",),
    closing=("</function>",),
)


def _token(words: str) -> str:
    """A token of DeepSeek's vocabulary, which has characters of its own for bars and spaces."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


CALLS_BEGIN, _CALLS_END = _token("tool calls begin"), _token("tool calls end")
_CALL_BEGIN, _CALL_END, _SEP = map(_token, ("tool call begin", "tool call end", "tool sep"))
_DEEPSEEK_HEAD = (
    rf"\s*(?:{_CALL_BEGIN})?\s*(?:function{_SEP})?{NAME}\s*(?:{_SEP})?\s*(?:```json)?\s*(?=\{{)"
)


def _deepseek(name: str, begin: str, end: str, separator: str) -> ToolFormat:
    return ToolFormat(
        name,
        NamedJson(_DEEPSEEK_HEAD, _CALL_BEGIN + begin, end + _CALL_END),
        opening=(CALLS_BEGIN,),
        inner=(_CALL_BEGIN,),
        closing=("```", _CALL_END, _CALLS_END),
        before=CALLS_BEGIN,
        after=_CALLS_END,
        separator=separator,
    )


DEEPSEEK_V3 = _deepseek("deepseek_v3", f"function{_SEP}%s\n```json\n", "\n```", "\n")
DEEPSEEK_V31 = _deepseek("deepseek_v31", f"%s{_SEP}", "", "")
_KIMI_K2_BEGIN, _KIMI_K2_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI_K2 = ToolFormat(
    "kimi_k2",
    NamedJson(
        rf"\s*(?:{re.escape(_KIMI_K2_BEGIN)})?\s*(?P<name>[^<{{]{{1,128}}?)\s*"
        rf"{re.escape(_KIMI_K2_ARGUMENTS)}\s*(?=\{{)",
        f"{_KIMI_K2_BEGIN}functions.%s:#{_KIMI_K2_ARGUMENTS}",
        "<|tool_call_end|>",
        named_by=tool_of_id,
    ),
    # Some write the mark of a section with "call"; vLLM's parser takes both.
    opening=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    inner=(_KIMI_K2_BEGIN,),
    closing=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    before="<|tool_calls_section_begin|>",
    after="<|tool_calls_section_end|>",
)
