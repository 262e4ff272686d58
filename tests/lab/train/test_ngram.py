"""N-gram models: probabilities against the textbook, sizes against the budget, others' files."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from paceline.core.errors import ConfigError, TrainingError
from paceline.loading.catalogue import embedded_model
from paceline.proposers.ngram_model import (
    NgramLookup,
    NgramTables,
    context_key,
    read_tables,
    write_tables,
)
from paceline.request.traces import Trace, TraceWriter
from paceline.text.tokenizer import Tokenizer
from paceline_lab.train.ngram.counts import (
    Corpus,
    Example,
    NgramCounts,
    count_examples,
    count_ngrams,
)
from paceline_lab.train.ngram.data import prompt_keys, split
from paceline_lab.train.ngram.estimation import prune, smooth
from paceline_lab.train.ngram.train import NgramTrainingConfig, train_ngram
from tests.toy import VOCAB as VOCAB_OF_TOY
from tests.toy import toy_folder

Gram = tuple[int, ...]
VOCAB = 6
WHOLE = 1 << 20


def texts(seed: int, count: int = 3, length: int = 60) -> list[list[int]]:
    dice = random.Random(seed)
    return [
        [min(dice.randrange(VOCAB), dice.randrange(VOCAB)) for _ in range(length)]
        for _ in range(count)
    ]


def counts_of(corpus: list[list[int]], order: int) -> NgramCounts:
    examples = [Example(np.array(text, np.int32)) for text in corpus]
    return count_ngrams(Corpus.of(examples), order, VOCAB)


def train(corpus: list[list[int]], order: int, **limits: int) -> NgramTables:
    limits = {"top_k": 64, "max_bytes": WHOLE} | limits
    return prune(smooth(counts_of(corpus, order), order), **limits)


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("order", [2, 5])
def test_pieces_count_as_the_whole(order: int, is_soft: bool) -> None:
    dice = np.random.default_rng(order)
    examples = []
    for size in (40, 1, 3, 0, 25, 60, 2):
        ids = dice.integers(0, VOCAB, (size, 2)).astype(np.int32)
        probs = dice.random((size, 2), np.float32)
        examples.append(Example(ids[:, 0], min(1, size), ids[1:], probs[1:]))
    whole = count_ngrams(Corpus.of(examples, is_soft=is_soft), order, VOCAB)
    for piece_tokens in (1, 30):
        pieces = count_examples(examples, order, VOCAB, is_soft=is_soft, piece_tokens=piece_tokens)
        assert pieces.num_tokens == pytest.approx(whole.num_tokens, abs=4)
        for one, other in zip(pieces.orders, whole.orders, strict=True):
            for column in dataclasses.fields(one):
                got, wanted = getattr(one, column.name), getattr(other, column.name)
                assert got.dtype == wanted.dtype
                np.testing.assert_allclose(got, wanted, rtol=1e-12, err_msg=column.name)
    with pytest.raises(TrainingError, match="no tokens to learn"):
        count_examples(examples[3:4], order, VOCAB)


class Textbook:
    """The definitions, n-gram by n-gram, with dictionaries."""

    def __init__(self, corpus: list[list[int]], order: int) -> None:
        raw: list[Counter[Gram]] = [Counter() for _ in range(order + 1)]
        befores: list[dict[Gram, set[int | None]]] = [{} for _ in range(order + 1)]
        for text in corpus:
            for n in range(1, order + 1):
                for at in range(len(text) - n + 1):
                    gram = tuple(text[at : at + n])
                    raw[n][gram] += 1
                    before = text[at - 1] if at else None
                    befores[n].setdefault(gram, set()).add(before)
        self.counts = raw
        for n in range(1, order):
            self.counts[n] = Counter({g: len(seen) for g, seen in befores[n].items()})
        self.discounts = [self._discounts(each) for each in self.counts]

    def _discounts(self, counts: Counter[Gram]) -> list[float]:
        n = Counter(counts.values())
        y = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.5
        ds = [0.0]
        for c in (1, 2, 3):
            ds.append(c - (c + 1) * y * n[c + 1] / n[c] if n[c] and n[c + 1] else y)
        return [min(max(d, 0.0), c) for c, d in enumerate(ds)]

    def probability(self, context: Gram, token: int) -> float:
        n = len(context) + 1
        after = {g: c for g, c in self.counts[n].items() if g[:-1] == context}
        lower = self.probability(context[1:], token) if context else 1.0 / VOCAB
        total = sum(after.values())
        if not total:
            return lower
        count = after.get((*context, token), 0)
        d = self.discounts[n]
        left = sum(d[min(c, 3)] for c in after.values()) / total
        return (count - d[min(count, 3)]) / total + left * lower


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_probabilities_are_the_textbooks(seed: int, order: int) -> None:
    corpus = [*texts(seed), [2], [5, 5]]
    model, book = NgramLookup(train(corpus, order)), Textbook(corpus, order)
    dice = random.Random(seed)
    contexts = [tuple(dice.randrange(VOCAB) for _ in range(order - 1)) for _ in range(25)]
    for context in (*contexts, (), (1,)):
        probs = [model.probability(context, token) for token in range(VOCAB)]
        expected = [book.probability(context, token) for token in range(VOCAB)]
        assert probs == pytest.approx(expected, abs=1e-6)
        assert sum(probs) == pytest.approx(1.0, abs=1e-6)


def test_what_is_left_after_pruning_still_sums_to_one() -> None:
    whole = train(texts(3), 4)
    model = NgramLookup(train(texts(3), 4, top_k=2, max_bytes=2000))
    assert max(np.diff(level.starts).max() for level in whole.levels) > 2
    for context in product(range(VOCAB), repeat=3):
        probs = sum(model.probability(context, token) for token in range(VOCAB))
        assert probs == pytest.approx(1.0, abs=1e-5)


def test_the_file_is_no_larger_than_the_budget(tmp_path: Path) -> None:
    corpus, kept = texts(4), []
    for max_bytes in (600, 1000, 2000, 4000, 8000):
        tables = train(corpus, 4, max_bytes=max_bytes)
        assert write_tables(tables, tmp_path / "model") <= max_bytes
        kept.append(sum(len(level.tokens) for level in tables.levels))
    assert kept == sorted(kept)
    assert kept[0] < kept[1] < kept[2] < kept[3]
    with pytest.raises(TrainingError, match="the least is"):
        train(corpus, 4, max_bytes=300)


def test_what_goes_first_costs_the_least_likelihood() -> None:
    corpus = texts(5)
    likelihoods = []
    for max_bytes in (700, 1200, 2400, 8000):
        model = NgramLookup(train(corpus, 3, max_bytes=max_bytes))
        loss = sum(
            -np.log(model.probability(text[max(0, at - 2) : at], text[at]))
            for text in corpus
            for at in range(len(text))
        )
        likelihoods.append(loss)
    assert likelihoods == sorted(likelihoods, reverse=True)
    assert likelihoods[-1] < 0.9 * likelihoods[0]


def test_soft_labels_weigh_what_the_target_thought() -> None:
    ids = np.array([[1, 2], [3, 0], [1, 2]], np.int32)
    probs = np.array([[0.75, 0.25], [1.0, 1e-9], [0.75, 0.25]], np.float32)
    example = Example(np.array([3, 1, 3, 1], np.int32), 1, ids, probs)
    counts = count_ngrams(Corpus.of([example], is_soft=True), 2, 4)
    pairs = counts.orders[1]
    context = pairs.contexts[pairs.context_of, 0].tolist()
    found = dict(zip(zip(context, pairs.tokens.tolist(), strict=True), pairs.weights, strict=True))
    assert found == pytest.approx({(3, 1): 1.5, (3, 2): 0.5, (1, 3): 1.0})
    model = NgramLookup(prune(smooth(counts, 2), 8, WHOLE))
    assert sum(model.probability([3], token) for token in range(4)) == pytest.approx(1.0)
    assert model.probability([3], 1) > model.probability([3], 2) > model.probability([3], 0)


def test_certain_soft_labels_are_the_tokens() -> None:
    (text, *_) = texts(6)
    tokens = np.array(text, np.int32)
    example = Example(tokens, 5, tokens[5:, None], np.ones((len(tokens) - 5, 1), np.float32))
    soft, hard = (Corpus.of([example], is_soft=each) for each in (True, False))
    for column in dataclasses.fields(Corpus):
        assert np.array_equal(getattr(soft, column.name), getattr(hard, column.name))


def test_what_is_held_out_is_whole_and_no_more_than_a_fifth() -> None:
    examples = [Example(np.full(10, i, np.int32)) for i in range(20)]
    learnt, held = split(examples, 10_000, seed=1)
    assert len(held) == 4
    assert {id(each) for each in [*learnt, *held]} == {id(each) for each in examples}
    assert [id(e) for e in split(examples, 10_000, seed=1)[1]] == [id(e) for e in held]
    assert split(examples, 0, seed=1) == (examples, [])


def test_the_keys_of_prompts_are_part_of_the_file_and_of_its_budget(tmp_path: Path) -> None:
    examples = [Example(np.array([i, i + 1, 5, 6, 7], np.int32), start=2) for i in (3, 1, 2, 1)]
    keys = prompt_keys([*examples, Example(np.array([8, 9], np.int32))])
    assert keys.tolist() == sorted(context_key([i, i + 1]) for i in (1, 2, 3))
    smoothed = smooth(count_ngrams(Corpus.of(examples), 3, 10), 3)
    with pytest.raises(TrainingError, match=r"vocabulary of 10 and 3 prompts; the least is 576"):
        prune(smoothed, 8, 575, prompts=keys)
    assert write_tables(prune(smoothed, 8, 576, prompts=keys), tmp_path / "m") <= 576


# --- from traces and texts to a file and its figures -----------------------------------------


def write_traces(folder: Path, *, fingerprint: str | None = None, logprob: float = -0.1) -> Path:
    """Forty answers of a target that counts, after two tokens of prompt."""
    writer = TraceWriter(folder, {"vocab_fingerprint": fingerprint})
    rows = [[9, 9, *((i + j) % 8 for j in range(10))] for i in range(40)]
    logprobs = np.full(10, logprob, np.float32)
    writer.write_shard(
        [
            Trace(i, 2, tokens, logprobs, tokens[2:, None], logprobs[:, None])
            for i, tokens in enumerate(np.array(rows, np.int32))
        ]
    )
    return folder


@pytest.mark.parametrize("is_soft", [False, True])
def test_traces_become_a_model_that_knows_the_target(tmp_path: Path, is_soft: bool) -> None:
    folder = write_traces(tmp_path / "traces", fingerprint="ab" * 16)
    output = str(tmp_path / "model.ngram")
    result = train_ngram(
        NgramTrainingConfig(output=output, traces=(str(folder),), soft_labels=is_soft)
    )
    tables = read_tables(output)
    assert (tables.vocab_size, tables.fingerprint) == (10, "ab" * 16)
    assert result.num_bytes == Path(output).stat().st_size
    assert result.report is not None
    assert result.report.num_tokens == 80
    assert sum(result.report.hit_rates.values()) == pytest.approx(1.0)
    assert result.report.acceptance.accepted[0] >= 0.9  # all but each answer's first token
    assert result.others["prompt lookup"].accepted[0] < 0.3
    assert tables.prompts.tolist() == [context_key([9, 9])]
    # Prompts are context only: the model never says 9.
    assert all(9 not in level.tokens for level in tables.levels)


def test_texts_are_read_by_the_targets_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("for i in range(10):\n    print(i)\n" * 50)
    config = NgramTrainingConfig(
        output=str(tmp_path / "m"),
        text=(str(tmp_path / "a.py"),),
        target=embedded_model("target"),
        held_out_tokens=0,
    )
    result = train_ngram(config)
    assert result.report is None
    assert read_tables(config.output).fingerprint is not None
    assert len(read_tables(config.output).prompts) == 0
    with pytest.raises(TrainingError, match="name its folder as target"):
        train_ngram(dataclasses.replace(config, target=None))
    traces = write_traces(tmp_path / "traces", fingerprint="cd" * 16)
    with pytest.raises(TrainingError, match="different vocabularies"):
        train_ngram(dataclasses.replace(config, traces=(str(traces),)))


def test_a_model_fits_a_target_whose_tokenizer_has_ids_beyond_its_logits(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "ab": 1, "beyond": 2 * VOCAB_OF_TOY}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(toy_folder(tmp_path) / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("ab cd " * 50)
    train_ngram(
        NgramTrainingConfig(
            output=str(tmp_path / "m"),
            text=(str(tmp_path / "a.txt"),),
            target=str(tmp_path),
            held_out_tokens=0,
        )
    )
    fingerprint = Tokenizer.from_folder(tmp_path).fingerprint
    tables = read_tables(str(tmp_path / "m"))
    tables.check_fits("m", VOCAB_OF_TOY, fingerprint)
    assert tables.vocab_size == VOCAB_OF_TOY


def test_soft_labels_need_log_probabilities(tmp_path: Path) -> None:
    folder = write_traces(tmp_path / "traces", logprob=0.0)
    config = NgramTrainingConfig(
        output=str(tmp_path / "m"), traces=(str(folder),), soft_labels=True
    )
    with pytest.raises(TrainingError, match="holds no log-probabilities"):
        train_ngram(config)
    folder = write_traces(tmp_path / "damaged", logprob=float("nan"))
    with pytest.raises(TrainingError, match="is damaged"):
        train_ngram(dataclasses.replace(config, traces=(str(folder),)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one is needed"),
        ({"traces": ("t",), "import_uzu": "m"}, "one is needed"),
        ({"import_llama": "m"}, "name the target"),
        ({"import_uzu": "m", "target": "t", "export_llama": "l"}, "no counts"),
        ({"import_uzu": "m", "target": "t", "order": 3, "max_bytes": 9}, "leave order, max_bytes"),
        ({"text": ("t",), "soft_labels": True}, "soft_labels"),
        ({"text": ("t",), "order": 6}, "order is 6"),
        ({"text": ("t",), "top_k": 65}, "top_k is 65"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramTrainingConfig(output="m", **options)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(TrainingError, match="go from 1 to 7"):
        counts_of([[1, 7]], 2)
    with pytest.raises(TrainingError, match="no tokens"):
        counts_of([], 2)


@pytest.mark.timing
def test_a_million_tokens_are_learnt_in_under_twenty_seconds(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    tokens = np.minimum(dice.zipf(1.3, 1_000_000) - 1, 4095).astype(np.int32)
    began = time.thread_time()
    counts = count_ngrams(Corpus.of([Example(each) for each in np.split(tokens, 500)]), 4, 4096)
    tables = prune(smooth(counts, 4), 8, 32 << 20)
    write_tables(tables, tmp_path / "model")
    assert time.thread_time() - began < 20
