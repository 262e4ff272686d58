"""``POST /speedup``: what may be claimed of answers that a client timed with and without drafts.

The server's page asks it, so that what it claims is what ``paceline run --compare`` would.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.speedup import claim
from paceline.server.http.body import read_body
from paceline.server.http.openapi import BODY_ERRORS, errors, takes
from paceline.server.http.sse import encode_json
from paceline.server.openai.common import PlainRoute
from paceline.server.protocol.speedup import SpeedupRequest, SpeedupResponse

router = APIRouter(route_class=PlainRoute)


@router.post(
    "/speedup",
    response_model=SpeedupResponse,
    responses=errors(*BODY_ERRORS),
    openapi_extra=takes(SpeedupRequest),
)
async def speedup(request: Request) -> Response:
    body = await read_body(request, SpeedupRequest)
    found = claim([body.measured])
    is_told = found.untold is None
    document = {
        "speedup": found.value if is_told else None,
        "low": found.low if is_told else None,
        "high": found.high if is_told else None,
        "is_certain": found.is_certain,
        "sentence": found.sentence(body.load_before),
    }
    return Response(encode_json(document), media_type="application/json")
