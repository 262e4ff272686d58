"""Drafts by a trained n-gram model: which they are, how likely, and what the text at hand adds.

The file of an n-gram model: it comes back as it was written, and nothing in it is trusted. The
n-gram model that comes with the embedded target: its file, its prompts, its place.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.api.llm import LLM
from paceline.backends.native.native import native_module, why_not_native
from paceline.build.default_drafts import default_speculative_config
from paceline.cli.options import RunOptions
from paceline.cli.settings import speculative_config
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.loading.catalogue import embedded_model, embedded_ngram_model
from paceline.proposers import build_proposers
from paceline.proposers.base import TargetInfo
from paceline.proposers.ngram_model import (
    DISPUTED,
    MAX_OCCURRENCES,
    UNANIMOUS,
    NgramLevel,
    NgramLookup,
    NgramModelProposer,
    NgramTables,
    NgramText,
    TextCache,
    context_key,
    parse_tables,
    read_tables,
    write_tables,
)
from paceline.request.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer
from tests.programs import module
from tests.proposers.drive import commit, make_request, propose
from tests.proposers.ngrams import ngram_config, toy_tables, train

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 0, 4, 3, 2, 1] * 2
ALL = 1 << 20
IMPLEMENTATIONS = [False, *([True] if why_not_native() is None else [])]


def test_a_tree_has_the_likeliest_paths_best_first() -> None:
    lookup = NgramLookup(train([TEXT], 3, vocab_size=5))
    tail = [3, 1]
    tokens, parents, probs = lookup.draft(None, tail, ALL, 3, 5, 1e-9)
    paths: dict[tuple[int, ...], float] = {}
    nodes: list[tuple[int, ...]] = []
    for token, parent, prob in zip(tokens, parents, probs, strict=True):
        above = nodes[parent] if parent >= 0 else ()
        nodes.append((*above, token))
        # A node's estimate is its probability where it stands, and a path's the product.
        assert prob == pytest.approx(lookup.probability([*tail, *above][-4:], token))
        paths[nodes[-1]] = paths.get(above, 1.0) * prob
    assert all(a >= b for a, b in pairwise(paths.values()))
    assert set(paths) == set(paths_after(tuple(tail), 3))


def paths_after(context: tuple[int, ...], depth: int) -> Iterator[tuple[int, ...]]:
    """Every path whose tokens followed the last one or two tokens somewhere in the text."""
    places = [(length, at) for length in (1, 2) for at in range(len(TEXT) - length)]
    known = {TEXT[at + n] for n, at in places if tuple(TEXT[at : at + n]) == context[-n:]}
    for token in known:
        yield (token,)
        for rest in paths_after((*context, token), depth - 1) if depth > 1 else ():
            yield (token, *rest)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_a_smaller_budget_gives_the_beginning_of_the_same_tree(
    nodes: int, depth: int, branching: int, more: int
) -> None:
    lookup, cache = NgramLookup(toy_tables()), TextCache()
    cache.extend([3, 4, 5, 3, 4, 6], 0)
    small = lookup.draft(cache, [3, 4], nodes, depth, branching, 0.0)
    large = lookup.draft(cache, [3, 4], nodes + more, depth, branching, 0.0)
    assert [column[: len(small[0])] for column in large] == list(small)
    assert len(small[0]) <= nodes
    assert max(small[1].count(parent) for parent in set(small[1])) <= branching


def test_unlikely_paths_are_left_out() -> None:
    lookup = NgramLookup(train([TEXT], 3, vocab_size=5))
    tokens, parents, probs = lookup.draft(None, [1, 2], ALL, 8, 5, 0.1)
    reached: list[float] = []
    for parent, prob in zip(parents, probs, strict=True):
        reached.append(prob * (reached[parent] if parent >= 0 else 1.0))
    assert tokens
    assert min(reached) >= 0.1


@pytest.mark.parametrize("is_backoff", [False, True])
@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_native_look_ups_draft_alike(order: int, is_backoff: bool) -> None:
    if (reason := why_not_native()) is not None:
        pytest.skip(reason)
    native, dice = native_module(), random.Random(order)
    texts = [[min(dice.randrange(1, 9), dice.randrange(1, 9)) for _ in range(200)] for _ in "ab"]
    tables = train(texts, order, vocab_size=9, top_k=3)
    # Files of earlier versions may have relative frequencies.
    tables = dataclasses.replace(tables, is_backoff=is_backoff)
    ours = NgramLookup(tables)
    theirs = native.NgramLookup(tables.levels, tables.unigrams, tables.is_backoff)
    text = [dice.randrange(10) for _ in range(120)]
    for window in (0, 20, 200):
        mine = NgramText(ours, window, 4, 0.01)
        other = native.NgramText(theirs, window, 4, 0.01)
        for end in range(1, len(text), 7):
            limits = text[:end], dice.randint(1, 20), dice.randint(1, 6)
            assert other.draft(*limits) == mine.draft(*limits)


def test_the_text_at_hand_is_followed() -> None:
    proposer = NgramModelProposer(ngram_config(), toy_tables())
    phrase = [21, 22, 23, 24, 25, 26]  # nothing that the model was trained on
    request = make_request(1, [*phrase, 9, *phrase[:3]])
    (tree,) = propose(proposer, request)
    assert tree.token_ids[:3] == phrase[3:6]
    once = tree.accept_probs[0]
    commit(proposer, request, [*phrase[3:], 9, *phrase[:3]])
    (tree,) = propose(proposer, request)
    assert tree.token_ids[:3] == phrase[3:6]
    assert tree.accept_probs[0] > once  # the second time it is surer
    without = NgramModelProposer(ngram_config(ngram_window=0), toy_tables())
    assert phrase[3] not in propose(without, request)[0].token_ids


def test_the_text_counts_by_the_rule_of_witten_and_bell() -> None:
    """After 7 came 8, 8 and 9: c / (C + bT), and bT / (C + bT) for what the model had said."""
    tables = train([[1, 2] * 8 + [7, 8]], 2, vocab_size=10)
    lookup, cache = NgramLookup(tables), TextCache()
    cache.extend([7, 8, 7, 8, 7, 9, 7], 0)
    tokens, _, probs = lookup.draft(cache, [7], ALL, 1, 9, 0.0)
    for token, count in ((8, 2), (9, 1)):
        against = 2 * DISPUTED[0]
        expected = (count + against * lookup.probability([7], token)) / (3 + against)
        assert probs[tokens.index(token)] == pytest.approx(expected)


def test_a_longer_context_that_always_went_on_alike_is_believed_more() -> None:
    lookup, believed = NgramLookup(train([[1, 2] * 8], 2, vocab_size=10)), []
    for length in (1, 2, 3):
        cache, context = TextCache(), [7, 8, 9][-length:]
        cache.extend([*context, 5, 0, *context], 0)
        tokens, _, probs = lookup.draft(cache, context, 1, 1, 9, 0.0)
        believed.append(probs[tokens.index(5)])
    assert believed == sorted(set(believed))
    assert believed[0] == pytest.approx(1 / (1 + UNANIMOUS[0]), abs=0.03)


def test_occurrences_are_the_latest() -> None:
    cache = TextCache()
    cache.extend([5, 1] * 20 + [5, 2], 0)
    assert cache.followers((5,)) == [2, *[1] * (MAX_OCCURRENCES - 1)]
    assert cache.followers((1, 5)) == [2, *[1] * (MAX_OCCURRENCES - 1)]
    assert cache.followers((2,)) == []


@pytest.mark.parametrize("is_native", IMPLEMENTATIONS)
@pytest.mark.parametrize(("window", "is_far"), [(8, False), (1000, True)])
def test_the_own_text_counts_as_far_back_as_the_window(
    window: int, is_far: bool, is_native: bool
) -> None:
    config = ngram_config(ngram_window=window)
    proposer = NgramModelProposer(config, toy_tables(), is_native=is_native)
    request = make_request(1, [45, 46], max_len=1000)
    propose(proposer, request)
    for at in range(200):
        commit(proposer, request, [at % 7])
    commit(proposer, request, [45])
    (tree,) = propose(proposer, request)
    assert (46 in tree.token_ids) == is_far


@pytest.mark.parametrize("is_native", IMPLEMENTATIONS)
def test_a_finished_request_is_forgotten(is_native: bool) -> None:
    proposer = NgramModelProposer(ngram_config(), toy_tables(), is_native=is_native)
    first, second = make_request(1, [45, 46, 45]), make_request(1, [0, 1, 45])
    assert 46 in propose(proposer, first)[0].token_ids
    proposer.finish(first)
    assert 46 not in propose(proposer, second)[0].token_ids


def test_it_is_built_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "toy.ngram"
    write_tables(toy_tables(), path)
    (config,) = parse_speculative_config({"method": "ngram_model", "model": str(path)})
    target = TargetInfo(48, None, "cpu", 64, 2, 0)
    (proposer,) = build_proposers([config], target, strict=True)
    assert proposer.name == "ngram_model"
    assert propose(proposer, make_request(1, [3, 4, 3, 4]))[0].token_ids
    small = TargetInfo(40, None, "cpu", 64, 2, 0)
    with pytest.raises(ConfigError, match="train one with the target's tokenizer"):
        build_proposers([config], small, strict=True)
    assert build_proposers([config], small, strict=False) == []


def test_the_file_must_be_named() -> None:
    with pytest.raises(ConfigError, match="paceline train ngram"):
        SpeculativeConfig(method="ngram_model")


@pytest.mark.parametrize("spoiled", ["buckets", "starts", "lower_weights", "values"])
def test_native_tables_must_go_together(spoiled: str) -> None:
    if (reason := why_not_native()) is not None:
        pytest.skip(reason)
    tables = toy_tables()
    level = tables.levels[0]
    broken = dataclasses.replace(level, **{spoiled: getattr(level, spoiled)[:-1]})
    with pytest.raises(ValueError, match="go together"):
        native_module().NgramLookup((broken,), tables.unigrams, False)


FINGERPRINT = "0123456789abcdef" * 2
CHECKSUM_AT, HASHED_FROM, PROMPTS_AT, DATA_AT = 24, 32, 160, 192
PROMPTS = np.array([3, 1 << 63], np.uint64)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small model's file."""
    path = tmp_path_factory.mktemp("ngrams") / "small.ngram"
    tables = train([[1, 2, 3, 1, 2, 4], [4, 3, 2, 1, 0]], order=3, vocab_size=5)
    tables = dataclasses.replace(tables, fingerprint=FINGERPRINT, prompts=PROMPTS)
    write_tables(tables, path)
    return path.read_bytes()


