"""Bodies of what describes a server: models, version, health."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """One name under which the model is served.

    ``promise`` says whether answers with speculation are those of plain decoding bit for bit, or
    up to rounding, where near-ties can fall otherwise.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["paceline"] = "paceline"
    root: str
    max_model_len: int
    promise: Literal["identical", "up to rounding"]
    proposers: list[str]
    dtype: str
    backend: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class Health(BaseModel):
    status: str
