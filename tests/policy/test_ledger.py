"""Noting steps puts off what is learnt from them, and changes nothing of it."""

from __future__ import annotations

import pytest

from paceline.policy.asking import Asking
from paceline.policy.cost_points import StepShape
from paceline.policy.drafting_cost import DraftingCost, DraftTime
from paceline.policy.ledger import MAX_NOTED, Ledger
from paceline.policy.planned import UNPLANNED
from paceline.policy.planner import Source, StepReport
from tests.policy.machine import LOOKUP, request

PLAIN = StepShape(1, 0, 0, 1)
PROBE = DraftTime(call=4.0)


def make_ledger() -> Ledger:
    asking = Asking(DraftingCost({LOOKUP.name: PROBE}), host_ms=0.0)
    asking.set_sources([LOOKUP])
    return Ledger(asking, reads_clock=True)


def test_noted_steps_teach_what_booked_ones_do() -> None:
    noting, booking = make_ledger(), make_ledger()
    for ledger in (noting, booking):
        assert not ledger._asking._accounts.probing.covers(PROBE.call)
    for step in range(2 * MAX_NOTED + 5):
        report = StepReport(PLAIN, 10.0 + step % 3, 11.0 + step % 5, 1, 1)
        noting.note(report)
        booking.book(report, UNPLANNED)
    noting.settle()
    assert noting.pace.overhead_ms == booking.pace.overhead_ms > 0.0
    assert noting.pace.factor == booking.pace.factor
    saved = booking._asking._accounts.probing._saved_ms
    assert noting._asking._accounts.probing._saved_ms == pytest.approx(saved)


def test_it_rests_until_a_probe_is_affordable_or_others_come() -> None:
    ledger = make_ledger()
    accounts = ledger._asking._accounts
    for request_id in (1, 2):
        for _ in range(30):
            accounts.settle((LOOKUP.name, 0), request_id, -1.0, 0.0, 1.0)
    one, two = request(1), request(2)
    assert ledger.is_resting([one], lambda: 1.0)
    assert ledger.is_resting([one, two], lambda: 1.0)
    for _ in range(30):
        accounts.settle((LOOKUP.name, 0), 2, 1.0, 0.0, 1.0)
    assert not ledger.is_resting([two], lambda: 1.0)
    assert ledger.is_resting([one], lambda: 1.0)
    passed = 0.0
    while ledger.is_resting([one], lambda: 1.0):
        ledger.note(StepReport(PLAIN, 10.0, 10.0, 1, 1))
        passed += 10.0
    assert passed == pytest.approx(PROBE.call / 0.004, abs=10.0)
    assert ledger.is_resting([], lambda: 1.0)  # speculation off


def test_who_cannot_draft_for_a_request_does_not_keep_it_from_resting() -> None:
    """A grammar's drafts pay, and are for those requests only that have a grammar."""
    ledger = make_ledger()
    asking, one, two = ledger._asking, request(1), request(2)
    odd = Source("odd", applies=lambda request: request.request_id % 2 == 1)
    for each in (one, two):
        for _ in range(30):
            asking._accounts.settle((LOOKUP.name, 0), each.request_id, -1.0, 0.0, 1.0)
    asking.ask(odd, [one], [0], [[]], 1.0)  # it joins
    assert not ledger.is_resting([one], lambda: 1.0)
    assert not ledger.is_resting([one, two], lambda: 1.0)
    assert ledger.is_resting([two], lambda: 1.0)
    assert asking.rest_ms([two]) == pytest.approx(PROBE.call / 0.004)
    assert asking.rest_ms([one]) == 0.0, "its probe would cost nothing"
