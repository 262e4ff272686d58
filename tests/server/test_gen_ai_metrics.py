"""OpenTelemetry's metrics of answers: names, buckets, labels, and which times they are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.server.engine_process.messages import Piece
from paceline.server.http.sse import Deadline
from paceline.server.metrics.server_metrics import Clock, ModelMetrics, ServerMetrics
from tests.server.asgi import application, call, post
from tests.server.chats import CHATML, USER, chat_tokenizer
from tests.server.fakes import FakeEngine
from tests.server.test_metrics import Samples, samples, value

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
        self.clock = Clock(metrics, "chat", *counts, deadline, now=lambda: self.at)

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
