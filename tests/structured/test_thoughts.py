"""What may follow thoughts, in a vocabulary small enough to try every path."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from paceline.core.errors import RequestError
from paceline.request.span import DraftTree
from paceline.request.structured_outputs import StructuredOutputs, ThoughtMarks
from paceline.structured.grammar import GrammarCompiler
from paceline.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
TOKENS = ["<end>", "a", "b", "<", ">", "/", "</", ">b", "/>", "</>", "a</>b", "b</>", "<t>", "t>"]
END = 0
MARKS = ThoughtMarks("<t>", "</>")
LONGEST = 3


@pytest.fixture(scope="module", params=[False, True], ids=["spelled", "added"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    """Fourteen tokens; the marks are tokens of the vocabulary, or were added to it."""
    merges = [("<", "/"), (">", "b"), ("/", ">"), ("</", ">")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    if request.param:
        backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in ("<t>", "</>")])
    compiler = GrammarCompiler(Tokenizer(backend), len(TOKENS), [END])
    yield compiler
    compiler.close()


@cache
def answers(pattern: str) -> list[str]:
    words = ("".join(w) for n in range(5) for w in itertools.product("ab", repeat=n))
    return [word for word in words if re.fullmatch(pattern, word)]


def fits(text: str, pattern: str, opened: bool) -> bool:
    """Whether a text can be the beginning of thoughts and an answer of up to a few letters."""
    known = answers(pattern)
    if not opened and not text.startswith("<t>"):
        return "<t>".startswith(text) or any(word.startswith(text) for word in known)
    _, mark, answer = text.removeprefix("" if opened else "<t>").partition("</>")
    return not mark or any(word.startswith(answer) for word in known)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("pattern", ["ab?", "b{2,4}", "(a|ba)(b|aa)"])
def test_masks_by_enumeration(compiler: GrammarCompiler, pattern: str, opened: bool) -> None:
    """White space is not in this vocabulary, so the answer follows the mark directly."""
    spec = StructuredOutputs(regex=pattern, after=replace(MARKS, opened=opened))
    (constraint,) = compiler.constraints(spec, 1)
    paths: list[list[int]] = [[]]
    while paths:
        path = paths.pop()
        text = "".join(TOKENS[i] for i in path)
        bits = int.from_bytes(constraint.mask(path), "little")
        found = {i for i in range(1, len(TOKENS)) if bits >> i & 1}
        expected = {i for i in range(1, len(TOKENS)) if fits(text + TOKENS[i], pattern, opened)}
        assert found <= expected, text
        if "</>" not in text and (opened or text.startswith("<t>")):
            assert found == expected, text
            assert not bits & 1, "thoughts do not end a text"
        everything = DraftTree(
            list(range(len(TOKENS))), [-1] * len(TOKENS), [1.0] * len(TOKENS), [""] * len(TOKENS)
        )
        if not path:
            legal = {i for i in constraint.legal(everything).token_ids if i != END}
            assert legal == found
        if len(path) < LONGEST:
            paths += [[*path, i] for i in found]


def test_committing_equals_looking_ahead(compiler: GrammarCompiler) -> None:
    spec = StructuredOutputs(regex="(a|ba)(b|aa)", after=MARKS)
    rng = random.Random(1)
    for _ in range(60):
        ahead, committed = compiler.constraints(spec, 2)
        path: list[int] = []
        while len(path) < 9 and not committed.is_complete:
            mask = ahead.mask(path)
            assert committed.mask(()) == mask
            assert committed.certain(()) == ahead.certain(path)
            bits = int.from_bytes(mask, "little") & ~1
            token = rng.choice([i for i in range(len(TOKENS)) if bits >> i & 1])
            committed.advance(token)
            path.append(token)


def test_marks_must_be_something() -> None:
    with pytest.raises(RequestError, match="closing marks"):
        ThoughtMarks("<think>", [""])


def allowed(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return {token for token in range(len(TOKENS)) if bits >> token & 1}


EVERYTHING = set(range(len(TOKENS)))
ONLY = {"</>": 9, "/>": 8, ">": 4}
"""The longest token for what of the closing mark is to come."""


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_are_closed_when_their_budget_is_spent(
    compiler: GrammarCompiler, budget: int, opened: bool
) -> None:
    spec = StructuredOutputs(free=True, after=replace(MARKS, opened=opened, budget=budget))
    (constraint,) = compiler.constraints(spec, 1)
    start = () if opened else (TOKENS.index("<t>"),)
    paths = [
        [*start, *thoughts] for n in range(4) for thoughts in itertools.product("ab</", repeat=n)
    ]
    for path in paths:
        ids = [token if isinstance(token, int) else TOKENS.index(token) for token in path]
        text = "".join(TOKENS[i] for i in ids[len(start) :])
        found, certain = allowed(constraint.mask(ids)), constraint.certain(ids)
        if len(ids) - len(start) < budget:
            assert (found, certain) == (EVERYTHING, None)
            continue
        begun = next(each for each in ("</", "<", "") if text.endswith(each))
        only = ONLY["</>".removeprefix(begun)]
        assert (found, certain) == ({only}, only)
        behind = [*ids, only]
        assert (allowed(constraint.mask(behind)), constraint.certain(behind)) == (EVERYTHING, None)
        assert not constraint.is_complete


def test_an_answer_without_thoughts_has_no_budget(compiler: GrammarCompiler) -> None:
    spec = StructuredOutputs(free=True, after=replace(MARKS, budget=0))
    (constraint,) = compiler.constraints(spec, 1)
    for token in (1, 2, 5, 1):
        assert allowed(constraint.mask(())) == EVERYTHING
        constraint.advance(token)


@pytest.mark.parametrize("budget", [0, 2])
def test_the_shape_of_the_answer_holds_behind_a_budget_too(
    compiler: GrammarCompiler, budget: int
) -> None:
    after = replace(MARKS, opened=True, budget=budget)
    (constraint,) = compiler.constraints(StructuredOutputs(regex="ab", after=after), 1)
    for token in (*[TOKENS.index("a")] * budget, TOKENS.index("</>")):
        assert token in allowed(constraint.mask(()))
        constraint.advance(token)
    assert allowed(constraint.mask(())) == {TOKENS.index("a")}


def test_a_budget_alone_is_no_shape() -> None:
    with pytest.raises(RequestError, match="free says nothing"):
        StructuredOutputs(free=True)
    with pytest.raises(RequestError, match="budget of thoughts is -1"):
        ThoughtMarks("<t>", "</>", budget=-1)
