"""The body of ``POST /speedup``: rounds of a comparison that a client measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from paceline.core.load import Load
from paceline.core.speedup import Arm, Round
from paceline.server.protocol.common import TAKES_FLOATS, ApiModel

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

    rounds: Annotated[list[RoundFields], Field(max_length=MAX_ROUNDS, fail_fast=True)]
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
