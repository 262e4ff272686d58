"""Structural tags: shapes for parts of a text that is free elsewhere, such as calls of tools.

Owns their formats, in the names of xgrammar, vLLM and SGLang, and refuses what is malformed. Knows
no grammar: :mod:`paceline.structured.lark` writes one for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.errors import ShapeError
from paceline.json_schema.references import endless_reference

MAX_PARTS = 1000
"""Elements, tags, triggers, ends, excluded texts or patterns of one format."""

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PARTS)]
Excludes = Annotated[list[Text], Field(max_length=MAX_PARTS)]


class _Format(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ConstString(_Format):
    """This text."""

    type: Literal["const_string"]
    value: str


class JsonSchema(_Format):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: bool | dict[str, Any]
    style: Literal["json"] = "json"

    @model_validator(mode="after")
    def _check_references(self) -> JsonSchema:
        reference = endless_reference(self.json_schema)
        if reference is not None:
            raise ValueError(f"its $ref {reference[:60]!r} leads back to itself with no way out")
        return self


class Regex(_Format):
    """What a regular expression matches as a whole."""

    type: Literal["regex"]
    pattern: Text


class Grammar(_Format):
    """A text of a grammar, in GBNF (which EBNF of other engines is) or in Lark."""

    type: Literal["grammar"]
    grammar: Text


class AnyText(_Format):
    """Any text without the excluded ones, up to the end of the tag that it is in.

    As a whole it matches each of the regular expressions ``patterns``.
    """

    type: Literal["any_text"]
    excludes: Excludes = []
    patterns: Excludes = []


class Sequence(_Format):
    """One format after the other."""

    type: Literal["sequence"]
    elements: Annotated[list[Format], Field(min_length=1, max_length=MAX_PARTS)]


class Or(_Format):
    """One of the formats."""

    type: Literal["or"]
    elements: Annotated[list[Format], Field(min_length=1, max_length=MAX_PARTS)]


class Repeated(_Format):
    """A format at most once, at least once, any number of times."""

    type: Literal["optional", "plus", "star"]
    content: Format


class Tag(_Format):
    """A format between two texts; of several ends any will do."""

    type: Literal["tag"] = "tag"
    begin: str
    content: Format
    end: str | Texts

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end,) if isinstance(self.end, str) else tuple(self.end)


Tags = Annotated[list[Tag], Field(min_length=1, max_length=MAX_PARTS)]


class TriggeredTags(_Format):
    """Free text in which what follows a trigger is the rest of a tag that begins with it.

    With ``at_least_one`` the text begins with a tag; with ``stop_after_first`` it ends with one.
    """

    type: Literal["triggered_tags"]
    triggers: Texts
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Excludes = []

    @model_validator(mode="after")
    def _check_triggers(self) -> TriggeredTags:
        for tag in self.tags:
            count = sum(map(tag.begin.startswith, self.triggers))
            if count != 1:
                raise ValueError(
                    f"the tag {tag.begin[:40]!r} begins with {count} of the triggers; it must "
                    "begin with exactly one"
                )
        return self


class TagsWithSeparator(_Format):
    """Tags with a text between each two, and nothing else."""

    type: Literal["tags_with_separator"]
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | Sequence
    | Or
    | Repeated
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]


class _Structure(_Format):
    begin: str
    schema_: bool | dict[str, Any] = Field(alias="schema")
    end: str


class _Older(_Format):
    """The form before formats could be nested: JSON between fixed texts."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[_Structure], Field(min_length=1, max_length=MAX_PARTS)]
    triggers: Texts

    def format(self) -> dict[str, Any]:
        tags = [
            {
                "begin": each.begin,
                "content": {"type": "json_schema", "json_schema": each.schema_},
                "end": each.end,
            }
            for each in self.structures
        ]
        return {"type": "triggered_tags", "triggers": self.triggers, "tags": tags}


class _Whole(_Format):
    type: Literal["structural_tag"] = "structural_tag"
    format: Format


for _each in (Sequence, Or, Repeated, Tag, TriggeredTags, TagsWithSeparator, _Whole):
    _each.model_rebuild()


def parsed(source: str, is_composed: bool = False) -> Format:
    """The format of a structural tag.

    Args:
        source: JSON, ``{"format": ...}`` or the older ``{"structures": [...], "triggers": [...]}``.
        is_composed: whoever reads the error has not seen the source, and is told no place in it.

    Raises:
        ShapeError: it is neither, or malformed.
    """
    try:
        given = json.loads(source)
        if not isinstance(given, Mapping):
            raise ValueError('it must be an object: {"type": "structural_tag", "format": ...}')
        if "format" not in given:
            given = {"format": _Older.model_validate(given).format()}
        return _Whole.model_validate(given).format
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "" if is_composed else ".".join(map(str, first["loc"])) + ": "
        detail = f"{place}{first.get('ctx', {}).get('error', first['msg'])}"
    except (ValueError, RecursionError) as error:
        detail = str(error)
    raise ShapeError("structural_tag", "is malformed", detail[:300])
