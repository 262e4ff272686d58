"""The matcher behind a request, against enumeration and against a fresh matcher."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from paceline.api.llm import embedded_model
from paceline.request.span import DraftTree
from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured.constraint import MatcherConstraint
from paceline.structured.grammar import GrammarCompiler
from paceline.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
LETTERS = "abc"
TOKENS = ["<end>", "a", "b", "c", "ab", "abc", "cc"]
END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["internal", "international", "external"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "flag": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "flag"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def small() -> Iterator[GrammarCompiler]:
    """Seven tokens, several of which spell the same strings."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c"), ("c", "c")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    compiler = GrammarCompiler(Tokenizer(backend), len(TOKENS), [END])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[GrammarCompiler, Tokenizer]]:
    tokenizer = Tokenizer.from_folder(embedded_model("target"))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    yield compiler, tokenizer
    compiler.close()


def allowed(mask: bytes, vocab_size: int = len(TOKENS)) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [i for i in range(vocab_size) if bits >> i & 1]


def language(pattern: str, longest: int) -> set[str]:
    words = ("".join(w) for n in range(longest + 1) for w in itertools.product(LETTERS, repeat=n))
    return {word for word in words if re.fullmatch(pattern, word)}


PATTERNS = ["a{2,4}", "(ab)*c", "[ab]{3}", "abc|abd?|cc+", "(a|bc){1,2}b", "abcabc", "c?"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_by_enumeration(small: GrammarCompiler, pattern: str) -> None:
    """A token may follow exactly if it leads to a word; forced strings have one spelling."""
    longest = 6
    words = language(pattern, longest + 3)
    (constraint,) = small.constraints(StructuredOutputs(regex=pattern), 1)
    paths: list[list[int]] = [[]]
    count = 0
    while paths:
        path = paths.pop()
        text = "".join(TOKENS[i] for i in path)
        found = allowed(constraint.mask(path))
        fits = [i for i in range(1, 7) if any(w.startswith(text + TOKENS[i]) for w in words)]
        assert (END in found) == (text in words), text
        inner = [i for i in found if i != END]
        assert set(inner) <= set(fits), text
        forced = constraint.certain(path)
        assert inner == ([forced] if forced is not None else fits), text
        paths += [[*path, i] for i in inner if len(text) + len(TOKENS[i]) <= longest]
        count += 1
    assert count > 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_end_is_known_when_nothing_may_follow(small: GrammarCompiler, pattern: str) -> None:
    words = language(pattern, 9)
    rng = random.Random(pattern)
    for _ in range(20):
        (constraint,) = small.constraints(StructuredOutputs(regex=pattern), 1)
        text = ""
        while len(text) < 6:
            token = rng.choice(allowed(constraint.mask(())))
            if token == END:
                break
            constraint.advance(token)
            text += TOKENS[token]
            goes_on = any(word.startswith(text) and word != text for word in words)
            assert constraint.is_complete == (not goes_on)
            if constraint.is_complete:
                assert text in words
                assert allowed(constraint.mask(())) == [END]
                break


def random_walk(
    constraint: MatcherConstraint, rng: random.Random, vocab_size: int, steps: int
) -> list[int]:
    path: list[int] = []
    for _ in range(steps):
        tokens = allowed(constraint.mask(path), vocab_size)
        path.append(rng.choice(tokens[:60]))
        if path[-1] == END:
            break
    return path


SPECS = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex=r"(\w+@\w+\.(com|org);){2}"),
    StructuredOutputs(choice=["left", "left turn", "right"]),
    StructuredOutputs(grammar='start: pair+\npair: NAME "=" /[0-9]+/ ";"\nNAME: /[a-z]{1,5}/'),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_wherever_it_has_been_it_equals_a_fresh_one(
    trained: tuple[GrammarCompiler, Tokenizer], spec: StructuredOutputs
) -> None:
    """The oracle: walks ahead, drafts, and rolling back leave no trace."""
    compiler, tokenizer = trained
    size = tokenizer.vocab_size
    for seed in range(2):
        rng = random.Random(seed)
        travelled, truth = compiler.constraints(spec, 2)
        output: list[int] = []
        while len(output) < 40 and not travelled.is_complete:
            for _ in range(rng.randrange(3)):
                ahead = random_walk(travelled, rng, size, rng.randrange(5))
                travelled.certain(ahead[:1])
                travelled.usual(ahead[:2])
                travelled.legal(chain([*ahead[:2], rng.randrange(size), *ahead[2:]]))
            mask = travelled.mask(())
            assert mask == truth.mask(())
            path = random_walk(travelled, rng, size, rng.randrange(1, 5))
            for token in path[: rng.randrange(1, 5)]:
                if token == END or travelled.is_complete:
                    break
                travelled.advance(token)
                truth.advance(token)
                output.append(token)
                assert travelled.is_complete == truth.is_complete
        (fresh,) = compiler.constraints(spec, 1)
        for token in output:
            fresh.advance(token)
        assert fresh.mask(()) == travelled.mask(())
        assert fresh.is_complete == travelled.is_complete


