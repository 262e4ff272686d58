"""Routers of vLLM and SGLang, unmodified, in front of two servers: their answers are the servers'.

They are no dependencies: pip install vllm-router sglang-router puts them where this looks.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tests.server.served import KEY, NAME, chat_model, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROUTERS = ("vllm_router", "sglang_router")
HEADERS = {"Authorization": f"Bearer {KEY}"}
QUESTIONS = ("What is the weather in Rome?", "And in Oslo?", "Who wrote this?", "Why?")
SECONDS = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, str, str]]]:
    """Two servers with KV events: addresses of HTTP, of events and of their replay."""
    model, found = chat_model(tmp_path_factory.mktemp("model")), []
    with ExitStack() as stack:
        for _ in range(2):
            out, again = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            events = {
                "enable_kv_cache_events": True,
                "endpoint": out.replace("127.0.0.1", "*"),
                "replay_endpoint": again,
            }
            options = ("--kv-events-config", json.dumps(events)) if find_spec("zmq") else ()
            found.append((stack.enter_context(served(model, *options)), out, again))
        yield found


@contextmanager
def router(package: str, *options: str, metrics: int = 0) -> Iterator[httpx.Client]:
    """A router's client, once it is well."""
    if find_spec(package) is None:
        pytest.skip(f"{package.replace('_', '-')} is not installed")
    port = free_port()
    command = [sys.executable, "-m", f"{package}.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics or free_port()), *options]
    process = subprocess.Popen(
        [*command, "--worker-startup-check-interval", "1"], stdout=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=address, headers=HEADERS, timeout=SECONDS) as client:
            wait_for(client)
            yield client
    finally:
        process.kill()
        process.wait()


def wait_for(client: httpx.Client) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("the router did not come up")


def asked(client: httpx.Client, question: str, **fields: Any) -> httpx.Response:
    body = {"model": NAME, "max_tokens": 24, "temperature": 0.7, "seed": 5}
    body |= {"messages": [{"role": "user", "content": question}], **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def lasting(text: str) -> str:
    """An answer without what differs from one request to the next."""
    text = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', text)
    return re.sub(r'"cached_tokens":\d+', '"cached_tokens":0', text)


def streamed(response: httpx.Response) -> tuple[str, str]:
    """The text of a stream, and why it ended; events hold as many tokens as a step brought."""
    *events, done = [line[6:] for line in response.text.splitlines() if line[:6] == "data: "]
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"]


def tokens_of(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=SECONDS).text
    (line,) = re.findall(r"^paceline:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return float(line)


def hits_of(metrics: str) -> int:
    """How often a router knew of a server that had a request's prefix."""
    text = httpx.get(metrics, timeout=SECONDS).text
    found = re.search(r'^vllm_router_kv_placement_lookups_total{result="hit"} (\d+)', text, re.M)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("package", ROUTERS)
def test_answers_through_a_router_are_the_servers_own(
    package: str, workers: list[tuple[str, str, str]]
) -> None:
    urls = [url for url, *_ in workers]
    before = [tokens_of(url) for url in urls]
    with (
        router(package, "--worker-urls", *urls, "--policy", "round_robin") as through,
        httpx.Client(base_url=urls[0], headers=HEADERS, timeout=SECONDS) as direct,
    ):
        told = [asked(through, question).text for question in QUESTIONS]
        pieces = [streamed(asked(through, question, stream=True)) for question in QUESTIONS]
        served_both = [tokens_of(url) > count for url, count in zip(urls, before, strict=True)]
        assert served_both == [True, True]
        for question, answer, piece in zip(QUESTIONS, told, pieces, strict=True):
            assert lasting(answer) == lasting(asked(direct, question).text)
            choice = json.loads(answer)["choices"][0]
            assert piece == (choice["message"]["content"], choice["finish_reason"])
        refused = through.post("/v1/chat/completions", json={"model": NAME, "messages": 1})
        assert refused.status_code in (400, 422)


def test_vllms_router_follows_the_cached_prefixes(workers: list[tuple[str, str, str]]) -> None:
    """All requests with a prefix go to the server that says it has it, and find it there."""
    pytest.importorskip("zmq", reason="paceline[events] is not installed")
    options = ["--policy", "kv_aware", "--kv-event-model", NAME, "--worker-urls"]
    options += [url for url, *_ in workers]
    for url, out, again in workers:
        options += [
            "--kv-event-source",
            f"{url}={out}",
            "--kv-event-replay-source",
            f"{url}={again}",
        ]
    port = free_port()
    metrics = f"http://127.0.0.1:{port}/metrics"
    with router("vllm_router", *options, metrics=port) as through:
        for subject in ("rain", "snow"):
            text = f"A long story about the {subject} " + "that falls on the plain " * 8
            body = {"model": NAME, "prompt": text, "max_tokens": 1}
            before, deadline = hits_of(metrics), time.monotonic() + SECONDS
            while hits_of(metrics) == before:  # until the router has heard of it
                assert time.monotonic() < deadline, "the router never knew who has the prefix"
                answer = through.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] > 0
