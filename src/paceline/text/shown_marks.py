"""Marks of thoughts and of tool calls, which whoever reads an answer has to see.

Vocabularies call some of them special, and decoding leaves special tokens out, but not these. The
formats that need them are in :mod:`paceline.server.chat`.
"""

from __future__ import annotations

_THOUGHTS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
    *("<mm:think>", "</mm:think>", "<thought>", "</thought>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|channel>", "<channel|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    *("<answer>", "</answer>", "<response>", "</response>"),
    *("<think:opensource>", "</think:opensource>"),
)
_CALLS = (
    *("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<longcat_tool_call>", "</longcat_tool_call>"),
    *("<tool_calls>", "</tool_calls>", "<function_calls>", "</function_calls>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_sep>", "<TOOLCALL>", "</TOOLCALL>", "<|function_call|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|tools_prefix|>", "<|tools_suffix|>"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>"),
    *("<|python_start|>", "<|python_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<function", "</function>", "<param", "</param>"),
    *("<start_function_call>", "<end_function_call>", "<escape>"),
)
_HUNYUAN = ("tool_calls", "tool_call", "arg_key", "arg_value")
_DEEPSEEK = ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")


def _of_deepseek(words: str) -> str:
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


DEEPSEEK_CALLS = _of_deepseek(_DEEPSEEK[0])
"""What begins calls of DeepSeek V3, R1 and V3.1."""
SHOWN = frozenset(
    {
        *_THOUGHTS,
        *_CALLS,
        "<tool_sep:opensource>",
        *(f"{begin}{word}:opensource>" for begin in ("<", "</") for word in _HUNYUAN),
        "\uff5cDSML\uff5c",
        *map(_of_deepseek, _DEEPSEEK),
    }
)
HARMONY = frozenset({"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"})
"""Marks of gpt-oss's messages."""
XTML = frozenset({"<|open|>", "<|close|>", "<|sep|>"})
"""Marks of Kimi K3's messages."""
ROLES = frozenset({"<|message_sep|>\n\n", "<|role_sep|>\n"})
"""Marks of GigaChat 3's messages; their tokens have the line breaks in them."""
FAMILIES = (HARMONY, XTML, ROLES)
"""Marks that are shown where a vocabulary has all of one family: alone they mean something else."""