def signed(data: bytes | bytearray) -> bytes:
    """The bytes with the checksum that they should have."""
    digest = xxhash.xxh3_64_intdigest(bytes(data[HASHED_FROM:]))
    return bytes(data[:CHECKSUM_AT]) + struct.pack("<Q", digest) + bytes(data[HASHED_FROM:])


def patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize("is_backoff", [False, True])
@pytest.mark.parametrize("order", [2, 5])
def test_a_file_comes_back_as_it_was_written(tmp_path: Path, order: int, is_backoff: bool) -> None:
    tables = train([[1, 2, 3, 1, 2, 4] * 4, [5]], order, vocab_size=6)
    kept = {"fingerprint": FINGERPRINT, "prompts": PROMPTS, "is_backoff": is_backoff}
    tables = dataclasses.replace(tables, **kept)
    assert write_tables(tables, tmp_path / "model") == (tmp_path / "model").stat().st_size
    found = read_tables(tmp_path / "model")
    for name in ("fingerprint", "is_backoff", "num_tokens", "order", "vocab_size"):
        assert getattr(found, name) == getattr(tables, name)
    assert np.array_equal(found.unigrams, tables.unigrams)
    assert np.array_equal(found.prompts, tables.prompts)
    for written, read in zip(tables.levels, found.levels, strict=True):
        for column in dataclasses.fields(NgramLevel):
            assert np.array_equal(getattr(written, column.name), getattr(read, column.name))
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]  # no unfinished file is left


