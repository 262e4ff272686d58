"""Bodies of ``/v1/embeddings``, and what they are answered with. Owns names, types and ranges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from paceline.server.protocol.common import TAKES_FLOATS, ApiModel
from paceline.server.protocol.completions import PromptField, batch_of

_LARGEST = (1 << 31) - 1
Dimensions = Annotated[int, Field(ge=1, le=_LARGEST), TAKES_FLOATS]
Pooling = Literal["mean", "last", "cls", "max", "weightedmean"]


class EmbeddingRequest(ApiModel):
    """The body of ``POST /v1/embeddings``; ``pooling`` is ours."""

    input: PromptField
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: Pooling | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_LARGEST), TAKES_FLOATS] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs as a batch."""
        return batch_of(self.input)


class Embedding(BaseModel):
    """A vector of length 1: numbers, or base64 of float32 values with the lowest byte first."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
