"""Replicas on a Ray cluster of this machine, as a user starts them: equal answers, and deaths."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import paceline
from paceline.loading.catalogue import embedded_model
from paceline.ray import build_app
from tests.ray.servers import (
    LONG,
    PATIENCE,
    by_replica,
    descendants,
    replicas_of,
    serving,
    until,
)

pytest.importorskip("ray", reason="replicas need the extra ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_OF_THE_ANSWER = ("id", "created", "created_at", "completed_at", "prompt_tokens_details")


@pytest.fixture(scope="module")
def replicas() -> Iterator[httpx.Client]:
    with serving("--replicas", "2") as (_, client):
        yield client


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Fifty, of all APIs: greedy and sampled, streamed and not."""
    made = list[tuple[str, dict[str, Any]]]()
    for i, (seed, stream) in enumerate(itertools.product((None, 1, 2, 3, 4), (False, True))):
        text = f"def f{i // 4}(a, b):\n    return"
        how = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
        chat = {"messages": [{"role": "user", "content": text}], "stream": stream}
        made += [
            ("/v1/completions", {"prompt": text, "max_tokens": 40, "stream": stream, **how}),
            ("/v1/chat/completions", {**chat, "max_tokens": 30, **how}),
            ("/v1/responses", {"input": text, "max_output_tokens": 20, "stream": stream, **how}),
            ("/api/chat", {**chat, "model": "embedded", "options": {"num_predict": 20, **how}}),
            ("/v1/embeddings", {"input": [text, f"{text} {seed}"]}),
        ]
    return made


def told(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """What an answer says: its JSON without ids and times, or a stream's words."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        return _without_names(response.json())
    lines = (line.removeprefix("data: ") for line in response.text.splitlines())
    return "".join(_words(json.loads(line)) for line in lines if line.startswith("{"))


def _without_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_names(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if not (k in _OF_THE_ANSWER or "duration" in k)}
    kept.pop("input_tokens_details", None)
    return {name: _without_names(each) for name, each in kept.items()}


def _words(event: dict[str, Any]) -> str:
    if event.get("type", "").startswith("response."):
        return event["delta"] if event["type"].endswith("text.delta") else ""
    choice = {**event, **(event.get("choices") or [{}])[0]}
    part = choice.get("delta") or choice.get("message") or choice
    ended = choice.get("finish_reason") or choice.get("done_reason") or ""
    return (part.get("text") or part.get("content") or "") + ended


def test_fifty_mixed_requests_are_answered_as_by_one_process(replicas: httpx.Client) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda each: told(replicas, *each), requests()))
        with serving() as (_, client):
            expected = list(pool.map(lambda each: told(client, *each), requests()))
    assert len(found) == 50
    assert found == expected
    assert len({str(each) for each in found}) > 30  # they say something, and not the same
    ended = by_replica(replicas, "request_success_total", finished_reason="length")
    assert len(ended) == 2
    assert all(ended.values()), "a replica was idle"


def test_a_client_that_leaves_ends_its_request(replicas: httpx.Client) -> None:
    before = sum(by_replica(replicas, "request_success_total", finished_reason="abort").values())
    with replicas.stream("POST", "/v1/completions", json=LONG) as response:
        next(response.iter_lines())
    ended = "request_success_total"
    until(lambda: sum(by_replica(replicas, ended, finished_reason="abort").values()) > before)
    assert not sum(by_replica(replicas, "num_requests_running").values())


def test_a_beginning_is_read_once(replicas: httpx.Client) -> None:
    def cached(end: str) -> int:
        body = {"prompt": "all the same words " * 20 + end, "max_tokens": 1}
        usage = replicas.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert all(cached(end) > 50 for end in ("two", "three", "four", "five"))


def test_a_replica_that_is_killed(replicas: httpx.Client) -> None:
    """Streams end with an error, what had not been answered is, and Serve starts another one."""
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(replicas.post, "/v1/completions", json=LONG) for _ in range(4)]
        wholes = [
            pool.submit(replicas.post, "/v1/completions", json={**LONG, "stream": False})
            for _ in range(4)
        ]
        until(lambda: all(by_replica(replicas, "num_requests_running").values()))
        os.kill(replicas_of(os.getpid())[0], signal.SIGKILL)
        ends = [each.result().text for each in streams]
        assert {each.result().status_code for each in wholes} == {200}
    assert all(end.endswith("data: [DONE]\n\n") for end in ends)
    broken = [end for end in ends if '"error"' in end]
    assert all('"code":"engine_dead"' in end for end in broken)
    until(lambda: len(by_replica(replicas, "num_requests_running")) == 2)
    assert replicas.get("/health").status_code == 200


def test_requests_in_flight_end_before_the_server_does() -> None:
    with serving("--replicas", "1") as (process, client), ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/v1/completions", json=LONG)
        until(lambda: sum(by_replica(client, "num_requests_running").values()))
        process.send_signal(signal.SIGTERM)
        assert running.result().text.endswith("data: [DONE]\n\n")


def test_replicas_that_cannot_start_again_end_the_server(tmp_path: Path) -> None:
    """Serve gives them up once its controller knows nothing of earlier ones."""
    model = Path(shutil.copytree(embedded_model("target"), tmp_path / "model"))
    with serving("--replicas", "1", model=str(model), code=2) as (process, _):
        model.rename(tmp_path / "gone")
        for name in ("ServeController", "ServeReplica:paceline:engine"):
            os.kill(descendants(process.pid, name)[0], signal.SIGKILL)
        process.wait(PATIENCE)


def test_an_application_for_serves_own_configuration() -> None:
    app = build_app({"model": "embedded", "replicas": 3, "threads": 2, "max_model_len": 256})
    assert type(app).__name__ == "Application"
    with pytest.raises(paceline.core.errors.ConfigError, match="replica_count"):
        build_app({"replica_count": 3})
