"""Milliseconds of a step outside of all forwards, as a line in requests and in drafts.

Owns the figures and what valid ones are; :mod:`paceline.workbench.profile_host` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

from paceline.errors import ProfileError
from paceline.policy.cost_points import MAX_MS


@dataclass(frozen=True, slots=True)
class HostTime:
    """What the host takes in a step in which all requests decode.

    Attributes:
        step: with one request and no draft.
        request: that each further request adds.
        draft: that proposing, planning and verifying a draft add.
        further_draft: that the draft of each further request adds.

    Raises:
        ProfileError: a value is no number from 0 on.
    """

    step: float = 0.0
    request: float = 0.0
    draft: float = 0.0
    further_draft: float = 0.0

    def __post_init__(self) -> None:
        for value in astuple(self):
            if type(value) not in (int, float) or not 0 <= value <= MAX_MS:
                raise ProfileError(f"a host time is {value!r}; allowed are numbers from 0 on")

    def of(self, requests: int, drafts: int) -> float:
        """Milliseconds of a step with so many requests, of which so many have a draft."""
        time = self.step + self.request * (requests - 1)
        return time + self.draft + self.further_draft * (drafts - 1) if drafts else time

    @classmethod
    def from_dict(cls, data: object) -> HostTime:
        """Raises :class:`ProfileError` where a key is missing or unknown, or a value is wrong."""
        names = [field.name for field in fields(cls)]
        if not isinstance(data, Mapping) or set(data) != set(names):
            raise ProfileError(f"a host time must be an object with {', '.join(names)}")
        return cls(**data)


NO_HOST_TIME = HostTime()
