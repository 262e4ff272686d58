"""``POST /speedup``: what may be claimed of answers that a client timed with and without drafts.

The server's page asks it, so that what it claims is what ``paceline run --compare`` would. Owns its
body: rounds of a comparison.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.machine import Load
from paceline.core.speedup import Arm, Round, claim
from paceline.server.http.body import read_body
from paceline.server.http.openapi import posts
from paceline.server.http.sse import encode_json
from paceline.server.protocol.generation import TAKES_FLOATS, ApiModel, up_to

MAX_ROUNDS = 1000
Count = Annotated[int, Field(ge=0, le=1 << 40), TAKES_FLOATS]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class ArmFields(ApiModel):
    """What one arm did in a round, which was one request."""

    seconds: Seconds
    steps: Count
    drafted: Count = 0

    @property
    def arm(self) -> Arm:
        return Arm(self.seconds, self.steps, self.steps, self.drafted)


class RoundFields(ApiModel):
    """Both arms on the same prompt."""

    plain: ArmFields
    speculative: ArmFields


class LoadFields(ApiModel):
    """The machine's load before, as ``/stats`` told it."""

    average: Annotated[float, Field(ge=0, le=1e6)]
    cores: Annotated[int, Field(ge=1, le=1 << 20), TAKES_FLOATS]


class SpeedupRequest(ApiModel):
    """Rounds of one prompt."""

    rounds: Annotated[list[RoundFields], up_to(MAX_ROUNDS)]
    load: LoadFields | None = None

    @property
    def measured(self) -> list[Round]:
        return [Round(each.plain.arm, each.speculative.arm) for each in self.rounds]

    @property
    def load_before(self) -> Load | None:
        return None if self.load is None else Load(self.load.average, self.load.cores)


class SpeedupResponse(BaseModel):
    """How much faster the speculative arm was, as far as it can be told.

    ``speedup`` and its 95 % interval are null where none can be told. ``is_certain`` is whether
    more rounds would tell nothing new; ``sentence`` says it for people.
    """

    speedup: float | None
    low: float | None
    high: float | None
    is_certain: bool
    sentence: str


router = APIRouter()


@posts(router, SpeedupRequest, "/speedup", answer=SpeedupResponse)
async def speedup(request: Request) -> Response:
    body = await read_body(request, SpeedupRequest)
    claimed = claim([body.measured])
    is_told = claimed.untold is None
    document = {
        "speedup": claimed.value if is_told else None,
        "low": claimed.low if is_told else None,
        "high": claimed.high if is_told else None,
        "is_certain": claimed.is_certain,
        "sentence": claimed.sentence(body.load_before),
    }
    return Response(encode_json(document), media_type="application/json")