def chain(tokens: Sequence[int]) -> DraftTree:
    return DraftTree.chain(tokens, [0.5] * len(tokens), "test")


def test_what_is_legal_is_what_the_masks_allow(
    trained: tuple[GrammarCompiler, Tokenizer],
) -> None:
    """Never a legal node less; an illegal one more only where a spelling is not the usual one."""
    rng, spared = random.Random(5), 0
    (constraint,) = trained[0].constraints(StructuredOutputs(json=SCHEMA), 1)
    seen = {True: 0, False: 0}
    for _ in range(30):
        tree = DraftTree()
        paths: list[list[int]] = [[]]
        fine = [True]
        for _ in range(10):
            at = rng.randrange(len(paths))
            options = allowed(constraint.mask(paths[at]), 4096) if fine[at] else []
            good = rng.choice(options[:40]) if options and rng.random() < 0.7 else None
            token = rng.randrange(1, 4096) if good is None else good
            path = [*paths[at], token]
            if path in paths or END in path:
                continue
            tree.token_ids.append(token)
            tree.parents.append(at - 1)
            tree.accept_probs.append(0.5)
            tree.origins.append("test")
            paths.append(path)
            fine.append(fine[at] and token in options)
        legal = constraint.legal(tree)
        kept = {tuple(path) for path in node_paths(legal)}
        for path, is_fine in zip(paths[1:], fine[1:], strict=True):
            seen[is_fine] += 1
            if is_fine:
                assert tuple(path) in kept
            else:
                spared += tuple(path) in kept
        constraint.advance(allowed(constraint.mask(()), 4096)[0])
    assert min(seen.values()) > 10
    assert spared < seen[False] / 10


def node_paths(tree: DraftTree) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def test_json_comes_in_one_style(trained: tuple[GrammarCompiler, Tokenizer]) -> None:
    """Keys and separators are certain, so that they need no model at all."""
    compiler, tokenizer = trained
    (constraint,) = compiler.constraints(StructuredOutputs(json=SCHEMA), 1)
    value = {"name": "Ada", "kind": "internal", "sizes": [1, 23], "flag": True}
    tokens = tokenizer.encode(json.dumps(value), add_special_tokens=False)
    certain = 0
    for token in tokens:
        known = constraint.certain(())
        assert known in (None, token)
        certain += known is not None
        constraint.advance(token)
    assert constraint.is_complete
    assert certain > len(tokens) / 2


def test_choices_are_tried_by_their_longest_spellings(
    trained: tuple[GrammarCompiler, Tokenizer],
) -> None:
    compiler, tokenizer = trained
    (constraint,) = compiler.constraints(StructuredOutputs(choice=["true", "false"]), 1)
    assert constraint.certain(()) is None
    found = constraint.alternatives((), 4)
    assert sorted(tokenizer.decode([token])[0] for token in found) == ["f", "t"]
    assert constraint.alternatives((), 1) == []
