"""Grammars in GBNF take and refuse what llama.cpp takes and refuses, token by token.

Recorded from xllamacpp 2026.10.11549 (llama.cpp b11549) by ``record_gbnf.py``. Runs of characters
and whole texts as one lexeme change no text that matches.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from paceline.api.llm import embedded_model
from paceline.core.errors import RequestError
from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured import gbnf
from paceline.structured.gbnf import from_gbnf
from paceline.structured.gbnf_parser import CharacterRun, parsed, sequences
from paceline.structured.grammar import GrammarCompiler
from paceline.text.token_pieces import TokenNames
from paceline.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY
from tests.quick import only
from tests.structured.gbnf_cases import OWN, REFUSED, RESTATED, TAKEN, recorded, token_texts
from tests.structured.gbnf_walk import END, Walk

pytest.importorskip("llguidance")
FOLDER = REPOSITORY / ".peers/src/llama-cpp-python/vendor/llama.cpp/grammars"
SOURCES = RESTATED | OWN
NO_TOKENS = TokenNames(size=10)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    yield made
    made.close()


def check_texts(walk: Walk, name: str) -> None:
    for text, verdict in recorded()["texts"][name]:
        assert walk.verdict(text) == verdict, text


@pytest.mark.parametrize("name", SOURCES)
def test_texts(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    check_texts(Walk(compiler, tokenizer, SOURCES[name]), name)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("name", RESTATED)
def test_texts_of_the_files(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    file = FOLDER / f"{name}.gbnf"
    if not file.exists():
        pytest.skip(f"there is no {file}: make peers downloads it")
    check_texts(Walk(compiler, tokenizer, file.read_text(encoding="utf-8")), name)


@pytest.mark.parametrize("name", only([*OWN, "json", "chess"], SOURCES))
def test_tokens_that_may_follow(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    """Where a text has to follow, its usual tokens alone do; elsewhere llama.cpp's, all of them."""
    known = sum(1 << token for token in token_texts())
    for begun, mask in recorded()["masks"][name]:
        (constraint,) = compiler.constraints(StructuredOutputs(grammar=SOURCES[name]), 1)
        for token in tokenizer.encode(begun, add_special_tokens=False):
            constraint.advance(token)
        theirs = int(mask, 16)
        ours = int.from_bytes(constraint.mask(()), "little") & known
        if constraint.certain(()) is None:
            assert ours == theirs, begun
        else:
            assert ours & ~theirs == 0, begun
            assert all(constraint.takes((token,)) == theirs >> token & 1 for token in token_texts())


