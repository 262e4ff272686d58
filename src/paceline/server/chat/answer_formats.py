"""Which formats a model answers in, by their names, or as its chat template shows.

Owns the tables of formats of tool calls and of marks of thoughts. Supporting another one is another
entry here, and for calls of a new kind a file in :mod:`paceline.server.chat.tool_calls`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paceline.server.chat.harmony import CHANNEL, MESSAGE
from paceline.server.chat.tool_calls import json_calls, literal_calls, xml_calls
from paceline.server.chat.tool_calls.format import ToolFormat
from paceline.text.tokenizer import Tokenizer

_ALSO_CALLED: dict[ToolFormat, tuple[str, ...]] = {
    json_calls.HERMES: ("ernie45", "granite4", "smollm3"),
    json_calls.LLAMA: ("llama3_json", "llama4_json"),
    xml_calls.QWEN3_CODER: ("qwen3_xml", "mimo", "step3p5"),
    json_calls.HUNYUAN: ("jamba",),
    json_calls.COHERE: ("cohere_command4",),
    literal_calls.PYTHONIC: ("llama4_pythonic",),
}
_FORMATS = (
    *(*_ALSO_CALLED, xml_calls.SEED_OSS, xml_calls.GLM45, xml_calls.GLM47, xml_calls.MINIMAX_M2),
    *(xml_calls.MINICPM5, xml_calls.DEEPSEEK_V32, xml_calls.DEEPSEEK_V4, xml_calls.HY_V3),
    *(xml_calls.KIMI_K3, json_calls.FUNCTIONARY31, json_calls.MISTRAL, json_calls.DEEPSEEK_V3),
    *(json_calls.DEEPSEEK_V31, json_calls.KIMI_K2, json_calls.GRANITE, json_calls.PHI4),
    *(json_calls.INTERNLM, json_calls.LONGCAT, json_calls.APERTUS, json_calls.XLAM),
    *(json_calls.NEMOTRON, json_calls.GIGACHAT3, literal_calls.OLMO3, literal_calls.LFM2),
    *(literal_calls.GEMMA4, literal_calls.FUNCTION_GEMMA),
)
TOOL_FORMATS = {
    name: form for form in _FORMATS for name in (form.name, *_ALSO_CALLED.get(form, ()))
}
"""By vLLM's names, and some of ours."""

_SHOWN_BY: tuple[tuple[tuple[str, ...], ToolFormat | None], ...] = (
    (("<seed:tool_call>",), xml_calls.SEED_OSS),
    (("<minimax:tool_call>",), xml_calls.MINIMAX_M2),
    (("]<]minimax[>[",), None),  # MiniMax M3: each key of an argument is a tag of its own
    ((">>>all",), None),  # functionary 3.2: ">>>", a name, a line of JSON
    (('<function name="', '<param name="'), xml_calls.MINICPM5),
    (("<function=", "<parameter="), xml_calls.QWEN3_CODER),
    (("<|start_header_id|>", "<function="), json_calls.FUNCTIONARY31),
    (("<function=",), None),
    (("<tool_sep{}>", ":opensource"), xml_calls.HY_V3),
    (("<tool_sep",), xml_calls.HY_V3_PREVIEW),
    (("<arg_key>", "</arg_key>\\n<arg_value>"), xml_calls.GLM45),
    (("<arg_key>", "</arg_key>\n<arg_value>"), xml_calls.GLM45),
    (("<arg_key>",), xml_calls.GLM47),
    (("<longcat_tool_call>",), json_calls.LONGCAT),
    (("[TOOL_CALLS]", "[ARGS]"), json_calls.MISTRAL),
    (("[TOOL_CALLS]",), json_calls.MISTRAL_LIST),
    (("DSML\uff5c", "function_calls"), xml_calls.DEEPSEEK_V32),
    (("DSML\uff5c", "tool_calls"), xml_calls.DEEPSEEK_V4),
    ((json_calls.CALLS_BEGIN, "```json"), json_calls.DEEPSEEK_V3),
    ((json_calls.CALLS_BEGIN,), json_calls.DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), json_calls.KIMI_K2),
    (("<|open|>", "<|close|>", "<|end_of_msg|>"), xml_calls.KIMI_K3),
    (("<|START_ACTION|>",), json_calls.COHERE),
    (("<|action_start|>",), json_calls.INTERNLM),
    (("<|tools_prefix|>",), json_calls.APERTUS),
    (("<|tool_call_start|>",), literal_calls.LFM2),
    (("<|tool_list_start|>",), literal_calls.LFM2),
    (("List of tools: [",), literal_calls.LFM2),
    (("<function_calls>",), literal_calls.OLMO3),
    (("<|tool_call>",), literal_calls.GEMMA4),
    (("<start_function_call>",), literal_calls.FUNCTION_GEMMA),
    (("<TOOLCALL>",), json_calls.NEMOTRON),
    (("<|role_sep|>", "<|function_call|>"), json_calls.GIGACHAT31),
    (("<|role_sep|>", "function call"), json_calls.GIGACHAT3),
    (("<tool_calls>",), json_calls.HUNYUAN),
    (("<|/tool|>",), json_calls.PHI4_MARKED),
    (("<|tool_call|>",), json_calls.GRANITE),
    (("<tool_call>",), json_calls.HERMES),
    (("func_name1(",), literal_calls.PYTHONIC),
    (("functools[",), json_calls.PHI4),
    (("<|python_tag|>",), json_calls.LLAMA),
    (("<|start_header_id|>",), json_calls.LLAMA),
    (("<|header_start|>",), json_calls.LLAMA),
)
"""Words that a chat template has if its model was taught a format, None for one that is not read
here; the first entry that fits counts."""


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format by its name, in the spelling of the chat template where that shows one. ``auto``
    asks the template alone, and gets None if it knows none. Names are
    :data:`paceline.server.http.config.TOOL_CALL_PARSERS`.
    """
    shown = _shown(tokenizer)
    named = TOOL_FORMATS.get(name)
    if named is None or (shown is not None and shown.name == named.name):
        return shown
    return named


def _shown(tokenizer: Tokenizer) -> ToolFormat | None:
    says = tokenizer.template_mentions
    if not says("tools"):
        return None
    return next((form for words, form in _SHOWN_BY if all(map(says, words))), None)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts stand between an opening and a closing mark, whichever comes first of each, and the
    answer follows, which may have marks around it as well.

    Attributes:
        shown_by: words of a chat template that show that the model was taught this format.
        answer: the marks that may stand before and behind the answer; empty if there are none.
        tail: a mark behind all of it, calls included; "" if there is none.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    shown_by: tuple[str, ...]
    answer: tuple[str, ...] = ()
    tail: str = ""


_THINK = ReasoningFormat(("<think>",), ("</think>",), ("think>",))
_LIKE_THINK = (
    *("deepseek_r1", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2"),
    *("nemotron_v3", "olmo3", "qwen3", "smollm3", "step3", "step3p5"),
)
_COHERE = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    ("<|START_THINKING|>",),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
_GIGACHAT3 = ReasoningFormat((), (), ("<|message_sep|>",), ("<|role_sep|>", "<|message_sep|>"))
"""Without thoughts: only the mark behind the answer is taken off."""
THOUGHT_FORMATS = {
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ("Here is my thought process:", "Here's my thought process:"),
    ),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), ("[THINK]",)),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), ("seed:think>",)),
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",), ("mm:think>",)),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), _COHERE),
    "gemma4": ReasoningFormat(("<|channel>thought",), ("<channel|>",), ("<|channel>",)),
    "apertus": ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",), ("<|inner_prefix|>",)),
    "exaone": ReasoningFormat(("<thought>", "<think>"), ("</thought>", "</think>"), ("<thought>",)),
    "hunyuan_a13b": replace(_THINK, shown_by=("<answer>",), answer=("<answer>", "</answer>")),
    "ernie45": replace(_THINK, shown_by=("<response>",), answer=("<response>", "</response>")),
    "hy_v3": ReasoningFormat(
        ("<think:opensource>", "<think>"),
        ("</think:opensource>", "</think>"),
        ("<think:opensource>", "'<think{}>'.format("),
    ),
    "kimi_k3": ReasoningFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        ("<|open|>think<|sep|>", "open_tag('think')"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        tail="<|close|>message<|sep|>",
    ),
    **dict.fromkeys(_LIKE_THINK, _THINK),
}
"""By vLLM's names, and ours. Where a template shows several of them, the first one counts."""


