"""Which proposers are asked for drafts: those whose drafts are expected to be worth their time.

A proposer's **value** is the number of tokens that its chosen nodes promised beyond the time of
verifying them, less the time of drafting at the current rate. All requests of an adapter, or all
that have none, share it, so that they need not find it out one by one. There is one for each
situation: the length of the match that a proposer has in the request's text, where it knows that
before it drafts, otherwise how much other proposers have drafted in the step already.

A proposer that does not seem to pay is asked as often as :class:`Exploration` allows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import itemgetter
from typing import NamedTuple

from paceline.planner.cost import CostModel
from paceline.planner.cost_table import NO_STEP, StepShape
from paceline.planner.drafts import Drafts
from paceline.planner.pace import ENOUGH, Pace
from paceline.request.request import Request

SITUATIONS = (0.25, 0.75, 1.5)
"""Expected tokens of existing drafts at which the next situation begins."""
MATCHES = (2, 3, 5, 12)
"""Lengths of matches, in tokens, at which the next situation begins."""
FIRST_VALUE = 0.5
"""Tokens expected of a proposer that was never asked: enough to be asked some times."""
PACE = 0.1
"""Weight of the latest draft in what is learnt of a proposer."""
MOST_TIMES = 3.0
"""A measured time counts as at most this many times the expected one: the machine may have
paused."""
USUAL_LAG = 16
"""Tokens that a proposer lacks after a step; more than that is catching up."""
SHARE = 0.004
"""Part of the time since it was last explored that exploring an estimate may cost."""
SAVED = 4
"""Explorations at the highest price that can be saved up."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a planner decides about as one: a proposer, or all that draft from texts."""

    name: str
    costs_forwards: bool = False  # it drafts by forwards of a model
    lag: Callable[[Request], int | None] = lambda request: 0
    """Tokens of a request that it has to read before it can draft; None where it will not."""
    applies: Callable[[Request], bool] = lambda request: True
    """Whether it can draft for a request at all, whatever its text."""
    costs_levels: bool = True  # with forwards: each further level of its trees takes one more
    matched: Callable[[Request], int] | None = None
    """Tokens at the end of a request's text that occurred before, which says beforehand what a
    draft may be worth; None where the source does not know."""

    @property
    def num_situations(self) -> int:
        """Number of situations that share the time for exploring it."""
        return 1 if self.matched is None else len(MATCHES) + 1


Explored = tuple[str, int]
"""A source, and a situation in which it is asked."""


@dataclass(slots=True)
class ProposerValue:
    """What one draft for one request brings and takes."""

    tokens: float = FIRST_VALUE  # that the chosen nodes promise beyond the time of verifying them
    ms: float = 0.0  # that planning and drafting take
    count: int = 0  # drafts from which these were learnt

    def gain(self, rate: float) -> float:
        """Tokens that asking is expected to bring, at ``rate`` tokens per millisecond."""
        return self.tokens - rate * self.ms

    def learn(self, tokens: float, ms: float, drafts: int = 1) -> None:
        """Take in what some drafts promised and took on average."""
        self.count += drafts
        pace = max(1.0 - (1.0 - PACE) ** drafts, drafts / (self.count + 2))
        self.ms += pace * (ms - self.ms)
        # Never negative, so that few drafts are enough to believe a change of text.
        self.tokens = max(0.0, self.tokens + pace * (tokens - self.tokens))


class ProposerValues(dict[tuple[str, int, str | None], ProposerValue]):
    """All values, by proposer, situation and adapter.

    The value for an adapter begins as that without one; a few drafts of its own outweigh it.
    """

    def __missing__(self, key: tuple[str, int, str | None]) -> ProposerValue:
        name, situation, adapter = key
        first = ProposerValue() if adapter is None else self[name, situation, None]
        value = self[key] = replace(first, count=0)
        return value


@dataclass(slots=True)
class DraftTime:
    """Times of one proposer in milliseconds."""

    call: float = 0.0  # of asking it for all requests of a step together, first level included
    level: float = 0.0  # of each further level; 0 where the time does not depend on them
    token: float = 0.0  # of each token that it has to catch up with beyond USUAL_LAG


