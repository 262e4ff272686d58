"""Who is asked: what is spent on trust, and who is not to wait for others' drafts."""

from __future__ import annotations

from dataclasses import replace

from paceline.policy.asking import Asking
from paceline.policy.drafting_cost import DraftingCost, DraftTime
from paceline.policy.planner import Source
from paceline.request import Request
from paceline.span import DraftTree
from tests.policy.machine import DRAFT, LOOKUP, request

LAG = 400
RATE = 0.1


def new_asking(source: Source) -> Asking:
    times = {DRAFT.name: DraftTime(1.0, 0.5, token=0.25), LOOKUP.name: DraftTime(1.0)}
    asking = Asking(DraftingCost(times))
    asking.set_sources([source])
    return asking


def short_request(request_id: int) -> Request:
    each = request(request_id)
    each.max_len = each.prompt_len + 60
    return each


def test_reading_has_to_pay_where_nobody_else_drafts() -> None:
    """A situation that comes seldom is not known for long; it is no reason to read a prompt."""
    source = replace(DRAFT, lag=lambda request: LAG)
    asking, each = new_asking(source), short_request(1)
    much = [DraftTree.chain([1, 2, 3], [0.9] * 3, LOOKUP.name)]

    def is_asked(drafts: list[DraftTree]) -> bool:
        return bool(asking.ask(source, [each], [0], [drafts], RATE))

    assert is_asked(much)
    for _ in range(8):
        asking._accounts.settle((DRAFT.name, 0), -1.0, 0.0)
    assert not is_asked([])
    assert not is_asked(much), "though nothing is known of what it adds to so much"


def test_what_a_free_proposer_adds_depends_on_what_is_drafted_already() -> None:
    asking, each = new_asking(LOOKUP), request(1)
    much = [DraftTree.chain([1, 2, 3], [0.9] * 3, DRAFT.name)]

    def is_asked(drafts: list[DraftTree]) -> bool:
        return bool(asking.ask(LOOKUP, [each], [0], [drafts], RATE))

    for _ in range(30):
        asking._accounts.settle((LOOKUP.name, 3), -1.0, 0.0)
    assert is_asked([])
    assert not is_asked(much)


def test_nobody_is_asked_while_somebody_who_lacks_tokens_gets_no_draft() -> None:
    source = replace(LOOKUP, glance=lambda each: {1: 3.0, 2: 0.0}[each.request_id])
    asking, pair = new_asking(source), [request(1), request(2)]

    def asked(*needy: int) -> list[int]:
        return [a.index for a in asking.ask(source, pair, [0, 1], [[], []], RATE, needy)]

    assert asked() == [0]
    assert asked(0) == [0]
    assert asked(1) == []