def reasoning_format(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format by its name; ``auto`` asks the chat template, and gets None if it knows none.
    Names are :data:`paceline.server.http.config.REASONING_PARSERS`.
    """
    if name == "none":
        return None
    if name in THOUGHT_FORMATS:
        return THOUGHT_FORMATS[name]
    for form in (*THOUGHT_FORMATS.values(), _GIGACHAT3):
        if any(tokenizer.template_mentions(word) for word in form.shown_by):
            return form
    return None


HARMONY_PARSERS = "openai_gptoss", "openai"
"""Harmony's names among parsers of thoughts and of calls, as in vLLM."""
_KIMIS_CALL, _MISTRALS_CALL = "<|tool_call_argument_begin|>", "[TOOL_CALLS]"
_TOOLS_IN_MESSAGE = "message['tools']"
"""What Phi-4-mini's template takes the tools from: a text in the message of the system."""


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How a model reads and writes chats: facts of its template, found when it is loaded.

    Attributes:
        is_harmony: it answers in Harmony, and the two that follow do not count.
        tools: how it writes calls; None where that is not known.
        thoughts: how it marks thoughts; None where it has none.
        knows_developers: the template has a role for developers.
        has_channels: the template is gpt-oss's, in which a message has thoughts or words.
        has_tools_in_message: the template takes tools from the message of the system.
        call_ids: what ids of earlier calls have to be: ``named`` by tool and number, as Kimi's, or
            ``short``, as Mistral's; "" where anything goes.
    """

    is_harmony: bool
    tools: ToolFormat | None
    thoughts: ReasoningFormat | None
    knows_developers: bool
    has_channels: bool
    has_tools_in_message: bool
    call_ids: Literal["named", "short", ""]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, reasoning_parser: str = "auto", tool_call_parser: str = "auto"
    ) -> ChatFormats:
        """The formats by these names; ``auto`` asks the chat template."""
        says, parsers = tokenizer.template_mentions, (reasoning_parser, tool_call_parser)
        shows_harmony = parsers == ("auto", "auto") and says(CHANNEL) and says(MESSAGE)
        is_named = any(map(str.__eq__, parsers, HARMONY_PARSERS))
        return cls(
            is_harmony=shows_harmony or is_named,
            tools=tool_format(tool_call_parser, tokenizer),
            thoughts=reasoning_format(reasoning_parser, tokenizer),
            knows_developers=says("developer"),
            has_channels=says(CHANNEL) and says("message.thinking"),
            has_tools_in_message=says(_TOOLS_IN_MESSAGE),
            call_ids="named" if says(_KIMIS_CALL) else "short" if says(_MISTRALS_CALL) else "",
        )