class DraftingCost:
    """Times of all proposers, by name, as they are learnt; or as they are known."""

    def __init__(self, known: Mapping[str, DraftTime] | None = None) -> None:
        self._times: dict[str, DraftTime] = {n: replace(t) for n, t in (known or {}).items()}
        self._calls: dict[str, int] = {}

    def of(self, name: str) -> DraftTime:
        """A proposer's times; zeros where it was not timed."""
        return self._times.get(name) or DraftTime()

    def milliseconds(self, name: str, num_levels: int = 1) -> float:
        """Time of one call that drafts this many levels and has nothing to catch up with."""
        time = self._times.get(name)
        return time.call + time.level * (num_levels - 1) if time else 0.0

    def catch_up(self, name: str, lag: int) -> float:
        """Time in which a proposer reads what it lacks beyond the usual."""
        return self.of(name).token * lag if lag > USUAL_LAG else 0.0

    def observe(
        self, name: str, num_levels: int, lag: int, milliseconds: float, has_levels: bool
    ) -> None:
        """Learn from one call whose requests together lacked ``lag`` tokens beyond the usual.

        Args:
            has_levels: each level takes a forward; otherwise the time does not depend on them.
        """
        if milliseconds <= 0.0:
            return
        count = self._calls[name] = self._calls.get(name, 0) + 1
        if count == 1:  # first calls are slow in every program, by any factor
            return
        time = self._times.get(name)
        if time is None:
            time = self._times[name] = DraftTime()
        levels = num_levels if has_levels else 1
        expected = time.call + time.level * (levels - 1)
        if lag:
            token_ms = max(0.0, milliseconds - expected) / lag
            token_ms = min(token_ms, MOST_TIMES * time.token) if time.token else token_ms
            time.token += (0.5 if time.token else 1.0) * (token_ms - time.token)
            return
        if expected == 0.0:
            time.call = milliseconds / levels
            time.level = time.call if has_levels else 0.0
            return
        pace = max(PACE, 1 / count)
        error = pace * (min(milliseconds, MOST_TIMES * expected) - expected)
        time.call += error * time.call / expected  # each in proportion to its part
        time.level += error * time.level / expected


class Exploration:
    """Time for choices that do not seem best, so that no estimate is believed for ever.

    Exploring an estimate may cost a small part of the time since that was last done: what is cheap
    is seen again soon, what is expensive seldom. Estimates have any hashable names.
    """

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._paid_until: dict[Hashable, float] = {}
        self._highest_ms: dict[Hashable, float] = {}  # price that was asked for

    def passed(self, milliseconds: float) -> None:
        """Let time pass. More than a step can take is a clock's jump, and ignored."""
        if 0.0 < milliseconds <= 1e6:
            self._now_ms += milliseconds

    def covers(self, what: Hashable, cost_ms: float) -> bool:
        """Whether exploring something may cost this much."""
        return self.milliseconds_until(what, cost_ms) <= 0.0

    def milliseconds_until(self, what: Hashable, cost_ms: float) -> float:
        """Time that has to pass before exploring something may cost this much."""
        if cost_ms > self._highest_ms.get(what, 0.0):
            self._highest_ms[what] = cost_ms
        return self._paid_until.get(what, 0.0) + cost_ms / SHARE - self._now_ms

    def spend(self, what: Hashable, cost_ms: float) -> None:
        """Something was explored. Savings beyond :data:`SAVED` explorations are lost."""
        longest = SAVED * (self._highest_ms.get(what, 0.0) / SHARE)
        begun = max(self._paid_until.get(what, 0.0), self._now_ms - longest)
        self._paid_until[what] = begun + cost_ms / SHARE


class Candidate(NamedTuple):
    """A request for which a source may be asked."""

    place: int  # in the step
    value: ProposerValue  # what the source is expected to bring; it learns from the draft
    lag: int  # tokens that the source has to catch up with, where they are more than usual
    explored: Explored  # what is explored where it is asked against this value


