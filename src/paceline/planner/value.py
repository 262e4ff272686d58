"""Who is asked for drafts: those whose drafts are expected to be worth the time they take.

A proposer's **value** is the tokens that its chosen nodes promised beyond the time of verifying
them, less the time of drafting at the going rate, which depends on how many requests decode. All
requests of an adapter share it, or all of none: what one of them shows, the others need not find
out. A proposer has a value for each situation. That is how long a match it has in the request's
text, where it knows that before it drafts, and else how much other proposers have drafted in the
step already.

One that does not seem to pay is asked as often as :class:`Exploration` lets it. A proposer that
drafts from texts is looked at in each step, which takes microseconds, and asked where matches as
long as it has have paid. Knows neither forwards nor what of a draft is verified.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

from paceline.planner.cost import CostModel
from paceline.planner.cost_table import NO_STEP, StepShape
from paceline.planner.drafts import Drafts
from paceline.planner.pace import ENOUGH, Pace
from paceline.request.request import Request

SITUATIONS = (0.25, 0.75, 1.5)
"""Expected tokens of the drafts that are there already; between these situations are told apart."""
MATCHES = (2, 3, 5, 12)
"""Lengths of matches in tokens, from which on situations are told apart."""
FIRST_VALUE = 0.5
"""Tokens that are expected of a proposer that was never asked: enough to be asked some times."""
PACE = 0.1
"""Weight of the latest draft in what is learnt of a proposer."""
MOST_TIMES = 3.0
"""A measurement counts as at most this many times the expected one: the machine may have paused."""
USUAL_LAG = 16
"""Tokens that a proposer lacks after a step; more than that is catching up."""
SHARE = 0.004
"""Part of the time since it was last explored that exploring an estimate may cost."""
SAVED = 4
"""Of the dearest prices, how many can be saved up."""
LONGEST_MS = 1e6
"""Time that may pass at once; a clock that says more has jumped."""
LEAST_MATCHES = 0, *MATCHES
"""Tokens from which on a match is in each situation of a source that knows its matches."""
NUM_SITUATIONS = len(LEAST_MATCHES)
READ_ROWS, READ_SHARE = 64, 1 / 24
"""A token that a source was not yet seen to catch up with takes as long as a row of so wide a step
of the target, and as so much of its plain step, at most."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a planner decides about as one: a proposer, or all that draft from texts.

    Attributes:
        name: of the proposer, or of all of them.
        costs_forwards: it drafts by forwards of a model.
        lag: tokens of a request that it has to read before it can draft; None where it will not.
        applies: whether it is for a request at all, whatever its text.
        costs_levels: each further level of its trees takes one more forward.
        matched: tokens at the end of a request's text that occurred before, which says beforehand
            what a draft may be worth; None where nothing does.
    """

    name: str
    costs_forwards: bool = False
    lag: Callable[[Request], int | None] = lambda request: 0
    applies: Callable[[Request], bool] = lambda request: True
    costs_levels: bool = True
    matched: Callable[[Request], int] | None = None

    @property
    def has_levels(self) -> bool:
        """Whether what it takes depends on the depth of its trees."""
        return self.costs_forwards and self.costs_levels

    @property
    def num_situations(self) -> int:
        """Over how many situations exploring is spread, where it knows its matches."""
        return 1 if self.matched is None else NUM_SITUATIONS


Explored = tuple[str, int]
"""A source, and a situation in which it is asked."""


@dataclass(slots=True)
class ProposerValue:
    """What one draft for one request brings and takes.

    Attributes:
        tokens: that the chosen nodes promise beyond the time in which they are verified.
        ms: that planning and drafting take.
        count: drafts that these rest on.
    """

    tokens: float = FIRST_VALUE
    ms: float = 0.0
    count: int = 0

    def gain(self, rate: float) -> float:
        """Tokens that asking is expected to bring, where a millisecond is worth ``rate`` tokens."""
        return self.tokens - rate * self.ms

    def learn(self, tokens: float, ms: float, drafts: int = 1) -> None:
        """Take in what some drafts promised and took on average."""
        self.count += drafts
        pace = max(1.0 - (1.0 - PACE) ** drafts, drafts / (self.count + 2))
        self.ms += pace * (ms - self.ms)
        # No less than nothing, so that a change of text is believed after few drafts.
        self.tokens = max(0.0, self.tokens + pace * (tokens - self.tokens))


class ProposerValues:
    """The values of all proposers."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int, str | None], ProposerValue] = {}
        self._all: dict[tuple[str, str | None], list[ProposerValue]] = {}

    def of(self, name: str, situation: int = 0, adapter: str | None = None) -> ProposerValue:
        """A proposer's value for requests of an adapter, or of none, whose value that of an adapter
        is at first; a few drafts of its own outweigh it."""
        key = name, situation, adapter
        value = self._values.get(key)
        if value is None:
            known = ProposerValue() if adapter is None else self.of(name, situation)
            value = self._values[key] = replace(known, count=0)
        return value

    def by_situation(self, name: str, adapter: str | None) -> list[ProposerValue]:
        """The values of a proposer that knows its matches."""
        known, situations = self._all.get((name, adapter)), range(NUM_SITUATIONS)
        if known is None:
            known = self._all[name, adapter] = [self.of(name, i, adapter) for i in situations]
        return known


