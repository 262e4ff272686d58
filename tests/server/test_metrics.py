"""What Prometheus reads: names, labels, histograms, and counters that survive a restart."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.request.metrics import EngineStats, SpeculationCounters
from paceline.server.metrics.server_metrics import (
    EARLIER_NAMES,
    PREFIX,
    ModelMetrics,
    ServerMetrics,
)
from tests.server.fakes import FakeEngine

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana-dashboard.json"
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
