"""Which replica a request goes to, by what was read where and how busy each is."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from paceline.ray.prompts import PART_BYTES, Traits, traits_of
from paceline.ray.routing import THRESHOLD, Affinity

IDLE = {"a": 0, "b": 0, "c": 0}


def traits(headers: list[tuple[bytes, bytes]] | None = None, **body: Any) -> Traits:
    return traits_of(json.dumps(body).encode(), headers or [])


def chat(*texts: str, **more: Any) -> Traits:
    return traits(messages=[{"role": "user", "content": text} for text in texts], **more)


@pytest.fixture
def policy() -> Affinity:
    return Affinity(rng=random.Random(1))


def test_requests_without_traits_go_round(policy: Affinity) -> None:
    chosen = [policy.choose(Traits(), {"a": 0, "b": 0}) for _ in range(6)]
    assert chosen in (["a", "b"] * 3, ["b", "a"] * 3)


def test_the_less_busy_of_two_is_chosen(policy: Affinity) -> None:
    assert {policy.choose(Traits(), {"a": 5, "b": 1}) for _ in range(8)} == {"b"}


def test_a_conversation_stays_where_it_began(policy: Affinity) -> None:
    first = policy.choose(chat("Hello.", "Hi."), IDLE)
    for _ in range(9):
        policy.choose(chat("Something else."), IDLE)
    assert policy.choose(chat("Hello.", "Hi.", "And then?"), IDLE) == first


def test_the_longest_known_beginning_decides(policy: Affinity) -> None:
    system = "You are a careful assistant. " * 30
    first = policy.choose(chat(system, "One."), IDLE)
    busy = {**IDLE, first: THRESHOLD + 1}
    second = policy.choose(chat(system, "Two."), busy)
    assert second != first
    assert policy.choose(chat(system, "One.", "More?"), IDLE) == first
    assert policy.choose(chat(system, "Two.", "More?"), IDLE) == second


def test_a_replica_is_passed_over_only_beyond_the_threshold(policy: Affinity) -> None:
    first = policy.choose(chat("Hello."), IDLE)
    assert policy.choose(chat("Hello."), {**IDLE, first: THRESHOLD}) == first
    assert policy.choose(chat("Hello."), {**IDLE, first: THRESHOLD + 1}) != first


def test_a_caller_goes_to_its_drafts_where_little_of_the_prompt_is_known(policy: Affinity) -> None:
    system = "You answer briefly."
    elsewhere = policy.choose(chat(system, "x", "y", "z"), {"a": 0})
    own = policy.choose(chat("Mine.", user="me"), {"b": 0})
    assert (elsewhere, own) == ("a", "b")
    assert policy.choose(chat(system, "q", "r", "s", user="me"), IDLE) == "b"
    # Most of it was read there, which is worth more than drafts.
    assert policy.choose(chat(system, "x", "y", "w", user="me"), IDLE) == "a"


def test_a_replica_that_is_gone_is_not_chosen(policy: Affinity) -> None:
    assert policy.choose(chat("Hello.", user="me"), {"a": 0}) == "a"
    assert policy.choose(chat("Hello.", user="me"), {"b": 0}) == "b"
    # The new one has read it since; that the old one did counts no more when its name returns.
    assert policy.choose(chat("Hello."), {"a": 0, "b": 0}) == "b"


def test_without_affinity_only_loads_count() -> None:
    policy = Affinity(is_on=False)
    chosen = {policy.choose(chat("Hello.", user="me"), {"a": 0, "b": 0}) for _ in range(4)}
    assert chosen == {"a", "b"}


def test_what_is_remembered_is_bounded() -> None:
    policy = Affinity(max_keys=4, rng=random.Random(1))
    assert policy.choose(chat("first"), {"a": 0}) == "a"
    for i in range(4):
        policy.choose(chat(f"other {i}"), {"b": 0})
    policy.choose(chat("last"), {"a": 0, "b": 0})  # the turn of the one that waited longer
    assert policy.choose(chat("other 3"), {"a": 1, "b": 1}) == "b"
    assert policy.choose(chat("first"), {"a": 1, "b": 0}) == "b"  # forgotten: the less busy one


def test_parts_tell_a_beginning_and_who_may_share_it() -> None:
    text = "word " * PART_BYTES
    one, longer = traits(prompt=text), traits(prompt=text + " and more")
    shared = len(text) // PART_BYTES
    assert one.parts[:shared] == longer.parts[:shared]
    assert one.parts[-1] != longer.parts[-1]
    assert not set(one.parts) & set(traits(prompt=text, cache_salt="s").parts)
    key = [(b"authorization", b"Bearer k")]
    assert not set(one.parts) & set(traits(key, prompt=text).parts)
    assert one.caller == 0


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
    assert traits(**body).parts
    assert traits(**body) == traits(**body)


@pytest.mark.parametrize("name", ["user", "cache_salt", "prompt_cache_key", "safety_identifier"])
def test_callers_are_told_apart(name: str) -> None:
    assert traits(prompt="a", **{name: "x"}).caller == traits(prompt="b", **{name: "x"}).caller
    assert traits(prompt="a", **{name: "x"}).caller != traits(prompt="a", **{name: "y"}).caller


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff"])
def test_what_is_no_request_has_no_traits(body: bytes) -> None:
    assert traits_of(body, []) == Traits()