@dataclass(slots=True)
class DraftTime:
    """Times of one proposer in milliseconds.

    Attributes:
        call: of asking it for all requests of a step together, first level included.
        level: of each further level of its trees; 0 for one whose time does not depend on them.
        token: of each token that it has to catch up with beyond :data:`USUAL_LAG`.
    """

    call: float = 0.0
    level: float = 0.0
    token: float = 0.0


UNKNOWN = DraftTime()
"""Of a proposer that was not timed; shared, so never written to."""


class DraftingCost:
    """Times of all proposers, by name, as they are learnt; or as they are known."""

    def __init__(self, known: Mapping[str, DraftTime] | None = None) -> None:
        self._times: dict[str, DraftTime] = {n: replace(t) for n, t in (known or {}).items()}
        self._calls: dict[str, int] = {}

    def of(self, name: str) -> DraftTime:
        return self._times.get(name, UNKNOWN)

    def milliseconds(self, name: str, num_levels: int = 1) -> float:
        """Time of one call that drafts so many levels and has nothing to catch up with."""
        time = self._times.get(name, UNKNOWN)
        return time.call + time.level * (num_levels - 1) if num_levels > 1 else time.call

    def catch_up(self, name: str, lag: int) -> float:
        """Time in which a proposer reads what it lacks beyond the usual."""
        return self.of(name).token * lag if lag > USUAL_LAG else 0.0

    def observe(
        self, name: str, num_levels: int, lag: int, milliseconds: float, has_levels: bool
    ) -> None:
        """Learn from one call.

        Args:
            lag: tokens that its requests lacked together beyond the usual, 0 for none.
            has_levels: each level takes a forward; without, the time does not depend on them.
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
        expected = self.milliseconds(name, levels)
        if lag:
            each = max(0.0, milliseconds - expected) / lag
            each = min(each, MOST_TIMES * time.token) if time.token else each
            time.token += (0.5 if time.token else 1.0) * (each - time.token)
            return
        if expected == 0.0:
            time.call = milliseconds / levels
            time.level = time.call if has_levels else 0.0
            return
        pace = max(PACE, 1 / count)
        error = pace * (min(milliseconds, MOST_TIMES * expected) - expected)
        time.call += error * time.call / expected  # each as far as it contributed
        time.level += error * time.level / expected


class Exploration:
    """Time for choices that do not seem best, so that no estimate is believed for ever.

    What was not seen for long may have become good. Exploring an estimate may cost a small part of
    the time that has passed since that was last done: what is cheap to see again is seen soon, what
    is dear seldom. Estimates are told apart by any names.
    """

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._paid_until: dict[Hashable, float] = {}
        self._dearest_ms: dict[Hashable, float] = {}  # that was asked for

    def passed(self, milliseconds: float) -> None:
        """Let time pass; what no step takes does not count."""
        if 0.0 < milliseconds <= LONGEST_MS:
            self._now_ms += milliseconds

    def covers(self, what: Hashable, cost_ms: float) -> bool:
        """Whether exploring something may cost so much."""
        return self.milliseconds_until(what, cost_ms) <= 0.0

    def milliseconds_until(self, what: Hashable, cost_ms: float) -> float:
        """Time that has to pass before exploring something may cost so much."""
        if cost_ms > self._dearest_ms.get(what, 0.0):
            self._dearest_ms[what] = cost_ms
        return self._paid_until.get(what, 0.0) + cost_ms / SHARE - self._now_ms

    def spend(self, what: Hashable, cost_ms: float) -> None:
        """Something was explored. What was saved beyond some of the dearest prices is lost."""
        longest = SAVED * (self._dearest_ms.get(what, 0.0) / SHARE)
        begun = max(self._paid_until.get(what, 0.0), self._now_ms - longest)
        self._paid_until[what] = begun + cost_ms / SHARE


class Candidate(NamedTuple):
    """A request for which a source may be asked.

    Attributes:
        place: in the step.
        value: what the source is expected to bring, and what learns from what it does.
        lag: tokens that the source has to catch up with, where they are more than usual.
        what: is explored where it is asked against this value.
    """

    place: int
    value: ProposerValue
    lag: int
    what: Explored


@dataclass(slots=True)
class Lesson:
    """What the drafts of some requests say of a source's value.

    Attributes:
        gain: what their chosen nodes promise beyond the time in which they are verified, in tokens.
    """

    value: ProposerValue
    indices: list[int] = field(default_factory=list)
    gain: float = 0.0


@dataclass(slots=True)
class Asked:
    """A source that is asked for drafts in a step.

    Attributes:
        name: of the source.
        count: requests for which it is asked.
        lag: tokens that it has to catch up with for these, beyond the usual.
        able: requests for which it could have been asked.
        lessons: what is learnt of it, by value. Requests that are still caught up with, or asked
            for drafts at any price, say nothing of others.
        cost_ms: the part of each request in the drafting time, were all of these asked: who shares
            a call with few is not to be charged for those who do not.
    """

    name: str
    count: int
    lag: int
    able: int
    lessons: Sequence[Lesson] = ()
    cost_ms: float = 0.0


@dataclass(slots=True)
class PlannedStep:
    """The step that is being planned.

    Attributes:
        requests: that may draft.
        forwards: milliseconds of the forward with 0, 1, 2, ... draft nodes; empty until needed.
        growth: the same with what else takes longer where there are some.
        plain_ms: predicted forward without drafts.
        rate: tokens that a millisecond is worth.
        slowdown: share of its plain speed that a request may lose to the drafts of others.
        ahead: tokens that each request has had beyond what it is owed; None where all may be held
            up.
        asks: who was asked.
        explored: who is asked to see whether it pays by now.
        levels, level_ms: of the proposer that drafts by forwards: how many, and the time of a
            further one.
        draft_ms: time of the proposers.
    """

    shape: StepShape = NO_STEP
    requests: Sequence[Request] = ()
    forwards: Sequence[float] = ()
    growth: Sequence[float] = ()
    plain_ms: float = 0.0
    rate: float = 0.0
    slowdown: float = 0.0
    ahead: Sequence[float] | None = None
    asks: list[Asked] = field(default_factory=list)
    explored: set[Explored] = field(default_factory=set)
    levels: int = 1
    level_ms: float = 0.0
    draft_ms: float = 0.0


UNPLANNED = PlannedStep()
"""A step for which no proposer is asked; shared, so never written to."""


class Asking:
    """Decides which sources are asked, and learns what they are worth.

    Args:
        pace: knows what a step takes longer where any proposer is asked.
        drafts: of the step that is planned.
        cost: predicts forwards.
    """

    def __init__(self, pace: Pace, drafts: Drafts, cost: CostModel) -> None:
        self._pace, self._drafts, self._cost = pace, drafts, cost
        self._sources: list[Source] = []
        self._values = ProposerValues()
        self.times, self.exploration = DraftingCost(), Exploration()
        self._watched: list[tuple[Source, str | None, list[bool]]] = []
        """While none is asked: sources that know their matches, and in which situations each is for
        requests of an adapter."""

    def set_sources(self, sources: Sequence[Source]) -> None:
        if not all(source in sources for source in self._sources):
            self._values = ProposerValues()  # what one brought says nothing of another
        self._sources = list(sources)

    # --- when to ask next ----------------------------------------------------------------------

    def pause_ms(self, step: PlannedStep) -> float:
        """Time that has to pass before any proposer is worth asking first, or may be explored.

        Until then :meth:`sleeps` says whether a text has come to where one may be.
        """
        self._watched = []
        least_ms = inf if self._sources else 0.0  # a planner that was told of none asks all
        for source in self._sources:
            able: dict[str | None, list[int]] = {}  # by adapter
            for i, request in enumerate(step.requests):
                if request.params.speculative.enabled and source.applies(request):
                    able.setdefault(request.adapter_name, []).append(i)
            pause = self._pause_of if source.matched is None else self._pause_until_matched
            for adapter, alike in able.items():
                least_ms = min(least_ms, pause(step, source, alike, adapter))
                if least_ms <= 0.0:
                    return least_ms
        return least_ms

    def _pause_of(
        self, step: PlannedStep, source: Source, able: Sequence[int], adapter: str | None
    ) -> float:
        """Milliseconds for which a source is asked for none of these requests of an adapter."""
        what, cost_ms = (source.name, 0), self._ask_ms(source)
        pause_ms = self.exploration.milliseconds_until(what, cost_ms)
        is_hopeful = self._values.of(source.name, 0, adapter).gain(step.rate) > 0.0
        if pause_ms > 0.0 and not is_hopeful:
            return pause_ms
        candidates = self._candidates(step, source, able)
        is_worth = [each for each in candidates if is_hopeful and self._is_worth(step, each)]
        if is_worth or (is_hopeful and not candidates):
            return 0.0  # where there is none, one may come from the next token on
        if candidates:
            cost_ms = self._ask_ms(source, min([each.lag for each in candidates]))
        else:  # looking in vain is exploring too
            self.exploration.spend(what, self._pace.ask_ms)
        return self.exploration.milliseconds_until(what, cost_ms)

    def _pause_until_matched(
        self, step: PlannedStep, source: Source, able: Sequence[int], adapter: str | None
    ) -> float:
        """The same for a source that knows its matches."""
        ask_ms, until = self._ask_ms(source), self.exploration.milliseconds_until
        is_asked, least_ms = [True] * NUM_SITUATIONS, inf
        for situation, value in enumerate(self._values.by_situation(source.name, adapter)):
            if value.tokens - step.rate * value.ms <= 0.0:
                pause_ms = until((source.name, situation), ask_ms)
                if pause_ms > 0.0:
                    is_asked[situation], least_ms = False, min(least_ms, pause_ms)
        for candidate in self._candidates(step, source, able):
            if is_asked[candidate.what[1]]:
                return 0.0
        if any(is_asked):
            self._watched.append((source, adapter, is_asked))
        return least_ms

    def sleeps(self, requests: Sequence[Request]) -> int:
        """For how many steps no source that knows its matches is to be asked before the pause is
        over; 0 where one is now. A match grows by a token per step at most."""
        shortest = MATCHES[-1]
        for source, adapter, is_asked in self._watched:
            assert source.matched is not None
            least = LEAST_MATCHES[is_asked.index(True)]
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
            worth = [each for each in worth if step.requests[each.place].is_forced]
        elif doubtful:
            worth += self._explored(step, source, doubtful)
            worth.sort()
        if worth:
            step.asks.append(_asked(step, source, worth, len(places)))
        return [*map(itemgetter(0), worth)]

    def drafted(self, step: PlannedStep, source: Source, levels: int, milliseconds: float) -> None:
        """Learn how long it took to draft trees of so many levels."""
        asked = step.asks[-1]
        self.times.observe(source.name, levels, asked.lag, milliseconds, source.has_levels)
        asked.cost_ms = self.times.milliseconds(source.name, levels) / asked.able
        for what in step.explored:
            if what[0] == source.name:
                cost_ms = (milliseconds + self._pace.ask_ms) * source.num_situations
                self.exploration.spend(what, cost_ms)

    def learn(self, step: PlannedStep) -> None:
        """Learn from a step's drafts what they are worth."""
        if step.asks:
            shared_ms = self._pace.ask_ms / sum(map(attrgetter("count"), step.asks))
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
    ) -> list[Candidate]:
        """Those of some requests for which a source could draft."""
        candidates = []
        for i in places:
            request, situation, what = step.requests[i], 0, (source.name, 0)
            lag = source.lag(request)
            if lag is None or (lag > USUAL_LAG and not self._has_time(step, source, request, lag)):
                continue
            if source.matched is not None:
                situation = bisect_right(MATCHES, source.matched(request))
                what = source.name, situation
            elif step.asks:
                situation = bisect_right(SITUATIONS, self._drafts.expected(i))
            value = self._values.of(source.name, situation, request.adapter_name)
            lag = lag if lag > USUAL_LAG else 0
            candidates.append(Candidate(i, value, lag, what))
        return candidates

    def _has_time(self, step: PlannedStep, source: Source, request: Request, lag: int) -> bool:
        """Whether reading what it lacks does not take longer than to do without."""
        if request.is_forced or not step.rate:
            return True
        return self._read_ms(step, source.name, lag) <= request.remaining / step.rate

    def _is_worth(self, step: PlannedStep, candidate: Candidate) -> bool:
        request, value = step.requests[candidate.place], candidate.value
        gain = value.tokens - step.rate * value.ms
        if (gain > 0.0 and not candidate.lag) or request.is_forced:
            return True
        if gain <= 0.0:
            return False
        # Catching up is an investment: it has to come back before the request ends, in the usual
        # situation, in which no other proposer drafts.
        name = candidate.what[0]
        gain = min(gain, self._values.of(name, 0, request.adapter_name).gain(step.rate))
        steps = request.remaining / (1 + gain)
        return gain * steps > step.rate * self._read_ms(step, name, candidate.lag)

    def _read_ms(self, step: PlannedStep, name: str, lag: int) -> float:
        """Time in which a source reads so many tokens, more than usual.

        Where none was timed, a token takes no longer than a row of the target, which a draft is
        smaller than: next to nothing of a step whose weights come from disk.
        """
        token_ms = self.times.of(name).token
        if token_ms:
            return token_ms * lag
        plain_ms, *_, wide_ms = self._cost.growth(step.shape, READ_ROWS)
        return lag * min((wide_ms - plain_ms) / READ_ROWS, READ_SHARE * plain_ms)

    def _explored(
        self, step: PlannedStep, source: Source, doubtful: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Those of these that are asked to see whether it pays by now: who is not behind first."""
        ready = [each for each in doubtful if not each.lag]
        ready = ready or [min(doubtful, key=lambda each: each.lag)]
        cost_ms = self._ask_ms(source, ready[0].lag)
        covered = {each.what for each in ready if self.exploration.covers(each.what, cost_ms)}
        step.explored |= covered
        return [each for each in ready if each.what in covered]


def _holds_up(step: PlannedStep, candidates: Sequence[Candidate]) -> bool:
    """Whether drafts for these hold up a request that cannot wait for them."""
    indices = {each.place for each in candidates}
    return any(has < ENOUGH and i not in indices for i, has in enumerate(step.ahead or ()))


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
