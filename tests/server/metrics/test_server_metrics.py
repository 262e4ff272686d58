"""What Prometheus reads: names, labels, histograms, and counters that survive a restart.

OpenTelemetry's names of the times of answers among them.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.request.engine_stats import EngineStats, SpeculationCounters
from paceline.server.engine_process.messages import Piece
from paceline.server.http.sse import Deadline
from paceline.server.metrics.server_metrics import (
    EARLIER_NAMES,
    PREFIX,
    AnswerTimes,
    ModelMetrics,
    ServerMetrics,
)
from tests.server.asgi import application, call, post
from tests.server.chats import CHATML, USER, chat_tokenizer
from tests.server.fakes import FakeEngine

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana-dashboard.json"
METRICS_PAGE = DASHBOARD.parent / "metrics.md"
Samples = dict[tuple[str, frozenset], float]


def speculated(times: int = 1) -> SpeculationCounters:
    counters = SpeculationCounters()
    for _ in range(times):
        counters.record(3, ["a", "a", "b"], ["a", "b"], 2)
    counters.record(1, [], [], 0)
    return counters


def busy(times: int = 1) -> EngineStats:
    stats = EngineStats(
        speculation=speculated(times),
        num_prompt_tokens=10 * times,
        num_output_tokens=3 * times + 1,
        num_queried_tokens=8 * times,
        num_cached_tokens=4 * times,
        expected_accepted_tokens=1.5 * times,
        kv_blocks_total=50,
        kv_blocks_used=5,
        num_running=2,
        decode_steps_by_rows={4: times, 1: 1},
    )
    stats.seconds = {"forward": 0.25 * times, "plan": 0.5}
    return stats


class Metrics(ModelMetrics):
    """Of a server of one model."""

    def __init__(self, prefix: str = PREFIX, model_name: str = "") -> None:
        self.server = ServerMetrics(prefix)
        super().__init__(self.server, model_name)

    def render(self, stats: EngineStats | None, client: FakeEngine, num_loads: int = 1) -> bytes:
        self.take(stats, client, num_loads)
        return self.server.render()


def samples(text: bytes) -> Samples:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def ready(**fields) -> FakeEngine:
    return FakeEngine(tokenizer=None, state="ready", **fields)


def test_the_engines_counters_by_proposer() -> None:
    found = samples(Metrics("paceline", "m").render(busy(), ready()))
    stem = "paceline:spec_decode_num"
    assert value(found, f"{stem}_draft_tokens_total", proposer="a") == 2
    assert value(found, f"{stem}_draft_tokens_total", proposer="b") == 1
    assert value(found, f"{stem}_accepted_tokens_total", proposer="b") == 1
    assert value(found, f"{stem}_accepted_tokens_per_pos_total", proposer="b", position="1") == 1
    assert value(found, f"{stem}_accepted_tokens_per_pos_total", proposer="b", position="0") == 0
    assert value(found, f"{stem}_steps_total") == 2
    assert value(found, "paceline:spec_decode_expected_tokens_total") == 3.5
    assert value(found, "paceline:spec_decode_realised_tokens_total") == 4
    assert value(found, "paceline:prefix_cache_hits_total") == 4
    assert value(found, "paceline:step_seconds_total", phase="forward") == 0.25
    assert value(found, "paceline:kv_cache_usage_perc") == 0.1
    assert value(found, "paceline:num_requests_running") == 2
    assert value(found, "paceline:engine_up") == 1
    assert (f"{stem}_drafts_total", frozenset()) not in found


def test_vllms_dashboards_find_totals_without_a_proposer() -> None:
    found = samples(Metrics("vllm", "m").render(busy(), ready()))
    stem = "vllm:spec_decode_num"
    assert value(found, f"{stem}_drafts_total") == 1
    assert value(found, f"{stem}_draft_tokens_total") == 3
    assert value(found, f"{stem}_accepted_tokens_total") == 2
    assert value(found, f"{stem}_accepted_tokens_per_pos_total", position="1") == 1
    assert not [name for name, labels in found if "proposer" in dict(labels)]


def test_what_reads_vllms_metrics_finds_the_kv_cache_and_its_size() -> None:
    found = samples(Metrics("vllm", "m").render(busy(), ready()))
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert value(found, "vllm:kv_cache_usage_perc") == 0.1  # a share, whatever the name says
    for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_waiting"):
        assert (f"vllm:{name}", frozenset()) in found


def test_earlier_names_of_vllms_metrics_say_the_same() -> None:
    metrics = Metrics("vllm", "m")
    metrics.token_gap.observe(0.004)
    text = metrics.render(busy(), ready())
    found, seen = samples(text), 0
    for name, earlier in EARLIER_NAMES.items():
        told = {k: v for k, v in found.items() if k[0].startswith(f"vllm:{name}")}
        for (sample, labels), number in told.items():
            other = f"vllm:{earlier}" + sample.removeprefix(f"vllm:{name}")
            assert found[other, labels] == number
            seen += 1
    assert seen > 2 * len(EARLIER_NAMES)
    assert b'vllm:time_per_output_token_seconds_bucket{le="0.005",model_name="m"} 1.0' in text
    assert not [name for name, _ in samples(Metrics().render(busy(), ready())) if "gpu_" in name]


def test_counters_go_on_through_a_restart() -> None:
    metrics, engine = Metrics(), ready()
    metrics.render(busy(5), engine)
    engine.state = "starting"
    down = samples(metrics.render(None, engine))
    assert value(down, "paceline:engine_up") == 0
    assert value(down, "paceline:prompt_tokens_total") == 50
    engine.num_restarts, engine.state = 1, "ready"
    for times, rows in ((1, 6), (2, 7)):
        found = samples(metrics.render(busy(times), engine))
        assert value(found, "paceline:prompt_tokens_total") == 50 + 10 * times
        drafted = value(found, "paceline:spec_decode_num_draft_tokens_total", proposer="a")
        assert drafted == 10 + 2 * times
        assert value(found, "paceline:step_rows_bucket", le="4.0") == rows + 2
        assert value(found, "paceline:engine_restarts_total") == 1


def test_counters_do_not_fall_when_an_older_snapshot_comes_late() -> None:
    metrics, engine = Metrics(), ready()
    for times in (5, 4, 6):
        found = samples(metrics.render(busy(times), engine))
        assert value(found, "paceline:prompt_tokens_total") == 10 * max(times, 5)


def test_widths_are_a_histogram() -> None:
    stats = EngineStats(decode_steps_by_rows={1: 5, 7: 2, 600: 1})
    found = samples(Metrics().render(stats, ready()))
    counts = [value(found, "paceline:step_rows_bucket", le=le) for le in ("1.0", "6.0", "8.0")]
    assert counts == [5, 5, 7]
    assert value(found, "paceline:step_rows_bucket", le="+Inf") == 8
    assert value(found, "paceline:step_rows_sum") == 5 + 14 + 600


def test_what_http_observes() -> None:
    metrics = Metrics()
    metrics.first_token.observe(0.02)
    metrics.token_gap.observe(0.004)
    metrics.token_gap.observe(0.012)
    metrics.observe_request(1.5, "stop")
    metrics.rejected.inc()
    found = samples(metrics.render(None, ready()))
    assert value(found, "paceline:time_to_first_token_seconds_bucket", le="0.01") == 0
    assert value(found, "paceline:time_to_first_token_seconds_bucket", le="0.025") == 1
    assert value(found, "paceline:inter_token_latency_seconds_count") == 2
    assert value(found, "paceline:e2e_request_latency_seconds_sum") == 1.5
    assert value(found, "paceline:request_success_total", finished_reason="stop") == 1
    assert value(found, "paceline:request_success_total", finished_reason="length") == 0
    assert value(found, "paceline:requests_rejected_total") == 1


@pytest.mark.timing
def test_observing_takes_microseconds() -> None:
    metrics = Metrics()
    best = float("inf")
    for _ in range(20):
        began = time.thread_time()
        for _ in range(100):
            metrics.token_gap.observe(0.003)
        best = min(best, time.thread_time() - began)
    assert best / 100 < 50e-6  # 2 µs; the rest is for machines that do something else too


def test_servers_have_metrics_of_their_own() -> None:
    one, other = Metrics(), Metrics()
    one.rejected.inc()
    found = samples(other.render(None, ready()))
    assert value(found, "paceline:requests_rejected_total") == 0


# --- the dashboard and the page -------------------------------------------------------------------


def exported() -> dict[str, set[str]]:
    """Every sample's name with its labels."""
    metrics = Metrics()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render(busy(), ready()).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    document = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in document["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_asks_for_what_is_exported(expression: str) -> None:
    names = re.findall(r"paceline:\w+", expression)
    known = exported()
    assert names
    assert set(names) <= known.keys()
    for labels, name in re.findall(r"by \(([^)]*)\) \(rate\((paceline:\w+)", expression):
        assert set(labels.split(", ")) <= known[name]


def test_the_page_of_metrics_lists_every_metric() -> None:
    families = text_string_to_metric_families(Metrics().render(busy(), ready()).decode())
    total = {"counter": "_total"}
    names = {
        family.name.removeprefix("paceline:") + total.get(family.type, "")
        for family in families
        if not family.name.endswith("_created")
    }
    told = re.findall(r"^\| `(\w+)`", METRICS_PAGE.read_text(), re.MULTILINE)
    assert sorted(told) == sorted(names)


DURATION = "gen_ai_server_request_duration_seconds"
FIRST = "gen_ai_server_time_to_first_token_seconds"
EACH = "gen_ai_server_time_per_output_token_seconds"
# ExplicitBucketBoundaries of docs/gen-ai/gen-ai-metrics.md in semantic-conventions-genai, 004902b8.
BUCKETS = {
    DURATION: "0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, "
    "81.92",
    EACH: "0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5",
    FIRST: "0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, "
    "10.0",
}
CHAT = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "paceline",
    "gen_ai_request_model": "m",
}


