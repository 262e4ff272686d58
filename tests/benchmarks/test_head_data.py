"""What heads are trained on: nothing of what judges them, and files that go on where they ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import LLM, embedded_model
from paceline.proposers.ngram_model import context_key, read_tables
from paceline.request.traces import read_traces
from tests.programs import module

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
head_data, prompt_sets = module("research.head_data"), module("prompt_sets")


@pytest.fixture(scope="module")
def questions(shared_data: Path) -> Any:
    return head_data.Questions(prompt_sets.questions(shared_data))


@pytest.fixture(scope="module")
def answered() -> list[list[int]]:
    """The prompts of all answers, in tokens."""
    files = sorted(DATA.glob("smollm2-answers*.jsonl.gz"))
    return [row["prompt_ids"] for file in files for row in head_data.read(file)]


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("What is the capital of France?", True),
        ("Too short.", False),
        ("Please: describe  a VIVID\ncharacter, in verse", False),
        ("describe a vivid", False),
        ("Describe: a -- vivid character?!", False),
        ("describe a vivid characterisation", True),
        ("Describe a scene", True),
    ],
)
def test_a_prompt_neither_holds_a_question_nor_is_part_of_one(text: str, usable: bool) -> None:
    asked = head_data.Questions(["Describe a vivid character.", "How many?"])
    assert head_data.is_usable(text, asked) == usable


def test_no_prompt_of_ours_is_asked_by_a_benchmark(questions: Any) -> None:
    files = sorted(DATA.glob("smollm2-prompts*.jsonl.gz"))
    prompts = [row["prompt"] for file in files for row in head_data.read(file)]
    assert len(prompts) > 18000
    assert not [text for text in prompts if not head_data.is_usable(text, questions)]


def test_no_answer_is_one_to_a_question_of_a_benchmark(
    questions: Any, answered: list[list[int]]
) -> None:
    """MT-bench, all of Spec-Bench, GSM8K and HumanEval: whatever drafts are measured on."""
    (row,) = head_data.read(DATA / "smollm2-vocabulary.jsonl.gz")
    texts = [head_data.asked(ids, row["pieces"]) for ids in answered]
    assert len(texts) > 10000
    assert not [text for text in texts if questions.overlap(text)]


def test_every_answered_prompt_is_one_of_ours(answered: list[list[int]]) -> None:
    """So the vocabulary is the one that they were encoded by."""
    (row,) = head_data.read(DATA / "smollm2-vocabulary.jsonl.gz")
    known = {row["prompt"] for row in head_data.read(DATA / "smollm2-prompts.jsonl.gz")}
    assert {head_data.asked(ids, row["pieces"]) for ids in answered} <= known


def test_the_shipped_table_has_learnt_only_answers_that_are_kept(answered: list[list[int]]) -> None:
    learnt = read_tables(f"{embedded_model('smollm2')}/ngram/model.ngram").prompts
    assert len(learnt) > 10000
    assert set(learnt.tolist()) <= {context_key(ids) for ids in answered}


def test_answers_become_traces_and_go_on_where_they_ended(tmp_path: Path) -> None:
    answers, traces = tmp_path / "answers.jsonl.gz", tmp_path / "traces"
    rows = [
        {"prompt_ids": [3, i + 4], "token_ids": [5, 6, 7], "temperature": 0.0} for i in range(3)
    ]
    with LLM("embedded", speculative_config=[]) as llm:
        for row in rows:
            head_data.append(answers, [row])
        head_data.write_traces(llm, answers, traces)
        head_data.write_traces(llm, answers, traces)
    found = list(read_traces(traces))
    assert [trace.token_ids.tolist() for trace in found] == [[3, i + 4, 5, 6, 7] for i in range(3)]
    assert [trace.prompt_len for trace in found] == [2, 2, 2]
