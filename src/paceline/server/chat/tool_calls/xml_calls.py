"""Calls that write each argument between tags, and the formats of models that write such calls.

Strings stand there as they are, all else as JSON; the schema of the tool says which are which. A
call is certain with its name; strings are told as the model writes them, other values when they are
whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.json_schema.resolver import Resolver
from paceline.server.chat.tool_calls.format import (
    LONGEST_HEAD,
    NAME,
    ForcedCall,
    Schema,
    ToolCall,
    ToolFormat,
    Tools,
    find_head,
)
from paceline.server.chat.tool_calls.parameters import (
    STRING,
    Parameter,
    bare,
    parameter,
    parameters,
    text_rules,
)
from paceline.server.chat.tool_calls.tag_forms import (
    Form,
    call_tag,
    const,
    json_of,
    one_of,
    optional,
    regex,
    sequence,
    star,
    tag,
    text_of,
)
from paceline.server.chat.tool_calls.values import Brackets, Nesting
from paceline.text.detokenizer import unfinished_tag

_ROOM = 16
"""Characters of white space and longer marks of types that the head of a value may have besides."""


_PLAIN = r"[^<&\n]*"
"""A text that stands in no section where the format has such."""
_ANY_KEY = r'[^\s<>"&](?:[^<>"&\n]{0,62}[^\s<>"&])?'


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """A call is a tag with its name, and tags with keys and values.

    Attributes:
        head: the pattern of what comes before the first parameter.
        begin: what a forced call is written with before the first parameter, see
            :func:`~paceline.server.chat.tool_calls.tag_forms.call_tag`.
        end: what ends a call.
        after: what a forced call is written with behind that.
        key: what stands before and behind a key.
        value: what stands before and behind a value.
        gap: white space between tags.
        padding: white space at both ends of a value, which is no part of it.
        types: what stands behind a key's tag where the value is a string, and where it is JSON; of
            formats that say so. ``%s`` is the name of another type.
        section: what a text may stand between as well, and does where it has characters that mean
            something in XML, or line feeds; of formats that have such sections.
        last: the text whose first appearance ends the head.
        escapes_keys: keys have entities for quotation marks and ampersands.
    """

    head: str
    begin: str
    end: str
    after: str
    key: tuple[str, str]
    value: tuple[str, str]
    gap: str = "\n"
    padding: str = ""
    types: tuple[str, str] = ("", "")
    section: tuple[str, str] = ("", "")
    last: str = ">"
    escapes_keys: bool = False

    @property
    def opening(self) -> str:
        """The pattern of what comes before a value."""
        before, behind = map(re.escape, self.key)
        value = rf"\s*{re.escape(self.value[0])}" if self.value[0] else ""
        text, other = map(re.escape, self.types)
        other = other.replace("%s", "[a-z]+")
        kind = rf"(?:(?P<text>{text})|(?P<json>{other})|>)" if text else "(?P<text>)(?P<json>)"
        return rf"{before}(?P<key>[^<\n{re.escape(self.key[1][0])}]+){behind}{kind}{value}"

    def key_of(self, written: str) -> str:
        """A key by what stands between its marks."""
        key = written.strip()
        return key.replace("&quot;", '"').replace("&amp;", "&") if self.escapes_keys else key

    def before_value(self, key: str) -> str:
        """A key between its marks."""
        if self.escapes_keys:
            key = key.replace("&", "&amp;").replace('"', "&quot;")
        return self.key[0] + key + self.key[1]

    def is_read(self, key: str) -> bool:
        """Whether a key is read as what it is."""
        written = self.before_value(key) + self.types[0] + self.value[0]
        match = re.match(self.opening, written)
        is_whole = match is not None and match.end() == len(written) < LONGEST_HEAD - _ROOM
        return is_whole and self.key_of(match["key"]) == key if match else False

    def reader(self, tools: Tools) -> XmlText:
        return XmlText(self, tools)

    def forced(self, name: str, schema: Schema) -> ForcedCall:
        parameter_forms = _XmlParameters(self)
        content = parameter_forms.of(schema)
        form = call_tag(self.begin, name, content, self.end + self.after)
        return ForcedCall(form, frozenset(parameter_forms.left))


class _XmlParameters:
    """The parameters of forced calls; ``left`` collects the keywords that they are not held to."""

    def __init__(self, calls: XmlCalls) -> None:
        self._calls = calls
        self.left = set[str]()

    def of(self, schema: Schema) -> Form:
        resolver = Resolver(schema)
        members = resolver.members(schema)
        self.left |= members.unenforced
        named = parameters(members, resolver)
        if named is not None:
            return sequence(*(form for each in named for form in self._parameter(each)))
        begin, end = self._calls.key
        value = self._value_behind(end, Parameter("", members.others, resolver))
        return star(sequence(const(begin), regex(_ANY_KEY), *value))

    def _parameter(self, each: Parameter) -> Iterator[Form]:
        """Nothing where the format cannot write the parameter."""
        value = self._value_behind(self._calls.before_value(each.key), each)
        if not self._calls.is_read(each.key) or self._listed(each) == []:
            self.left.add("required" if each.is_required else "properties")
        else:
            yield sequence(*value) if each.is_required else optional(sequence(*value))

    def _listed(self, each: Parameter) -> list[str] | None:
        """The only values that are allowed, as they are written; None where others are."""
        if each.values is None or (self._calls.types[0] and each.kinds != STRING):
            return None
        texts = map(bare, each.values)  # what has the end in it is read up to there
        return [text for text in texts if self._end_of(text) not in text]

    def _end_of(self, text: str) -> str:
        calls = self._calls
        return (calls.section[1] if self._is_in_section(text) else "") + calls.value[1]

    def _is_in_section(self, text: str) -> bool:
        return bool(self._calls.section[0]) and not re.fullmatch(_PLAIN, text)

    def _value_behind(self, begin: str, each: Parameter) -> list[Form]:
        """A value, whose first tag ends with this text."""
        calls = self._calls
        opening, closing = calls.value
        text = calls.types[0]
        behind = (calls.gap if opening else "") + opening + calls.padding
        end = calls.padding + closing
        forms, listed = list[Form](), self._listed(each)
        if listed is not None:
            values = one_of(const(self._written(value)) for value in listed)
            forms.append(tag(begin + text + behind, values, end))
        elif "string" in each.kinds:
            # What it ends with is read as its end wherever it stands, so none may stand in it.
            forms.append(self._text(begin + text + behind, self._patterns(each)))
        if listed is None and (each.kinds - STRING if text else "string" not in each.kinds):
            others = self._others(each)
            forms += [tag(begin + mark + behind, json_of(schema), end) for mark, schema in others]
        return [forms[0] if len(forms) == 1 else one_of(forms), const(calls.gap)]

    def _written(self, text: str) -> str:
        return text.join(self._calls.section) if self._is_in_section(text) else text

    def _text(self, begin: str, patterns: list[str]) -> Form:
        closing, (opening, end) = self._calls.value[1], self._calls.section
        if not opening:
            return tag(begin, text_of(patterns), closing)
        plain = sequence(text_of([*patterns, _PLAIN]), const(closing))
        # What both begin with stands before them, or a plain text could not end at once.
        return sequence(
            const(begin), one_of([plain, tag(opening, text_of(patterns), end + closing)])
        )

    def _others(self, each: Parameter) -> list[tuple[str, Schema]]:
        """What stands behind the keys of values that are no strings, and schemas of these."""
        mark = self._calls.types[1]
        if "%s" in mark:
            return [(mark.replace("%s", kind), schema) for kind, schema in each.by_type().items()]
        return [(mark, each.without_strings if "string" in each.kinds else each.whole)]

    def _patterns(self, each: Parameter) -> list[str]:
        says_type = bool(self._calls.types[0])
        if not says_type and not each.kinds <= STRING | {"null"}:  # it may be of another type
            self.left |= each.narrowing
            return []
        rules = text_rules(each)
        self.left |= rules.unenforced
        null = "|null" if "null" in each.kinds and not says_type else ""
        behind = self._calls.padding.replace("\n", r"\n")
        return [f"(?:{pattern}{null}){behind}" for pattern in rules.patterns]


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


class XmlText:
    """See :class:`~paceline.server.chat.tool_calls.format.CallReader`."""

    def __init__(self, kind: XmlCalls, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._name = ""
        self._at = 0  # how far the text has been read
        self._arguments = ""
        self._parameter: Parameter | None = None  # that whose value is being read
        self._is_string = False
        self._is_json = False  # the value is, as the format says or the schema
        self._has_begun = False  # the value has, behind its padding or the mark of a section
        self._closing = ""  # what ends the value
        self._json: Brackets | None = None  # of the value, if it begins with one
        self._searched = 0  # up to where the value's end has been looked for
        self._end: int | None = None

    def read(self, text: str) -> ToolCall | None:
        if not self._name:
            head = find_head(self._kind.head, self._kind.last, text)
            if head is None:
                return None
            if head.name not in self._tools:
                return ToolCall()
            self._name, self._at, self._arguments = head.name, head.end, "{"
        while self._end is None and self._step(text):
            pass
        return ToolCall(self._name, self._arguments, self._end)

    def _step(self, text: str) -> bool:
        """One tag or value on; False where more is needed."""
        if self._parameter is None:
            return self._read_tag(text)
        if not self._has_begun and not self._begin_value(text):
            return False
        return self._read_string(text) if self._is_string else self._read_other(text)

    def _read_tag(self, text: str) -> bool:
        kind = self._kind
        rest = text[self._at : self._at + LONGEST_HEAD].lstrip()
        at = self._at + len(text[self._at : self._at + LONGEST_HEAD]) - len(rest)
        tag = re.match(kind.opening, rest)
        if tag is not None:
            key = kind.key_of(tag["key"])
            self._begin(key, bool(tag["text"]), bool(tag["json"]), at + tag.end())
        elif rest.startswith(kind.end):
            self._arguments, self._end = self._arguments + "}", at + len(kind.end)
        elif self._may_be_tag(rest) and len(text) - self._at < LONGEST_HEAD:
            return False
        else:  # the call ends without its end
            self._arguments, self._end = self._arguments + "}", self._at
        return True

    def _may_be_tag(self, rest: str) -> bool:
        marks = self._kind.end, self._kind.key[0]
        return rest.startswith(marks[1]) or any(each.startswith(rest) for each in marks)

    def _begin(self, key: str, is_text: bool, is_json: bool, at: int) -> None:
        self._parameter = parameter(self._tools[self._name], key)
        allowed = self._parameter.kinds
        self._is_string = allowed == STRING or (is_text and "string" in allowed)
        self._has_begun = False
        self._is_json = is_json or "string" not in allowed
        separator = "" if self._arguments == "{" else ", "
        self._arguments += f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        self._arguments += '"' if self._is_string else ""
        self._at, self._searched, self._json = at, at, None

    def _begin_value(self, text: str) -> bool:
        """Past what a value begins with besides itself; False while that is to come."""
        kind = self._kind
        opening, closing = kind.section[0] or kind.padding, kind.value[1]
        if len(text) < self._at + len(opening) and opening.startswith(text[self._at :]):
            return False
        has_opening = text.startswith(opening, self._at)
        self._at += len(opening) if has_opening else 0
        self._searched = self._at
        self._closing = (kind.section[1] if has_opening else "") + closing
        self._has_begun = True
        return True

    def _read_string(self, text: str) -> bool:
        """A string is told as far as it is certain."""
        kind, closing = self._kind, self._closing
        end = text.find(closing, self._at)
        held = 0 if end >= 0 else unfinished_tag(text, (kind.padding + closing, closing))
        stop = max(self._at, len(text) - held) if end < 0 else end
        if end >= 0 and kind.padding and text.endswith(kind.padding, self._at, end):
            stop -= len(kind.padding)
        self._arguments += json.dumps(text[self._at : stop], ensure_ascii=False)[1:-1]
        self._at = stop
        if end >= 0:
            self._finish('"', end)
        return end >= 0

    def _read_other(self, text: str) -> bool:
        closing, padding = self._closing, self._kind.padding
        if not self._skip_json(text):
            return False
        end = text.find(closing, self._searched)
        if end < 0:
            self._searched = max(self._at, len(text) - len(closing) + 1)
            return False
        value = text[self._at : end]
        if padding:
            value = value.removesuffix(padding)
        assert self._parameter is not None
        self._finish(self._parameter.as_json(value), end)
        return True

    def _skip_json(self, text: str) -> bool:
        """Past the brackets of a list or an object, whose strings may hold what ends a value."""
        if self._json is None and self._is_json:
            begin = self._at + len(text[self._at :]) - len(text[self._at :].lstrip())
            if begin == len(text):
                return False
            self._json = Brackets(begin) if text[begin] in "[{" else None
        if self._json is None:
            return True
        brackets = self._json.read(text)
        self._searched = max(self._searched, brackets.end)
        return brackets.nesting is not Nesting.OPEN

    def _finish(self, value: str, end: int) -> None:
        self._arguments += value
        self._at, self._parameter = end + len(self._closing), None
