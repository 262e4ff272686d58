"""Milliseconds of a step outside of all forwards: linear in requests, drafts and draft nodes.

Owns the figures and what valid ones are; :mod:`paceline.workbench.profile_host` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from paceline.errors import ProfileError
from paceline.policy.cost_points import MAX_MS


@dataclass(frozen=True, slots=True)
class HostTime:
    """What the host takes in a step in which all requests decode.

    Attributes:
        step: with one request and no draft.
        request: that each further request adds.
        draft: that a draft adds beside planning: packing, verifying and committing more. Asking in
            vain costs as much: what is seldom done is slow.
        further_draft: that the draft of each further request adds, proposing it included.
        ask: that planning adds where any proposer is asked, choosing from its draft included.
        node: that each draft node adds.
        calls: that each proposer that is asked adds, whether or not it drafts anything; by method,
            of those that need no forwards.

    Raises:
        ProfileError: a value is no number from 0 on.
    """

    step: float = 0.0
    request: float = 0.0
    draft: float = 0.0
    further_draft: float = 0.0
    ask: float = 0.0
    node: float = 0.0
    calls: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.calls, Mapping) or not all(type(key) is str for key in self.calls):
            raise ProfileError(f"a host time's calls are {self.calls!r}, not times by methods")
        times = [self.step, self.request, self.draft, self.further_draft, self.ask, self.node]
        for value in [*times, *self.calls.values()]:
            if type(value) not in (int, float) or not 0 <= value <= MAX_MS:
                raise ProfileError(f"a host time is {value!r}; allowed are numbers from 0 on")

    def of(self, requests: int, drafts: int, nodes: int = 0, asked: bool = False) -> float:
        """Milliseconds of a step, calls left out.

        Args:
            requests: that decode, at least one.
            drafts: requests of these that have one.
            nodes: of all drafts together.
            asked: whether any proposer was asked.
        """
        time = self.step + self.request * (requests - 1) + self.ask * asked
        if asked or drafts:
            time += self.draft
        if drafts:
            time += self.further_draft * (drafts - 1) + self.node * nodes
        return time

    def planning(self, drafted: bool) -> float:
        """Milliseconds of planning a step in which a proposer is asked, and those lost in vain."""
        return self.ask if drafted else self.ask + self.draft

    def call(self, method: str) -> float:
        """Milliseconds of asking a proposer; of one that was not measured those of the slowest."""
        return self.calls.get(method, max(self.calls.values(), default=0.0))

    @classmethod
    def from_dict(cls, data: object) -> HostTime:
        """Raises :class:`ProfileError` where a key is missing or unknown, or a value is wrong."""
        known = {each.name for each in fields(cls)}
        needed = known - {"ask", "node", "calls"}  # which were not always measured
        if not isinstance(data, Mapping) or not needed <= set(data) <= known:
            raise ProfileError(f"a host time must be an object with {', '.join(sorted(known))}")
        return cls(**data)


NO_HOST_TIME = HostTime()
