"""Counters by proposer, sums of counters, and the widths of an engine's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.engine_stats import EngineStats, SpeculationCounters
from paceline.request.request import MAX_UNCOUNTED, TARGET_ORIGIN, VerifyResult, count_step
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from tests.toy import lookup_config, toy_engine

# a at depth 1; below it b's and a's candidates at depth 2; c at depth 3 below b's.
MERGED = DraftTree([1, 2, 3, 4], [-1, 0, 0, 1], [0.9, 0.5, 0.3, 0.4], ["a", "b", "a", "c"])


def counted(accepted: int, times: int = 1) -> SpeculationCounters:
    """After a step in which the path a, b, c was accepted so far."""
    counters = SpeculationCounters()
    origins = [*["a", "b", "c"][:accepted], TARGET_ORIGIN]
    for _ in range(times):
        count_step(VerifyResult([0], [0] * len(origins), origins, MERGED), counters)
    return counters


def test_a_merged_draft_counts_for_each_of_its_proposers() -> None:
    counters = counted(accepted=2)
    assert counters.num_accepted_by_origin == {"a": 1, "b": 1, "c": 0}
    drafted = {name: (own.num_drafts, own.num_draft_tokens) for name, own in by(counters)}
    assert drafted == {"a": (1, 2), "b": (1, 1), "c": (1, 1)}
    # A position is the depth in the whole draft, not the place among a proposer's own tokens.
    assert {name: own.num_accepted_tokens_per_pos for name, own in by(counters)} == {
        "a": [1],
        "b": [0, 1],
        "c": [],
    }
    assert (counters.num_drafts, counters.num_draft_tokens) == (1, 4)
    assert counters.num_accepted_tokens_per_pos == [1, 1, 0]


def by(counters: SpeculationCounters):
    return counters.by_proposer.items()


def test_adding_counters_equals_counting_on() -> None:
    total = SpeculationCounters()
    for accepted in (0, 3, 1, 3):
        total.add(counted(accepted))
    again = counted(3, times=2)
    for accepted in (1, 0):
        again.add(counted(accepted))
    assert total == again
    assert total.num_accepted_by_origin == {"a": 3, "b": 2, "c": 2}
    assert total.by_proposer["c"].num_accepted_tokens_per_pos == [0, 0, 2]


def test_a_plain_step_counts_for_nobody() -> None:
    counters = SpeculationCounters()
    count_step(VerifyResult([0], [5], [TARGET_ORIGIN]), counters)
    assert (counters.num_steps, counters.num_drafts, counters.by_proposer) == (1, 0, {})


def test_proposers_counters_sum_to_the_requests_and_widths_to_the_steps() -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config(num_speculative_tokens=3))])
    for seed in range(2):
        engine.add_request([7, 8, 9] * 6, SamplingParams(max_tokens=12, temperature=0, seed=seed))
    requests = list(engine.requests.values())
    while engine.has_work:
        engine.step()
    stats: EngineStats = engine.stats()
    own = stats.speculation.by_proposer["prompt_lookup"]
    assert own.num_draft_tokens == stats.speculation.num_draft_tokens > 0
    assert own.num_accepted_tokens == stats.speculation.num_accepted_tokens
    per_request = SpeculationCounters()
    for request in requests:
        per_request.add(request.counters)
    assert per_request == stats.speculation
    assert 0.0 < stats.expected_accepted_tokens <= stats.speculation.num_draft_tokens
    widths = stats.decode_steps_by_rows
    assert 0 < sum(widths.values()) < stats.num_target_forwards  # the prompts' step is no width
    prompt_rows = 2 * 18 - stats.num_cached_tokens
    assert sum(rows * steps for rows, steps in widths.items()) == stats.num_rows - prompt_rows
    assert stats.num_queried_tokens == 2 * 17


def test_a_reset_takes_back_what_was_counted_and_nothing_of_the_requests() -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config(num_speculative_tokens=3))])
    engine.add_request([7, 8, 9] * 6, SamplingParams(max_tokens=8, temperature=0))
    engine.add_request([7, 8, 9] * 6, SamplingParams(max_tokens=24, temperature=0))
    requests = list(engine.requests.values())

    def counted_by_requests(times: int) -> SpeculationCounters:
        total = SpeculationCounters()
        for request in requests:
            total.add(request.counters, times)
        return total

    while len(engine.requests) == 2:
        engine.step()
    assert engine.stats().speculation == counted_by_requests(1), "one ended and one did not"
    before = counted_by_requests(-1)
    engine.reset_stats()
    assert engine.stats().speculation.num_emitted_tokens == 0
    while engine.has_work:
        engine.step()
    since = counted_by_requests(1)
    assert since.num_emitted_tokens == 8 + 24
    since.add(before)
    found = engine.stats().speculation
    assert 0 < found.num_emitted_tokens < 24
    assert found.num_accepted_tokens_per_pos == since.num_accepted_tokens_per_pos
    assert found.num_accepted_by_origin == since.num_accepted_by_origin
    assert (found.num_steps, found.num_drafts) == (since.num_steps, since.num_drafts)


def test_the_prefix_cache_counts_what_was_looked_for_and_found() -> None:
    engine = toy_engine([])
    for _ in range(2):
        engine.add_request(list(range(1, 41)), SamplingParams(max_tokens=2, temperature=0))
        while engine.has_work:
            engine.step()
    stats = engine.stats()
    assert (stats.num_queried_tokens, stats.num_cached_tokens) == (2 * 39, 32)


@pytest.mark.parametrize("reset_at", [None, 20, 2 * MAX_UNCOUNTED])
def test_what_is_counted_does_not_depend_on_when_it_is_looked_at(reset_at: int | None) -> None:
    """Steps are counted together later on, or at once where somebody looks."""
    engines = [
        toy_engine([PromptLookupProposer(lookup_config())], max_model_len=512) for _ in range(2)
    ]
    params = SamplingParams(max_tokens=400, temperature=1.5, seed=3, ignore_eos=True)
    requests = []
    for engine in engines:
        engine.add_request([7, 8, 9] * 6, params)
        requests += engine.requests.values()
    for at in range(3 * MAX_UNCOUNTED):
        for engine in engines:
            engine.step()
        assert engines[0].stats().num_running == len(engines[0].requests)
        assert requests[0].counters.num_steps == at + 1
        if at == reset_at:
            for engine in engines:
                engine.reset_stats()
    looked_at, left = [replace(engine.stats(), seconds={}) for engine in engines]
    assert looked_at == left
    assert requests[0].counters == requests[1].counters
    counters = left.speculation
    assert counters.num_drafts > 0
    assert 0.0 < left.expected_accepted_tokens < counters.num_draft_tokens
    assert sum(left.decode_steps_by_rows.values()) == counters.num_steps - (reset_at is None)