@dataclass(slots=True)
class Lesson:
    """What the drafts of some requests say of a source's value."""

    value: ProposerValue
    indices: list[int] = field(default_factory=list)
    gain: float = 0.0  # tokens that the chosen nodes promise beyond the time of verifying them


@dataclass(slots=True)
class Asked:
    """A source that is asked for drafts in a step.

    Requests that are still caught up with, or that demand drafts at any price, are no lesson.
    """

    name: str  # of the source
    count: int  # requests for which it is asked
    lag: int  # tokens that it has to catch up with for these, beyond the usual
    able: int  # requests for which it could have been asked
    lessons: Sequence[Lesson] = ()
    cost_ms: float = 0.0
    """Each request's part of the drafting time if all ``able`` ones were asked: those that share a
    call with few others are not charged for that."""


@dataclass(slots=True)
class PlannedStep:
    """The step that is being planned."""

    shape: StepShape = NO_STEP
    requests: Sequence[Request] = ()  # that may draft
    forwards: Sequence[float] = ()
    """Milliseconds of the forward with 0, 1, 2, ... draft nodes; empty until needed."""
    growth: Sequence[float] = ()  # the same, with what the host takes longer for drafts
    plain_ms: float = 0.0  # predicted forward without drafts
    rate: float = 0.0  # tokens that a millisecond is worth
    slowdown: float = 0.0  # share of its speed that a request may lose to the drafts of others
    ahead: Sequence[float] | None = None
    """Tokens that each request has had beyond its due; None where all may be held up."""
    candidates: dict[tuple[str, int], Candidate] = field(default_factory=dict)
    """By source and request: those whose situation does not depend on other sources."""
    asks: list[Asked] = field(default_factory=list)
    explored: set[Explored] = field(default_factory=set)
    levels: int = 1  # of the proposer that drafts by forwards
    level_ms: float = 0.0  # of a further one
    draft_ms: float = 0.0  # time of the proposers


UNPLANNED = PlannedStep()
"""A step for which no proposer is asked; shared, so never written to."""


