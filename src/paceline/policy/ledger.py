"""What steps took and brought, booked where the next plans look it up. Owns the order of booking.

Most steps of most texts are planned by nobody, because nobody is worth asking. They are to cost as
little as possible: they are noted, and booked together when somebody plans again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from paceline.policy.asking import Asking
from paceline.policy.pace import Pace, PlainCheck
from paceline.policy.planned import UNPLANNED, PlannedStep
from paceline.policy.planner import StepReport
from paceline.request import Request

GLANCE_SHARE = 0.004
"""Share of the time in which nobody is asked that glances at drafts may take."""
GLANCE_MS = 0.01
"""A glance at one proposer's draft for one request, about."""
MAX_NOTED = 64
"""Steps that are noted at most until they are booked."""


class Ledger:
    """See the module's docstring.

    Args:
        asking: gets told what asking brought.
        reads_clock: False where the times of steps are predicted ones.
        overhead_ms: of a step outside of drafting and the forward; 0 where it is not known.
    """

    def __init__(self, asking: Asking, reads_clock: bool, overhead_ms: float = 0.0) -> None:
        self.pace = Pace(overhead_ms)
        self.plain_check = PlainCheck()
        self._asking = asking
        self._reads_clock = reads_clock
        self._noted: list[StepReport] = []
        self._resting: list[int] | None = None  # for whom nobody is worth asking,
        self._rest_ms = 0.0  # for so long
        self._willing: list[Request] = []  # those of them who allow it
        self._between_ms = self._glance_in_ms = 0.0  # from glance to glance, and to the next

    def is_resting(self, requests: Sequence[Request]) -> bool:
        """Whether nobody is worth asking. It stays so until time passes, other requests come, or a
        glance shows a draft that promises enough.

        Where somebody is, everything is booked.
        """
        request_ids = [request.request_id for request in requests]
        if request_ids == self._resting and self._rest_ms > 0.0 and not self._sees_promise():
            return True
        self.settle()
        willing = [request for request in requests if request.params.speculative.enabled]
        if self._asking.is_anyone_worth_asking(willing):
            return False
        self._resting, self._rest_ms = request_ids, self._asking.rest_ms(willing)
        self._willing = willing
        self._between_ms = len(willing) * self._asking.num_glanced * GLANCE_MS / GLANCE_SHARE
        self._glance_in_ms = self._between_ms or inf
        return True

    def _sees_promise(self) -> bool:
        """Whether it is time for a glance, and that shows a draft that is worth asking for."""
        if self._glance_in_ms > 0.0:
            return False
        self._glance_in_ms = self._between_ms
        return self._asking.sees_promise(self._willing)

    def note(self, report: StepReport) -> None:
        """Take in a step that nobody planned."""
        self._noted.append(report)
        self._rest_ms -= report.total_ms
        self._glance_in_ms -= report.total_ms
        if len(self._noted) == MAX_NOTED:
            self.settle()

    def settle(self) -> None:
        """Book what is noted."""
        noted, self._noted, self._resting = self._noted, [], None
        for report in noted:
            self.book(report, UNPLANNED)

    def book(self, report: StepReport, step: PlannedStep) -> None:
        """Learn from a step, once all earlier ones are booked."""
        shape, forward_ms, total_ms, decoding, emitted, padding = report
        self._asking.settle(step.asks, step.rate, step.host_ms, total_ms)
        is_mixed = shape.requests > decoding
        if not decoding or is_mixed or total_ms <= 0.0:
            return
        drafted = shape.rows - padding > decoding
        if self._reads_clock:
            rest_ms = total_ms - forward_ms - step.draft_ms - step.host_ms
            self.pace.observe_overhead(rest_ms, drafted)
        if drafted and self._reads_clock:
            self.plain_check.observe_draft()
        elif not drafted and step.plain_ms:
            self.plain_check.observe_plain(step.plain_ms, forward_ms)
        plain_ms = step.plain_ms if drafted else forward_ms
        self.pace.observe(emitted / decoding, total_ms, plain_ms)