def test_files_of_the_first_version_are_read_on(tmp_path: Path) -> None:
    write_tables(toy_tables(), tmp_path / "model")
    old = signed(patched((tmp_path / "model").read_bytes(), 8, b"\x01"))
    found = parse_tables(old, "old")
    assert len(found.prompts) == 0
    assert np.array_equal(found.levels[-1].values, toy_tables().levels[-1].values)
    assert len(read_tables(embedded_ngram_model()).prompts) == 0


def test_every_key_is_in_its_bucket() -> None:
    for level in toy_tables().levels:
        for at, key in enumerate(level.keys.tolist()):
            bucket = key >> (64 - level.bucket_bits)
            assert level.buckets[bucket] <= at < level.buckets[bucket + 1]


def test_the_vocabulary_must_be_the_targets(image: bytes) -> None:
    tables = parse_tables(image, "small")
    tables.check_fits("small", 5, FINGERPRINT)
    tables.check_fits("small", 6, None)  # a target without a tokenizer
    with pytest.raises(ConfigError, match="another tokenizer"):
        tables.check_fits("small", 5, "f" * 32)
    with pytest.raises(ConfigError, match="5 tokens and the target has 4"):
        tables.check_fits("small", 4, FINGERPRINT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"", "not an n-gram model"),
        (lambda d: d[:191], "not an n-gram model"),
        (lambda d: patched(d, 0, b"GGUF"), "not an n-gram model"),
        (lambda d: patched(d, 8, b"\x03"), "format version 3; known: 1 and 2"),
        (lambda d: patched(d, 12, b"\x09"), "order 9"),
        (lambda d: patched(d, 52, b"\x06"), "flags 0x6"),
        (lambda d: d[:-8], "it is incomplete"),
        (lambda d: patched(d, len(d) - 9, b"\xff"), "checksum"),
        (lambda d: signed(patched(d, 48, b"\xff" * 4)), "beyond its end"),
        (lambda d: signed(patched(d, 48, bytes(4))), "damaged"),
        (lambda d: signed(patched(d, 64, b"\xff" * 8)), "beyond its end"),
        (lambda d: signed(patched(d, 72, b"\xff" * 8)), "beyond its end"),
        (lambda d: signed(patched(d, 80, b"\x00")), "0 bits"),
        (lambda d: signed(patched(d, 80, b"\xff")), "255 bits"),
        (lambda d: signed(patched(d, DATA_AT, struct.pack("<f", 1.5))), "unigram"),
        (lambda d: signed(patched(d, DATA_AT, struct.pack("<f", float("nan")))), "unigram"),
        (lambda d: signed(patched(d, DATA_AT + 24, b"\xff" * 8)), "keys do not ascend"),
        (lambda d: signed(patched(d, PROMPTS_AT, b"\xff" * 8)), "beyond its end"),
        (lambda d: signed(patched(d, PROMPTS_AT, b"\x01")), "do not fill it"),
        (lambda d: signed(patched(d, len(d) - 8, bytes(8))), "prompts do not ascend"),
    ],
)
def test_what_is_not_whole_and_sound_is_refused(
    image: bytes, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse_tables(change(image), "small")
    (tmp_path / "small").write_bytes(change(image))
    with pytest.raises(ModelLoadError):
        read_tables(tmp_path / "small")


def test_a_file_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            read_tables(path)
    with pytest.raises(ModelLoadError, match="cannot write"):
        write_tables(toy_tables(), tmp_path / "no" / "folder")


def mutate(data: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, cut off or doubled; mostly with the right size and checksum."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed))
        kind = dice.random()
        if kind < 0.6:
            changed[at] = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        elif kind < 0.8:
            value = dice.choice((0, 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1))
            field = struct.pack("<Q", value)[: len(changed) - at]
            changed[at : at + len(field)] = field
        elif kind < 0.9:
            del changed[at:]
        else:
            changed[at:at] = changed[at : at + dice.randint(1, 64)]
        if not changed:
            return b""
    if dice.random() < 0.8 and len(changed) > DATA_AT:
        changed[16:24] = struct.pack("<Q", len(changed))
        return signed(changed)
    return bytes(changed)


def draft_everywhere(tables: NgramTables) -> None:
    """Look up what the model may know, on both paths."""
    texts: list[Any] = [NgramText(NgramLookup(tables), 8, 4, 0.0)]
    if why_not_native() is None:
        native = native_module()
        made = native.NgramLookup(tables.levels, tables.unigrams, tables.is_backoff)
        texts.append(native.NgramText(made, 8, 4, 0.0))
    for text in texts:
        for token_ids in ([1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3, 4]):
            tokens, _, probs = text.draft(token_ids, 12, 4)
            assert all(0 <= token < max(5, tables.vocab_size) for token in tokens)
            assert all(0.0 <= prob <= 1.0 for prob in probs)


def fuzz(image: bytes, count: int, seed: int) -> int:
    """Read that many damaged files; returns how many were none the worse."""
    dice, survivors = random.Random(seed), 0
    for _ in range(count):
        try:
            tables = parse_tables(mutate(image, dice), "damaged")
        except ModelLoadError:
            continue
        draft_everywhere(tables)
        survivors += 1
    return survivors


def test_damaged_files_are_refused_or_harmless(image: bytes) -> None:
    survivors = fuzz(image, 2500, seed=1)
    assert 25 < survivors < 2250  # the checks behind the checksum are reached


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_damaged_files_are_refused_or_harmless(image: bytes) -> None:
    assert fuzz(image, 100_000, seed=2)


def test_both_programs_hash_contexts_alike() -> None:
    if (reason := why_not_native()) is not None:
        pytest.skip(reason)
    dice = random.Random(0)
    for length in (1, 2, 3, 4):
        for _ in range(50):
            context = [dice.getrandbits(32) for _ in range(length)]
            assert native_module().context_key(context) == context_key(context)


MAX_BYTES = 4 << 20
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def"


def test_its_file_is_small_and_of_the_targets_vocabulary() -> None:
    file, tokenizer = embedded_ngram_model(), Tokenizer.from_folder(embedded_model("target"))
    tables = read_tables(file)
    tables.check_fits(file, tokenizer.vocab_size, tokenizer.fingerprint)
    assert (tables.vocab_size, tables.fingerprint) == (tokenizer.vocab_size, tokenizer.fingerprint)
    assert Path(file).stat().st_size <= MAX_BYTES


def test_the_default_drafts_by_it_and_changes_no_token() -> None:
    (config,) = (c for c in default_speculative_config("embedded") if c.method == "ngram_model")
    assert config.model == embedded_ngram_model()
    assert speculative_config(RunOptions(method="ngram_model"), "embedded")[0].model == config.model
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
        with LLM("embedded", speculative_config=[], planner="fixed", strict=True) as llm:
            plain = llm.generate(PROMPT, params)
            llm.set_speculation(None)
            together = llm.generate(PROMPT, params)
        assert together.token_ids == plain.token_ids
        drafted = together.completions[0].counters.by_proposer
        assert drafted["ngram_model"].num_draft_tokens > 0


def test_no_prompt_that_it_learnt_from_is_a_benchmarks() -> None:
    prompts = module("research.ngram_prompts")
    known = "the quick brown fox jumps over the lazy dog"
    texts = [known[4:], "the quick brown fox sleeps over the lazy dog", "lazy dog"]
    assert prompts.without(texts, [known, "eight or nine words", "lazy dog"]) == texts[1:2]
    assert set(module("prompt_sets").load_prompts("embedded").kind("prose")) < set(
        prompts.benchmark_prompts()
    )


def test_prompts_are_pieces_of_lines_from_all_over_a_text() -> None:
    prompts = module("research.ngram_prompts")
    lines = [f"line {number} of a text that is long\n" for number in range(200)]
    pieces = prompts.cut("".join(lines), 12)
    assert len(pieces) > 9
    assert all(piece.startswith("line ") and len(piece) <= 400 for piece in pieces)
    assert all(piece in "".join(lines) for piece in pieces)
    numbers = [int(piece.split()[1]) for piece in pieces]
    assert numbers == sorted(set(numbers))
    assert numbers[0] < 20 < 150 < numbers[-1]
