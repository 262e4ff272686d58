"""The vocabulary as the compiler of grammars takes it, and when and where its tables are made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tokenizers

from paceline import LLM, SamplingParams
from paceline.api.llm import embedded_model
from paceline.core.errors import RequestError
from paceline.core.worker_process import WorkerSlot
from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured.grammar import GrammarCompiler, GrammarVocabulary
from paceline.text.tokenizer import Tokenizer
from tests.children import HAS_PROC, running
from tests.server.grammars import marked_tokenizer

llguidance = pytest.importorskip("llguidance")
TEXTS = ["hello world", " two  spaces", "\n\n\tx", "é ü 漢字", '{"name": "']
BEYOND = 7
"""Rows of logits that no token has."""
WISH = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs(choice=["a"]))
PATIENCE = 60.0


def with_added(marks: dict[str, bool]) -> Tokenizer:
    """The embedded tokenizer with added tokens, which are special or not."""
    backend = tokenizers.Tokenizer.from_file(f"{embedded_model('target')}/tokenizer.json")
    for text, special in marks.items():
        token = tokenizers.AddedToken(text, special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
    return Tokenizer(backend, special_tokens={"eos_token": "<|endoftext|>"})


def with_space_first() -> Tokenizer:
    """A vocabulary of SentencePiece's kind, which puts a space before a text and has bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = [*((word, 0.0) for word in words), ("▁", -1.0), ("▁hello", -2.0), ("hello", -2.0)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(backend, special_tokens=roles)


@pytest.mark.parametrize("made", [marked_tokenizer, with_space_first])
def test_the_tables_are_those_of_the_file(made: Callable[[], Tokenizer]) -> None:
    tokenizer = made()
    size, eos = tokenizer.vocab_size + BEYOND, list(tokenizer.eos_token_ids)
    by_file = llguidance.LLTokenizer(tokenizer.to_json(), size, eos)
    ours = llguidance.LLTokenizer(GrammarVocabulary(tokenizer, size, eos), size, eos)
    for token in range(tokenizer.vocab_size):
        assert ours.decode_bytes([token]) == by_file.decode_bytes([token]), token
        if token != tokenizer.unk_token_id:  # which writes nothing; a file need not say so
            assert ours.is_special_token(token) == by_file.is_special_token(token), token
    assert ours.eos_tokens == by_file.eos_tokens
    assert [ours.tokenize_str(text) for text in TEXTS] == [
        by_file.tokenize_str(text) for text in TEXTS
    ]


def test_what_texts_are_not_written_in() -> None:
    """As llguidance 1.9.1 reads a file: angle brackets make a mark of an added token."""
    marks = {"<a b>": False, "[c]": False, "plain": False, "[d]": True, "<e": False}
    tokenizer = with_added(marks)
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size, [0])
    special = set(vocabulary.special_token_ids)
    ids = {text: tokenizer.encode(text)[0] for text in marks}
    assert {text for text, token in ids.items() if token in special} == {"<a b>", "[d]"}
    assert vocabulary.pieces[ids["[d]"]] == b""
    assert vocabulary.tokens[ids["[d]"]] == b"[d]"


def test_an_added_token_of_a_byte_level_vocabulary_is_spelt_as_it_is() -> None:
    """As DeepSeek's ``<|tool▁calls▁begin|>``, which is no text with spaces."""
    tokenizer = with_added({"two▁words": False})
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size, [0])
    (token,) = tokenizer.encode("two▁words")
    assert vocabulary.pieces[token].decode() == tokenizer.decode([token]) == "two▁words"


def test_a_text_behind_others_gets_no_space() -> None:
    tokenizer = with_space_first()
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    assert tokenizer.decode(tokenizer.encode("x") + vocabulary("hello")) == "xhello"


@pytest.mark.parametrize("text", ["a <|im|> b", "<think>", "<|im|>"])
def test_a_forced_text_may_spell_a_special_token(text: str) -> None:
    """llguidance 1.9.1, told a ``tokenizer.json``, forces that token and then refuses it."""
    tokenizer = with_added({"<|im|>": True, "<think>": False})
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    (constraint,) = compiler.constraints(StructuredOutputs(choice=[text]), 1)
    written = list[int]()
    while not constraint.is_complete:
        token = constraint.certain(())
        if token is None:
            bits = int.from_bytes(constraint.mask(()), "little")
            token = (bits & -bits).bit_length() - 1
        constraint.advance(token)
        written.append(token)
    compiler.close()
    assert tokenizer.decode(written) == text
    assert len(written) > 1


