"""Runs of characters as one lexeme: only where no text is read otherwise than by characters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from paceline.errors import RequestError
from paceline.llm import embedded_model
from paceline.models.tokenizer import Tokenizer
from paceline.runtime.gbnf import from_gbnf, runs
from paceline.runtime.grammar import GrammarCompiler
from paceline.runtime.token_names import TokenNames
from paceline.structured_outputs import StructuredOutputs
from tests.quick import only
from tests.runtime.gbnf_cases import RESTATED

pytest.importorskip("llguidance")
END = 0
ALPHABET = "abcé\n"
LETTERS = ('"a"', '"b"', '"ab"', "[a-b]", "[^a]", "[bc]", '"é"', "[éü]", "[^é]", ".", '"\\n"')
COUNTS = ("", "", "", "*", "+", "*", "+", "?", "{2,}", "{2}", "{0,2}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(embedded_model("target"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    yield made
    made.close()


def num_runs(source: str, *, is_whole: bool = True) -> int:
    return from_gbnf(source, TokenNames(size=9), is_whole=is_whole).count("}/")


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('root ::= [a-z]+ "1"', 1),
        ('root ::= [a-z]+ "b"', 0),
        ('root ::= "b" [a-z]*', 1),
        ('root ::= "b"? [a-z]*', 0),
        ('root ::= "b" "1" | [a-z]+', 1),
        ('root ::= "b" "c" | [a-z]+', 0),
        ('root ::= "<" ([^<&] | "&" [a-z]{4})* "<"', 1),
        ('root ::= ([a-z]+ ","?)+', 0),
        ('root ::= ([a-z]+ ",")+ | [A-Z]+', 2),
        ('root ::= letter+ "."\nletter ::= small | [A-Z]\nsmall ::= [a-z]', 1),
        ('root ::= [^ü]+ "ü"', 0),  # the first byte of both is the same
        ('root ::= [^ü]+ "!"', 0),
        ('root ::= [^ü!]+ "!"', 1),
        ('root ::= [a-z]+ "1" <[5]>', 0),  # one token may stand for many characters
        ('root ::= "(" root? ")" | [a-z]+', 1),
        ('root ::= "(" [a-z]* root? ")" | [a-z]+', 0),
        ('root ::= [a-b]+ | [^a]* "."', 0),
    ],
)
def test_where_runs_are(source: str, count: int) -> None:
    assert num_runs(source) == count


def test_what_follows_a_grammar_may_go_on_like_its_end() -> None:
    assert num_runs('root ::= [a-z]+ "." [a-z]+') == 2
    assert num_runs('root ::= [a-z]+ "." [a-z]+', is_whole=False) == 1


def test_the_texts_of_json_are_runs() -> None:
    """So that a mask within costs next to nothing."""
    assert "]{1,}/" in from_gbnf(RESTATED["json"], TokenNames())


def drawn(chance: random.Random) -> str:
    def alternatives(depth: int) -> str:
        return " | ".join(sequence(depth) for _ in range(chance.choice((1, 1, 2, 3))))

    def sequence(depth: int) -> str:
        return " ".join(item(depth) for _ in range(chance.choice((1, 2, 2, 3))))

    def item(depth: int) -> str:
        inner = f"({alternatives(depth + 1)})" if chance.random() < 0.3 and depth < 3 else ""
        return (inner or chance.choice((*LETTERS, "x" if depth < 9 else '"a"'))) + chance.choice(
            COUNTS
        )

    return f"root ::= {alternatives(0)}\nx ::= {alternatives(9)}"


def accepted(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str) -> list[bool]:
    """Whether each short text can begin a text of the grammar, and be one."""
    found = []
    for text in map("".join, itertools.product(ALPHABET, repeat=3)):
        (constraint,) = compiler.constraints(StructuredOutputs(grammar=grammar), 1)
        for character in text:
            tokens = tokenizer.encode(character, add_special_tokens=False)
            taken = constraint.takes(tokens)
            found.append(taken)
            if not taken:
                break
            for token in tokens:
                constraint.advance(token)
            found.append(constraint.takes((END,)))
    return found


@pytest.mark.parametrize("seed", only([0], range(40)))
def test_runs_change_no_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    tried = 0
    while tried < 5:
        source = drawn(chance)
        with suppress(RequestError):  # left recursion, or too much at once for a mask
            quick = from_gbnf(source, TokenNames())
            if "}/" not in quick:
                continue
            with monkeypatch.context() as context:
                context.setattr(runs, "MAX_SIZE", 0)
                plain = from_gbnf(source, TokenNames())
            assert quick != plain
            known = accepted(compiler, tokenizer, plain)
            assert accepted(compiler, tokenizer, quick) == known, source
            tried += 1
