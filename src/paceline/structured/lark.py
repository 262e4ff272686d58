"""Grammars in Lark, as llguidance reads them: texts, expressions, schemas, structural tags.

Owns how the free text of a structural tag ends: at the first trigger or end that it runs into.
Knows no request and compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.core.errors import RequestError, ShapeError
from paceline.json_schema.normal_form import normal_form
from paceline.request import structural_tags
from paceline.request.structural_tags import (
    AnyText,
    ConstString,
    Format,
    Grammar,
    JsonSchema,
    Or,
    Regex,
    Repeated,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)
from paceline.request.structured_outputs import JSON_STYLE
from paceline.structured.gbnf import from_gbnf
from paceline.text.token_pieces import TokenNames

_GBNF = re.compile(r"(?:^|[\r\n])[ \t]*[\w-]+[ \t]*::=")
"""A rule of GBNF or EBNF; Lark writes a colon alone. Within its line, since what could run on over
empty lines would take the square of their number."""


def source_of(grammar: str, tokens: TokenNames, *, is_whole: bool = True) -> dict[str, str]:
    """A grammar in Lark or GBNF, in Lark; nothing is behind what it matches if it ``is_whole``.
    ``RequestError`` where it is in GBNF and cannot be used.
    """
    if _GBNF.search(grammar):
        grammar = from_gbnf(grammar, tokens, is_whole=is_whole)
    return {"lark_grammar": grammar}


def json_of(schema: Mapping[str, Any] | bool) -> str:
    """What matches JSON of a schema; its own wishes as to white space come first."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    schema = dict(normal_form(schema))
    own = schema.get("x-guidance")
    style = {**JSON_STYLE, **(own if isinstance(own, Mapping) else {})}
    return f"%json {quoted({**schema, 'x-guidance': style})}"


def expression(pattern: str) -> str:
    """A regular expression as Lark writes it, between slashes."""
    escaped, is_escaped = [], False
    for character in pattern:
        if character == "/" and not is_escaped:
            escaped.append("\\")
        escaped.append(character)
        is_escaped = character == "\\" and not is_escaped
    return f"/(?:{''.join(escaped)})/".replace("\n", "\\n")


def escaped_text(text: str) -> str:
    """A fixed text inside of a regular expression."""
    return re.sub(r"[][\\^$.|?*+(){}\-&~#]", r"\\\g<0>", text)


