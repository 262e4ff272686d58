"""``POST /v1/responses``, and what is kept of them: found, listed, deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import TypeAdapter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.hosting.answering import received, respond
from paceline.server.hosting.serving import Serving
from paceline.server.http.body import WholeAnswer
from paceline.server.http.errors import NOT_FOUND, ApiError
from paceline.server.http.openapi import errors, posts
from paceline.server.http.sse import EVENTS
from paceline.server.openai.chat import num_prompt_tokens
from paceline.server.responses.answer import Kept, Responses, caller_of, store_of
from paceline.server.responses.request import (
    DeletedResponse,
    InputTokens,
    Item,
    ItemList,
    ReferenceItem,
    ResponseBody,
    ResponsesRequest,
    items_of,
)

MAX_LISTED = 100
router = APIRouter()
_ITEM: TypeAdapter[Any] = TypeAdapter(Item)


@posts(router, ResponsesRequest, "/v1/responses", "/responses", answer=ResponseBody, events=EVENTS)
async def responses(request: Request) -> Response:
    asked, _ = await _asked(request)
    return await respond(request, asked, asked.failure)


async def _asked(request: Request) -> tuple[Responses, Serving]:
    """What a body asks for, with the conversation that it goes on from, and its model."""
    serving, body, deadline = await received(request, ResponsesRequest)
    before: Sequence[dict[str, Any]] = ()
    if body.previous_response_id is not None:
        previous = _find(request, body.previous_response_id, "previous_response_id")
        before = from_json(previous.items)
    return Responses(serving, body, deadline, _items(request, body), before), serving


@posts(
    router,
    ResponsesRequest,
    "/v1/responses/input_tokens",
    "/responses/input_tokens",
    answer=InputTokens,
)
async def input_tokens(request: Request) -> Response:
    """How many tokens a response with this body would read; nothing is generated or kept."""
    asked, serving = await _asked(request)
    counted = InputTokens(input_tokens=await num_prompt_tokens(serving, asked.body))
    return WholeAnswer.of(request, counted.model_dump())


@router.post("/responses/compact", include_in_schema=False)
@router.post("/v1/responses/compact", responses=errors(400))
async def compact() -> None:
    raise ApiError(
        400,
        "/v1/responses/compact is not served: a shorter conversation would be a summary that the "
        "model makes up, and a whole one would save nothing; send fewer items, or ask the model "
        "for a summary in words",
        code="compaction_not_supported",
    )


@router.post("/responses/{response_id}/cancel", include_in_schema=False)
@router.post("/v1/responses/{response_id}/cancel", responses=errors(400, 404))
async def cancel(request: Request, response_id: str) -> None:
    _find(request, response_id)
    raise ApiError(
        400,
        "only a response with background: true can be cancelled, and there are none here; close "
        "the connection of a request to end it",
        param="response_id",
    )


@router.get("/responses/{response_id}", include_in_schema=False)
@router.get("/v1/responses/{response_id}", responses=errors(400, 404), response_model=ResponseBody)
async def response(request: Request, response_id: str, stream: str = "false") -> Response:
    if stream.lower() != "false":
        message = f"stream is {stream[:40]!r}; a response that is kept is told whole: send false"
        raise ApiError(400, message, param="stream")
    return WholeAnswer.of_json(request, _find(request, response_id).document)


@router.delete("/responses/{response_id}", include_in_schema=False)
@router.delete("/v1/responses/{response_id}", responses=errors(404))
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    _find(request, response_id)
    store_of(request).drop(caller_of(request), response_id)
    return DeletedResponse(id=response_id)


@router.get("/responses/{response_id}/input_items", include_in_schema=False)
@router.get("/v1/responses/{response_id}/input_items", responses=errors(400, 404))
async def input_items(
    request: Request, response_id: str, order: str = "desc", limit: str = "20", after: str = ""
) -> ItemList:
    """
    Args:
        order: ``asc``, or ``desc``, which begins with the last item.
        limit: most items of one answer.
        after: id of the item that the answer goes on after.
    """
    items: list[dict[str, Any]] = from_json(_find(request, response_id).input)
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order[:40]!r}; allowed: asc, desc", param="order")
    count = int(limit) if limit.isdecimal() and len(limit) < 4 else 0
    if not 1 <= count <= MAX_LISTED:
        message = f"limit is {limit[:40]!r}; allowed: 1 to {MAX_LISTED}"
        raise ApiError(400, message, param="limit")
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after and after not in ids:
        raise ApiError(400, f"after is {after[:80]!r}; there is no such item", param="after")
    start = ids.index(after) + 1 if after else 0
    end = start + count
    listed = ids[start:end] or [None]
    has_more = end < len(ids)
    return ItemList(
        data=items[start:end], first_id=listed[0], last_id=listed[-1], has_more=has_more
    )


def _items(request: Request, body: ResponsesRequest) -> list[Any]:
    """The items of a body, with those in place that it refers to.

    Raises:
        ApiError: 404, it refers to one that is not kept.
    """
    items, outputs = items_of(body), dict[str, dict[str, Any]]()
    for place, item in enumerate(items):
        if not isinstance(item, ReferenceItem):
            continue
        owner = store_of(request).owner(caller_of(request), item.id)
        if owner is not None and owner not in outputs:
            response = store_of(request).find(caller_of(request), owner)
            output = [] if response is None else from_json(response.document)["output"]
            outputs[owner] = {each["id"]: each for each in output}
        kept_item = outputs.get(owner or "", {}).get(item.id)
        if kept_item is None:
            message = f"item {item.id[:80]!r} is not kept here; send the item itself"
            raise ApiError(404, message, NOT_FOUND, param=f"input.{place}.id")
        items[place] = _ITEM.validate_python(kept_item)
    return items


def _find(request: Request, response_id: str, param: str | None = None) -> Kept:
    """
    Raises:
        ApiError: 404, there is none; 400 where a body names it.
    """
    response = store_of(request).find(caller_of(request), response_id)
    if response is None:
        raise ApiError(
            404 if param is None else 400,
            f"response {response_id[:80]!r} is not kept here: it was not stored, belongs to "
            "another key, or had to make room; send all items of the conversation",
            NOT_FOUND if param is None else "invalid_request_error",
            param=param,
            code="previous_response_not_found" if param else None,
        )
    return response
