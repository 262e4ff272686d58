"""Replicas on a Ray cluster of this machine, as a user starts them: equal answers, and deaths."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import paceline
from paceline.ray import build_app

pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'paceline[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ("--threads", "1", "--max-model-len", "512", "--kv-cache-memory", "64M")
LONG = {"prompt": "Once", "max_tokens": 480, "stream": True, "ignore_eos": True}
_OF_THE_ANSWER = ("id", "created", "created_at", "completed_at", "prompt_tokens_details")


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server and a client of it; it must end by itself when it is told to."""
    settings = {n: v for n, v in os.environ.items() if not n.startswith("PACELINE_")}
    settings |= {"PYTHONPATH": str(Path(paceline.__file__).parent.parent)}
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *SMALL, *options]
    process = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("paceline serves "))
        with ThreadPoolExecutor(1) as reader:
            reader.submit(process.stderr.read)
            with httpx.Client(base_url=line.split(" at ")[1].split()[0], timeout=120) as client:
                yield process, client
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    finally:
        process.kill()


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


def by_replica(client: httpx.Client, name: str, **labels: str) -> dict[str, float]:
    page = client.get("/metrics").text
    lines = (line for line in page.splitlines() if line.startswith(f"paceline:{name}{{"))
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return {
        line.split('replica="')[1].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if all(each in line for each in wanted)
    }


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
        os.kill(_replicas_of(os.getpid())[0], signal.SIGKILL)
        ends = [each.result().text for each in streams]
        assert {each.result().status_code for each in wholes} == {200}
    assert all(end.endswith("data: [DONE]\n\n") for end in ends)
    broken = [end for end in ends if '"error"' in end]
    assert all('"code":"engine_dead"' in end for end in broken)
    until(lambda: len(by_replica(replicas, "num_requests_running")) == 2)
    assert replicas.get("/health").status_code == 200


def _replicas_of(ancestor: int) -> list[int]:
    """Processes of Serve's engines that the tests of this process started."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in table.stdout.splitlines()[1:]]
    own = {ancestor}
    for _ in rows:
        own |= {int(pid) for pid, parent, _ in rows if int(parent) in own}
    return [int(pid) for pid, _, args in rows if "engine" in args and int(pid) in own]


def test_requests_in_flight_end_before_the_server_does() -> None:
    with serving("--replicas", "1") as (process, client), ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/v1/completions", json=LONG)
        until(lambda: sum(by_replica(client, "num_requests_running").values()))
        process.send_signal(signal.SIGTERM)
        assert running.result().text.endswith("data: [DONE]\n\n")


def test_an_application_for_serves_own_configuration() -> None:
    app = build_app({"replicas": 3, "threads": 2, "max_model_len": 256})
    assert type(app).__name__ == "Application"
    with pytest.raises(paceline.errors.ConfigError, match="replica_count"):
        build_app({"replica_count": 3})
