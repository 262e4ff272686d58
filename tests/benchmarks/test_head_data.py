"""What heads are trained on: nothing of what judges them, and files that go on where they ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.api.llm import LLM
from paceline.request.traces import read_traces
from tests.programs import module

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
head_data = module("research.head_data")


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("What is the capital of France?", True),
        ("Too short.", False),
        ("Please: describe  a vivid\ncharacter, in verse", False),
        ("describe a vivid", False),
    ],
)
def test_a_prompt_neither_holds_a_question_nor_is_part_of_one(text: str, usable: bool) -> None:
    assert head_data.is_usable(text, {"describe a vivid character"}) == usable


def test_no_prompt_of_ours_occurs_in_what_judges() -> None:
    if not (head_data.data_folder() / "prompts" / "mt_bench.jsonl").exists():
        pytest.skip("the public prompts are not here")
    questions = head_data.judged()
    rows = head_data.read(DATA / "smollm2-prompts.jsonl.gz")
    assert len(rows) > 9000
    assert all(head_data.is_usable(row["prompt"], questions) for row in rows)


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
