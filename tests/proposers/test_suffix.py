"""The suffix proposer: what it drafts, what it shares between requests, and what it never does.

The suffix automaton against counting by hand.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.native.native import why_not_native
from paceline.proposers.suffix import (
    USUAL_DEPTH,
    SharedTexts,
    SuffixAutomaton,
    SuffixCursor,
    SuffixProposer,
)
from paceline.request.request import FinishReason, Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree
from tests.proposers.drive import commit, make_request, propose
from tests.request.test_span import paths
from tests.toy import Job, run_jobs, suffix_config, toy_engine

IMPLEMENTATIONS = [False, *([True] if why_not_native() is None else [])]


def suffix(is_native: bool = False, **options: Any) -> SuffixProposer:
    return SuffixProposer(suffix_config(**options), is_native)


def drafted(proposer: SuffixProposer, tokens: Sequence[int], **limits: int) -> DraftTree:
    return propose(proposer, make_request(1, tokens), **limits)[0]


def end(proposer: SuffixProposer, request: Request, reason: Any = FinishReason.STOP) -> None:
    request.finish_reason = reason
    proposer.finish(request)


def answered(tokens: Sequence[int]) -> Request:
    """All but the first token are output."""
    request = make_request(1, tokens)
    request.prompt_len = 1
    return request


# --- drafts of a request by itself ----------------------------------------------------------------


def test_continues_the_longest_match_first() -> None:
    tree = drafted(suffix(), [9, 1, 2, 5, 6, 7, 8, 1, 2, 4, 4, 9, 1, 2])
    assert tree.token_ids[0] == 5
    assert set(tree.origins) == {"suffix"}
    assert tree.path_probs() == sorted(tree.path_probs(), reverse=True)


def test_shorter_matches_add_what_the_longest_did_not_see() -> None:
    tree = drafted(suffix(), [9, 1, 2, 5, 8, 1, 2, 4, 8, 1, 2, 4, 9, 1, 2], depth=1)
    assert [tree.token_ids, tree.parents] == [[5, 4], [ROOT, ROOT]]


def test_counts_decide_between_continuations() -> None:
    tree = drafted(suffix(), [1, 2, 7, 1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2], depth=1)
    assert tree.token_ids == [7, 8]
    assert tree.accept_probs[0] > 2 * tree.accept_probs[1]
    once = drafted(suffix(), [1, 2, 7, 1, 2])
    often = drafted(suffix(), [1, 2, 7] * 6 + [1, 2])
    assert often.accept_probs[0] > once.accept_probs[0]


def test_disagreement_becomes_branches() -> None:
    tree = drafted(suffix(), [1, 2, 7, 5, 6, 1, 2, 8, 5, 9, 1, 2], depth=3)
    assert {(7,), (8,), (7, 5), (8, 5), (7, 5, 6), (8, 5, 9)} <= set(paths(tree))
    chain = drafted(suffix(max_tree_nodes=0, max_branching=1), [1, 2, 7, 5, 1, 2, 8, 5, 1, 2])
    assert chain.is_chain


def test_a_rare_continuation_is_not_drafted() -> None:
    tokens = [*([1, 2] * 12), 1, 3, 1]
    assert set(drafted(suffix(), tokens, depth=1).token_ids) == {2}
    rare = suffix(suffix_decoding_min_token_prob=0.01)
    assert set(drafted(rare, tokens, depth=1).token_ids) == {2, 3}


@pytest.mark.parametrize(("match", "depth"), [(2, USUAL_DEPTH), (12, 12), (20, 16)])
def test_drafts_are_as_long_as_their_match(match: int, depth: int) -> None:
    text = list(range(10, 60))
    tree = drafted(suffix(), [*text, 1, *text[:match]], depth=16)
    assert max(tree.depths()) == depth
    longer = suffix(suffix_decoding_max_spec_factor=100.0)
    assert max(drafted(longer, [*text, 1, *text[:match]], depth=16).depths()) == 16


def test_longer_matches_are_surer() -> None:
    text = list(range(10, 60))
    sure = [
        drafted(suffix(), [*text, 1, *text[:n]]).accept_probs[0] for n in (1, 2, 3, 6, 12, 20, 24)
    ]
    assert sure == sorted(sure)
    assert sure[0] < 0.5 < 0.9 < sure[-1]


def test_unlikely_nodes_are_left_out() -> None:
    tokens = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2]
    assert len(drafted(suffix(), tokens, depth=1)) == 3
    assert not len(drafted(suffix(min_accept_prob=0.5), tokens, depth=1))


def test_what_was_committed_meanwhile_is_caught_up_with() -> None:
    proposer, request = suffix(), make_request(1, [1, 2, 3])
    propose(proposer, request)
    request.token_ids += [4, 1, 2]  # nobody told
    assert propose(proposer, request)[0].token_ids[:2] == [3, 4]


# --- between requests -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_native", IMPLEMENTATIONS)
def test_finished_requests_help_others_of_their_salt_alone(is_native: bool) -> None:
    proposer = suffix(is_native)
    for salt, token in (("", 5), ("a", 6)):
        request = make_request(1, [1, 2])
        request.cache_salt = salt
        commit(proposer, request, [3, token, 4])
        end(proposer, request)
    found = {}
    for salt in ("", "a", "b"):
        request = make_request(2, [9, 2, 3])
        request.cache_salt = salt
        (tree,) = propose(proposer, request)
        found[salt] = set(tree.token_ids)
    assert found == {"": {5, 4}, "a": {6, 4}, "b": set()}


@pytest.mark.parametrize("reason", [FinishReason.ABORT, None])
def test_preempted_requests_are_not_shared(reason: FinishReason | None) -> None:
    proposer, request = suffix(), answered([1, 2, 3, 4])
    end(proposer, request, reason)
    assert bool(len(propose(proposer, make_request(2, [1, 2]))[0])) == (reason is not None)


def test_an_engine_leaves_the_shared_texts_alone() -> None:
    """Preempted requests among them: each is shared once, when it ends."""
    proposer = suffix()
    engine = toy_engine([proposer], num_blocks=7, enable_prefix_caching=False)
    jobs = [
        Job([3, 4, 5, 3, 4, 6] * n, SamplingParams(temperature=0.8, seed=n, max_tokens=30))
        for n in (3, 5, 6)
    ]
    answers = [result.token_ids for group in run_jobs(engine, jobs) for result in group]
    stats = engine.stats()
    assert stats.num_preemptions
    assert not stats.num_proposer_failures
    for index, answer in enumerate(answers, start=100):  # each was shared
        *known, following = answer[:9]
        (tree,) = propose(proposer, make_request(index, known))
        assert following in tree.token_ids


def test_nothing_is_shared_where_nothing_may_be_cached() -> None:
    proposer = suffix(suffix_decoding_max_cached_requests=0)
    end(proposer, answered([1, 2, 3, 4]))
    assert not len(drafted(proposer, [1, 2]))


def test_of_a_prompt_only_the_end_is_shared() -> None:
    proposer, request = suffix(suffix_decoding_max_tree_depth=4), make_request(1, range(50))
    end(proposer, request, FinishReason.ABORT)
    assert not len(drafted(proposer, [48]))
    commit(proposer, request, [60, 61])
    end(proposer, request)
    assert not len(drafted(proposer, [20]))
    assert drafted(proposer, [48, 49]).token_ids == [60, 61]


def test_its_own_text_counts_before_that_of_others() -> None:
    proposer = suffix(max_branching=1, max_tree_nodes=0)
    end(proposer, answered([1, 2, 3]))
    assert drafted(proposer, [1, 2, 4, 1, 2]).token_ids[0] == 4


def shared(max_texts: int, max_tokens: int) -> SharedTexts:
    return SharedTexts(lambda: SuffixAutomaton(8), max_texts, max_tokens)


def knows(texts: SharedTexts, salt: str, tokens: Sequence[int]) -> bool:
    found = [automaton.match(tokens)[1] for automaton in texts.automata(salt)]
    return len(tokens) in found


@pytest.mark.parametrize(("max_texts", "max_tokens"), [(1, 1000), (10, 1000), (1000, 24), (7, 1)])
def test_the_shared_store_is_bounded(max_texts: int, max_tokens: int) -> None:
    texts = shared(max_texts, max_tokens)
    for i in range(200):
        texts.add(f"{i % 3}", range(5 * i, 5 * i + 1 + i % 9))
        held = [each for salt in "012" for each in texts.automata(salt)]
        assert texts.num_texts <= max_texts
        assert texts.num_tokens == sum(each.num_tokens for each in held) <= max_tokens
    assert texts.num_texts


def test_the_latest_texts_stay() -> None:
    texts = shared(10, 1000)
    for i in range(100):
        texts.add("", [i, i + 1000, i + 2000])
        assert knows(texts, "", [i, i + 1000, i + 2000])
        assert knows(texts, "", [i - 4, i + 996]) or i < 4
    assert not knows(texts, "", [80, 1080])


def test_the_salt_that_was_not_used_for_longest_goes_first() -> None:
    texts = shared(6, 1000)
    for salt in "abc":
        texts.add(salt, [1, 2])
        texts.add(salt, [1, 2])
    texts.automata("a")
    texts.add("d", [1, 2])
    assert {salt: knows(texts, salt, [1, 2]) for salt in "abcd"} == {
        "a": True,
        "b": False,
        "c": True,
        "d": True,
    }


# --- hostile texts --------------------------------------------------------------------------------


def fibonacci_word(length: int) -> list[int]:
    before, word = [1], [2]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(
    "tokens",
    [
        [7] * 32768,
        list(range(32768)),
        [7 if i % 2 else i for i in range(32768)],
        [i * i % 8191 for i in range(32768)],
        fibonacci_word(32768),
    ],
    ids=["equal", "distinct", "alternating", "squares", "fibonacci"],
)
@pytest.mark.parametrize("is_native", IMPLEMENTATIONS)
def test_a_long_context_takes_no_longer(is_native: bool, tokens: list[int]) -> None:
    """The bounds are generous, and far below quadratic times."""
    proposer, request = suffix(is_native), make_request(1, tokens)
    began = time.thread_time()
    propose(proposer, request)
    first = time.thread_time() - began
    steps = []
    for token in tokens[:50]:
        request.token_ids.append(token)
        began = time.thread_time()
        propose(proposer, request)
        steps.append(time.thread_time() - began)
    assert first < (1.0 if is_native else 15.0)
    assert min(steps) < (1e-4 if is_native else 5e-3)


@pytest.mark.parametrize("is_native", IMPLEMENTATIONS)
def test_what_a_text_matches_is_known_before_it_is_drafted_from(is_native: bool) -> None:
    proposer = suffix(is_native)
    one = make_request(1, [1, 2, 3, 4, 9, 2, 3, 4])
    assert proposer.matched(one) == 3
    one.token_ids.append(7)
    assert proposer.matched(one) == 0
    one.token_ids += [3, 4]
    assert proposer.matched(one) == 2
    proposer.finish(one)


TOKENS = st.lists(st.integers(0, 2), max_size=24)


def occurs(texts: list[list[int]], tokens: list[int]) -> bool:
    n = len(tokens)
    return any(text[i : i + n] == tokens for text in texts for i in range(len(text) - n + 1))


def continuations(texts: list[list[int]], tokens: list[int]) -> Counter[int]:
    n = len(tokens)
    return Counter(
        text[i] for text in texts for i in range(n, len(text)) if text[i - n : i] == tokens
    )


def built(texts: list[list[int]], depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(depth)
    for text in texts:
        automaton.end_text()
        automaton.extend(text)
    return automaton


@given(st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 9), st.booleans())
def test_matches_and_counts(
    texts: list[list[int]], tokens: list[int], depth: int, is_own: bool
) -> None:
    tokens = texts[-1] if is_own and texts else tokens
    automaton = built(texts, depth)
    place = automaton.match(tokens)
    longest = min(depth, len(tokens))
    while not (longest == 0 or occurs(texts, tokens[-longest:])):
        longest -= 1
    assert place[1] == longest
    seen = Counter[int]()
    for length, total, edges in automaton.contexts(place):
        expected = continuations(texts, tokens[-length:])
        assert {token: count for token, (_, count) in edges.items()} == expected
        assert total == expected.total() >= seen.total()  # each says what the longer one does
        seen = expected


@given(st.lists(TOKENS, max_size=4))
def test_its_size_is_bounded(texts: list[list[int]]) -> None:
    automaton = built(texts, 24)
    assert automaton.num_tokens == sum(map(len, texts))
    assert automaton.num_states <= 2 * automaton.num_tokens + 1


def test_one_text_repeated_adds_no_states() -> None:
    text = [1, 2, 3, 1, 2, 4, 1]
    assert built([text] * 5, 24).num_states == built([text], 24).num_states


def test_in_pieces_as_at_once() -> None:
    text = [1, 2, 1, 2, 3, 1, 2, 1, 3]
    whole, pieces = built([text], 24), SuffixAutomaton(24)
    for end in (2, 2, 5, 9):
        pieces.extend(text[:end], pieces.num_tokens)
    assert pieces.num_tokens == whole.num_tokens
    assert list(pieces.contexts(pieces.match(text))) == list(whole.contexts(whole.match(text)))


def test_what_came_last_is_looked_at_first() -> None:
    automaton = built([[1, 2, 1, 3, 1, 2, 1, 4]], 24)
    ((_, _, edges),) = automaton.contexts(automaton.match([1]))
    assert list(reversed(edges)) == [4, 2, 3]


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=6), st.integers(1, 5))
def test_a_cursor_is_where_the_whole_text_matches(
    pieces: list[tuple[list[int], bool]], depth: int
) -> None:
    """While the text grows, and while the automata do."""
    shared, own, text = SuffixAutomaton(depth), SuffixAutomaton(depth), list[int]()
    cursors = [SuffixCursor(shared), SuffixCursor(own, is_own=True)]
    for tokens, is_shared in pieces:
        if is_shared:
            shared.end_text()
            shared.extend(tokens)
        else:
            text += tokens
            own.extend(text, own.num_tokens)
        for cursor in cursors:
            assert cursor.advance(text) == cursor.automaton.match(text)
    assert cursors[0].advance(text[:-1]) == shared.match(text[:-1])