@pytest.mark.parametrize("source", [*REFUSED, *TAKEN])
def test_what_is_a_grammar(source: str) -> None:
    assert recorded()["taken"][source] is (source in TAKEN)
    if source in TAKEN:
        assert from_gbnf(source, NO_TOKENS)
    else:
        with pytest.raises(RequestError):
            from_gbnf(source, NO_TOKENS)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= "a" <[5]> "b"', [["a", 5, "b"]], [["a", 6], ["a", "b"], [5]]),
        ('root ::= (!<[5]>)* <[5]> "."', [[5, "."], [6, "a", 2, 5, "."]], [["."], [6, 0]]),
        ("root ::= <|im_start|> !<|im_end|>+ <|im_end|>", [[1, 7, 2]], [[1, 2], ["<"]]),
        ('root ::= [^x]* <[1]> | "a" <[0]>', [["a", 1], [1]], [["a", 0], ["x"]]),
        ('root ::= "a" | "b" (<[0]> | <[4096]> | [z-a] | "\\x00" | "\\uD800")', [["a"]], [["b"]]),
        ('root ::= "a" (<[0]> "b")* <[4096]>? "c"{0}', [["a"]], [["a", "b"], ["c"]]),
    ],
)
def test_tokens_by_name(
    compiler: GrammarCompiler, tokenizer: Tokenizer, source: str, good: list[Any], bad: list[Any]
) -> None:
    """As llama.cpp b11549: of a text's end no reference is one, and a text may be written as one
    token only where the vocabulary has it."""
    for path in good + bad:
        (constraint,) = compiler.constraints(StructuredOutputs(grammar=source), 1)
        is_taken = True
        for each in path:
            (token,) = tokenizer.encode(each) if isinstance(each, str) else [each]
            is_taken = is_taken and bool(constraint.mask(())[token // 8] >> token % 8 & 1)
            if is_taken:
                constraint.advance(token)
        assert (is_taken and bool(constraint.mask(())[0] & 1)) is (path in good), path


def test_parts_of_characters_are_tokens_too(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """llama.cpp b11549 never takes one for ``!<token>``."""
    parts = tokenizer.encode("😀", add_special_tokens=False)
    assert len(parts) > 1
    (constraint,) = compiler.constraints(StructuredOutputs(grammar="root ::= !<[5]>+"), 1)
    for token in parts:
        assert constraint.mask(())[token // 8] >> token % 8 & 1
        constraint.advance(token)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a"\nx ::= (b', "Expected ')' at line 2, column 9 of the GBNF, where it ends"),
        ('root ::= "a" x\n\ny ::= "b"', "Rule 'x' not found at line 1, column 14"),
        ('root ::= "a" x{0}', "Rule 'x' not found at line 1, column 14"),
        ('root ::= "a" | item\r\nitem ::= (root | ) "b"', "Left recursion: rule 'root'"),
        ('root ::= "\\d"', "\\d is not an escape; allowed: \\n "),
        ('root ::= "a"{3,2}', "At least 3 and at most 2 repetitions at line 1, column 13"),
        ("root ::= <|tool|>", "No single token of the model at line 1, column 10"),
        ("root ::= <[0]>", "No text matches the GBNF"),
        ("root ::= " + "(" * 300, "Groups nested deeper than 200 levels"),
        ("root ::= " + '"a" ' * 30 + '{"9"}', "Expected a number at line 1, column 131"),
    ],
)
def test_refusals_say_where_and_why(compiler: GrammarCompiler, source: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        compiler.constraints(StructuredOutputs(grammar=source), 1)


def test_names_of_other_engines_are_taken(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """llama.cpp's have no underscore; examples of vLLM and xgrammar do."""
    walk = Walk(compiler, tokenizer, 'root ::= a_b a-b\na_b ::= "x"\na-b ::= "y"')
    assert walk.verdict("xy") == 2


def test_hostile_grammars_are_read_in_one_pass() -> None:
    """Nothing here takes the square of the grammar's length: the test would not end."""
    chain = "".join(f"r{i} ::= r{i + 1} | <[{i}]>\n" for i in range(1000))
    for source in (
        f"root ::= r0\n{chain}r1000 ::= <[99]>",
        'root ::= "a"' + "+" * 20_000,
        "root ::= " + "|" * 20_000,
        "root ::= [" + "a-z" * 8_000 + "]",
        "root ::= " + "#\n" * 20_000 + '"a"',
    ):
        assert from_gbnf(source, NO_TOKENS).startswith("%llguidance {}")


pytest.importorskip("llguidance")
ALPHABET = "abcé\n"
LETTERS = ('"a"', '"b"', '"ab"', "[a-b]", "[^a]", "[bc]", '"é"', "[éü]", "[^é]", ".", '"\\n"')
COUNTS = ("", "", "", "*", "+", "*", "+", "?", "{2,}", "{2}", "{0,2}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(embedded_model("target"))


def num_runs(source: str, *, is_whole: bool = True) -> int:
    rules = parsed(source, TokenNames(size=9))
    bodies = gbnf.with_runs(rules.bodies, rules.root, is_whole=is_whole).values()
    items = (item for body in bodies for line in sequences(body) for item in line)
    return sum(isinstance(item, CharacterRun) for item in items)


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
