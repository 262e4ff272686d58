"""Proposers at whose drafts one can glance are asked for what they promise, and only then."""

from __future__ import annotations

from math import inf

import pytest

from paceline.policy.asking import Asking
from paceline.policy.cost_points import StepShape
from paceline.policy.drafting_cost import DraftingCost, DraftTime
from paceline.policy.ledger import GLANCE_MS, GLANCE_SHARE, MAX_NOTED, WAKE_MS, Ledger
from paceline.policy.planner import Source, StepReport
from paceline.request import Request
from tests.policy.machine import request

NAME, OTHER = "seen", "other"
STEP_MS = 1.0
RATE = 0.01
PLAIN = StepReport(StepShape(1, 0, 0, 1), STEP_MS, STEP_MS, 1, 1)


def longer(request: Request) -> Request:
    request.token_ids.append(1)
    return request


class Seen:
    """What one proposer promises each request, and how often somebody looked."""

    def __init__(self, **promised: float) -> None:
        self.promised = {int(name[1:]): tokens for name, tokens in promised.items()}
        self.looks = 0
        self.source = Source(NAME, glance=self.glance)
        self.asking = Asking(DraftingCost({NAME: DraftTime(4.0), OTHER: DraftTime(4.0)}))
        self.asking.set_sources([self.source])

    def glance(self, request: Request) -> float:
        self.looks += 1
        return self.promised[request.request_id]

    def asked(self, *requests: Request) -> list[int]:
        places = range(len(requests))
        asks = self.asking.ask(self.source, requests, places, [[] for _ in places], rate=RATE)
        return [asked.index for asked in asks]

    def lose(self, situation: int) -> None:
        for _ in range(30):
            self.asking._accounts.settle((NAME, situation), -1.0, 0.0)


def test_who_promises_nothing_is_not_asked() -> None:
    seen = Seen(r1=0.0, r2=2.0)
    assert seen.asked(request(1), request(2)) == [1]
    assert not seen.asking.is_anyone_worth_asking([request(1)], RATE)
    assert seen.asking.is_anyone_worth_asking([request(1), request(2)], RATE)


def test_what_small_drafts_bring_says_nothing_of_large_ones() -> None:
    seen = Seen(r1=0.5)
    assert seen.asked(request(1)) == [0]
    seen.lose(situation=1)
    assert seen.asked(request(1)) == []
    seen.promised[1] = 3.0
    assert seen.asked(request(1)) == [], "it is as it was at the last glance"
    assert seen.asked(longer(request(1))) == [0]


@pytest.mark.parametrize(("promised", "expected"), [(0.1, 0.1), (0.4, 0.4), (3.0, 0.5), (inf, 0.5)])
def test_at_first_it_is_believed_what_it_promises_up_to_half_a_token(
    promised: float, expected: float
) -> None:
    seen = Seen(r1=promised)
    assert seen.asked(request(1)) == [0]
    (key,) = seen.asking._accounts._accounts
    assert seen.asking._accounts.gain(key, 0.0) == expected


def test_probes_go_where_it_promises_most() -> None:
    seen = Seen(r1=0.1, r2=3.0)
    seen.lose(situation=0)
    seen.lose(situation=3)
    assert seen.asked(request(1), request(2)) == []
    seen.asking._accounts.probing[NAME].passed(1e6)
    assert seen.asked(request(1), request(2)) == [1]


def test_a_request_that_asks_for_drafts_is_not_glanced_at() -> None:
    seen, forced = Seen(r1=0.0), request(1, 4)
    assert seen.asked(forced) == [0]
    assert seen.looks == 0


def test_it_wakes_when_a_glance_shows_a_draft() -> None:
    seen, one = Seen(r1=0.0), request(1)
    ledger = Ledger(seen.asking, reads_clock=True)
    assert ledger.is_resting([one], lambda: RATE)
    for _ in range(5):
        ledger.note(PLAIN)
        assert ledger.is_resting([longer(one)], lambda: RATE)
    seen.promised[1] = 2.0
    woken = 0
    while ledger.is_resting([longer(one)], lambda: RATE):
        ledger.note(PLAIN)
        woken += 1
    assert woken * STEP_MS <= (WAKE_MS + GLANCE_MS) / GLANCE_SHARE + STEP_MS


def test_glances_take_their_share_of_the_time() -> None:
    seen, many = Seen(**{f"r{i}": 0.0 for i in range(8)}), [request(i) for i in range(8)]
    ledger = Ledger(seen.asking, reads_clock=True)
    steps = 1000
    for _ in range(steps):
        assert ledger.is_resting([longer(each) for each in many], lambda: RATE)
        ledger.note(PLAIN)
    wake_ms = WAKE_MS + len(many) * GLANCE_MS
    share = GLANCE_SHARE * steps * STEP_MS
    # What is booked after every MAX_NOTED steps begins with a glance too.
    most = share + (steps / MAX_NOTED + 1) * wake_ms
    assert 0.8 * share <= seen.looks / len(many) * wake_ms <= most


def test_where_nobody_can_be_glanced_at_nobody_looks() -> None:
    seen, one = Seen(r1=0.0), request(1)
    seen.asking.set_sources([Source(OTHER)])
    ledger = Ledger(seen.asking, reads_clock=True)
    for _ in range(30):
        seen.asking._accounts.settle((OTHER, 0), -1.0, 0.0)
    for _ in range(50):
        assert ledger.is_resting([one], lambda: RATE)
        ledger.note(PLAIN)
    assert seen.looks == 0
