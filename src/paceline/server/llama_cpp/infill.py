"""``POST /infill``: a gap in a text filled, in llama.cpp's form. Owns the order of its parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.http.openapi import GENERATION_ERRORS, answers, errors, takes
from paceline.server.http.sse import event
from paceline.server.openai.common import PlainRoute, received, respond
from paceline.server.openai.completions import Completion
from paceline.server.protocol.infill import InfillRequest, InfillResponse

router = APIRouter(route_class=PlainRoute)


@router.post(
    "/infill",
    responses=answers(InfillResponse) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(InfillRequest),
)
async def infill(request: Request) -> Response:
    serving, body, deadline = await received(request, InfillRequest)
    return await respond(request, Infill(serving, body, deadline))


class Infill(Completion):
    """The completion of a gap, told as llama.cpp tells it."""

    may_be_empty = True

    async def document(self, request: Request) -> dict[str, Any]:
        parts = list[dict[str, Any]]()
        async with self._answers(request) as found:
            async for piece in found:
                parts += await self._parts(found, piece)
        return self._ended(self._joined(parts))

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with self._answers(request) as found:
            yield b""
            async for piece in found:
                for part in await self._parts(found, piece):
                    is_last = part["finish_reason"] is not None
                    yield event(self._ended(part) if is_last else _told(part))

    def _ended(self, part: dict[str, Any]) -> dict[str, Any]:
        usage = self._usage.document()
        word = part["stop_reason"] if isinstance(part["stop_reason"], str) else ""
        reason = "limit" if part["finish_reason"] == "length" else "word" if word else "eos"
        return {
            **_told(part),
            "stop": True,
            "model": self._head["model"],
            "stop_type": reason,
            "stopping_word": word,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "truncated": False,
            "usage": usage,
        }


def _told(part: dict[str, Any]) -> dict[str, Any]:
    """What a part says besides its words is told where it was asked for."""
    wanted = ("tokens", "token_ids", "prompt_token_ids")
    also = {name: part[name] for name in wanted if name in part}
    return {"index": 0, "content": part["text"], "stop": False, **also}
