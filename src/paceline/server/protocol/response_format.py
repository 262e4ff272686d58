"""The field ``response_format`` of chats and completions, as OpenAI, vLLM and llama.cpp have it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.server.protocol.common import ApiModel


class JsonSchemaFormat(ApiModel):
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """What the answer must match.

    ``schema`` beside ``json_object`` is llama.cpp's; ``format``, or ``structures`` and
    ``triggers``, are those of :mod:`paceline.request.structural_tags`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError(
                "json_schema is for response_format.type json_schema, and needed there"
            )
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema is only allowed with response_format.type json_object")
        if bool(self.structural_tag) != (self.type == "structural_tag"):
            raise ValueError(
                "format, or structures and triggers, are for response_format.type structural_tag, "
                "and needed there"
            )
        return self

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The fields of a structural tag that are given."""
        names = ("format", "structures", "triggers")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