class Timed:
    """A clock of a chat of two samples that began at 100 seconds, which the test moves."""

    def __init__(self, num_prompts: int = 1, num_samples: int = 2, timeout: float = 60.0) -> None:
        self.at = 100.0
        self._server = ServerMetrics()
        metrics = ModelMetrics(self._server, "m")
        deadline = Deadline(timeout, began=100.0)
        counts = num_prompts, num_samples
        self.clock = AnswerTimes(metrics, "chat", *counts, deadline, now=lambda: self.at)

    def tell(self, at: float, sample: int, count: int, reason: str | None = None) -> None:
        self.at = at
        ids = [5] * count
        self.clock.observe(Piece(sample, ids, ["target"] * count, finish_reason=reason))

    def close(self, at: float, has_failed: bool = False) -> Samples:
        self.at = at
        self.clock.close(has_failed)
        return samples(self._server.render())


def count(found: Samples, name: str, **labels: str) -> float:
    return value(found, f"{name}_count", **CHAT, **labels)


def total(found: Samples, name: str, **labels: str) -> float:
    return value(found, f"{name}_sum", **CHAT, **labels)


def test_times_are_of_the_prompt_and_of_each_answer() -> None:
    timed = Timed()
    timed.tell(100.5, sample=1, count=1)
    timed.tell(101.0, sample=0, count=2)
    timed.tell(102.5, sample=1, count=8, reason="stop")  # 8 tokens in 2 seconds
    timed.tell(105.0, sample=0, count=3, reason="length")  # 4 tokens in 4 seconds
    found = timed.close(105.5)
    assert (count(found, FIRST), total(found, FIRST)) == (1, 0.5)
    assert (count(found, EACH), total(found, EACH)) == (2, 0.25 + 1.0)
    assert count(found, DURATION, error_type="") == 1
    assert total(found, DURATION, error_type="") == 5.5


