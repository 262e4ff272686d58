"""Processes that are killed at random under load: clients hear the right tokens, or an error.

``PACELINE_TEST_FAULT_SECONDS`` says how long; 600 is what a release is held to.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any, NamedTuple

import httpx
import pytest

pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'paceline[ray]'")

from tests.ray.servers import by_replica, descendants, serving, until

SECONDS = float(os.environ.get("PACELINE_TEST_FAULT_SECONDS", "25"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 575)]

PAUSES = (1.0, 8.0)
"""Between two deaths: shorter and longer than a replica needs to start."""
NUM_CLIENTS = 6
ENGINE, STAGE = "paceline-engine", "paceline.runtime.stages"
REPLICA, INGRESS = "ServeReplica:paceline:engine", "ServeReplica:paceline:ingress"
PROXY, CONTROLLER, SPARE = "ProxyActor", "ServeController", "ray::IDLE"
TYPED = ("engine_dead", "starting", "request_failed")
LOST = "lost"
"""What comes where nobody is left who could say what happened."""
PATIENT = ("--max-engine-restarts", "100000")


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
    """Raises httpx.TimeoutException: the answer hangs."""
    parts, status = list[str](), 0
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            status = response.status_code
            parts += response.iter_text()
    except httpx.TimeoutException:
        raise
    except httpx.TransportError:
        status = status or -1
    return heard("".join(parts), status, body["stream"])


def heard(text: str, status: int, is_stream: bool) -> Told:
    """
    Args:
        text: as much of the answer as came.
        status: of HTTP; -1 where there was none.
    """
    if status != 200:
        with suppress(ValueError, KeyError, TypeError):
            return Told("", json.loads(text)["error"]["code"])
        return Told("", LOST)
    if not is_stream:
        with suppress(ValueError):
            return Told(json.loads(text)["choices"][0]["text"])
        return Told("", LOST)
    *blocks, rest = text.split("\n\n")
    is_whole = not rest and blocks[-1:] == ["data: [DONE]"]
    whole = blocks[:-1] if is_whole else blocks
    found = [json.loads(block.removeprefix("data: ")) for block in whole]
    error = found[-1].get("error", {}).get("code", "") if is_whole else LOST
    return Told("".join(each["choices"][0]["text"] for each in found if "choices" in each), error)


def kill_at_random(rng: random.Random, victims: tuple[str, ...]) -> Counter[str]:
    """Returns how many of each were killed."""
    deadline, deaths = time.monotonic() + SECONDS, Counter[str]()
    while time.monotonic() < deadline:
        kind = rng.choice(victims)
        if alive := descendants(os.getpid(), kind):
            with suppress(ProcessLookupError):
                os.kill(rng.choice(alive), signal.SIGKILL)
                deaths[kind] += 1
        time.sleep(rng.uniform(*PAUSES))
    return deaths


def is_at_rest(client: httpx.Client, num_engines: int) -> bool:
    """All engines are there, and none of them runs anything or holds a block."""
    running = by_replica(client, "num_requests_running")
    used = by_replica(client, "kv_cache_usage_perc")
    engines = descendants(os.getpid(), ENGINE)
    return (
        len(running) == len(engines) == num_engines
        and not any(running.values())
        and not any(used.values())
    )


@pytest.mark.parametrize(
    ("options", "victims", "codes"),
    [
        pytest.param(("--replicas", "2"), (REPLICA, ENGINE), TYPED, id="replicas"),
        pytest.param(
            ("--replicas", "2"),
            (REPLICA, ENGINE, INGRESS, PROXY, CONTROLLER, SPARE),
            (*TYPED, LOST),
            id="all of Ray's processes",
        ),
        pytest.param(("--pipeline-parallel-size", "2"), (STAGE,), TYPED, id="stages"),
    ],
)
def test_random_deaths_cost_no_token_and_hang_no_client(
    options: tuple[str, ...], victims: tuple[str, ...], codes: tuple[str, ...]
) -> None:
    with serving() as (_, client):
        expected = [ask(client, body) for body in bodies()]
    assert len({told.text for told in expected}) == len(expected) / 2
    with serving(*options, *PATIENT) as (_, client), ThreadPoolExecutor(NUM_CLIENTS) as pool:
        is_over = Event()

        def go_on(start: int) -> Iterator[tuple[int, Told]]:
            for i in itertools.count(start):
                if is_over.is_set():
                    return
                which = i % len(expected)
                told = ask(client, bodies()[which])
                yield which, told
                if told.error:
                    is_over.wait(0.1)  # as a client that tries again

        asked = [pool.submit(lambda k: list(go_on(k)), 2 * k + k % 2) for k in range(NUM_CLIENTS)]
        try:
            deaths = kill_at_random(random.Random(1), victims)
        finally:
            is_over.set()
        answers = [told for each in asked for told in each.result()]  # a timeout here is a hang
        ends = Counter(told.error or "whole" for _, told in answers)
        wrong = [
            (which, told)
            for which, told in answers
            if told != expected[which]
            and not (told.error in codes and expected[which].text.startswith(told.text))
        ]
        print(f"deaths: {dict(deaths)}; answers: {dict(ends)}; wrong: {len(wrong)}")
        assert wrong == []
        assert deaths.total() >= 2
        assert ends["whole"] >= NUM_CLIENTS
        num_engines = 2 if "--replicas" in options else 1
        until(lambda: is_at_rest(client, num_engines))
        assert [ask(client, body) for body in bodies()] == expected
