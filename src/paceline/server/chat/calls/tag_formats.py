"""Formats of models that write each argument by itself: between tags, or as source code does."""

from __future__ import annotations

import re
import string

from paceline.server.chat.calls.format import LIST_END, ToolFormat
from paceline.server.chat.calls.json_formats import LIST
from paceline.server.chat.calls.kind import NAME, EitherKind, Syntax
from paceline.server.chat.calls.literal_calls import LiteralCalls
from paceline.server.chat.calls.literals import Literals
from paceline.server.chat.calls.xml_calls import XmlCalls

_IN_NAMES = f"{string.ascii_letters}{string.digits}_.-"


def _qwen_xml(name: str, mark: str) -> ToolFormat:
    return ToolFormat(
        name,
        XmlCalls(
            head=rf"\s*<function={NAME}>",
            begin=f"<{mark}>\n<function=%s>\n",
            end="</function>",
            after=f"\n</{mark}>",
            key=("<parameter=", ">"),
            value=("", "</parameter>"),
            padding="\n",
        ),
        opening=(f"<{mark}>",),
        inner=("<function=",),
        closing=(f"</{mark}>",),
        separator="\n",
    )


def _glm(name: str, gap: str) -> ToolFormat:
    return ToolFormat(
        name,
        XmlCalls(
            head=rf"\s*{NAME}\s*(?=<arg_key>|</tool_call>)",
            begin=f"<tool_call>%s{gap}",
            end="</tool_call>",
            after="",
            key=("<arg_key>", "</arg_key>"),
            value=("<arg_value>", "</arg_value>"),
            gap=gap,
        ),
        opening=("<tool_call>",),
        closing=(),
        separator=gap,
    )


QWEN3_CODER = _qwen_xml("qwen3_coder", "tool_call")
SEED_OSS = _qwen_xml("seed_oss", "seed:tool_call")
GLM45 = _glm("glm45", "\n")
GLM47 = _glm("glm47", "")
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    XmlCalls(
        head=rf'\s*<invoke name="{NAME}">',
        begin='<invoke name="%s">\n',
        end="</invoke>",
        # As a separator, "\n" would hide behind "\n</minimax:tool_call>" in grammars.
        after="\n",
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
    ),
    opening=("<minimax:tool_call>",),
    inner=("<invoke name=",),
    closing=("</minimax:tool_call>",),
    before="<minimax:tool_call>\n",
    after="</minimax:tool_call>",
)

MINICPM5 = ToolFormat(
    "minicpm5",
    XmlCalls(
        head=rf'\s*"{NAME}">',
        begin='<function name="%s">',
        end="</function>",
        after="",
        key=('<param name="', '">'),
        value=("", "</param>"),
        gap="",
        section=("<![CDATA[", "]]>"),
    ),
    opening=("<function name=",),
    closing=(),
    separator="\n",
)


def _dsml(name: str, block: str) -> ToolFormat:
    """DeepSeek's markup, whose tags have a token of their own in front of their names."""
    opening, closing = "<\uff5cDSML\uff5c", "</\uff5cDSML\uff5c"
    blocks = ("function_calls>", "tool_calls>")
    return ToolFormat(
        name,
        XmlCalls(
            head=rf'\s*{opening}invoke name="{NAME}">',
            begin=f'{opening}invoke name="%s">\n',
            end=f"{closing}invoke>",
            after="\n",
            key=(f'{opening}parameter name="', '"'),
            value=("", f"{closing}parameter>"),
            types=(' string="true">', ' string="false">'),
        ),
        opening=tuple(opening + each for each in blocks),
        inner=(f"{opening}invoke name=",),
        closing=tuple(closing + each for each in blocks),
        before=f"{opening}{block}>\n",
        after=f"{closing}{block}>",
    )


def _hunyuan3(suffix: str) -> ToolFormat:
    """Hunyuan's marks, which end with a word of their own in the models that are published."""
    key, value, call, calls, sep = (
        f"{each}{suffix}>"
        for each in ("arg_key", "arg_value", "tool_call", "tool_calls", "tool_sep")
    )
    return ToolFormat(
        "hy_v3",
        XmlCalls(
            head=rf"\s*(?:<{call})?\s*{NAME}\s*<{sep}",
            begin=f"<{call}%s<{sep}\n",
            end=f"</{call}",
            after="\n",
            key=(f"<{key}", f"</{key}"),
            value=(f"<{value}", f"</{value}"),
            last=f"<{sep}",
        ),
        opening=(f"<{calls}",),
        inner=(f"<{call}",),
        closing=(f"</{calls}",),
        before=f"<{calls}\n",
        after=f"</{calls}",
    )


HY_V3 = _hunyuan3(":opensource")
HY_V3_PREVIEW = _hunyuan3("")
_SEP = "<|sep|>"
KIMI_K3 = ToolFormat(
    "kimi_k3",
    XmlCalls(
        head=rf'\s*<\|open\|>call tool="{NAME}"[^<]*{re.escape(_SEP)}',
        begin=f'<|open|>call tool="%s" index="#"{_SEP}',
        end=f"<|close|>call{_SEP}",
        after="",
        key=('<|open|>argument key="', '"'),
        value=("", f"<|close|>argument{_SEP}"),
        gap="",
        types=(f' type="string"{_SEP}', f' type="%s"{_SEP}'),
        last=_SEP,
        escapes_keys=True,
    ),
    opening=(f"<|open|>tools{_SEP}",),
    inner=("<|open|>call tool=",),
    closing=(f"<|close|>tools{_SEP}",),
    before=f"<|open|>tools{_SEP}",
    after=f"<|close|>tools{_SEP}",
)
DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")

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
