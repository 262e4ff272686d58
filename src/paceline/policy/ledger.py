"""What steps took and brought, booked where the next plans look it up. Owns the order of booking.

Most steps of most texts are planned by nobody, because nobody is worth asking. They are to cost as
little as possible: they are noted, and booked together when somebody plans again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.policy.asking import Asking
from paceline.policy.asks import asks_for_drafts
from paceline.policy.pace import Pace
from paceline.policy.planned import PlannedStep
from paceline.policy.planner import PlainStep, StepReport
from paceline.request import Request

GLANCE_SHARE = 0.005
"""Share of the time in which nobody is asked that glances at drafts may take in the long run."""
WAKE_MS, GLANCE_MS = 0.03, 0.012
"""Looking up whether to glance, and a glance at one proposer's draft for one request, about: as
they come, seldom, with what they need out of the processor's caches."""
SHORTER = 4
"""The first pause between two glances is so much shorter than the longest; each is doubled."""
MAX_NOTED = 64
"""Steps that are noted at most until they are booked."""


class Ledger:
    """See the module's docstring.

    Args:
        asking: gets told what asking brought.
        reads_clock: False where the times of steps are predicted ones.
        pace: what is known of it beforehand.
    """

    def __init__(self, asking: Asking, reads_clock: bool, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self._asking = asking
        self._reads_clock = reads_clock
        self._noted: list[PlainStep] = []
        self._noted_ms = 0.0  # of them, and of steps that say nothing of plain decoding
        self._resting: list[int] | None = None  # for whom nobody is worth asking,
        self._rest_ms = 0.0  # for so long
        self._watched: Sequence[Request] = ()  # whose drafts may end that,
        self._is_held = False  # all of them together, else any of them
        # From a glance to the next one, at most that, and what is left of it.
        self._pause_ms = self._longest_ms = self._glance_in_ms = 0.0

    def is_resting(
        self,
        requests: Sequence[Request],
        rate: Callable[[], float],
        needy: Callable[[], Sequence[tuple[Request, float]]] = tuple,
    ) -> bool:
        """Whether nobody is worth asking. It stays so until time passes, other requests come, or a
        glance shows a draft that promises enough.

        Where somebody is, everything is booked.

        Args:
            rate: says how many tokens a millisecond is worth.
            needy: says who cannot wait for the drafts of others, and for how many steps to come:
                unless it pays for all of these, nobody is worth asking.
        """
        request_ids = [request.request_id for request in requests]
        if request_ids == self._resting and self._rest_ms > 0.0 and not self._sees_promise(rate):
            return True
        self.settle()
        willing = [request for request in requests if request.params.speculative.enabled]
        tokens_per_ms, asking = rate(), self._asking
        if not any(map(asks_for_drafts, willing)):
            waiting = needy()
            self._watched = [request for request, _ in waiting]
            self._is_held = not asking.pays_for_all(self._watched, tokens_per_ms)
            if self._is_held and tokens_per_ms > 0.0:
                steps = max([steps for _, steps in waiting])
                self._rest(request_ids, steps * len(requests) / tokens_per_ms)
                return True
        if asking.is_anyone_worth_asking(willing, tokens_per_ms):
            self._pause_ms = 0.0
            return False
        self._watched, self._is_held = willing, False
        self._rest(request_ids, asking.rest_ms(willing))
        return True

    def _rest(self, request_ids: list[int], milliseconds: float) -> None:
        """Let nobody be asked for these requests for so long."""
        self._resting, self._rest_ms = request_ids, milliseconds
        glances = len(self._watched) * self._asking.num_glanced
        self._longest_ms = (WAKE_MS + glances * GLANCE_MS) / GLANCE_SHARE if glances else 0.0
        self._pause_ms = self._glance_in_ms = max(self._pause_ms, self._longest_ms / SHORTER)

    def _sees_promise(self, rate: Callable[[], float]) -> bool:
        """Whether it is time for a glance, and that shows a draft that is worth asking for."""
        if self._glance_in_ms > 0.0 or not self._longest_ms:
            return False
        self._pause_ms = self._glance_in_ms = min(2 * self._pause_ms, self._longest_ms)
        pays = self._asking.pays_for_all if self._is_held else self._asking.sees_promise
        return pays(self._watched, rate())

    @property
    def quiet_ms(self) -> float:
        """Time in which it stays so that nobody is worth asking for the same requests."""
        if self._resting is None:
            return 0.0
        return min(self._rest_ms, self._glance_in_ms) if self._longest_ms else self._rest_ms

    def note(self, report: StepReport) -> None:
        """Take in a step that nobody planned."""
        shape, forward_ms, total_ms, decoding, emitted = report
        is_plain = decoding > 0 and shape.requests == decoding and total_ms > 0.0
        steps = [PlainStep(forward_ms, total_ms, emitted / decoding)] if is_plain else []
        self.note_plain(steps, total_ms)

    def note_plain(self, steps: Sequence[PlainStep], milliseconds: float) -> None:
        """Take in plain steps that nobody planned, and the time that they and others took."""
        self._noted += steps
        self._noted_ms += milliseconds
        self._rest_ms -= milliseconds
        self._glance_in_ms -= milliseconds
        if len(self._noted) >= MAX_NOTED:
            self.settle()

    def settle(self) -> None:
        """Book what is noted."""
        self._resting = None
        if self._noted_ms:
            self._asking.pass_time(self._noted_ms)
            self.pace.observe_plain(self._noted, self._reads_clock)
            self._noted, self._noted_ms = [], 0.0

    def book(self, report: StepReport, step: PlannedStep) -> None:
        """Learn from a step, once all earlier ones are booked."""
        shape, forward_ms, total_ms, decoding, emitted = report
        host_ms = step.host_ms
        if self._reads_clock and shape.rows == decoding:
            # Asked in vain: what the step took beyond a plain one is the price of asking.
            beyond_ms = total_ms - forward_ms - step.draft_ms - self.pace.overhead_ms
            host_ms = max(host_ms, beyond_ms)
        self._asking.settle(step.asks, host_ms, total_ms)
        is_mixed = shape.requests > decoding
        if not decoding or is_mixed or total_ms <= 0.0:
            return
        drafted = shape.rows > decoding
        if self._reads_clock:
            rest_ms = total_ms - forward_ms - step.draft_ms - step.host_ms
            if drafted:
                self.pace.observe_drafted(rest_ms, decoding)
            else:
                self.pace.observe_overhead(rest_ms)
        plain_ms = step.plain_ms if drafted else forward_ms
        self.pace.observe(emitted / decoding, total_ms, plain_ms)
