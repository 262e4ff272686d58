"""Tokens of thoughts are counted in every protocol's usage, wherever an answer is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from paceline.request.request import TokenLogprobs
from paceline.request.structured_outputs import ThoughtMarks
from paceline.server.chat.answer import AnswerParser
from paceline.server.chat.answer_parts import Placed, ThoughtCount, ThoughtTokens, TokenPlaces
from paceline.server.chat.choice_stream import ChatChoice, ChatLogprobs
from paceline.server.chat.harmony import ASSISTANT, Harmony, HarmonyParser
from paceline.server.engine_process.messages import Piece
from paceline.server.engine_process.tokens import TokenTexts
from paceline.text.tokenizer import Tokenizer
from tests.server.chats import CHATML, HARMONY_CHAT, THINKING, USER, ChatServer
from tests.server.protocols import Asked


class Case(NamedTuple):
    """An answer whose tokens are characters: its thoughts without and with their marks."""

    answer: str
    inside: str
    marked: str
    template: str = THINKING


OPENING = THINKING.replace("{% elif open_thoughts %}", "{% else %}")
ANALYSIS = "<|channel|>analysis<|message|>Hm."
FINAL = "<|start|>assistant<|channel|>final<|message|>B."
CASES = {
    "closed": Case("<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "<think>\nHm.\n</think>"),
    "empty": Case("<think>\n\n</think>\n\nYes.", "\n\n", "<think>\n\n</think>"),
    "cut": Case("\n<think>Hm. </thin", "Hm. </thin", "<think>Hm. </thin"),
    "none": Case("Yes <think>.</think>", "", ""),
    "opened": Case("Hm.\n</think>\nYes.", "Hm.\n", "Hm.\n</think>", OPENING),
    "unknown": Case("<think>Hm.</think>Yes.", "", "", CHATML),
    "harmony": Case(
        f"{ANALYSIS}<|end|><|start|>assistant{ANALYSIS}<|end|>{FINAL}",
        "Hm.Hm.",
        f"{ANALYSIS}<|end|><|start|>assistant{ANALYSIS}<|end|>",
        HARMONY_CHAT,
    ),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_usage_tells_them(name: str, streams: bool) -> None:
    case = CASES[name]
    server = Asked(case.answer, case.template)

    async def usage(protocol: str) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = (await server.told(protocol, streams))["usage"]
        return found

    chat = asyncio.run(usage("chat"))
    assert chat["completion_tokens_details"] == {"reasoning_tokens": len(case.inside)}
    response = asyncio.run(usage("responses"))
    assert response["output_tokens_details"] == {"reasoning_tokens": len(case.inside)}
    message = asyncio.run(usage("messages"))
    assert message["output_tokens_details"] == {"thinking_tokens": len(case.marked)}


@pytest.mark.parametrize("name", [name for name in CASES if name != "harmony"])
def test_thoughts_that_are_told_as_words_are_counted_too(name: str) -> None:
    case = CASES[name]
    server = ChatServer(case.answer, case.template)
    told, shown = (server.post([USER], reasoning_format=each)[1] for each in ("auto", "none"))
    assert shown["usage"] == told["usage"]
    assert shown["choices"][0]["message"] == {"role": "assistant", "content": case.answer}


def test_those_of_all_samples_are_told_and_read_by_openais_package() -> None:
    server = ChatServer("<think>Hm, so.</think>Yes.", THINKING)
    one = server.ask().usage.completion_tokens_details.reasoning_tokens
    assert 0 < one < server.ask().usage.completion_tokens
    assert server.ask(n=3).usage.completion_tokens_details.reasoning_tokens == 3 * one
    chunks = server.stream(n=3, stream_options={"include_usage": True})
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 3 * one


def test_the_usage_so_far_grows() -> None:
    server = ChatServer("<think>Hm, so.</think>Yes.", THINKING)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream([USER], stream_options=options)
    told = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
    assert told == sorted(told)
    assert len(set(told)) == told[-1] + 1


TOKENS = ("<th", "ink>", "ink>\nH", "m", " ", ".</", "</", "think>", "think>Y", "es", "<", "\n")
"""Of which some are a mark's end and the thoughts' beginning, or the other way round."""
HEADS = ("<|channel|>", "analysis<|message|>", "H", "m<", "|end|>", "<|start|>", "assistant")


def spelling(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer with these tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={t: i for i, t in enumerate(texts)}))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


SPELLING, HARMONY_SPELLING = spelling(TOKENS), spelling(HEADS)


def counted(
    tokenizer: Tokenizer, parser: AnswerParser | HarmonyParser, pieces: Sequence[Piece]
) -> ThoughtCount:
    tokens, placed, inside, marked = ThoughtTokens(), TokenPlaces(tokenizer, []), 0, 0
    for piece in pieces:
        parser.push(piece.text, final=piece.finish_reason is not None)
        more = tokens.take(placed.take(piece), parser.thoughts)
        inside, marked = inside + more.inside, marked + more.marked
    return ThoughtCount(inside, marked)


def pieces_of(ids: Sequence[int], texts: Sequence[str], lag: int, size: int) -> list[Piece]:
    """Pieces of ``size`` tokens whose text comes ``lag`` characters late."""
    found, text, shown = list[Piece](), "", 0
    for at in range(0, len(ids), size):
        more = ids[at : at + size]
        text += "".join(texts[each] for each in more)
        end = max(shown, len(text) - lag)
        found.append(Piece(0, more, ["target"] * len(more), text[shown:end]))
        shown = end
    return [*found, Piece(0, [], [], text[shown:], finish_reason="stop")]


@pytest.mark.parametrize(
    ("opened", "tokens", "count"),
    [
        (False, ["<th", "ink>", "m", "</", "think>", "es"], (1, 5)),
        (False, ["<th", "ink>\nH", "m", ".</", "think>Y", "es"], (3, 5)),
        (False, ["<th", "ink>\nH", "m"], (2, 3)),
        (True, ["\n", "m", ".</", "think>", "\n", "es"], (3, 4)),
        (True, ["\n", "<th", "ink>", "m", "</", "think>", "es"], (1, 6)),
    ],
)
def test_tokens_count_that_are_thoughts_in_part(
    opened: bool, tokens: list[str], count: tuple[int, int]
) -> None:
    parser = AnswerParser(ThoughtMarks(("<think>",), ("</think>",), opened), None)
    ids = [TOKENS.index(each) for each in tokens]
    assert counted(SPELLING, parser, pieces_of(ids, TOKENS, 0, 1)) == count


SIZES = [(lag, size) for lag in (0, 1, 3, 9) for size in (1, 2, 5, 40)]


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(TOKENS) - 1), max_size=14),
    begins=st.sampled_from([[], [0, 1], [0, 2]]),
    opened=st.booleans(),
)
def test_the_count_does_not_depend_on_cuts(ids: list[int], begins: list[int], opened: bool) -> None:
    marks = ThoughtMarks(("<think>",), ("</think>",), opened)
    found = {
        counted(SPELLING, AnswerParser(marks, None), pieces_of([*begins, *ids], TOKENS, *each))
        for each in SIZES
    }
    assert len(found) == 1


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, len(HEADS) - 1), max_size=14), begins=st.booleans())
def test_the_count_of_harmony_does_not_depend_on_cuts(ids: list[int], begins: bool) -> None:
    ids = [*([0, 1, 2, 3, 4] if begins else []), *ids]
    found = {
        counted(HARMONY_SPELLING, HarmonyParser(Harmony(ASSISTANT)), pieces_of(ids, HEADS, *each))
        for each in SIZES
    }
    assert len(found) == 1
    assert not begins or max(found).inside >= 2


class CountedPlaces(TokenPlaces):
    num_taken = 0

    def take(self, piece: Piece) -> list[Placed]:
        self.num_taken += 1
        return super().take(piece)


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_tokens_are_placed_once_for_thoughts_and_log_probs(with_logprobs: bool) -> None:
    ids = [TOKENS.index(text) for text in ("<th", "ink>\nH", "m", "</", "think>Y", "es", "\n")]
    places = CountedPlaces(SPELLING, [])
    logprobs = ChatLogprobs(TokenTexts(None), only_words=True) if with_logprobs else None
    parser = AnswerParser(ThoughtMarks("<think>", "</think>"), None)
    choice, told, count = ChatChoice(0, parser, places, logprobs, None), list[Any](), 0
    for number, token_id in enumerate(ids):
        end = "stop" if number + 1 == len(ids) else None
        entry = [TokenLogprobs(token_id, -1.0, 1, ())]
        piece = Piece(0, [token_id], ["target"], TOKENS[token_id], entry, finish_reason=end)
        told += choice.take(piece)
        count += choice.new_thoughts.inside
    assert count == 2
    assert places.num_taken == (len(ids) if with_logprobs else 5), "no more than is needed"
    named = [each for part in told for each in (part["logprobs"] or {}).get("content", ())]
    assert len(named) == (3 if with_logprobs else 0)
