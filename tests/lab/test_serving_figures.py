"""Figures, ratios, arrivals and counters, against values computed by hand."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from paceline.core.errors import ConfigError, RequestError
from paceline_lab.bench.client import EventParser, Outcome
from paceline_lab.bench.datasets import TraceRow, arrival_times, read_trace
from paceline_lab.bench.figures import figures_of, parse_goodput
from paceline_lab.bench.runs import block_size, ratio_of_medians
from paceline_lab.bench.server import growth, parse_counters, speculation_figures

TRACE = Path(__file__).parents[3] / "shared/data/traces/azure_llm_inference_code.csv"

OUTCOMES = [
    # 4 tokens in 2 texts; 1 token; failed; 3 tokens in 3 texts.
    Outcome(10, 4, start=0.0, ttft=0.1, itls=[0.3], latency=0.4, text="ab"),
    Outcome(20, 1, start=0.2, ttft=0.2, itls=[], latency=0.2, text="c"),
    Outcome(99, 9, start=0.2, ttft=0.9, itls=[0.9], latency=9.0, error="HTTP 500: no"),
    Outcome(30, 3, start=1.0, ttft=0.3, itls=[0.1, 0.2], latency=0.6, text="def"),
]


def test_figures_by_hand() -> None:
    found = figures_of(OUTCOMES, 2.0, (50.0, 99.0), {"ttft": 250.0, "tpot": 120.0})
    expected = {
        "completed": 3,
        "failed": 1,
        "failure_reasons": {"HTTP 500: no": 1},
        "total_input_tokens": 60,
        "total_output_tokens": 8,
        "request_throughput": 1.5,
        "output_throughput": 4.0,
        "total_token_throughput": 34.0,
        "request_goodput": 1.0,  # the last one's first token is late
        "max_concurrent_requests": 2,
        "max_output_tokens_per_s": 5.0,  # in the first second, with both texts' two tokens
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "std_ttft_ms": 1e3 * np.std([0.1, 0.2, 0.3]),
        "p99_ttft_ms": 298.0,  # between 200 and 300, at 0.98 of the way
        "mean_tpot_ms": (100.0 + 150.0) / 2,
        "p50_tpot_ms": 125.0,
        "mean_itl_ms": 200.0,
        "median_itl_ms": 200.0,
        "mean_e2el_ms": 400.0,
        "input_lens": [10, 20, 99, 30],
        "output_lens": [4, 1, 0, 3],
        "ttfts": [0.1, 0.2, None, 0.3],
        "itls": [[0.3], [], [], [0.1, 0.2]],
        "generated_texts": ["ab", "c", "", "def"],
        "errors": ["", "", "HTTP 500: no", ""],
    }
    for key, value in expected.items():
        is_list = isinstance(value, list | dict)
        assert found[key] == (value if is_list else pytest.approx(value)), key


def test_nothing_completed_gives_no_times() -> None:
    found = figures_of([OUTCOMES[2]], 1.0)
    assert (found["completed"], found["failed"], found["output_throughput"]) == (0, 1, 0.0)
    assert found["mean_ttft_ms"] is found["p99_e2el_ms"] is None
    assert found["request_goodput"] is None
    assert found["max_concurrent_requests"] == found["max_output_tokens_per_s"] == 0


def test_a_request_that_follows_another_is_not_beside_it() -> None:
    chain = [Outcome(start=float(i), latency=1.0) for i in range(3)]
    assert figures_of(chain, 3.0)["max_concurrent_requests"] == 1


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "e2el:1.5"]) == {"ttft": 200.0, "e2el": 1.5}
    for wrong in ("itl:3", "ttft", "ttft:x", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="METRIC:MILLISECONDS"):
            parse_goodput([wrong])


# --- ratios ------------------------------------------------------------------------------------


def test_ratio_of_medians() -> None:
    found = ratio_of_medians([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found is not None
    assert (found.ours, found.theirs, found.value, found.num_pairs) == (4.0, 2.0, 2.0, 3)
    # Every draw takes both of a pair: the ratio of the medians is 2 in all of them.
    assert (found.low, found.high) == (2.0, 2.0)
    single = ratio_of_medians([3.0], [2.0])
    assert single is not None
    assert (single.value, single.low, single.interval) == (1.5, None, "-")
    assert ratio_of_medians([], []) is ratio_of_medians([1.0], [0.0]) is None


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(30):
        difficulty = rng.lognormal(0.0, 0.5, 40)  # of each prompt, for both arms
        noise = rng.lognormal(0.0, 0.1, (2, 40))
        found = ratio_of_medians(1.5 * difficulty * noise[0], difficulty * noise[1])
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.5 <= found.high
        assert found.high - found.low < 0.8
    assert covered >= 25  # 95 % of 30 is 28.5


@pytest.mark.parametrize(
    ("count", "concurrency", "block"), [(100, 4, 10), (100, 32, 32), (5, 1, 1), (3, 16, 3)]
)
def test_block_size(count: int, concurrency: int, block: int) -> None:
    assert block_size(count, concurrency) == block


# --- arrivals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    times = np.array(arrival_times(20_000, 5.0, burstiness, seed=3))
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(20_000 / 5.0)
    assert gaps.mean() == pytest.approx(0.2)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)
    if burstiness == 1.0:  # exponential
        assert (gaps > 0.2).mean() == pytest.approx(np.exp(-1), abs=0.01)


def test_arrivals_follow_the_seed() -> None:
    assert arrival_times(9, 2.0, 1.0, 7) == arrival_times(9, 2.0, 1.0, 7)
    assert arrival_times(9, 2.0, 1.0, 7) != arrival_times(9, 2.0, 1.0, 8)
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, float("inf"), 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    for rate, burstiness in ((0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="above 0"):
            arrival_times(3, rate, burstiness, 0)


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 23:59:59.5000009,4808,10\r\n"
        "2023-11-17 00:00:01.0000000,110,0\r\n"
        "\r\n"
        "2023-11-17 00:00:02.5000000,7,3\r\n"
    )
    rows = read_trace(path, 10)
    assert [row.time for row in rows] == pytest.approx([0.0, 1.5, 3.0])
    assert [(row.prompt_len, row.output_len) for row in rows] == [(4808, 10), (110, 1), (7, 3)]
    assert len(read_trace(path, 2)) == 2
    path.write_text("0.5,1,2\n3.5,3,4\n")
    assert read_trace(path, 5) == [TraceRow(0.0, 1, 2), TraceRow(3.0, 3, 4)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b,c\n", "no requests"),
        ("1,2,3\nnow,2,3\n", "line 2"),
        ("1,2,3\n1,2\n", "line 2"),
        ("1,2,3\n1,x,3\n", "line 2"),
        ("1,2,3\ninf,2,3\n", "line 2"),
    ],
)
def test_damaged_traces(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(RequestError, match=problem):
        read_trace(path, 10)


@pytest.mark.skipif(not TRACE.exists(), reason="the shared traces are not here")
def test_a_recorded_trace() -> None:
    rows = read_trace(TRACE, 4)
    assert [(row.prompt_len, row.output_len) for row in rows] == [
        (4808, 10),
        (3180, 8),
        (110, 27),
        (7433, 14),
    ]
    assert [row.time for row in rows] == pytest.approx([0.0, 0.052, 0.098189, 0.140684], abs=1e-6)


# --- what servers say --------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab\r:é", min_size=1), max_size=5), st.integers(0, 2**32), st.booleans())
def test_events_survive_any_cut(texts: list[str], seed: int, returns: bool) -> None:
    texts = [text.replace("\r", "") or "x" for text in texts]
    end = "\r\n" if returns else "\n"
    stream = "".join(f": note{end}event: x{end}data: {text}{end}{end}" for text in texts).encode()
    rng, parser, found = random.Random(seed), EventParser(), list[bytes]()
    while stream:
        cut = rng.randint(1, 7)
        found += parser.feed(stream[:cut])
        stream = stream[cut:]
    assert found == [text.encode() for text in texts]


def test_data_lines_are_joined_and_limited() -> None:
    assert EventParser().feed(b"data:a\ndata: b\n\n: only a note\n\n") == [b"a\nb"]
    with pytest.raises(ValueError, match="more than 8"):
        EventParser(limit=8).feed(b"data: 123456789")


def test_counters_are_summed_over_labels_and_count_all_steps() -> None:
    text = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 3.0
vllm:spec_decode_num_drafts_total{engine="1"} 1.0
vllm:spec_decode_num_drafts_created{engine="1"} 1.7e+09
vllm:spec_decode_num_steps_total 8
vllm:spec_decode_num_draft_tokens_total 1.2e+01
vllm:spec_decode_num_accepted_tokens_total 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2
other:spec_decode_num_drafts_total 100
"""
    found = parse_counters(text)
    assert found is not None
    figures = speculation_figures(found)
    names = ("num_drafts", "draft_tokens", "accepted_tokens")
    assert [figures[f"spec_decode_{name}"] for name in names] == [4, 12, 6]
    assert figures["spec_decode_acceptance_length"] == pytest.approx(1 + 6 / 8)
    assert figures["spec_decode_per_position_acceptance_rates"] == [0.0, 0.5]
    assert parse_counters("process_cpu_seconds_total 1\n") is None
    merged = parse_counters(f"{text}\nvllm:spec_decode_num_draft_steps_total 3\n")
    assert merged is not None
    assert merged["num_drafts"] == 3  # one draft was a tree of two proposers
    assert speculation_figures(growth(found, found, {})) == {}
    assert growth({}, found, found)["num_draft_tokens"] == 24
