"""Which replica a request goes to, by what was read where and how busy each is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.ray.routing import ANSWER, PART_BYTES, Affinity, parts_of

IDLE = {"a": 0, "b": 0, "c": 0}
BUSY = dict.fromkeys(IDLE, 100)


def parts(headers: list[tuple[bytes, bytes]] | None = None, **body: Any) -> tuple[int, ...]:
    return parts_of(json.dumps(body).encode(), headers or [])


def chat(*texts: str, **more: Any) -> tuple[int, ...]:
    return parts(messages=[{"role": "user", "content": text} for text in texts], **more)


@pytest.fixture
def policy() -> Affinity:
    return Affinity()


def name_of(policy: Affinity, parts: tuple[int, ...], work: dict[str, int]) -> str:
    return policy.choose(parts, work).name


def test_requests_without_a_prompt_go_round(policy: Affinity) -> None:
    assert [name_of(policy, (), {"a": 0, "b": 0}) for _ in range(6)] == ["a", "b"] * 3


def test_the_one_with_the_least_work_is_chosen(policy: Affinity) -> None:
    assert {name_of(policy, (), {"a": 3, "b": 1, "c": 2}) for _ in range(8)} == {"b"}


def test_work_is_what_is_read_and_the_answer(policy: Affinity) -> None:
    first, longer = chat("Hello.", "Hi."), chat("Hello.", "Hi.", "And then?")
    assert policy.choose(first, {"a": 0}) == ("a", ANSWER + 2)
    assert policy.choose(first, {"a": 0}) == ("a", ANSWER)
    assert policy.choose(longer, {"a": 0}) == ("a", ANSWER + 1)
    assert policy.choose(longer, {"b": 0}) == ("b", ANSWER + 3)


def test_a_conversation_stays_where_it_began(policy: Affinity) -> None:
    first = name_of(policy, chat("Hello.", "Hi."), IDLE)
    for _ in range(9):
        policy.choose(chat("Something else."), IDLE)
    assert name_of(policy, chat("Hello.", "Hi.", "And then?"), IDLE) == first


def test_the_longest_known_beginning_decides(policy: Affinity) -> None:
    system = "You are a careful assistant. " * 30
    first = name_of(policy, chat(system, "One."), IDLE)
    second = name_of(policy, chat(system, "Two."), {**IDLE, first: 100})
    assert second != first
    assert name_of(policy, chat(system, "One.", "More?"), IDLE) == first
    assert name_of(policy, chat(system, "Two.", "More?"), IDLE) == second


def test_known_parts_are_worth_waiting_for_as_many(policy: Affinity) -> None:
    told = chat("a", "b", "c")
    first = name_of(policy, told, IDLE)
    assert name_of(policy, told, {**IDLE, first: 2}) == first
    assert name_of(policy, told, {**IDLE, first: 4}) != first


def test_what_all_have_read_attracts_to_none(policy: Affinity) -> None:
    system = "You are a careful assistant. " * 30
    for name in IDLE:
        policy.choose(chat(system), {**BUSY, name: 0})
    work = dict.fromkeys(IDLE, 0)
    for i in range(12):
        chosen, more = policy.choose(chat(system, f"Question {i}."), work)
        work[chosen] += more
    assert set(work.values()) == {4 * (ANSWER + 1)}


def test_a_replica_that_is_gone_is_not_chosen(policy: Affinity) -> None:
    assert name_of(policy, chat("Hello."), {"a": 0}) == "a"
    assert name_of(policy, chat("Hello."), {"b": 0}) == "b"
    # The new one has read it since; that the old one did counts no more when its name returns.
    assert name_of(policy, chat("Hello."), {"a": 0, "b": 0}) == "b"


def test_without_affinity_only_work_counts() -> None:
    policy = Affinity(is_on=False)
    told = chat("Hello.")
    chosen = [policy.choose(told, {"a": 0, "b": 0}) for _ in range(4)]
    assert chosen == [("a", ANSWER + 1), ("b", ANSWER + 1)] * 2


def test_what_is_remembered_is_bounded() -> None:
    policy = Affinity(max_keys=4)
    assert name_of(policy, chat("first"), {"a": 0}) == "a"
    for i in range(4):
        policy.choose(chat(f"other {i}"), {"b": 0})
    assert policy.choose(chat("other 3"), {"b": 0}).work == ANSWER
    assert policy.choose(chat("first"), {"a": 0}).work == ANSWER + 1


def test_parts_tell_a_beginning_and_who_may_share_it() -> None:
    text = "word " * PART_BYTES
    one, longer = parts(prompt=text), parts(prompt=text + " and more")
    shared = len(text) // PART_BYTES
    assert one[:shared] == longer[:shared]
    assert one[-1] != longer[-1]
    assert not set(one) & set(parts(prompt=text, cache_salt="s"))
    key = [(b"authorization", b"Bearer k")]
    assert not set(one) & set(parts(key, prompt=text))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": ["a", "b"]},
        {"messages": [{"role": "user", "content": "Hello."}]},
        {"input": "Hello."},
        {"input": [{"role": "user", "content": "Hello."}]},
        {"system": "Be brief.", "messages": [{"role": "user", "content": [{"text": "Hi."}]}]},
    ],
)
def test_prompts_of_every_api_have_parts(body: dict[str, Any]) -> None:
    assert parts(**body)
    assert parts(**body) == parts(**body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff"])
def test_what_is_no_request_has_no_parts(body: bytes) -> None:
    assert parts_of(body, []) == ()
