"""Runs of characters and whole texts as one lexeme: these change no text that matches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from paceline.api.llm import embedded_model
from paceline.core.errors import RequestError
from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured import gbnf
from paceline.structured.gbnf import from_gbnf
from paceline.structured.gbnf_parser import Run, parsed, sequences
from paceline.structured.grammar import GrammarCompiler
from paceline.text.token_pieces import TokenNames
from paceline.text.tokenizer import Tokenizer
from tests.quick import only
from tests.structured.gbnf_cases import RESTATED
from tests.structured.gbnf_walk import END, Walk

pytest.importorskip("llguidance")
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
    rules = parsed(source, TokenNames(size=9))
    bodies = gbnf.with_runs(rules.bodies, rules.root, is_whole=is_whole).values()
    items = (item for body in bodies for line in sequences(body) for item in line)
    return sum(isinstance(item, Run) for item in items)


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
@pytest.mark.parametrize("is_whole", [True, False])
def test_lexemes_change_no_text(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    is_whole: bool,
) -> None:
    """Neither runs nor, where nothing follows the grammar, whole texts."""
    chance = random.Random(seed)
    tried = 0
    while tried < 5:
        source = drawn(chance)
        with suppress(RequestError):  # left recursion, or too much at once for a mask
            quick = from_gbnf(source, TokenNames(), is_whole=is_whole)
            with monkeypatch.context() as context:
                context.setattr(gbnf, "MAX_RULES_WITH_RUNS", 0)
                context.setattr(gbnf, "MAX_EXPRESSION_SIZE", 0)
                plain = from_gbnf(source, TokenNames())
            if quick == plain:
                continue
            known = accepted(compiler, tokenizer, plain)
            assert accepted(compiler, tokenizer, quick) == known, source
            tried += 1


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ('root ::= [a-z]+ .* "."', True),
        ('root ::= x{2,3} | y?\nx ::= "a" | y\ny ::= "b"', True),
        ('root ::= ""', True),
        ('root ::= "a" root | "b"', False),
        ('root ::= "a" <[5]>', False),
        ('root ::= ("a" | "b"){2}' + ' "c"' * 1000, False),
        ("root ::= " + "(" * 60 + '"a"' + ")" * 60, False),
    ],
)
def test_what_is_one_expression(source: str, is_one: bool) -> None:
    assert ("\nrule_0: /(" in from_gbnf(source, TokenNames(size=9))) is is_one


def test_expressions_are_written_in_time() -> None:
    """Rules that double at each level, without a character in between."""
    rules = "".join(f"x{n} ::= x{n + 1} x{n + 1}\n" for n in range(40))
    assert "/(" not in from_gbnf(f'root ::= "a" x0\n{rules}x40 ::= ""', TokenNames())


def test_many_places_at_once_cost_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Here a text may stand in as many places as it has characters."""
    walk = Walk(compiler, tokenizer, 'root ::= ([^x]+ .*){3} "." .*')
    text = "so it goes on, and on, and on, and on " * 4
    assert walk.verdict(f"{text}.") == len(text) + 1
    assert walk.verdict(text) == -len(text) - 1
