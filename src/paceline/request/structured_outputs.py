"""What shape a request's output must have, as its caller names it. Owns the limits on its size.

Knows no grammar: :mod:`paceline.structured.grammar` compiles what is asked for here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import RequestError, ShapeError
from paceline.json_schema.references import endless_reference

KINDS = ("json", "regex", "choice", "grammar", "structural_tag", "json_object", "free")
MAX_SOURCE_BYTES = 1 << 16
"""Of a schema as JSON, a grammar, or all choices together."""
MAX_REGEX_BYTES = 4096
MAX_CHOICES = 1000
MAX_DEPTH = 64
"""How deep objects and lists of a JSON schema nest."""
MORE_IF_COMPOSED = 8
"""How many times these sizes are allowed for what is composed of parts that are within them."""
JSON_STYLE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""White space as most programs write it. Left to the model it is what small ones get lost in."""


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Strings between which a model thinks before it answers.

    Attributes:
        opening: one of them opens the thoughts.
        closing: whichever of them comes first closes them.
        opened: the prompt ends inside of thoughts.
        budget: tokens after which thoughts that go on are closed by the first closing mark; None is
            any number.

    Raises:
        RequestError: there is no mark, or one is empty, or the budget is negative.
    """

    opening: Sequence[str]
    closing: Sequence[str]
    opened: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise RequestError(f"the budget of thoughts is {self.budget}; allowed: 0 and more")
        for name in ("opening", "closing"):
            marks = getattr(self, name)
            object.__setattr__(self, name, (marks,) if isinstance(marks, str) else tuple(marks))
            if not getattr(self, name) or not all(getattr(self, name)):
                raise RequestError(f"the {name} marks of thoughts are {marks!r}; name at least one")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A shape for the output; exactly one field besides ``after`` is given. Names as in vLLM.

    Attributes:
        json: a JSON schema, as a mapping or as its text.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: a grammar in Lark or in GBNF.
        structural_tag: shapes for parts of a text that is free elsewhere, as a mapping or as its
            text: :mod:`paceline.request.structural_tags`.
        json_object: any JSON object.
        free: anything; what ``after`` says of thoughts is all that holds.
        after: the output may begin with thoughts between these marks; the shape holds for what
            follows them.
        composed: a program wrote it, of schemas that were within the limits by themselves.

    Raises:
        RequestError: none or several are given, or one is malformed or too large.

    >>> StructuredOutputs(choice=["yes", "no"]).key
    'choice:["yes","no"]'
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    json_object: bool = False
    free: bool = False
    after: ThoughtMarks | None = None
    composed: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ShapeError("", f"holds {found}; exactly one of {', '.join(KINDS)} is allowed")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json, self._times))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ShapeError(name, "must be a text that is not empty")
        for name in ("json_object", "free"):
            if not isinstance(getattr(self, name), bool):
                raise ShapeError(name, f"is {getattr(self, name)!r}; allowed: true")
        if self.free and self.after is None:
            raise ShapeError("free", "says nothing; give after with a budget")
        if self.structural_tag is not None:
            object.__setattr__(
                self, "structural_tag", _tag_text(self.structural_tag, self._times, self.composed)
            )
        self._check_size()

    def _check_size(self) -> None:
        limit = MAX_REGEX_BYTES if self.regex is not None else MAX_SOURCE_BYTES * self._times
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise ShapeError(self.kind, "is not valid text", str(error)) from None
        if size > limit:
            raise ShapeError(self.kind, f"has {size} bytes; at most {limit} are allowed")

    @property
    def _times(self) -> int:
        """How many times the size of one part is allowed."""
        return MORE_IF_COMPOSED if self.composed else 1

    def behind(self, thoughts: ThoughtMarks | None) -> StructuredOutputs:
        """The same shape for what follows thoughts between these marks; it is not checked again."""
        shape = copy.copy(self)
        object.__setattr__(shape, "after", thoughts)
        return shape

    @property
    def kind(self) -> str:
        """Which of the fields is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """The field's content as one text: a schema and choices as JSON."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        return "" if value is True else _dumps(value)

    @property
    def key(self) -> str:
        """Equal exactly for shapes with the same meaning to the compiler."""
        return f"{self.kind}:{self.source}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise ShapeError("choice", "must be a list of strings")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ShapeError("choice", f"holds {len(choices)} strings; allowed: 1 to {MAX_CHOICES}")
    for text in choices:
        if not isinstance(text, str) or not text:
            raise ShapeError(
                "choice", f"holds {str(text)[:40]!r}; allowed: strings that are not empty"
            )
    return tuple(choices)


def _schema_text(schema: object, times: int) -> str:
    text, parsed = _json_text("json", schema, times)
    reference = endless_reference(parsed)
    if reference is not None:
        raise ShapeError(
            "json",
            "cannot be used",
            f"its $ref {reference[:60]!r} leads back to itself with no way out, so that no value "
            "ever matches",
        )
    return text


def _tag_text(tag: object, times: int, is_composed: bool) -> str:
    from paceline.request.structural_tags import parsed  # pydantic takes its time to load

    text, _ = _json_text("structural_tag", tag, times)
    parsed(text, is_composed)
    return text


def _json_text(name: str, value: object, times: int) -> tuple[str, Any]:
    """The value as JSON text, and what that says, within so many times the limits.

    Texts are kept as they are, so that the order of properties stays the caller's.
    """
    limit = MAX_SOURCE_BYTES * times
    try:
        if isinstance(value, str):
            if len(value) > limit:
                raise ShapeError(name, f"has {len(value)} characters; at most {limit} are allowed")
            parsed = json.loads(value)
            _check_depth(name, parsed, times)
            return value, parsed
        _check_depth(name, value, times)
        return _dumps(value), value
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        what = "JSON schema" if name == "json" else "JSON"
        raise ShapeError(name, f"is no {what}", str(error)) from None


def _check_depth(name: str, schema: object, times: int) -> None:
    if not isinstance(schema, Mapping | bool):
        what = "a JSON schema: an object" if name == "json" else "an object"
        raise ShapeError(name, f"must be {what}")
    level: list[Any] = [schema]
    size, limit, deepest = 0, MAX_SOURCE_BYTES * times, MAX_DEPTH * times
    for _ in range(deepest):
        level = [value for value in level if isinstance(value, Mapping | list | tuple)]
        if not level:
            return
        size += sum(map(len, level))
        if size > limit:  # none is written in less than a byte
            raise ShapeError(
                name, f"holds more than {limit} values; at most {limit} bytes are allowed"
            )
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, Mapping) else value)
        ]
    raise ShapeError(name, f"nests deeper than {deepest} levels")
