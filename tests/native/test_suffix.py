"""The native suffix automaton and its trees against those in Python, which they must equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proposers import suffix

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")
TOKENS = st.lists(st.integers(0, 3), max_size=40)
RULES = st.fixed_dictionaries(
    {
        "branching": st.integers(1, 5),
        "min_token_prob": st.sampled_from([0.0, 0.1, 0.4]),
        "min_path_prob": st.sampled_from([0.0, 0.02, 0.2]),
        "max_spec_factor": st.sampled_from([0.0, 1.0, 100.0]),
    }
)


def drafted(
    module: Any, drafting: Any, depth: int, groups: list[list[list[int]]], *asked: Any, **rules: Any
) -> tuple[Any, list[int]]:
    """A draft below a text that shares such automata, and how large these are."""
    automata = []
    for texts in groups:
        made = module.SuffixAutomaton(depth)
        for text in texts:
            made.end_text()
            made.extend(text[:5])
            made.extend(text, min(5, len(text)))
        automata.append(made)
    drafter = drafting.SuffixRules(suffix.others_by_length(depth), **rules)
    text = drafting.SuffixText(drafter, depth)
    text.share(automata)
    return tuple(text.draft(*asked)), [each.num_states for each in automata]


@given(
    st.integers(1, 9),
    st.lists(st.lists(TOKENS, max_size=3), max_size=3),
    TOKENS,
    st.integers(0, 20),
    st.integers(0, 12),
    RULES,
)
def test_both_draft_alike(
    depth: int,
    groups: list[list[list[int]]],
    tokens: list[int],
    nodes: int,
    most: int,
    rules: dict[str, Any],
) -> None:
    asked = (depth, groups, tokens, nodes, most)
    assert drafted(native, native, *asked, **rules) == drafted(suffix, suffix, *asked, **rules)


@given(st.integers(1, 5), st.lists(st.tuples(TOKENS, st.booleans()), max_size=6))
def test_both_follow_a_growing_text_alike(depth: int, pieces: list[tuple[list[int], bool]]) -> None:
    """Each piece is added to the text, or to the automaton that is shared with it."""
    found = []
    for module, drafting in ((native, native), (suffix, suffix)):
        shared = module.SuffixAutomaton(depth)
        drafter = drafting.SuffixRules(
            suffix.others_by_length(depth),
            branching=3,
            min_token_prob=0.1,
            min_path_prob=0.0,
            max_spec_factor=1.0,
        )
        followed = drafting.SuffixText(drafter, depth)
        followed.share([shared])
        text: list[int] = []
        drafts = []
        for tokens, is_shared in pieces:
            if is_shared:
                shared.end_text()
                shared.extend(tokens)
            else:
                text = text + tokens
            drafts.append((followed.matched(text), *followed.draft(text, 9, 5)))
            fresh = drafting.SuffixText(drafter, depth)
            fresh.share([shared])
            assert drafts[-1] == (fresh.matched(text), *fresh.draft(text, 9, 5))
        found.append(drafts)
    assert found[0] == found[1]


def test_a_text_keeps_what_is_shared_with_it() -> None:
    made = native.SuffixAutomaton(4)
    made.extend([1, 2, 3])
    rules = {"branching": 1, "min_token_prob": 0.0, "min_path_prob": 0.0, "max_spec_factor": 1.0}
    text = native.SuffixText(native.SuffixRules(suffix.others_by_length(4), **rules), 4)
    text.share([made])
    del made
    assert text.draft([1, 2], 1, 1)[0] == [3]


def test_wide_states() -> None:
    """Hundreds of continuations of one token, more than are looked at."""
    text = [x for i in range(400) for x in (7, 10 + i * i % 211)]
    rules = {"branching": 64, "min_token_prob": 0.0, "min_path_prob": 0.0, "max_spec_factor": 9.0}
    asked = (24, [[text, text[:99]]], [7], 200, 5)
    found = drafted(native, native, *asked, **rules)
    assert found == drafted(suffix, suffix, *asked, **rules)
    assert len(found[0][0]) == 200


def test_memory_per_token() -> None:
    """As docs/proposers.md states it, room for growth included."""
    for text in ([5] * 9000, list(range(9000)), [i * i % 8191 % 50 for i in range(9000)]):
        made = native.SuffixAutomaton(24)
        made.extend(text)
        assert 24 * len(text) < made.num_bytes < 200 * len(text)


def test_faulty_arguments_are_refused() -> None:
    made = native.SuffixAutomaton(4)
    with pytest.raises(ValueError, match="max_depth is 0"):
        native.SuffixAutomaton(0)
    with pytest.raises(ValueError, match="32 bits"):
        made.extend([1 << 40])
    with pytest.raises(TypeError):
        made.extend(["a"])
    drafter = native.SuffixRules(
        [(1.0, 1.0)] * 4, branching=1, min_token_prob=0.0, min_path_prob=0.0, max_spec_factor=1.0
    )
    for depth in (0, 4):
        with pytest.raises(ValueError, match="not from 1 to"):
            native.SuffixText(drafter, depth)
    text = native.SuffixText(drafter, 3)
    for other in (None, 5, drafter):
        with pytest.raises(TypeError, match="something else"):
            text.share([other])
    with pytest.raises(ValueError, match="deeper"):
        text.share([made])
