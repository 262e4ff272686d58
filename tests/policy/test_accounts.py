"""Accounts of asking: who is asked, how accounts sink and recover, and what probes may cost."""

from __future__ import annotations

import pytest

from paceline.policy.accounts import PROBE_SHARE, START, Accounts, situation

KEY = ("draft_model", 0)
RATE, COST_MS = 0.5, 2.0


def book(accounts: Accounts, gain: float) -> None:
    """What asking brought at the going rate."""
    accounts.settle(KEY, gain + RATE * COST_MS, COST_MS)


def test_a_proposer_that_was_never_asked_is_worth_asking() -> None:
    assert Accounts().gain(KEY, RATE) == START > 0


def test_losses_close_an_account_and_few_gains_open_it_again() -> None:
    accounts = Accounts()
    losses = 0
    while accounts.gain(KEY, RATE) > 0:
        book(accounts, -0.1)
        losses += 1
    assert losses <= 10
    for _ in range(1000):
        book(accounts, -5.0)
    assert accounts.gain(KEY, RATE) == pytest.approx(-RATE * COST_MS), "its time alone"
    assert accounts.gain(KEY, 0.0) == 0.0, "nothing pays by being asked among fewer requests"
    gains = 0
    while accounts.gain(KEY, RATE) <= 0:
        book(accounts, 1.0)
        gains += 1
    assert gains <= 8


def test_situations_have_accounts_of_their_own() -> None:
    accounts = Accounts()
    for _ in range(20):
        book(accounts, -0.05)
    assert accounts.gain(KEY, RATE) < 0
    assert accounts.gain(("draft_model", 1), RATE) == START


def test_probes_take_their_share_of_the_time_and_no_more() -> None:
    accounts, spent, steps, cost = Accounts(), 0.0, 20_000, 0.7
    for _ in range(steps):
        if accounts.probing[KEY[0]].covers(cost):
            accounts.probe(KEY, accounts.by_waiting(KEY, [1, 2])[0], cost)
            spent += cost
        accounts.probing[KEY[0]].passed(1.0)
    assert 0.9 * PROBE_SHARE * steps < spent <= PROBE_SHARE * steps


def test_cheap_probes_leave_those_of_others_their_share() -> None:
    accounts, dear = Accounts(), 0
    for _ in range(20_000):
        for name, cost in (("lookup", 0.2), ("draft_model", 8.0)):
            if accounts.probing[name].covers(cost):
                accounts.probe((name, 0), 1, cost)
                dear += cost == 8.0
            accounts.probing[name].passed(1.0)
    assert dear == pytest.approx(PROBE_SHARE * 20_000 / 8.0, abs=1.0)


def test_saved_probes_are_few() -> None:
    accounts = Accounts()
    assert not accounts.probing[KEY[0]].covers(1.0)
    for _ in range(100_000):
        accounts.probing[KEY[0]].passed(1.0)
    probes = 0
    while accounts.probing[KEY[0]].covers(1.0):
        accounts.probe(KEY, 1, 1.0)
        probes += 1
    assert 1 <= probes <= 8


def test_whoever_waited_longest_is_probed() -> None:
    accounts = Accounts()
    order = []
    for _ in range(6):
        chosen = accounts.by_waiting(KEY, [7, 8, 9])[0]
        accounts.probe(KEY, chosen, 0.0)
        order.append(chosen)
    assert order == [7, 8, 9, 7, 8, 9]


def test_a_finished_request_is_forgotten() -> None:
    accounts = Accounts()
    for request_id in (7, 8):
        accounts.probe(KEY, request_id, 0.0)
    accounts.finish(8)
    assert accounts.by_waiting(KEY, [7, 8]) == [8, 7]


def test_situations_are_ordered_by_what_others_drafted() -> None:
    assert [situation(tokens) for tokens in (0.0, 0.5, 1.0, 4.0)] == [0, 1, 2, 3]


def test_what_pays_does_not_where_time_is_dearer() -> None:
    accounts = Accounts()
    for _ in range(200):
        accounts.settle(KEY, 1.5, COST_MS)
    assert accounts.gain(KEY, RATE) == pytest.approx(0.5, abs=0.05)
    assert accounts.gain(KEY, 4 * RATE) < 0.0


def test_who_was_never_asked_is_believed_less_what_asking_takes() -> None:
    accounts = Accounts()
    accounts.open(KEY, 3.0, COST_MS)
    assert accounts.gain(KEY, 0.1) == START - 0.1 * COST_MS
    accounts.open(KEY, 0.0, COST_MS)  # it is open
    assert accounts.gain(KEY, 0.0) == START
