"""``POST /api/embed``, and ``/api/embeddings``, which is older and takes one text."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.hosting.serving import Serving
from paceline.server.hosting.whole_answer import WholeAnswer
from paceline.server.http.openapi import GENERATION_ERRORS, errors, takes
from paceline.server.http.sse import while_connected
from paceline.server.ollama.answer import Times
from paceline.server.ollama.fields import (
    EmbedAnswer,
    EmbeddingAnswer,
    EmbeddingRequest,
    EmbedRequest,
)
from paceline.server.openai.common import PlainRoute, encode_all, received
from paceline.server.openai.embeddings import Pooling, floats

router = APIRouter(route_class=PlainRoute)


@router.post(
    "/api/embed",
    response_model=EmbedAnswer,
    responses=errors(*GENERATION_ERRORS),
    openapi_extra=takes(EmbedRequest),
)
async def embed(request: Request) -> Response:
    serving, body, deadline = await received(request, EmbedRequest)

    async def embedded() -> tuple[list[bytes], int]:
        async with serving.using(body.keep_alive):
            pooling = Pooling(
                request,
                serving,
                deadline,
                body.pooling,
                body.dimensions,
                adapter=serving.adapter_of(body.model),
            )
            return await _vectors(serving, pooling, body.texts, body.truncate is not False)

    vectors, count = await while_connected(request.receive, embedded(), deadline)
    totals = Times(deadline.began).totals({"prompt_tokens": count, "completion_tokens": 0})
    told = ("total_duration", "load_duration", "prompt_eval_count")
    document = {
        "model": body.model,
        "embeddings": [floats(vector) for vector in vectors],
        **{name: totals[name] for name in told},
    }
    return WholeAnswer.of(request, document)


@router.post(
    "/api/embeddings",
    response_model=EmbeddingAnswer,
    responses=errors(*GENERATION_ERRORS),
    openapi_extra=takes(EmbeddingRequest),
)
async def embedding(request: Request) -> Response:
    serving, body, deadline = await received(request, EmbeddingRequest)
    texts = [body.prompt] if body.prompt else []

    async def embedded() -> tuple[list[bytes], int]:
        async with serving.using(body.keep_alive):
            adapter = serving.adapter_of(body.model)
            pooling = Pooling(request, serving, deadline, adapter=adapter)
            return await _vectors(serving, pooling, texts, is_cut=True)

    vectors, _ = await while_connected(request.receive, embedded(), deadline)
    found = floats(vectors[0]) if vectors else ()
    return WholeAnswer.of(request, {"embedding": found})


async def _vectors(
    serving: Serving, pooling: Pooling, texts: list[str], is_cut: bool
) -> tuple[list[bytes], int]:
    """The vectors of texts, and how many tokens these are.

    Args:
        is_cut: the ends of texts that do not fit into the context are left out; what encoding puts
            behind a text stays.
    """
    if not texts:
        return [], 0
    context = serving.client.info.max_model_len
    if is_cut:
        # No encoding of the rest could begin within the context.
        most = context * serving.client.info.longest_token
        texts = [text[:most] for text in texts]
    inputs = await encode_all(serving, texts)
    if is_cut:
        end = serving.tokenizer.end_ids
        inputs = [_cut(token_ids, context - 1, end) for token_ids in inputs]
    return await pooling.vectors(inputs), sum(map(len, inputs))


def _cut(token_ids: list[int], most: int, end: Sequence[int]) -> list[int]:
    return token_ids if len(token_ids) <= most else [*token_ids[: most - len(end)], *end]
