"""``paceline bench``: against a scripted server, and the engine itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.cli.conftest import Result
from tests.lab.fake_server import FakeServer, Script, serving

Cli = Callable[..., Result]
COUNTERS = {
    "spec_decode_num_drafts_total": 4,
    "spec_decode_num_draft_tokens_total": 8,
    "spec_decode_num_accepted_tokens_total": 6,
    'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 3,
}
ROWS = """
Successful requests: 5
Failed requests: 1
Benchmark duration (s): N
Total input tokens: 35
Total generated tokens: 15
Request throughput (req/s): N
Request goodput (req/s): N
Output token throughput (tok/s): N
Peak output token throughput (tok/s): N
Peak concurrent requests: N
Total token throughput (tok/s): N
Mean TTFT (ms): N
Median TTFT (ms): N
P50 TTFT (ms): N
P99.9 TTFT (ms): N
Mean TPOT (ms): N
Median TPOT (ms): N
P50 TPOT (ms): N
P99.9 TPOT (ms): N
Mean ITL (ms): N
Median ITL (ms): N
P50 ITL (ms): N
P99.9 ITL (ms): N
Mean E2EL (ms): N
Median E2EL (ms): N
P50 E2EL (ms): N
P99.9 E2EL (ms): N
Acceptance rate (%): 75.00
Acceptance length: 2.50
Drafts: 24
Draft tokens: 48
Accepted tokens: 36
Acceptance at position 0 (%): 75.00
"""


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer(counters=COUNTERS)) as server:
        yield server


@pytest.fixture
def bench(cli: Cli, fake: FakeServer) -> Callable[..., Result]:
    def call(*more: str) -> Result:
        base = ("bench", "serve", "--base-url", fake.url, "--random-input-len", "12")
        return cli(*base, "--num-prompts", "6", *more)

    return call


def rows_of(out: str) -> list[str]:
    """Names with exact values; times and rates as N."""
    rows = [line.rsplit(":", 1) for line in out.splitlines() if ":" in line[:42]]
    found = []
    for name, value in rows:
        is_rate = "(s)" in name or "/s)" in name or "(ms)" in name or "Peak" in name
        if value.strip():
            found.append(f"{name.strip()}: {'N' if is_rate else value.strip()}")
    return found


def test_rows_and_file(
    bench: Callable[..., Result],
    fake: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    fake.script = lambda body, number: Script(status=429 if body["seed"] == 13 else 200)
    result = bench(
        *("--metric-percentiles", "50,99.9"),
        *("--max-concurrency", "2", "--goodput", "ttft:1e9", "--seed", "10"),
        *("--num-warmups", "2", "--extra-body", '{"user": "me"}', "--header", "x-who=me"),
        *("--api-key", "secret", "--save-result", "--json"),
    )
    assert result.code == 0
    # What is waited for and the server's line come first, that of the file last.
    _, _, *shown, _ = rows_of(result.err)
    assert result.err.startswith("waiting for http://127.0.0.1:")
    reason = "  1 x HTTP 429: refused with 429"
    assert reason in result.err.splitlines()
    assert [row for row in shown if "429" not in row] == ROWS.strip().splitlines()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("openai-fake-model-")
    saved = json.loads(file.read_text())
    assert saved == result.document
    assert "secret" not in file.read_text()
    assert (saved["completed"], saved["failed"]) == (5, 1)
    assert saved["failure_reasons"] == {"HTTP 429: refused with 429": 1}
    assert saved["request_goodput"] == saved["request_throughput"]
    assert saved["spec_decode_per_position_acceptance_rates"] == [0.75]
    assert {"p99.9_ttft_ms", "median_tpot_ms", "mean_itl_ms", "p50_e2el_ms"} <= saved.keys()
    assert not {"ttfts", "generated_texts", "errors"} & saved.keys()
    assert (saved["model_id"], saved["request_rate"]) == ("org/fake-model", "inf")
    # The trial, two warm-ups, six measured requests with seeds from the flag's on.
    assert [body["seed"] for body in fake.bodies[:1]] == [10]
    assert sorted(body["seed"] for body in fake.bodies[3:]) == list(range(10, 16))
    assert all(body["temperature"] == 0.0 and body["user"] == "me" for body in fake.bodies)
    assert all(body["ignore_eos"] is True for body in fake.bodies)
    assert len({body["prompt"] for body in fake.bodies}) == 9
    assert all(
        (headers["x-who"], headers["Authorization"]) == ("me", "Bearer secret")
        for headers in fake.headers
    )


def test_chat_and_details(bench: Callable[..., Result], fake: FakeServer, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"turns": ["question {i}"]}}\n' for i in range(3)))
    file = tmp_path / "results" / "r.json"
    arguments = (
        *("--backend", "openai-chat", "--dataset-name", "spec_bench", "--temperature", "0.7"),
        *("--dataset-path", str(questions), "--save-detailed", "--save-result"),
        *("--result-filename", str(file)),
        *("--ready-check-timeout-sec", "0"),
    )
    assert bench(*arguments).code == 0
    first = json.loads(file.read_text())
    assert bench(*arguments, "--request-rate", "200", "--model", "other").code == 0
    second = json.loads(file.read_text())
    assert first["generated_texts"] == ["one two three"] * 6
    assert [len(first[key]) for key in ("ttfts", "itls", "input_lens", "output_lens")] == [6] * 4
    assert (first["model_id"], second["model_id"]) == ("org/fake-model", "other")
    assert (first["request_rate"], second["request_rate"]) == ("inf", 200.0)
    assert second["start_times"] == sorted(second["start_times"])
    assert len(fake.bodies) == 12  # no trial
    messages = {body["messages"][0]["content"] for body in fake.bodies}
    assert messages == {"question 0", "question 1", "question 2"}
    assert all(body["temperature"] == 0.7 and "ignore_eos" not in body for body in fake.bodies)


def test_replay_of_a_trace(bench: Callable[..., Result], fake: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n10.0,30,4\n10.1,20,9\n10.2,25,2\n")
    result = bench("--trace-path", str(trace), "--json", "--save-detailed")
    document = result.document
    starts = document["start_times"]
    assert document["num_prompts"] == 3
    for start, at in zip(starts, (0.0, 0.1, 0.2), strict=True):
        assert start > at - 0.005  # an event loop may count in milliseconds
    assert document["duration"] > 0.195
    by_seed = {body["seed"]: body for body in fake.bodies[1:]}
    assert [by_seed[i]["max_tokens"] for i in range(3)] == [4, 9, 2]
    # The server counts a token per character and one more.
    assert [len(by_seed[i]["prompt"]) + 1 for i in range(3)] == [30, 20, 25]


def test_two_servers(bench: Callable[..., Result], fake: FakeServer) -> None:
    def answer(body: Any, number: int) -> Script:
        texts = ("other", " text") if body["seed"] == 4 else Script.texts
        return Script(texts, gap=0.01)

    with serving(FakeServer(script=answer, can_flush=False)) as other:
        body = '{"speculative": {"enabled": false}}'
        result = bench("--compare-with", other.url, "--compare-extra-body", body, "--json")
    assert result.code == 0
    assert "DIFFERENT text for 1 of 6 prompts: 4" in result.err
    assert f"{other.url} cannot flush its prefix cache" in result.err
    assert f"{fake.url} cannot" not in result.out
    comparison = result.document["comparison"]
    assert comparison["texts_differing"] == [4]
    assert comparison["prefix_cache_flushed"] == [True, False]
    assert comparison["ratios"].keys() == {"output_throughput", "ttft", "tpot", "e2el"}
    assert comparison["figures"]["completed"] == 6
    assert all(body["speculative"] == {"enabled": False} for body in other.bodies)
    assert not any("speculative" in body for body in fake.bodies)


def test_nothing_completed_is_exit_code_1(bench: Callable[..., Result], fake: FakeServer) -> None:
    fake.script = lambda body, number: Script(status=500)
    result = bench("--ready-check-timeout-sec", "0")
    assert result.code == 1
    assert "6 x HTTP 500: refused with 500" in result.out
    refused = bench()
    assert (refused.code, "fails the first request: HTTP 500" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "vllm"), "allowed: openai, openai-chat"),
        (("--metric-percentiles", "101"), "write numbers like 50,90,99"),
        (("--goodput", "itl:5"), "METRIC:MILLISECONDS"),
        (("--request-rate", "0"), "must be above 0"),
        (("--trace-path", "x.csv", "--request-rate", "1"), "cannot be used together"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--api-key", ""), "--api-key is empty"),
        (("--header", "nonsense"), "write KEY=VALUE"),
        (("--result-filename", "x"), "needs --save-result"),
        (("--extra-body", "[" * 100_000), "--extra-body is not valid JSON"),
        (("--compare-extra-body", "{}"), "--compare-with"),
        (
            ("--compare-with", "http://host:1", "--compare-extra-body", "{"),
            "--compare-extra-body is not valid JSON",
        ),
        (("--compare-with", "host:1"), "write http://HOST:PORT"),
        (("--dataset-name", "custom"), "needs --dataset-path"),
        (("--tokenizer", "/nowhere"), "/nowhere"),
    ],
)
def test_options_that_cannot_be(
    bench: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    result = bench(*arguments)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("error: ")
    assert message in result.err


# --- throughput --------------------------------------------------------------------------------


@pytest.fixture
def throughput(cli: Cli) -> Callable[..., Result]:
    def call(*more: str) -> Result:
        sizes = ("--random-input-len", "12", "--random-output-len", "6", "--num-prompts", "4")
        return cli("bench", "throughput", "embedded", *sizes, "--json", *more)

    return call


def test_throughput(throughput: Callable[..., Result]) -> None:
    result = throughput("--no-speculation")
    assert result.code == 0
    found = result.document
    assert (found["num_requests"], found["total_num_tokens"]) == (4, 4 * (12 + 6))
    seconds = found["elapsed_time"]
    assert found["requests_per_second"] == pytest.approx(4 / seconds)
    assert found["tokens_per_second"] == pytest.approx(72 / seconds)
    assert result.err.splitlines()[1].startswith(f"Throughput: {4 / seconds:.2f} requests/s, ")


def test_throughput_plain_and_speculative(throughput: Callable[..., Result]) -> None:
    arguments = ("--compare", "--max-num-seqs", "2", "--method", "prompt_lookup")
    result = throughput(*arguments, "--temperature", "0.8")
    assert result.code == 0
    found = result.document
    assert found["outputs_differing"] == []
    assert found["plain"]["num_draft_tokens"] == 0
    assert found["plain"]["total_output_tokens"] == found["total_output_tokens"] == 24
    assert found["output_tokens_per_second_ratio"]["num_pairs"] == 2
    ratio = found["plain"]["elapsed_time"] / found["elapsed_time"]
    assert found["speedup"] == pytest.approx(ratio)
    assert "identical output for all of 4 prompts" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compare", "--no-speculation"), "--compare needs speculation"),
        (("--max-model-len", "8"), "prompt"),
    ],
)
def test_throughput_that_cannot_be(
    throughput: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    result = throughput(*arguments)
    assert result.code == 2
    assert message in result.err
