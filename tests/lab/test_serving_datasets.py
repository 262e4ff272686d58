"""Prompts of benchmarks: their lengths, their reproducibility, and files that are refused."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from paceline.core.errors import ConfigError, RequestError
from paceline_lab.bench.datasets import (
    MAKERS,
    TraceRow,
    make_samples,
    make_trace_samples,
)
from paceline_lab.bench.options import DATASETS, DatasetOptions
from paceline_lab.bench.token_counting import (
    TokenCounter,
    open_counter,
    server_counter,
    text_of_length,
)
from tests.lab.fake_server import FakeServer, serving

WORDS = TokenCounter()


def dataset(name: str, path: str, **more: Any) -> DatasetOptions:
    return DatasetOptions(dataset_name=name, dataset_path=path, **more)


@pytest.fixture(scope="module")
def tokens() -> TokenCounter:
    return open_counter(str(files("paceline") / "embedded" / "target"))


def written(folder: Path, rows: list[Any], array: bool = False) -> str:
    path = folder / "rows.json"
    lines = json.dumps(rows) if array else "\n".join(map(json.dumps, rows))
    path.write_text(lines, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_random_texts_have_their_length(tokens: TokenCounter, length: int) -> None:
    for counter in (tokens, WORDS):
        text, found = text_of_length(counter, random.Random(length), length)
        assert found == length == counter.count(text)
    text, found = text_of_length(tokens, random.Random(1), length + 4, "def main():")
    assert text.startswith("def main():")
    assert found == length + 4


def test_random_prompts(tokens: TokenCounter) -> None:
    config = DatasetOptions(
        random_input_len=40, random_output_len=10, random_range_ratio=0.5, random_prefix_len=20
    )
    samples = make_samples(config, tokens, 30, seed=1)
    lengths = [sample.prompt_len for sample in samples]
    assert min(lengths) in range(40, 50)
    assert max(lengths) in range(70, 81)
    assert {sample.output_len for sample in samples} <= set(range(5, 16))
    assert len({sample.prompt for sample in samples}) == 30
    assert len({sample.prompt[:40] for sample in samples}) == 1
    assert make_samples(config, tokens, 30, seed=1) == samples
    # Those for a warm-up are drawn after the measured ones, which stay what they are.
    assert make_samples(config, tokens, 33, seed=1)[:30] == samples
    assert make_samples(config, tokens, 1, seed=2) != samples[:1]


def test_prompts_of_a_trace() -> None:
    rows = [TraceRow(0.0, 12, 3), TraceRow(0.5, 7, 1)]
    samples = make_trace_samples(rows, DatasetOptions(), WORDS, seed=0)
    assert [(s.prompt_len, s.output_len) for s in samples] == [(12, 3), (7, 1)]
    other = dataset("custom", "x")
    with pytest.raises(ConfigError, match="--dataset-name random"):
        make_trace_samples(rows, other, WORDS, seed=0)


def test_sonnet(tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("\n\n".join(f"line {i} of the poem" for i in range(40)))
    config = DatasetOptions(
        dataset_name="sonnet",
        dataset_path=str(poem),
        sonnet_input_len=100,
        sonnet_prefix_len=40,
        sonnet_output_len=9,
    )
    samples = make_samples(config, WORDS, 5, seed=0)
    for sample in samples:
        assert 95 < sample.prompt_len <= 100
        assert sample.prompt_len == WORDS.count(sample.prompt)
        assert "line 0 of the poem\nline 1 of the poem\n" in sample.prompt
    assert len({sample.prompt for sample in samples}) == 5


@pytest.mark.parametrize("array", [True, False])
def test_sharegpt(tmp_path: Path, array: bool) -> None:
    def talk(question: int, answer: int) -> dict[str, Any]:
        turns = [("human", "q " * question), ("gpt", "a " * answer), ("human", "more")]
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    rows = [talk(5, 6), talk(2, 9), talk(9, 2), talk(2000, 9), talk(1000, 1500), talk(8, 7)]
    path = written(tmp_path, [*rows, {"conversations": []}], array)
    config = dataset("sharegpt", path, disable_shuffle=True)
    samples = make_samples(config, WORDS, 3, seed=0)
    assert [(s.prompt_len, s.output_len) for s in samples] == [(5, 6), (8, 7), (5, 6)]
    config = dataset("sharegpt", path, sharegpt_output_len=20)
    found = {(s.prompt_len, s.output_len) for s in make_samples(config, WORDS, 4, seed=0)}
    assert found == {(5, 20), (9, 20), (1000, 20), (8, 20)}


def test_custom_and_spec_bench(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello there"}]
    rows = [
        {"prompt": "one two", "output_tokens": 5},
        {"turns": ["three", "four"], "category": "maths"},
        {"question": "five six seven", "category": "maths"},
        {"messages": chat},
    ]
    path = written(tmp_path, rows)
    config = DatasetOptions(
        dataset_name="custom", dataset_path=path, custom_output_len=8, disable_shuffle=True
    )
    found = [(s.prompt, s.prompt_len, s.output_len) for s in make_samples(config, WORDS, 5, 0)]
    assert found[0] == found[4] == ("one two", 2, 5)
    assert found[1:4] == [("three", 1, 8), ("five six seven", 3, 8), ((chat[0],), 2, 8)]
    shuffled = dataset("custom", path)
    orders = {str([s.prompt for s in make_samples(shuffled, WORDS, 4, i)]) for i in range(9)}
    assert len(orders) > 1
    config = DatasetOptions(
        dataset_name="spec_bench",
        dataset_path=path,
        spec_bench_category="maths",
        disable_shuffle=True,
    )
    assert [s.prompt for s in make_samples(config, WORDS, 2, 0)] == ["three", "five six seven"]
    with pytest.raises(RequestError, match="there are None, maths"):
        make_samples(
            dataset("spec_bench", path, spec_bench_category="x"),
            WORDS,
            2,
            0,
        )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "2: no prompt; a row has one of prompt"),
        ({"prompt": 5}, "2: prompt must be a text, or token ids, that is not empty"),
        ({"prompt": ""}, "2: prompt must be a text, or token ids"),
        ({"turns": []}, "2: turns must be a list that begins with a text"),
        ({"messages": ["a"]}, "2: a message is an object with role"),
        ({"prompt": "a", "output_tokens": 0}, "2: output_tokens is 0"),
        ({"prompt": [1, 2]}, "2: prompt must be a text: servers are sent texts"),
        ("a", "a row is an object"),
    ],
)
def test_rows_that_are_no_prompts(tmp_path: Path, row: Any, problem: str) -> None:
    path = written(tmp_path, [{"prompt": "good"}, row])
    with pytest.raises(RequestError, match=problem):
        make_samples(dataset("custom", path), WORDS, 2, 0)


def test_files_that_are_no_datasets(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('{"prompt": ')
    with pytest.raises(RequestError, match="not JSON"):
        make_samples(dataset("custom", str(broken)), WORDS, 1, 0)
    with pytest.raises(RequestError, match="cannot read"):
        make_samples(dataset("sonnet", str(tmp_path / "none")), WORDS, 1, 0)
    with pytest.raises(RequestError, match="no conversation of two turns"):
        make_samples(
            dataset("sharegpt", written(tmp_path, [{"a": 1}])),
            WORDS,
            1,
            0,
        )
    short = [{"conversations": [{"value": "a"}, {"value": "b"}]}]
    with pytest.raises(RequestError, match="too short or too long"):
        make_samples(
            dataset("sharegpt", written(tmp_path, short)),
            WORDS,
            1,
            0,
        )


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"dataset_name": "poem"}, "allowed: random, sonnet"),
        ({"dataset_path": "x"}, "reads no --dataset-path"),
        ({"dataset_name": "custom"}, "needs --dataset-path"),
        ({"random_range_ratio": 1.0}, "below 1"),
    ],
)
def test_configurations_that_contradict_themselves(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DatasetOptions(**values)


@pytest.mark.parametrize(
    ("form", "name", "length"),
    [("prompt", "server", 4), ("content", "server", 4), ("x", "words", 1)],
)
def test_the_server_counts_if_it_can(form: str, name: str, length: int) -> None:
    with serving(FakeServer(tokenizes=form)) as fake:
        counter = server_counter(fake.url, "m", {"Authorization": "Bearer k"})
        assert (counter.name, counter.count("abc")) == (name, length)
        text, found = text_of_length(counter, random.Random(0), 50)
        assert counter.count(text) == found == 50


def test_every_dataset_that_is_named_can_be_made() -> None:
    assert tuple(MAKERS) == DATASETS