def quoted(value: Any) -> str:
    """A fixed text, or a schema, as JSON writes it and Lark reads it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_COUNTS = {"optional": "?", "plus": "+", "star": "*"}
_ANYTHING, _SOMETHING = r"(.|\n)*", r"(.|\n)+"

Ends = tuple[str, ...]


def tag_grammar(source: str, tokens: TokenNames | None = None) -> str:
    """JSON that lists the grammars of a structural tag, which is JSON; ``RequestError`` where it is
    malformed.
    """
    composer = _Composer(tokens or TokenNames())
    start = composer.expr(structural_tags.parsed(source), ())
    rules = "\n".join(["%llguidance {}", f"start: {start}", *composer.rules]) + "\n"
    return json.dumps({"grammars": [{"lark_grammar": rules}, *composer.grammars]})


class _Composer:
    """Expressions for formats, and the rules and grammars that these refer to.

    What is free ends where a text in ``ends`` has come, and takes that in; without ends it goes on.
    """

    def __init__(self, names: TokenNames) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._names, self._tokens = names, names.texts
        longest = sorted(names.texts, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest))) if longest else None

    def expr(self, form: Format, ends: Ends) -> str:
        match form:
            case AnyText():
                return self._free(ends, form.excludes, form.patterns)
            case TriggeredTags():
                return self._triggered(form, ends)
            case structural_tags.Sequence():
                return self._sequence(form, ends)
            case Or():
                return _one_of(self.expr(each, ends) for each in form.elements)
        return _joined(self._bounded(form), self._any_end(ends))

    def _bounded(self, form: Format) -> str:
        match form:
            case ConstString():
                return self._literal(form.value)
            case JsonSchema():
                return json_of(form.json_schema)
            case Regex():
                return expression(form.pattern)
            case Grammar():
                name = f"grammar_{len(self.grammars)}"
                source = source_of(form.grammar, self._names, is_whole=False)
                self.grammars.append({"name": name, **source})
                return f"@{name}"
            case Repeated():
                if _is_free(form.content):
                    raise _endless(form.type)
                return f"({self.expr(form.content, ())}){_COUNTS[form.type]}"
            case Tag():
                return _joined(self._literal(form.begin), self._rest(form))
        assert isinstance(form, TagsWithSeparator)
        return self._separated(form)

    def _rest(self, tag: Tag) -> str:
        return self.expr(tag.content, () if tag.ends == ("",) else tag.ends)

    def _sequence(self, form: structural_tags.Sequence, ends: Ends) -> str:
        parts: list[str] = []
        free: Format | None = None  # and what follows is its end
        for each in form.elements:
            if free is not None:
                if not isinstance(each, ConstString) or not each.value:
                    raise _endless("sequence")
                parts.append(self.expr(free, (each.value,)))
                free = None
            elif _is_free(each):
                free = each
            else:
                parts.append(self.expr(each, ()))
        parts.append(self._any_end(ends) if free is None else self.expr(free, ends))
        return _joined(*parts)

    def _triggered(self, form: TriggeredTags, ends: Ends) -> str:
        rounds = self._rule(
            _one_of(
                _joined(
                    self._free((trigger,), form.excludes),
                    _one_of(
                        _joined(self._literal(tag.begin.removeprefix(trigger)), self._rest(tag))
                        for tag in form.tags
                        if tag.begin.startswith(trigger)
                    ),
                )
                for trigger in form.triggers
                if any(tag.begin.startswith(trigger) for tag in form.tags)
            )
        )
        first = _one_of(map(self._bounded, form.tags)) if form.at_least_one else ""
        if not form.stop_after_first:
            return _joined(first, f"{rounds}*", self._free(ends, form.excludes))
        end = self._any_end(ends)
        if form.at_least_one:
            return _joined(first, end)
        return _one_of([_joined(rounds, end), self._free(ends, form.excludes)])

    def _separated(self, form: TagsWithSeparator) -> str:
        tag = self._rule(_one_of(map(self._bounded, form.tags)))
        more = "" if form.stop_after_first else f"({_joined(self._literal(form.separator), tag)})*"
        whole = _joined(tag, more)
        return whole if form.at_least_one else f"({whole})?"

    def _free(self, ends: Ends, excludes: Iterable[str], patterns: Iterable[str] = ()) -> str:
        """Any text up to the first end that matches all of the patterns.

        Tokens that are written as one are no part of free text, so that text is as long as it can
        be where one follows; elsewhere it ends as soon as it can.
        """
        bytes_only = [end for end in ends if not self._has_token(end)]
        alternatives = []
        if bytes_only or not ends:
            stop = f"(?:{'|'.join(map(escaped_text, bytes_only))})" if ends else ""
            alternatives.append(self._terminal(stop, excludes, patterns, "[lazy]" if ends else ""))
        for end in ends:
            if end not in bytes_only:
                head, *_ = self._parts(end)
                text = "" if head in self._tokens else head
                words = self._terminal(escaped_text(text), excludes, patterns)
                alternatives.append(_joined(words, self._literal(end[len(text) :])))
        return _one_of(alternatives)

    def _terminal(
        self, stop: str, excludes: Iterable[str], patterns: Iterable[str], how: str = ""
    ) -> str:
        name = f"text_{len(self.rules)}" if how else f"TEXT_{len(self.rules)}"
        wholes = [f"(?:{each})" for each in patterns]
        body = " & ".join(expression(f"{each}{stop}") for each in wholes or [_ANYTHING])
        if wholes and how:  # or a pattern would take in the first end
            body += f" & ~{expression(f'{_ANYTHING}{stop}{_SOMETHING}')}"
        without = "|".join(map(escaped_text, excludes))
        if without:
            body += f" & ~{expression(f'{_ANYTHING}(?:{without}){_ANYTHING}')}"
        self.rules.append(f"{name}{how}: {body}")
        return name

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _any_end(self, ends: Ends) -> str:
        return _one_of(map(self._literal, ends)) if ends else ""

    def _has_token(self, text: str) -> bool:
        return self._token is not None and self._token.search(text) is not None

    def _parts(self, text: str) -> list[str]:
        if self._token is None:
            return [text]
        return [each for each in re.split(f"({self._token.pattern})", text) if each]

    def _literal(self, text: str) -> str:
        return _joined(
            *(
                f"<[{self._tokens[each]}]>" if each in self._tokens else quoted(each)
                for each in self._parts(text)
                if each
            )
        )


def _is_free(form: Format) -> bool:
    match form:
        case AnyText() | TriggeredTags():
            return True
        case structural_tags.Sequence():
            return _is_free(form.elements[-1])
        case Or():
            return any(map(_is_free, form.elements))
    return False


def _endless(kind: str) -> RequestError:
    return ShapeError(
        "structural_tag",
        f"has free text in a {kind} that does not tell where it ends; put it into a tag, or a "
        "const_string behind it",
    )


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part) or '""'


def _one_of(parts: Iterable[str]) -> str:
    alternatives = list(dict.fromkeys(parts))
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"
