"""Who is asked for drafts: those whose drafts are expected to be worth the time they take.

Whether a proposer is asked is decided by its value in the situation at hand; one that does not
seem to pay is asked as often as exploring it may cost. A proposer that drafts from texts knows
before it drafts how long a match it has, so it is looked at in each step, which takes microseconds,
and asked where such matches have paid.

Owns what is learnt of proposers. Knows neither forwards nor what of a draft is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from paceline.planner.cost import CostModel
from paceline.planner.credit import ENOUGH
from paceline.planner.drafting_cost import USUAL_LAG, DraftingCost
from paceline.planner.drafts import Drafts
from paceline.planner.exploration import Exploration
from paceline.planner.pace import Pace
from paceline.planner.planned import Asked, Candidate, Lesson, PlannedStep, asks_for_drafts
from paceline.planner.planner import Source
from paceline.planner.proposer_value import (
    MATCHES,
    ProposerValues,
    drafted_situation,
    matched_situation,
)
from paceline.request.request import Request

LEAST_MATCHES = 0, *MATCHES
"""Tokens from which on a match is in each situation of a source that knows its matches."""
MATCHED = range(len(LEAST_MATCHES))
READ_ROWS, READ_SHARE = 64, 1 / 24
"""A token that a source was not yet seen to catch up with takes as long as a row of so wide a step
of the target, and as so much of its plain step, at most."""
MAX_ASLEEP = 64
"""Steps for which no match is looked at, at most."""


class Asking:
    """See the module's docstring.

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
        self._asleep = 0
        """Steps for which no match can become long enough: it grows by a token per step."""

    def set_sources(self, sources: Sequence[Source]) -> None:
        if not all(source in sources for source in self._sources):
            self._values = ProposerValues()  # what one brought says nothing of another
        self._sources = list(sources)

    # --- when to ask next ----------------------------------------------------------------------

    def pause_ms(self, step: PlannedStep) -> float:
        """Time that has to pass before any proposer is worth asking first, or may be explored.

        Until then :meth:`wakes` says whether a text has come to where one may be.
        """
        self._watched, self._asleep = [], 0
        willing = [i for i, each in enumerate(step.requests) if each.params.speculative.enabled]
        least_ms = inf if self._sources else 0.0  # a planner that was told of none asks all
        for source in self._sources:
            able = [i for i in willing if source.applies(step.requests[i])]
            pause = self._pause_of if source.matched is None else self._pause_until_matched
            for adapter in dict.fromkeys(step.requests[i].adapter_name for i in able):
                alike = [i for i in able if step.requests[i].adapter_name == adapter]
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
        is_hopeful = self._values.of(*what, adapter).gain(step.rate) > 0.0
        if pause_ms > 0.0 and not is_hopeful:
            return pause_ms
        found = self._candidates(step, source, able)
        if is_hopeful and (not found or any(self._is_worth(step, each) for each in found)):
            return 0.0  # where none is found, one may be from the next token on
        if found:
            cost_ms = self._ask_ms(source, min(each.lag for each in found))
        else:  # looking in vain is exploring too
            self.exploration.spend(what, self._pace.ask_ms)
        return self.exploration.milliseconds_until(what, cost_ms)

    def _pause_until_matched(
        self, step: PlannedStep, source: Source, able: Sequence[int], adapter: str | None
    ) -> float:
        """The same for a source that knows its matches."""
        pauses_ms, ask_ms = [], self._ask_ms(source)
        for situation in MATCHED:
            what, pause_ms = (source.name, situation), 0.0
            if self._values.of(*what, adapter).gain(step.rate) <= 0.0:
                pause_ms = self.exploration.milliseconds_until(what, ask_ms)
            pauses_ms.append(pause_ms)
        found = self._candidates(step, source, able)
        if any(pauses_ms[each.what[1]] <= 0.0 for each in found):
            return 0.0
        is_asked = [pause_ms <= 0.0 for pause_ms in pauses_ms]
        if any(is_asked):
            self._watched.append((source, adapter, is_asked))
        return min([pause_ms for pause_ms in pauses_ms if pause_ms > 0.0], default=inf)

    def wakes(self, requests: Sequence[Request]) -> bool:
        """Whether a source that knows its matches is to be asked before the pause is over."""
        if self._asleep:
            self._asleep -= 1
            return False
        shortest = MAX_ASLEEP
        for source, adapter, is_asked in self._watched:
            assert source.matched is not None
            least = LEAST_MATCHES[is_asked.index(True)]
            for each in requests:
                if each.adapter_name != adapter:
                    continue
                matched = source.matched(each)
                if not is_asked[matched_situation(matched)]:
                    shortest = min(shortest, least - matched)
                elif each.params.speculative.enabled and source.applies(each):
                    return True
        self._asleep = max(0, shortest - 1)
        return False

    # --- in a step -----------------------------------------------------------------------------

    def ask(self, step: PlannedStep, source: Source, places: Sequence[int]) -> list[int]:
        """For which of some requests of a step a source drafts."""
        worth, doubtful = list[Candidate](), list[Candidate]()
        for each in self._candidates(step, source, places):
            (worth if self._is_worth(step, each) else doubtful).append(each)
        if step.ahead and source.costs_forwards and _holds_up(step, worth):
            worth = [each for each in worth if asks_for_drafts(step.requests[each.place])]
        elif doubtful:
            worth += self._explored(step, source, doubtful)
            worth.sort()
        if worth:
            lag = sum([each.lag for each in worth])
            lessons = _lessons(step, worth)
            step.asks.append(Asked(source.name, len(worth), lag, len(places), lessons))
        return [each.place for each in worth]

    def drafted(self, step: PlannedStep, source: Source, levels: int, milliseconds: float) -> None:
        """Learn how long it took to draft trees of so many levels."""
        asked = step.asks[-1]
        self.times.observe(source.name, levels, asked.lag, milliseconds, source.has_levels)
        asked.cost_ms = self.times.milliseconds(source.name, levels) / asked.able
        for what in step.explored:
            if what[0] == source.name:
                cost_ms = (milliseconds + self._pace.ask_ms) * _num_situations(source)
                self.exploration.spend(what, cost_ms)

    def learn(self, step: PlannedStep) -> None:
        """Learn from a step's drafts what they are worth."""
        shared_ms = self._pace.ask_ms / (sum([asked.count for asked in step.asks]) or 1)
        for asked in step.asks:
            for lesson in asked.lessons:
                lesson.learn(asked.cost_ms + shared_ms)

    def _ask_ms(self, source: Source, lag: int = 0) -> float:
        """What exploring a source counts for; its situations share what that may cost."""
        ask_ms = self.times.milliseconds(source.name) + self._pace.ask_ms
        return (ask_ms + self.times.catch_up(source.name, lag)) * _num_situations(source)

    def _candidates(
        self, step: PlannedStep, source: Source, places: Sequence[int]
    ) -> list[Candidate]:
        """Those of some requests for which a source could draft."""
        found = []
        for i in places:
            request, situation, what = step.requests[i], 0, (source.name, 0)
            lag = source.lag(request)
            if lag is None:
                continue
            most_ms = request.remaining / step.rate if step.rate else inf
            if not asks_for_drafts(request) and self._read_ms(step, source.name, lag) > most_ms:
                continue  # it would take longer than to do without
            if source.matched is not None:
                situation = matched_situation(source.matched(request))
                what = source.name, situation
            elif step.asks:
                situation = drafted_situation(self._drafts.expected(i))
            value = self._values.of(source.name, situation, request.adapter_name)
            found.append(Candidate(i, value, lag if lag > USUAL_LAG else 0, what))
        return found

    def _is_worth(self, step: PlannedStep, candidate: Candidate) -> bool:
        request, name = step.requests[candidate.place], candidate.what[0]
        gain = candidate.value.gain(step.rate)
        if (gain > 0.0 and not candidate.lag) or asks_for_drafts(request):
            return True
        if gain <= 0.0:
            return False
        # Catching up is an investment: it has to come back before the request ends, in the usual
        # situation, in which no other proposer drafts.
        usual = self._values.of(name, adapter=request.adapter_name)
        gain = min(gain, usual.gain(step.rate))
        steps = request.remaining / (1 + gain)
        return gain * steps > step.rate * self._read_ms(step, name, candidate.lag)

    def _read_ms(self, step: PlannedStep, name: str, lag: int) -> float:
        """Time in which a source reads what it lacks.

        Where none was timed, a token takes no longer than a row of the target, which a draft is
        smaller than: next to nothing of a step whose weights come from disk.
        """
        if lag <= USUAL_LAG or self.times.of(name).token:
            return self.times.catch_up(name, lag)
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


def _lessons(step: PlannedStep, candidates: Sequence[Candidate]) -> Sequence[Lesson]:
    lessons: dict[int, Lesson] = {}
    for index, value, lag, _ in candidates:
        if not lag and not asks_for_drafts(step.requests[index]):
            lesson = lessons.get(id(value))
            if lesson is None:
                lesson = lessons[id(value)] = Lesson(value)
            lesson.indices.append(index)
    return [*lessons.values()]


def _num_situations(source: Source) -> int:
    return 1 if source.matched is None else len(MATCHED)
