"""Which format of tool calls a model uses: by its name, or as its chat template shows.

Owns the names. Supporting another format is another entry here and in
:mod:`paceline.server.chat.calls`.
"""

from __future__ import annotations

from paceline.server.chat.calls import json_formats, literal_calls, xml_calls
from paceline.server.chat.calls.format import ToolFormat
from paceline.text.tokenizer import Tokenizer

TOOL_FORMATS: dict[str, ToolFormat] = {
    **dict.fromkeys(("hermes", "ernie45", "granite4", "smollm3"), json_formats.HERMES),
    **dict.fromkeys(("llama", "llama3_json", "llama4_json"), json_formats.LLAMA),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo", "step3p5"), xml_calls.QWEN3_CODER),
    "seed_oss": xml_calls.SEED_OSS,
    "glm45": xml_calls.GLM45,
    "glm47": xml_calls.GLM47,
    "minimax_m2": xml_calls.MINIMAX_M2,
    "minicpm5": xml_calls.MINICPM5,
    "functionary_v31": json_formats.FUNCTIONARY31,
    "mistral": json_formats.MISTRAL,
    "deepseek_v3": json_formats.DEEPSEEK_V3,
    "deepseek_v31": json_formats.DEEPSEEK_V31,
    "deepseek_v32": xml_calls.DEEPSEEK_V32,
    "deepseek_v4": xml_calls.DEEPSEEK_V4,
    "kimi_k2": json_formats.KIMI_K2,
    "granite": json_formats.GRANITE,
    "phi4_mini_json": json_formats.PHI4,
    **dict.fromkeys(("hunyuan_a13b", "jamba"), json_formats.HUNYUAN),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), json_formats.COHERE),
    "internlm": json_formats.INTERNLM,
    "longcat": json_formats.LONGCAT,
    "apertus": json_formats.APERTUS,
    "xlam": json_formats.XLAM,
    **dict.fromkeys(("pythonic", "llama4_pythonic"), literal_calls.PYTHONIC),
    "olmo3": literal_calls.OLMO3,
    "lfm2": literal_calls.LFM2,
    "nemotron_json": json_formats.NEMOTRON,
    "gigachat3": json_formats.GIGACHAT3,
    "hy_v3": xml_calls.HY_V3,
    "kimi_k3": xml_calls.KIMI_K3,
    "gemma4": literal_calls.GEMMA4,
    "functiongemma": literal_calls.FUNCTION_GEMMA,
}
"""By vLLM's names, and some of ours."""

_SHOWN_BY: tuple[tuple[tuple[str, ...], ToolFormat | None], ...] = (
    (("<seed:tool_call>",), xml_calls.SEED_OSS),
    (("<minimax:tool_call>",), xml_calls.MINIMAX_M2),
    (("]<]minimax[>[",), None),  # MiniMax M3: each key of an argument is a tag of its own
    ((">>>all",), None),  # functionary 3.2: ">>>", a name, a line of JSON
    (('<function name="', '<param name="'), xml_calls.MINICPM5),
    (("<function=", "<parameter="), xml_calls.QWEN3_CODER),
    (("<|start_header_id|>", "<function="), json_formats.FUNCTIONARY31),
    (("<function=",), None),
    (("<tool_sep{}>", ":opensource"), xml_calls.HY_V3),
    (("<tool_sep",), xml_calls.HY_V3_PREVIEW),
    (("<arg_key>", "</arg_key>\\n<arg_value>"), xml_calls.GLM45),
    (("<arg_key>", "</arg_key>\n<arg_value>"), xml_calls.GLM45),
    (("<arg_key>",), xml_calls.GLM47),
    (("<longcat_tool_call>",), json_formats.LONGCAT),
    (("[TOOL_CALLS]", "[ARGS]"), json_formats.MISTRAL),
    (("[TOOL_CALLS]",), json_formats.MISTRAL_LIST),
    (("DSML\uff5c", "function_calls"), xml_calls.DEEPSEEK_V32),
    (("DSML\uff5c", "tool_calls"), xml_calls.DEEPSEEK_V4),
    ((json_formats.CALLS_BEGIN, "```json"), json_formats.DEEPSEEK_V3),
    ((json_formats.CALLS_BEGIN,), json_formats.DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), json_formats.KIMI_K2),
    (("<|open|>", "<|close|>", "<|end_of_msg|>"), xml_calls.KIMI_K3),
    (("<|START_ACTION|>",), json_formats.COHERE),
    (("<|action_start|>",), json_formats.INTERNLM),
    (("<|tools_prefix|>",), json_formats.APERTUS),
    (("<|tool_call_start|>",), literal_calls.LFM2),
    (("<|tool_list_start|>",), literal_calls.LFM2),
    (("List of tools: [",), literal_calls.LFM2),
    (("<function_calls>",), literal_calls.OLMO3),
    (("<|tool_call>",), literal_calls.GEMMA4),
    (("<start_function_call>",), literal_calls.FUNCTION_GEMMA),
    (("<TOOLCALL>",), json_formats.NEMOTRON),
    (("<|role_sep|>", "<|function_call|>"), json_formats.GIGACHAT31),
    (("<|role_sep|>", "function call"), json_formats.GIGACHAT3),
    (("<tool_calls>",), json_formats.HUNYUAN),
    (("<|/tool|>",), json_formats.PHI4_MARKED),
    (("<|tool_call|>",), json_formats.GRANITE),
    (("<tool_call>",), json_formats.HERMES),
    (("func_name1(",), literal_calls.PYTHONIC),
    (("functools[",), json_formats.PHI4),
    (("<|python_tag|>",), json_formats.LLAMA),
    (("<|start_header_id|>",), json_formats.LLAMA),
    (("<|header_start|>",), json_formats.LLAMA),
)
"""Words that a chat template has if its model was taught a format, None for one that is not read
here; the first entry that fits counts."""


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format by its name; ``auto`` asks the chat template, and gets None if it knows none.

    Models write some formats in several ways, and then the template says in which. Names are
    :data:`paceline.server.http.config.TOOL_CALL_PARSERS`.
    """
    shown = _shown(tokenizer)
    named = TOOL_FORMATS.get(name)
    if named is None or (shown is not None and shown.name == named.name):
        return shown
    return named


def _shown(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the chat template shows."""
    says = tokenizer.template_mentions
    if not says("tools"):
        return None
    return next((form for words, form in _SHOWN_BY if all(map(says, words))), None)