# --- when and where the tables are made -----------------------------------------------------------


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which tables were made."""
    return replace_tables(monkeypatch, llguidance.LLTokenizer)


def replace_tables(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[object, int, list[int]], object]
) -> list[int]:
    threads = list[int]()

    def noted(vocabulary: object, size: int, eos: list[int]) -> object:
        threads.append(threading.get_ident())
        return make(vocabulary, size, eos)

    monkeypatch.setattr(llguidance, "LLTokenizer", noted)
    return threads


@contextmanager
def opened() -> Iterator[LLM]:
    with LLM("embedded", speculative_config=[], num_threads=1) as llm:
        yield llm


def test_tables_are_made_once_by_whoever_wishes_for_them(makers: list[int]) -> None:
    with opened() as llm:
        llm.generate("x", SamplingParams(max_tokens=1))
        assert makers == []
        llm.prepare_grammars()
        assert llm.generate("x", WISH).text == "a"
        llm.prepare_grammars()
        assert makers == [threading.get_ident()]


def test_the_engines_thread_makes_no_tables(makers: list[int]) -> None:
    with opened() as llm:
        assert llm.generate("x", WISH).text == "a"
        assert llm.call(lambda _: threading.get_ident()) not in makers
    assert len(makers) == 1


def test_what_takes_a_large_vocabulary_long_is_done_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, looks = with_added({"<a>": False}), list[str]()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    compiler.prepare()
    for name in ("shown_added_tokens", "mark_ids", "encoder_within", "to_json"):
        note = lambda *_, name=name: looks.append(name)  # noqa: E731
        monkeypatch.setattr(Tokenizer, name, note)
    compiler.constraints(StructuredOutputs(regex="a<a>"), 1)
    compiler.constraints(StructuredOutputs(json={"type": "object"}), 1)
    compiler.close()
    assert looks == []


@pytest.mark.skipif(not HAS_PROC, reason="reads /proc")
def test_the_process_that_tries_grammars_out_starts_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, has_started = list[str](), threading.Event()
    honest = WorkerSlot.start

    def noted(slot: WorkerSlot) -> None:
        honest(slot)
        has_started.set()

    monkeypatch.setattr(WorkerSlot, "start", noted)
    monkeypatch.setattr(WorkerSlot, "ask", lambda _, line, seconds: asked.append(line))
    before = set(running("grammar_worker.py"))
    tokenizer = with_added({})
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    compiler.prepare()
    assert has_started.wait(PATIENCE)
    assert set(running("grammar_worker.py")) - before
    compiler.close()
    assert asked == []


def test_only_requests_with_a_grammar_wait_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    are_wanted, may_be = threading.Event(), threading.Event()
    honest, answers = llguidance.LLTokenizer, list[str]()

    def slow(*given: Any) -> object:
        are_wanted.set()
        assert may_be.wait(PATIENCE)
        return honest(*given)

    threads = replace_tables(monkeypatch, slow)
    with opened() as llm:
        shaped = [
            threading.Thread(target=lambda: answers.append(llm.generate("x", WISH).text))
            for _ in range(2)
        ]
        for each in shaped:
            each.start()
        assert are_wanted.wait(PATIENCE)
        assert llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids
        assert answers == []
        may_be.set()
        for each in shaped:
            each.join(PATIENCE)
    assert answers == ["a", "a"]
    assert len(threads) == 1


def test_where_tables_cannot_be_made_only_grammars_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*given: object) -> object:
        raise ValueError("no such vocabulary")

    threads = replace_tables(monkeypatch, broken)
    with opened() as llm:
        llm.prepare_grammars()
        for _ in range(2):
            with pytest.raises(RequestError, match="this model's tokenizer: no such vocabulary"):
                llm.generate("x", WISH)
        assert llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids
    assert len(threads) == 1  # what failed is not tried for every request


def test_a_vocabulary_that_the_library_cannot_hold() -> None:
    """A token of more than 1,023 bytes fails an assertion of llguidance 1.9.1."""
    tokenizer = with_added({"x" * 2000: False})
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    compiler.prepare()
    with pytest.raises(RequestError, match="cannot be used with this model's tokenizer"):
        compiler.constraints(StructuredOutputs(regex="a"), 1)


def test_a_model_without_a_tokenizer_is_served_all_the_same() -> None:
    GrammarCompiler(None, 64, [0]).prepare()
