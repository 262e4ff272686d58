"""Two calls in each format, as models are forced to write them: of the weather, and of a sum."""

from __future__ import annotations

import re
from typing import Any

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "hourly": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER_SCHEMA, "add": NO_ARGUMENTS}
CALLS = [("weather", {"city": "Rome", "days": 3}), ("add", {})]

_OBJECT = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
_PLAIN = '{"name": "add", "arguments": {}}'
_LIST = f"[{_OBJECT}, {_PLAIN}]"
_PYTHON = 'weather(city="Rome", days=3)'
_QWEN = """<MARK>
<function=weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
3
</parameter>
</function>
</MARK>
<MARK>
<function=add>
</function>
</MARK>"""
_GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>add
</tool_call>"""
_HUNYUAN = re.sub(
    r"<(/?\w+)>",
    r"<\1:opensource>",
    """<tool_calls>
<tool_call>weather<tool_sep>
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>add<tool_sep>
</tool_call>
</tool_calls>""",
)
_XTML = re.sub(
    r"<(/?)([^<>]+)>",
    lambda tag: f"<|{'close' if tag[1] else 'open'}|>{tag[2]}<|sep|>",
    '<tools><call tool="weather" index="1"><argument key="city" type="string">Rome</argument>'
    '<argument key="days" type="number">3</argument></call><call tool="add" index="2"></call>'
    "</tools>",
)
_MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Rome</parameter>
<parameter name="days">3</parameter>
</invoke>
<invoke name="add">
</invoke>
</minimax:tool_call>"""
_MINICPM = """<function name="weather"><param name="city">Rome</param><param name="days">3</param>\
</function>
<function name="add"></function>"""
_BAR, _SPACE = "\uff5c", "\u2581"
_DSML = """<|DSML|MARK>
<|DSML|invoke name="weather">
<|DSML|parameter name="city" string="true">Rome</|DSML|parameter>
<|DSML|parameter name="days" string="false">3</|DSML|parameter>
</|DSML|invoke>
<|DSML|invoke name="add">
</|DSML|invoke>
</|DSML|MARK>""".replace("|", _BAR)
_ARGUMENTS = '{"city": "Rome", "days": 3}'


def deepseek(text: str) -> str:
    """Its tokens are written here with plain bars and spaces."""
    parts = text.split("<|")
    marks = [part.partition("|>") for part in parts[1:]]
    told = (f"<{_BAR}{mark.replace(' ', _SPACE)}{_BAR}>{rest}" for mark, _, rest in marks)
    return parts[0] + "".join(told)


SAMPLES = {
    "hermes": f"<tool_call>\n{_OBJECT}\n</tool_call>\n<tool_call>\n{_PLAIN}\n</tool_call>",
    "longcat": (
        f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>\n"
        f"<longcat_tool_call>\n{_PLAIN}\n</longcat_tool_call>"
    ),
    "llama": f"{_OBJECT}; {_PLAIN}".replace("arguments", "parameters"),
    "internlm": (
        f"<|action_start|><|plugin|>\n{_OBJECT}<|action_end|>"
        f"<|action_start|><|plugin|>\n{_PLAIN}<|action_end|>"
    ).replace("arguments", "parameters"),
    "xlam": _LIST,
    "granite": f"<|tool_call|>{_LIST}",
    "phi4_mini_json": f"functools{_LIST}",
    "hunyuan_a13b": f"<tool_calls>{_LIST}</tool_calls>",
    "cohere_command3": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f'{_ARGUMENTS}}}, {{"tool_call_id": "1", "tool_name": "add", "parameters": {{}}}}]'
        "<|END_ACTION|>"
    ),
    "nemotron_json": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "gigachat3": "".join(
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{each}" for each in (_OBJECT, _PLAIN)
    ),
    "hy_v3": _HUNYUAN,
    "kimi_k3": _XTML,
    "apertus": f'<|tools_prefix|>[{{"weather": {_ARGUMENTS}}}, {{"add": {{}}}}]<|tools_suffix|>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]add[ARGS]{{}}",
    "deepseek_v3": deepseek(
        "<|tool calls begin|><|tool call begin|>function<|tool sep|>weather\n```json\n"
        f"{_ARGUMENTS}\n```<|tool call end|>\n<|tool call begin|>function<|tool sep|>add\n"
        "```json\n{}\n```<|tool call end|><|tool calls end|>"
    ),
    "deepseek_v31": deepseek(
        f"<|tool calls begin|><|tool call begin|>weather<|tool sep|>{_ARGUMENTS}<|tool call end|>"
        "<|tool call begin|>add<|tool sep|>{}<|tool call end|><|tool calls end|>"
    ),
    "deepseek_v32": _DSML.replace("MARK", "function_calls"),
    "deepseek_v4": _DSML.replace("MARK", "tool_calls"),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|><|tool_call_begin|>"
        "functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "qwen3_coder": _QWEN.replace("MARK", "tool_call"),
    "seed_oss": _QWEN.replace("MARK", "seed:tool_call"),
    "glm45": _GLM,
    "glm47": _GLM.replace("\n", ""),
    "minimax_m2": _MINIMAX,
    "minicpm5": _MINICPM,
    "functionary_v31": f"<function=weather>{_ARGUMENTS}</function><function=add>{{}}</function>",
    "pythonic": f"[{_PYTHON}, add()]",
    "olmo3": f"<function_calls>\n{_PYTHON}\nadd()\n</function_calls>",
    "lfm2": f"<|tool_call_start|>[{_PYTHON}, add()]<|tool_call_end|>",
    "gemma4": (
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:add{}<tool_call|>"
    ),
    "functiongemma": (
        "<start_function_call>call:weather{city:<escape>Rome<escape>,days:3}<end_function_call>"
        "<start_function_call>call:add{}<end_function_call>"
    ),
}
"""By the names of the formats."""
BARE = ("llama", "xlam", "pythonic")
"""Formats in which calls begin at the start of the answer, without a mark."""