def test_answers_that_failed_have_a_duration_alone() -> None:
    timed = Timed(num_samples=1)
    timed.tell(101.0, sample=0, count=3)
    found = timed.close(103.0, has_failed=True)
    assert total(found, DURATION, error_type="error") == 3.0
    late = Timed(num_samples=1, timeout=2.0).close(103.0)
    assert count(late, DURATION, error_type="error") == 1
    left = Timed(num_samples=1)
    left.tell(101.0, sample=0, count=3)
    left.tell(102.0, sample=0, count=1, reason="abort")
    gone = left.close(103.0)
    assert count(gone, DURATION, error_type="abort") == 1
    for each in (found, late, gone):
        assert not [name for name, _ in each if name.startswith((FIRST, EACH))]


def test_one_token_takes_no_time_after_the_first() -> None:
    timed = Timed(num_prompts=2, num_samples=1)
    for prompt in (0, 1):
        timed.tell(101.0, sample=prompt, count=1, reason="length")
    found = timed.close(102.0)
    assert count(found, FIRST) == count(found, DURATION, error_type="") == 2
    assert not [name for name, _ in found if name.startswith(EACH)]


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_are_those_of_the_conventions(name: str) -> None:
    timed = Timed(num_samples=1)
    timed.tell(101.0, sample=0, count=3, reason="stop")
    found = [dict(labels) for sample, labels in timed.close(102.0) if sample == f"{name}_bucket"]
    bounds = sorted(float(labels["le"]) for labels in found)
    assert bounds == [*map(float, BUCKETS[name].split(", ")), float("inf")]


ANSWERS = {name: {"chat"} for name in BUCKETS}
TEXTS = {name: {"text_completion"} for name in BUCKETS}


@pytest.mark.parametrize("prefix", ["paceline", "vllm"])
@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, ANSWERS),
        ("/v1/responses", {"input": "Hi."}, ANSWERS),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}, ANSWERS),
        ("/api/chat", {"messages": [USER]}, ANSWERS),
        ("/v1/completions", {"prompt": "Hi."}, TEXTS),
        ("/api/generate", {"prompt": "Hi.", "raw": True}, TEXTS),
        ("/v1/embeddings", {"input": "Hi."}, {DURATION: {"embeddings"}}),
        ("/api/embed", {"input": ["Hi.", "Ho."]}, {DURATION: {"embeddings"}}),
    ],
)
def test_every_door_has_its_operation(
    prefix: str, path: str, body: dict[str, Any], wanted: dict[str, set[str]]
) -> None:
    engine = FakeEngine(tokenizer=chat_tokenizer(CHATML))
    app = application(engine, metrics_prefix=prefix, served_model_names=("m", "other"))
    answer = post(app, path, {"model": "other", **body})
    assert answer.status_code == 200, answer.text
    found = dict[str, set[str]]()
    for name, labels in re.findall(
        r"^(gen_ai_\w+)_count{(.*)}", call(app, "GET", "/metrics").text, re.MULTILINE
    ):
        assert 'gen_ai_request_model="m"' in labels
        found.setdefault(name, set()).add(re.findall(r'operation_name="(\w+)"', labels)[0])
    assert found == wanted
