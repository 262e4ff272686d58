"""``POST /v1/embeddings``: texts as vectors, which are pooled hidden states of the served model.

Owns the order of a batch, and vectors as bytes, numbers and base64. The vectors come from the
engine with the first piece of an answer of one token, which nobody reads.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import EngineClosedError
from paceline.request.sampling_params import POOLINGS, SamplingParams, SpeculativeParams
from paceline.server.hosting.answering import encode_all, received
from paceline.server.hosting.serving import EncodedPrompt, Serving
from paceline.server.http.body import WholeAnswer
from paceline.server.http.errors import ApiError
from paceline.server.http.openapi import GENERATION_ERRORS, posts
from paceline.server.http.sse import Deadline, while_connected
from paceline.server.protocol.completions import Dimensions, PoolingKind, PromptField, batch_of
from paceline.server.protocol.generation import ApiModel, CacheSalt, KeptTokens
from paceline.server.protocol.sampling import answer_limit, truncated

router = APIRouter()
_PLAIN = SpeculativeParams(enabled=False)


class EmbeddingRequest(ApiModel):
    """The body of ``POST /v1/embeddings``; ``pooling`` is ours."""

    input: PromptField
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: PoolingKind | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: KeptTokens | None = None
    cache_salt: CacheSalt | None = None
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


@posts(
    router,
    EmbeddingRequest,
    "/v1/embeddings",
    "/embeddings",
    answer=EmbeddingResponse,
    statuses=GENERATION_ERRORS,
)
async def embeddings(request: Request) -> Response:
    serving, body, deadline = await received(request, EmbeddingRequest)
    work = _document(request, serving, body, deadline)
    document = await while_connected(request.receive, work, deadline)
    document["model"] = body.model or serving.name
    return WholeAnswer.of(request, document)


async def _document(
    request: Request, serving: Serving, body: EmbeddingRequest, deadline: Deadline
) -> dict[str, Any]:
    given: list[Any] = body.inputs
    async with serving.using():
        if isinstance(given[0], str):  # all of them are
            given = await encode_all(serving, given, body.add_special_tokens)
        info = serving.client.info
        inputs = [truncated(each, body.truncate_prompt_tokens, info) for each in given]
        params = pooling_params(serving, body.pooling, body.dimensions)
        asked = request, serving, deadline, serving.adapter_of(body.model), body.cache_salt
        vectors = await pooled(inputs, params, body.dimensions, *asked)
    encoded = in_base64 if body.encoding_format == "base64" else floats
    count = sum(map(len, inputs))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encoded(vector)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def pooling_params(serving: Serving, kind: str | None, dimensions: int | None) -> SamplingParams:
    """What the engine is asked for.

    Args:
        kind: one of :data:`paceline.request.sampling_params.POOLINGS`; None is the server's or the
            model's.

    Raises:
        ApiError: the model has not so many dimensions, or its own pooling is not offered.
    """
    most = serving.client.info.hidden_size
    if dimensions is not None and dimensions > most:
        message = f"dimensions is {dimensions}; the model has {most}: ask for at most so many"
        raise ApiError(400, message, param="dimensions")
    kind = kind or serving.pooling
    if kind not in POOLINGS:
        raise ApiError(
            400,
            f"the model was made for pooling by {kind!r}, which is not offered; to get other "
            f"vectors from it, send pooling; allowed: {', '.join(POOLINGS)}",
            param="pooling",
        )
    return SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, pooling=kind, speculative=_PLAIN
    )


async def pooled(
    inputs: Sequence[list[int]],
    params: SamplingParams,
    dimensions: int | None,
    request: Request,
    serving: Serving,
    deadline: Deadline,
    adapter: str | None,
    cache_salt: str | None = None,
) -> list[bytes]:
    """One vector for each input, as float32 values with the lowest byte first.

    Many inputs are sent a batch at a time, for which places in the queue are held.

    Raises:
        RequestError, ApiError: an input is empty or too long, or the queue is full.
    """
    info, vectors = serving.client.info, list[bytes]()
    for token_ids in inputs:
        answer_limit(len(token_ids), 1, info)
    size = info.max_num_seqs
    with serving.admitted(min(size, len(inputs))):
        for first in range(0, len(inputs), size):
            prompts = [EncodedPrompt(each, params) for each in inputs[first : first + size]]
            batch = [b""] * len(prompts)
            answering = serving.answering(
                request, prompts, deadline, cache_salt, "embeddings", adapter
            )
            async with answering as answers:
                async for piece in answers:
                    batch[piece.sample] = piece.embedding
            if not all(batch):
                raise EngineClosedError("the engine ended before the answer did")
            vectors += batch
    return [shortened(vector, dimensions) for vector in vectors] if dimensions else vectors


def floats(vector: bytes) -> tuple[float, ...]:
    """The numbers of a vector."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def in_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def shortened(vector: bytes, dimensions: int) -> bytes:
    """The first numbers of a vector, as one of length 1."""
    kept = floats(vector)[:dimensions]
    length = math.hypot(*kept) or 1.0
    return struct.pack(f"<{len(kept)}f", *(each / length for each in kept))
