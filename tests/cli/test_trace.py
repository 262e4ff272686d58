"""``paceline trace`` on the embedded model: rows, resumption, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.api.llm import LLM, embedded_model
from paceline.request.sampling_params import SamplingParams
from paceline.request.traces import Trace, TraceWriter, read_meta, read_traces
from paceline_lab.train.data import read_answers
from tests.cli.conftest import Result
from tests.disks import full_disk

Cli = Callable[..., Result]
TEXTS = ["def add(a, b):", "Once upon a time", "import os", "The king", "class A:"]
MODEL = embedded_model("target")


@pytest.fixture
def trace(cli: Cli, tmp_path: Path) -> Callable[..., Result]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))

    def call(*more: str, prompts: Path = prompts) -> Result:
        base = ("trace", MODEL, "--prompts", str(prompts), "-o", str(tmp_path / "traces"))
        return cli(*base, "--max-tokens", "6", "--shard-size", "2", "--top-logprobs", "4", *more)

    return call


def test_rows_predict_the_token_of_their_own_index(
    trace: Callable[..., Result], tmp_path: Path
) -> None:
    result = trace()
    assert (result.code, result.out) == (0, "")
    traces = list(read_traces(tmp_path / "traces"))
    assert [each.prompt_index for each in traces] == [0, 1, 2, 3, 4]
    with LLM("embedded", speculative_config=[]) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0)
        expected = [llm.generate(text, params) for text in TEXTS]
    for each, output in zip(traces, expected, strict=True):
        assert each.output_token_ids.tolist() == output.token_ids
        assert each.token_ids[: each.prompt_len].tolist() == output.prompt_token_ids
        assert each.top_ids.shape == each.top_logprobs.shape == (len(output.token_ids), 4)
        # Greedy: the likeliest token of a row is the one that it predicted.
        assert each.top_ids[:, 0].tolist() == output.token_ids
        assert each.logprobs.tolist() == each.top_logprobs[:, 0].tolist()
        assert (np.diff(each.top_logprobs, axis=1) <= 0).all()
    assert len(read_answers(tmp_path / "traces", 4096)) == len(TEXTS)


def test_an_interrupted_trace_continues(
    trace: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = ("--temperature", "0.9")
    trace(*sampled)
    shards = sorted((tmp_path / "traces").glob("shard-*.npz"))
    assert [path.name for path in shards] == [f"shard-0000{i}.npz" for i in range(3)]
    complete = [path.read_bytes() for path in shards]
    shards[1].write_bytes(complete[1][:-50])
    shards[2].unlink()

    written: list[int] = []
    write = TraceWriter.write_shard

    def counted(self: TraceWriter, traces: list[Trace]) -> None:
        written.append(self.num_shards)
        write(self, traces)

    monkeypatch.setattr(TraceWriter, "write_shard", counted)
    result = trace(*sampled)
    assert "2 of 5 prompts are there already" in result.err
    assert written == [1, 2]
    traces = list(read_traces(tmp_path / "traces"))
    assert [each.prompt_index for each in traces] == [0, 1, 2, 3, 4]
    # A prompt's sample depends on its index alone.
    assert [path.read_bytes()[:2000] for path in shards] == [data[:2000] for data in complete]
    assert trace(*sampled).code == 0
    assert written == [1, 2]


@pytest.mark.parametrize(
    "more",
    [("--temperature", "0.5"), ("--max-tokens", "7"), ("--dtype", "float32"), ("--seed", "1")],
)
def test_other_settings_are_refused(
    trace: Callable[..., Result], tmp_path: Path, more: tuple[str, ...]
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "x"}')
    assert trace(prompts=one).code == 0
    result = trace(*more, prompts=one)
    assert result.code == 2
    assert "holds traces of something else" in result.err


def test_other_prompts_and_models_are_refused(
    trace: Callable[..., Result], cli: Cli, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text('{"prompt": "x"}')
    other.write_text('{"prompt": "y"}')
    assert trace(prompts=one).code == 0
    assert "prompts_digest" in trace(prompts=other).err
    folder = tmp_path / "traces"
    arguments = ("--prompts", str(one), "-o", str(folder), "--max-tokens", "6")
    assert "model is 'target' there" in cli("trace", embedded_model("draft"), *arguments).err


def test_the_embedded_model_has_a_name(
    trace: Callable[..., Result], cli: Cli, tmp_path: Path
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "x"}')
    folders = [tmp_path / "traces", tmp_path / "named"]
    assert trace(prompts=one).code == 0
    arguments = ("--max-tokens", "6", "--shard-size", "2", "--top-logprobs", "4")
    result = cli("trace", "embedded", "--prompts", str(one), "-o", str(folders[1]), *arguments)
    assert result.code == 0
    by_folder, by_name = map(read_meta, folders)
    assert by_folder | {"model": "embedded"} == by_name
    (first,), (second,) = map(read_traces, folders)
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_meta(trace: Callable[..., Result], tmp_path: Path) -> None:
    trace()
    meta: dict[str, Any] = read_meta(tmp_path / "traces")
    assert meta["model"] == "target"
    assert meta["num_prompts"] == len(TEXTS)
    assert meta["params"]["top_logprobs"] == 4


def test_a_full_disk_is_one_line_and_the_rest_is_traced_later(
    trace: Callable[..., Result], tmp_path: Path
) -> None:
    with full_disk():
        result = trace()
    assert result.code == 2
    assert "error: cannot write " in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["meta.json"]
    assert trace().code == 0
    assert len(list(read_traces(tmp_path / "traces"))) == len(TEXTS)