class Asking:
    """Decides which sources are asked, and learns what they are worth."""

    def __init__(self, pace: Pace, drafts: Drafts, cost: CostModel) -> None:
        self._pace, self._drafts, self._cost = pace, drafts, cost
        self._sources: list[Source] = []
        self._values = ProposerValues()
        self.times, self.exploration = DraftingCost(), Exploration()
        self._watched: list[tuple[Source, str | None, list[bool]]] = []
        """While no source is asked: those that know their matches, and in which situations each is
        to be asked for requests of an adapter."""

    def set_sources(self, sources: Sequence[Source]) -> None:
        if not all(source in sources for source in self._sources):
            self._values.clear()  # what one brought says nothing of another
        self._sources = list(sources)

    # --- when to ask next ----------------------------------------------------------------------

    def pause_ms(self, step: PlannedStep) -> float:
        """Time that has to pass before any proposer is worth asking, or may be explored.

        Until then :meth:`sleeps` says whether a text has come to where one may be.
        """
        self._watched = []
        least_ms = inf if self._sources else 0.0  # without sources the pause would never end
        for source in self._sources:
            able: dict[str | None, list[int]] = {}  # by adapter
            for place, request in enumerate(step.requests):
                if request.params.speculative.enabled and source.applies(request):
                    able.setdefault(request.adapter_name, []).append(place)
            pause = self._pause_of if source.matched is None else self._pause_until_matched
            for adapter, places in able.items():
                least_ms = min(least_ms, pause(step, source, places, adapter))
                if least_ms <= 0.0:
                    return least_ms
        return least_ms

    def _pause_of(
        self, step: PlannedStep, source: Source, places: Sequence[int], adapter: str | None
    ) -> float:
        """Milliseconds for which a source is asked for none of these requests of an adapter."""
        explored, cost_ms = (source.name, 0), self._ask_ms(source)
        pause_ms = self.exploration.milliseconds_until(explored, cost_ms)
        is_hopeful = self._values[source.name, 0, adapter].gain(step.rate) > 0.0
        if pause_ms > 0.0 and not is_hopeful:
            return pause_ms
        least_lag = None
        for candidate in self._candidates(step, source, places):
            if is_hopeful and self._is_worth(step, candidate):
                return 0.0
            least_lag = candidate.lag if least_lag is None else min(least_lag, candidate.lag)
        if least_lag is not None:
            cost_ms = self._ask_ms(source, least_lag)
        elif is_hopeful:
            return 0.0  # there may be a candidate after the next token
        else:  # looking in vain is exploring too
            self.exploration.spend(explored, self._pace.ask_ms)
        return self.exploration.milliseconds_until(explored, cost_ms)

    def _pause_until_matched(
        self, step: PlannedStep, source: Source, places: Sequence[int], adapter: str | None
    ) -> float:
        """The same for a source that knows its matches."""
        for candidate in self._candidates(step, source, places):
            if self._pause_in(step, source, candidate.explored[1], candidate.value) <= 0.0:
                return 0.0
        is_asked, least_ms = [True] * source.num_situations, inf
        for situation in range(source.num_situations):
            value = self._values[source.name, situation, adapter]
            pause_ms = self._pause_in(step, source, situation, value)
            if pause_ms > 0.0:
                is_asked[situation], least_ms = False, min(least_ms, pause_ms)
        if any(is_asked):
            self._watched.append((source, adapter, is_asked))
        return least_ms

    def _pause_in(
        self, step: PlannedStep, source: Source, situation: int, value: ProposerValue
    ) -> float:
        """Milliseconds for which a source is not asked in one of its situations."""
        if value.tokens - step.rate * value.ms > 0.0:
            return 0.0
        explored = source.name, situation
        return self.exploration.milliseconds_until(explored, self._ask_ms(source))

    def sleeps(self, requests: Sequence[Request]) -> int:
        """Number of steps in which no source that knows its matches is to be asked before the pause
        is over; 0 where one is now. A match grows by one token per step at most."""
        shortest = MATCHES[-1]
        for source, adapter, is_asked in self._watched:
            assert source.matched is not None
            least = (0, *MATCHES)[is_asked.index(True)]
            for request in requests:
                if request.adapter_name != adapter:
                    continue
                matched = source.matched(request)
                if not is_asked[bisect_right(MATCHES, matched)]:
                    shortest = min(shortest, least - matched)
                elif request.params.speculative.enabled and source.applies(request):
                    return 0
        return max(1, shortest)

    # --- in a step -----------------------------------------------------------------------------

    def ask(self, step: PlannedStep, source: Source, places: Sequence[int]) -> list[int]:
        """For which of some requests of a step a source drafts."""
        worth, doubtful = list[Candidate](), list[Candidate]()
        for candidate in self._candidates(step, source, places):
            (worth if self._is_worth(step, candidate) else doubtful).append(candidate)
        if step.ahead and source.costs_forwards and _holds_up(step, worth):
            worth = [candidate for candidate in worth if step.requests[candidate.place].is_forced]
        elif doubtful:
            worth += self._explored(step, source, doubtful)
            worth.sort()
        if worth:
            step.asks.append(_asked(step, source, worth, len(places)))
        return [*map(itemgetter(0), worth)]

    def drafted(
        self, step: PlannedStep, source: Source, levels: int, milliseconds: float, has_levels: bool
    ) -> None:
        """Learn how long it took to draft trees of this many levels."""
        asked = step.asks[-1]
        self.times.observe(source.name, levels, asked.lag, milliseconds, has_levels)
        asked.cost_ms = self.times.milliseconds(source.name, levels) / asked.able
        for explored in step.explored:
            if explored[0] == source.name:
                cost_ms = (milliseconds + self._pace.ask_ms) * source.num_situations
                self.exploration.spend(explored, cost_ms)

    def learn(self, step: PlannedStep) -> None:
        """Learn from a step's drafts what they are worth."""
        if step.asks:
            shared_ms = self._pace.ask_ms / sum([asked.count for asked in step.asks])
        for asked in step.asks:
            for lesson in asked.lessons:
                count = len(lesson.indices)
                lesson.value.learn(lesson.gain / count, asked.cost_ms + shared_ms, count)

    def _ask_ms(self, source: Source, lag: int = 0) -> float:
        """What exploring a source counts for; its situations share what that may cost."""
        ask_ms = self.times.milliseconds(source.name) + self._pace.ask_ms
        if lag:
            ask_ms += self.times.catch_up(source.name, lag)
        return ask_ms * source.num_situations

    def _candidates(
        self, step: PlannedStep, source: Source, places: Sequence[int]
    ) -> Iterator[Candidate]:
        """Those of some requests for which a source could draft."""
        name, matched, values, known = source.name, source.matched, self._values, step.candidates
        explored = name, 0
        for place in places:
            if (name, place) in known:
                yield known[name, place]
                continue
            request, situation = step.requests[place], 0
            lag = source.lag(request)
            if lag is None or (lag > USUAL_LAG and not self._has_time(step, source, request, lag)):
                continue
            if matched is not None:
                situation = bisect_right(MATCHES, matched(request))
                explored = name, situation
            elif step.asks:
                situation = bisect_right(SITUATIONS, self._drafts.expected(place))
            value = values[name, situation, request.adapter_name]
            found = Candidate(place, value, lag if lag > USUAL_LAG else 0, explored)
            if matched is not None:
                known[name, place] = found
            yield found

    def _has_time(self, step: PlannedStep, source: Source, request: Request, lag: int) -> bool:
        """Whether reading what it lacks does not take longer than the rest without drafts."""
        if request.is_forced or not step.rate:
            return True
        return self._read_ms(step, source.name, lag) <= request.remaining / step.rate

    def _is_worth(self, step: PlannedStep, candidate: Candidate) -> bool:
        value, request = candidate.value, step.requests[candidate.place]
        gain = value.tokens - step.rate * value.ms
        if (gain > 0.0 and not candidate.lag) or request.is_forced:
            return True
        if gain <= 0.0:
            return False
        # Catching up is an investment. It has to come back before the request ends, in the usual
        # situation, in which no other proposer drafts.
        name = candidate.explored[0]
        gain = min(gain, self._values[name, 0, request.adapter_name].gain(step.rate))
        steps = request.remaining / (1 + gain)
        return gain * steps > step.rate * self._read_ms(step, name, candidate.lag)

    def _read_ms(self, step: PlannedStep, name: str, lag: int) -> float:
        """Time in which a source reads the tokens that it has to catch up with."""
        token_ms = self.times.of(name).token
        if token_ms:
            return token_ms * lag
        # A source is smaller than the target, so before it was measured a token takes as long as
        # a row of the target in a wide step, or less where that is a time of reading from disk.
        rows = 64
        plain_ms, *_, wide_ms = self._cost.growth(step.shape, rows)
        return lag * min((wide_ms - plain_ms) / rows, 1 / 24 * plain_ms)

    def _explored(
        self, step: PlannedStep, source: Source, doubtful: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Those that are asked to see whether it pays by now, first those without a lag."""
        ready = [candidate for candidate in doubtful if not candidate.lag]
        ready = ready or [min(doubtful, key=lambda candidate: candidate.lag)]
        cost_ms = self._ask_ms(source, ready[0].lag)
        covered = {c.explored for c in ready if self.exploration.covers(c.explored, cost_ms)}
        step.explored |= covered
        return [candidate for candidate in ready if candidate.explored in covered]


def _holds_up(step: PlannedStep, candidates: Sequence[Candidate]) -> bool:
    """Whether drafts for these hold up a request that cannot wait for them."""
    places = {candidate.place for candidate in candidates}
    return any(has < ENOUGH and i not in places for i, has in enumerate(step.ahead or ()))


def _asked(step: PlannedStep, source: Source, candidates: Sequence[Candidate], able: int) -> Asked:
    lag, lessons = 0, dict[int, Lesson]()
    for place, value, behind, _ in candidates:
        lag += behind
        if not behind and not step.requests[place].is_forced:
            lesson = lessons.get(id(value))
            if lesson is None:
                lesson = lessons[id(value)] = Lesson(value)
            lesson.indices.append(place)
    return Asked(source.name, len(candidates), lag, able, [*lessons.values()])
