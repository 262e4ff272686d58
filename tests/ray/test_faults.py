"""Replicas that are killed at random under load: clients hear the right tokens, or an error."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

import httpx
import pytest

pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'paceline[ray]'")

from tests.ray.servers import by_replica, replicas_of, serving, until
from tests.server.asgi import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 25.0
PAUSES = (1.0, 5.0)
"""Between two deaths: shorter and longer than a replica needs to start."""
NUM_CLIENTS = 6
ERRORS = ("engine_dead", "starting")


class Told(NamedTuple):
    """What a client heard; ``error`` is a code, and empty where the answer is whole."""

    text: str
    error: str = ""


def bodies() -> list[dict[str, Any]]:
    """Greedy and sampled, long and short, each of them streamed and not."""
    return [
        {
            "prompt": f"def f{i}(a, b):\n",
            "max_tokens": 16 + 40 * i,
            "ignore_eos": True,
            "temperature": 0.8 if i % 2 else 0.0,
            "seed": i,
            "stream": stream,
        }
        for i, stream in itertools.product(range(6), (False, True))
    ]


def ask(client: httpx.Client, body: Mapping[str, Any]) -> Told:
    response = client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return Told("", response.json()["error"]["code"])
    if not body["stream"]:
        return Told(response.json()["choices"][0]["text"])
    assert response.text.endswith("data: [DONE]\n\n")
    found = events(response.text)
    error = found[-1].get("error", {}).get("code", "")
    return Told("".join(e["choices"][0]["text"] for e in found if "choices" in e), error)


def kill_at_random(rng: random.Random, seconds: float) -> int:
    """Returns how many replicas were killed."""
    deadline, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        if alive := replicas_of(os.getpid()):
            os.kill(rng.choice(alive), signal.SIGKILL)
            count += 1
        time.sleep(rng.uniform(*PAUSES))
    return count


def test_random_deaths_cost_no_token_and_hang_no_client() -> None:
    with serving() as (_, client):
        expected = [ask(client, body) for body in bodies()]
    assert len({told.text for told in expected}) == len(expected) / 2
    with serving("--replicas", "2") as (_, client), ThreadPoolExecutor(NUM_CLIENTS) as pool:
        is_over = Event()

        def go_on(start: int) -> Iterator[tuple[int, Told]]:
            for i in itertools.count(start):
                if is_over.is_set():
                    return
                which = i % len(expected)
                yield which, ask(client, bodies()[which])

        asked = [pool.submit(lambda k: list(go_on(k)), 2 * k + k % 2) for k in range(NUM_CLIENTS)]
        try:
            num_deaths = kill_at_random(random.Random(1), SECONDS)
        finally:
            is_over.set()
        heard = [told for each in asked for told in each.result()]  # a timeout here is a hang
        for which, told in heard:
            assert told == expected[which] or (
                told.error in ERRORS and expected[which].text.startswith(told.text)
            )
        whole = sum(not told.error for _, told in heard)
        print(f"{num_deaths} deaths, {whole} of {len(heard)} answers whole")
        assert num_deaths >= 2
        assert whole >= NUM_CLIENTS
        until(lambda: len(by_replica(client, "num_requests_running")) == 2)
        assert [ask(client, body) for body in bodies()] == expected
