"""Formats of models that write the arguments of a call as a JSON object."""

from __future__ import annotations

import re

from paceline.server.chat.calls.call_ids import tool_of_id
from paceline.server.chat.calls.format import LIST_END, ToolFormat
from paceline.server.chat.calls.json_calls import JsonCalls, NamedJson
from paceline.server.chat.calls.kind import NAME, CallKind, EitherKind

OBJECT = '{"name": "%s", "arguments": '
LIST = JsonCalls(OBJECT, is_listed=True)

HERMES = ToolFormat(
    "hermes",
    JsonCalls(f"<tool_call>\n{OBJECT}", "}\n</tool_call>"),
    opening=("<tool_call>",),
    closing=("</tool_call>",),
    separator="\n",
)
LONGCAT = ToolFormat(
    "longcat",
    JsonCalls(f"<longcat_tool_call>\n{OBJECT}", "}\n</longcat_tool_call>"),
    opening=("<longcat_tool_call>",),
    closing=("</longcat_tool_call>",),
    separator="\n",
)
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
    call: CallKind = LIST,
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
    EitherKind((_MISTRAL_NAMED, LIST)),
    opening=("[TOOL_CALLS]",),
    closing=LIST_END,
    again="{",
)
MISTRAL_LIST = ToolFormat(
    "mistral",
    EitherKind((LIST, _MISTRAL_NAMED)),
    opening=("[TOOL_CALLS]",),
    closing=LIST_END,
    again="{",
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
