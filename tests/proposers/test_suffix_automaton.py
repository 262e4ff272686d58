"""The suffix automaton against counting by hand."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.proposers.suffix import SuffixAutomaton, SuffixCursor

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
