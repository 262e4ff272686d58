"""Processes that are killed at random under load, and what clients hear of it.

Six clients ask all the time, greedily and with seeds, streamed or not, and know the answers of one
process. Meanwhile processes of a kind are killed as by the system, at random times that are shorter
and longer than such a process needs to start. What has been heard of an answer that ends with an
error must be how the right one begins. In the end every engine must be there and hold no block, and
say again what it said before.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any, NamedTuple

import httpx

from tests.ray.servers import by_replica, comes_true, descendants, serving, until

RESTARTS = ("--max-engine-restarts", "100000")
PAUSES = (1.0, 16.0)
"""Seconds between two deaths: a replica needs between 4 and 9 to start on two cores at rest."""
NUM_CLIENTS = 6
LEAST_DEATHS = 2
REPLICA = "ServeReplica:paceline:engine"
CONTROLLER, SPARE = "ServeController", "ray::IDLE"
TYPED = ("engine_dead", "starting", "request_failed")
WHOLE, LOST, HUNG = "whole", "lost", "hung"
"""Lost is what comes where nobody is left who could say what happened."""


class Story(NamedTuple):
    """What is killed of which server, and the codes of errors that clients may hear."""

    options: tuple[str, ...]
    victims: tuple[str, ...]
    codes: tuple[str, ...]
    num_engines: int


REPLICAS = ("--replicas", "2")
ENGINE_NAME = "paceline-engine"
STORIES = {
    "replicas": Story(REPLICAS, (REPLICA, ENGINE_NAME), TYPED, 2),
    "all of Ray's processes": Story(REPLICAS, (REPLICA, ENGINE_NAME, CONTROLLER, SPARE), TYPED, 2),
    "stages": Story(("--pipeline-parallel-size", "2"), ("paceline.stages",), TYPED, 1),
}


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
    parts, status = list[str](), 0
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            status = response.status_code
            parts += response.iter_text()
    except httpx.TimeoutException:
        return Told("", HUNG)
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


def is_wrong(told: Told, expected: Told, codes: Sequence[str]) -> bool:
    if told == expected or told.error == HUNG:
        return False
    return told.error not in codes or not expected.text.startswith(told.text)


class Crowd:
    """Clients that ask until it is over, and what they heard."""

    def __init__(self, client: httpx.Client, expected: Sequence[Told], codes: Sequence[str]):
        self.ends: Counter[str] = Counter()
        self.wrong: list[tuple[int, Told]] = []
        self._client, self._expected, self._codes = client, expected, codes
        self._is_over = Event()

    def __enter__(self) -> Crowd:
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        starts = (2 * k + k % 2 for k in range(NUM_CLIENTS))
        self._asked = [self._pool.submit(self._go_on, start) for start in starts]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        with self._pool:
            for each in self._asked:
                each.result()

    def _go_on(self, start: int) -> None:
        for i in itertools.count(start):
            if self._is_over.is_set():
                return
            which = i % len(self._expected)
            told = ask(self._client, bodies()[which])
            self.ends[told.error or WHOLE] += 1
            if is_wrong(told, self._expected[which], self._codes):
                self.wrong.append((which, told))
            if told.error:
                self._is_over.wait(0.1)  # as a client that tries again


def kill_at_random(
    pid: int, rng: random.Random, victims: Sequence[str], seconds: float, crowd: Crowd
) -> Counter[str]:
    """Returns how many of each were killed: at least so many that they and the answers count.

    A busy machine may take longer to start a process than passes until the next death, and then
    nobody is answered. So an answer comes between two deaths once the time is over.
    """
    deadline, deaths = time.monotonic() + seconds, Counter[str]()
    while True:
        kind = rng.choice(victims)
        if alive := descendants(pid, kind):
            with suppress(ProcessLookupError):
                os.kill(rng.choice(alive), signal.SIGKILL)
                deaths[kind] += 1
        time.sleep(rng.uniform(*PAUSES))
        if time.monotonic() < deadline:
            continue
        if deaths.total() >= LEAST_DEATHS and crowd.ends[WHOLE] >= NUM_CLIENTS:
            return deaths
        before = crowd.ends[WHOLE]
        until(lambda before=before: crowd.ends[WHOLE] > before)


def holding(pid: int, client: httpx.Client, num_engines: int) -> int:
    """Engines that are missing, run something or hold a block, when they have had their time."""
    left = num_engines

    def are_at_rest() -> bool:
        nonlocal left
        left = _holding_now(pid, client, num_engines)
        return not left

    comes_true(are_at_rest)
    return left


def _holding_now(pid: int, client: httpx.Client, num_engines: int) -> int:
    try:
        used = by_replica(client, "kv_cache_usage_perc")
        running = by_replica(client, "num_requests_running")
    except httpx.TransportError:
        return num_engines
    num_alive = len(descendants(pid, ENGINE_NAME))
    if len(used) == len(running) == num_alive == num_engines:
        return sum(bool(used[name] or running[name]) for name in used)
    return max(1, abs(num_engines - min(num_alive, len(used))))


def known() -> list[Told]:
    """What one process answers."""
    with serving(*RESTARTS) as (_, client):
        return [ask(client, body) for body in bodies()]


class Toll(NamedTuple):
    """What deaths have cost.

    Attributes:
        wrong: answers with tokens that one process does not say, or with an unknown error.
        holding: engines that are missing, run something or hold a block afterwards.
        other_afterwards: answers that are not the known ones when all is quiet again.
    """

    deaths: Counter[str]
    ends: Counter[str]
    wrong: list[tuple[int, Told]]
    holding: int
    other_afterwards: int


def toll_of(name: str, expected: Sequence[Told], seconds: float) -> Toll:
    """Deaths of a story go on for so many seconds, or until there were enough of them."""
    story = STORIES[name]
    with serving(*RESTARTS, *story.options) as (server, client):
        with Crowd(client, expected, story.codes) as crowd:
            rng = random.Random(1)
            deaths = kill_at_random(server.pid, rng, story.victims, seconds, crowd)
        left = holding(server.pid, client, story.num_engines)
        again = sum(
            ask(client, body) != answer for body, answer in zip(bodies(), expected, strict=True)
        )
    return Toll(deaths, crowd.ends, crowd.wrong, left, again)
