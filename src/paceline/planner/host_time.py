"""Milliseconds of a step outside of all forwards: linear in requests, drafts and draft nodes.

Owns the figures and what valid ones are; :mod:`paceline.profiling.profile_host` and, of a model
that drafts, :mod:`paceline.profiling.profile_drafting` measure them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.core.checks import check_number
from paceline.core.errors import ProfileError
from paceline.planner.cost_points import MAX_MS

_DRAFTING = "drafting"
_NOT_ALWAYS_MEASURED = {"ask", "node", "calls", "merge", _DRAFTING}


def _check(times: Iterable[float]) -> None:
    for value in times:
        check_number("a host time", value, 0, MAX_MS, float, ProfileError)


def _parts(of: type[Any], data: object, optional: Collection[str] = ()) -> dict[str, Any]:
    """Raises :class:`ProfileError` where a key is missing or unknown."""
    known = {each.name for each in fields(of)}
    if not isinstance(data, Mapping) or not known - set(optional) <= set(data) <= known:
        raise ProfileError(f"a host time must be an object with {', '.join(sorted(known))}")
    return dict(data)


@dataclass(frozen=True, slots=True)
class DraftingHostTime:
    """What a call of a model that drafts takes beyond what its forwards take by its table.

    Attributes:
        call: with one request and one level.
        level: that each further level adds.
        request: that each further request adds to each level.
        node: that each further node of a request's level adds.

    Raises:
        ProfileError: a value is no number from 0 on.
    """

    call: float = 0.0
    level: float = 0.0
    request: float = 0.0
    node: float = 0.0

    def __post_init__(self) -> None:
        _check([self.call, self.level, self.request, self.node])

    def first_level(self, requests: int, nodes: int = 1) -> float:
        """Milliseconds of a call with one level, of so many nodes per request."""
        return self.call + self._more(requests, nodes)

    def further_level(self, requests: int, nodes: int = 1) -> float:
        """Milliseconds that a level of so many nodes per request adds."""
        return self.level + self._more(requests, nodes)

    def _more(self, requests: int, nodes: int) -> float:
        return self.request * (requests - 1) + self.node * requests * (nodes - 1)

    @classmethod
    def from_dict(cls, data: object) -> DraftingHostTime:
        """Raises :class:`ProfileError` where a key is missing or unknown, or a value is wrong."""
        return cls(**_parts(cls, data))


NO_DRAFTING_HOST_TIME = DraftingHostTime()


@dataclass(frozen=True, slots=True)
class HostTime:
    """What the host takes in a step in which all requests decode.

    Attributes:
        step: with one request and no draft.
        request: that each further request adds.
        draft: that a draft adds to planning: packing, verifying and committing more.
        further_draft: that the draft of each further request adds, proposing it included.
        ask: that planning adds where any proposer is asked, choosing from its draft included.
        node: that each draft node adds.
        calls: that each proposer that is asked adds, whether or not it drafts anything; by method,
            of those that need no forwards.
        merge: that making one tree of a request's two adds.
        drafting: where the model drafts for another; the rest is where it is drafted for.

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
    merge: float = 0.0
    drafting: DraftingHostTime = NO_DRAFTING_HOST_TIME

    def __post_init__(self) -> None:
        if not isinstance(self.calls, Mapping) or not all(type(key) is str for key in self.calls):
            raise ProfileError(f"a host time's calls are {self.calls!r}, not times by methods")
        times = [self.step, self.request, self.draft, self.further_draft, self.ask, self.node]
        _check([*times, *self.calls.values(), self.merge])

    def of(
        self, requests: int, drafts: int, nodes: int = 0, asked: bool = False, merges: int = 0
    ) -> float:
        """Milliseconds of a step, calls left out.

        Args:
            requests: that decode, at least one.
            drafts: requests of these that have one.
            nodes: of all drafts together.
            asked: whether any proposer was asked.
            merges: trees that were drafted beyond the first of each request.
        """
        time = self.step + self.request * (requests - 1) + self.ask * asked + self.merge * merges
        if drafts:
            time += self.draft + self.further_draft * (drafts - 1) + self.node * nodes
        return time

    def call(self, method: str) -> float:
        """Milliseconds of asking a proposer; of one that was not measured those of the slowest."""
        return self.calls.get(method, max(self.calls.values(), default=0.0))

    @classmethod
    def from_dict(cls, data: object) -> HostTime:
        """Raises :class:`ProfileError` where a key is missing or unknown, or a value is wrong."""
        parts = _parts(cls, data, _NOT_ALWAYS_MEASURED)
        if _DRAFTING in parts:
            parts[_DRAFTING] = DraftingHostTime.from_dict(parts[_DRAFTING])
        return cls(**parts)

    def completed_by(self, other: HostTime) -> HostTime:
        """With what another one knows where nothing was measured: drafted for, or drafting."""
        drafting = self.drafting
        if drafting == NO_DRAFTING_HOST_TIME:
            drafting = other.drafting
        is_known = replace(self, drafting=NO_DRAFTING_HOST_TIME) != NO_HOST_TIME
        return replace(self if is_known else other, drafting=drafting)


NO_HOST_TIME = HostTime()
