"""Noting steps puts off what is learnt from them, and changes nothing of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.policy.accounts import PROBE_SHARE
from paceline.policy.asking import Asking
from paceline.policy.cost_points import StepShape
from paceline.policy.drafting_cost import DraftingCost, DraftTime
from paceline.policy.ledger import MAX_NOTED, Ledger
from paceline.policy.planned import UNPLANNED
from paceline.policy.planner import Source, StepReport
from paceline.request import Request
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
        assert not ledger._asking._accounts.probing[LOOKUP.name].covers(PROBE.call)
    for step in range(2 * MAX_NOTED + 5):
        report = StepReport(PLAIN, 10.0 + step % 3, 11.0 + step % 5, 1, 1)
        noting.note(report)
        booking.book(report, UNPLANNED)
    noting.settle()
    assert noting.pace.overhead_ms == booking.pace.overhead_ms > 0.0
    assert noting.pace.factor == booking.pace.factor
    saved = booking._asking._accounts.probing[LOOKUP.name]._saved_ms
    assert noting._asking._accounts.probing[LOOKUP.name]._saved_ms == pytest.approx(saved)


def test_it_rests_until_a_probe_is_affordable_or_others_come() -> None:
    ledger = make_ledger()
    accounts = ledger._asking._accounts
    for _ in range(30):
        accounts.settle((LOOKUP.name, 0), -1.0, 0.0)
    one, two = request(1), request(2)
    assert ledger.is_resting([one], lambda: 1.0)
    assert ledger.is_resting([one, two], lambda: 1.0)
    passed = 0.0
    while ledger.is_resting([one], lambda: 1.0):
        ledger.note(StepReport(PLAIN, 10.0, 10.0, 1, 1))
        passed += 10.0
    assert passed == pytest.approx(PROBE.call / PROBE_SHARE, abs=10.0)
    assert ledger.is_resting([], lambda: 1.0)  # speculation off


def test_who_cannot_draft_for_a_request_does_not_keep_it_from_resting() -> None:
    """A grammar's drafts pay, and are for those requests only that have a grammar."""
    ledger = make_ledger()
    asking, one, two = ledger._asking, request(1), request(2)
    odd = Source("odd", applies=lambda request: request.request_id % 2 == 1)
    for _ in range(30):
        asking._accounts.settle((LOOKUP.name, 0), -1.0, 0.0)
    asking.ask(odd, [one], [0], [[]], 1.0)  # it joins
    assert not ledger.is_resting([one], lambda: 1.0)
    assert not ledger.is_resting([one, two], lambda: 1.0)
    assert ledger.is_resting([two], lambda: 1.0)
    assert asking.rest_ms([two]) == pytest.approx(PROBE.call / PROBE_SHARE)
    assert asking.rest_ms([one]) == 0.0, "its probe would cost nothing"


def test_while_somebody_lacks_tokens_nobody_is_asked_unless_it_pays_for_him() -> None:
    ledger = make_ledger()
    ahead, behind = request(1), request(2)
    asking = ledger._asking
    own = Source("own", applies=lambda request: request is ahead)
    asking.ask(own, [ahead], [0], [[]], 1.0)  # it joins, and pays
    for _ in range(30):
        asking._accounts.settle((LOOKUP.name, 0), -1.0, 0.0)
    looks = 0

    def is_resting(who: Sequence[tuple[Request, float]]) -> bool:
        def needy() -> Sequence[tuple[Request, float]]:
            nonlocal looks
            looks += 1
            return who

        return ledger.is_resting([ahead, behind], lambda: 0.5, needy)

    assert not is_resting([]), "it pays for one of them"
    assert not is_resting([(ahead, 30.0)]), "it pays for him"
    looks = steps = 0
    while is_resting([(behind, 30.0)] if steps < 30 else []):
        ledger.note(StepReport(StepShape(2, 0, 0, 2), 4.0, 4.0, 2, 2))
        steps += 1
    assert steps == 30, "tokens that both together get in so many steps"
    assert looks == 2, "nobody looks it up meanwhile"


def test_who_wants_drafts_gets_them_whoever_lacks_tokens() -> None:
    ledger, forced, behind = make_ledger(), request(1, 4), request(2)
    for _ in range(30):
        ledger._asking._accounts.settle((LOOKUP.name, 0), -1.0, 0.0)
    assert not ledger.is_resting([forced, behind], lambda: 0.5, lambda: [(behind, 30.0)])
