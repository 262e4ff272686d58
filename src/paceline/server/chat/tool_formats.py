"""Which format of tool calls a model uses: by its name, or as its chat template shows.

Owns the names. Supporting another format is another entry here and in
:mod:`paceline.server.chat.calls`.
"""

from __future__ import annotations

from paceline.server.chat.calls import json_formats as json
from paceline.server.chat.calls import tag_formats as tags
from paceline.server.chat.calls.format import ToolFormat
from paceline.text.tokenizer import Tokenizer

FORMATS: dict[str, ToolFormat] = {
    **dict.fromkeys(("hermes", "ernie45", "granite4", "smollm3"), json.HERMES),
    **dict.fromkeys(("llama", "llama3_json", "llama4_json"), json.LLAMA),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo", "step3p5"), tags.QWEN3_CODER),
    "seed_oss": tags.SEED_OSS,
    "glm45": tags.GLM45,
    "glm47": tags.GLM47,
    "minimax_m2": tags.MINIMAX_M2,
    "minicpm5": tags.MINICPM5,
    "functionary_v31": json.FUNCTIONARY31,
    "mistral": json.MISTRAL,
    "deepseek_v3": json.DEEPSEEK_V3,
    "deepseek_v31": json.DEEPSEEK_V31,
    "deepseek_v32": tags.DEEPSEEK_V32,
    "deepseek_v4": tags.DEEPSEEK_V4,
    "kimi_k2": json.KIMI_K2,
    "granite": json.GRANITE,
    "phi4_mini_json": json.PHI4,
    **dict.fromkeys(("hunyuan_a13b", "jamba"), json.HUNYUAN),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), json.COHERE),
    "internlm": json.INTERNLM,
    "longcat": json.LONGCAT,
    "apertus": json.APERTUS,
    "xlam": json.XLAM,
    **dict.fromkeys(("pythonic", "llama4_pythonic"), tags.PYTHONIC),
    "olmo3": tags.OLMO3,
    "lfm2": tags.LFM2,
    "nemotron_json": json.NEMOTRON,
    "gigachat3": json.GIGACHAT3,
    "hy_v3": tags.HY_V3,
    "kimi_k3": tags.KIMI_K3,
    "gemma4": tags.GEMMA4,
    "functiongemma": tags.FUNCTION_GEMMA,
}
"""By vLLM's names, and some of ours."""

_SHOWN_BY: tuple[tuple[tuple[str, ...], ToolFormat | None], ...] = (
    (("<seed:tool_call>",), tags.SEED_OSS),
    (("<minimax:tool_call>",), tags.MINIMAX_M2),
    (("]<]minimax[>[",), None),  # MiniMax M3: each key of an argument is a tag of its own
    ((">>>all",), None),  # functionary 3.2: ">>>", a name, a line of JSON
    (('<function name="', '<param name="'), tags.MINICPM5),
    (("<function=", "<parameter="), tags.QWEN3_CODER),
    (("<|start_header_id|>", "<function="), json.FUNCTIONARY31),
    (("<function=",), None),
    (("<tool_sep{}>", ":opensource"), tags.HY_V3),
    (("<tool_sep",), tags.HY_V3_PREVIEW),
    (("<arg_key>", "</arg_key>\\n<arg_value>"), tags.GLM45),
    (("<arg_key>", "</arg_key>\n<arg_value>"), tags.GLM45),
    (("<arg_key>",), tags.GLM47),
    (("<longcat_tool_call>",), json.LONGCAT),
    (("[TOOL_CALLS]", "[ARGS]"), json.MISTRAL),
    (("[TOOL_CALLS]",), json.MISTRAL_LIST),
    (("DSML\uff5c", "function_calls"), tags.DEEPSEEK_V32),
    (("DSML\uff5c", "tool_calls"), tags.DEEPSEEK_V4),
    ((json.CALLS_BEGIN, "```json"), json.DEEPSEEK_V3),
    ((json.CALLS_BEGIN,), json.DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), json.KIMI_K2),
    (("<|open|>", "<|close|>", "<|end_of_msg|>"), tags.KIMI_K3),
    (("<|START_ACTION|>",), json.COHERE),
    (("<|action_start|>",), json.INTERNLM),
    (("<|tools_prefix|>",), json.APERTUS),
    (("<|tool_call_start|>",), tags.LFM2),
    (("<|tool_list_start|>",), tags.LFM2),
    (("List of tools: [",), tags.LFM2),
    (("<function_calls>",), tags.OLMO3),
    (("<|tool_call>",), tags.GEMMA4),
    (("<start_function_call>",), tags.FUNCTION_GEMMA),
    (("<TOOLCALL>",), json.NEMOTRON),
    (("<|role_sep|>", "<|function_call|>"), json.GIGACHAT31),
    (("<|role_sep|>", "function call"), json.GIGACHAT3),
    (("<tool_calls>",), json.HUNYUAN),
    (("<|/tool|>",), json.PHI4_MARKED),
    (("<|tool_call|>",), json.GRANITE),
    (("<tool_call>",), json.HERMES),
    (("func_name1(",), tags.PYTHONIC),
    (("functools[",), json.PHI4),
    (("<|python_tag|>",), json.LLAMA),
    (("<|start_header_id|>",), json.LLAMA),
    (("<|header_start|>",), json.LLAMA),
)
"""Words that a chat template has if its model was taught a format, None for one that is not read
here; the first entry that fits counts."""


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format by its name; ``auto`` asks the chat template, and gets None if it knows none.

    Models write some formats in several ways, and then the template says in which. Names are
    :data:`paceline.server.http.config.TOOL_CALL_PARSERS`.
    """
    shown = _shown(tokenizer)
    named = FORMATS.get(name)
    if named is None or (shown is not None and shown.name == named.name):
        return shown
    return named


def _shown(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the chat template shows."""
    says = tokenizer.template_mentions
    if not says("tools"):
        return None
    return next((form for words, form in _SHOWN_BY if all(map(says, words))), None)
