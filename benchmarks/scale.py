"""What replicas cost and bring on one machine, beside one process with all of its cores.

Agents ask in turns, several at once: their prompts begin with the same instructions, each goes on
with a task of its own and all that was said, and names its caller. Told are tokens per second, how
much of the prompts was cached, and accepted tokens per step. The time to the first token is that of
short streams one after another. What one replica takes longer than one process with as many threads
is Serve's and the ingress'.

Replicas are killed, of each model several times, each time until as many as before serve again.

What routing does to caches and drafts is counted apart, without Serve, on the times and lengths of
a recorded service (:mod:`agent_requests`).

    python benchmarks/scale.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import agent_requests
import httpx
from agent_requests import routed, turns
from harness import arguments, chosen, names, note
from load_server import ServerProcess
from prompt_sets import load_prompts
from replica_faults import REPLICA
from report import Report, Row, Target, grid, table

from paceline.core.errors import RequestError

ONE, ONE_REPLICA = "one process, 2 threads", "1 replica of 2 threads"
REPLICAS = "2 replicas of 1 thread"
ARMS = {
    ONE: ("--threads", "2"),
    ONE_REPLICA: ("--threads", "2", "--replicas", "1"),
    REPLICAS: ("--threads", "1", "--replicas", "2"),
}
LIMITS = ("--max-model-len", "2048", "--kv-cache-memory", "64M")
ANSWER_TOKENS = 48
MOST_OVERHEAD_MS = 8.0
LEAST_THROUGHPUT, LEAST_HITS, LEAST_ACCEPTED = 0.93, 0.9, 1.2
MOST_RECOVERY_SECONDS = 10.0
PATIENCE = 300.0
EMBEDDED = "embedded"
"""The model of a server that is given none."""
RULES = "You edit files of a project. Answer with the changed lines alone, and nothing else. " * 12


@contextmanager
def served(*options: str) -> Iterator[httpx.Client]:
    """A client of ``paceline serve`` with these options."""
    server = ServerProcess(*options)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=300) as client:
            yield client
    finally:
        server.end()


def first_token_seconds(client: httpx.Client, index: int) -> float:
    """From the request to the first event of its stream."""
    body = {"prompt": f"{index} is", "max_tokens": 2, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        seconds = time.perf_counter() - began
        for _ in lines:
            pass
    return seconds


def agent(client: httpx.Client, name: str, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """The usage of each answer of one agent, which asks for one task after another."""
    said, usages = [{"role": "system", "content": RULES}], []
    for task in tasks:
        said.append({"role": "user", "content": task})
        body = {
            "messages": said,
            "user": name,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "include_metrics": True,
        }
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        said.append(answer["choices"][0]["message"])
        usages.append(answer["usage"])
    return usages


def measured(arm: str, options: argparse.Namespace) -> Row:
    edits = load_prompts("auto").kind("edit")
    tasks = [[text[:400] for text in edits[i :: options.agents]] for i in range(options.agents)]
    with served(*LIMITS, *ARMS[arm]) as client, ThreadPoolExecutor(options.agents) as pool:
        for index in range(8):
            first_token_seconds(client, -index)
        firsts = [first_token_seconds(client, index) for index in range(options.streams)]
        began = time.perf_counter()
        asked = [
            pool.submit(agent, client, f"agent {i}", own[: options.turns])
            for i, own in enumerate(tasks)
        ]
        usages = [usage for each in asked for usage in each.result()]
        seconds = time.perf_counter() - began
    drafts = [usage["metrics"]["speculative_decoding"] for usage in usages]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    note(f"{arm}: {seconds:.1f} s")
    return {
        "arm": arm,
        "first_token_ms": median(firsts) * 1e3,
        "tokens_per_second": sum(usage["completion_tokens"] for usage in usages) / seconds,
        "cached_share": cached / prompts,
        "accepted_per_step": sum(d["num_accepted_tokens"] for d in drafts)
        / sum(d["num_steps"] for d in drafts),
        "requests": len(usages),
    }


def num_serving(client: httpx.Client) -> int:
    """Replicas that tell their metrics."""
    return len(set(re.findall(r'replica="(\d+)"', client.get("/metrics").text)))


def recoveries(model: str, count: int) -> list[float]:
    """Seconds from the death of a replica until both of them serve."""
    server, found = ServerProcess(model, *LIMITS, *ARMS[REPLICAS]), list[float]()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE) as client:
            for index in range(count):
                began = time.monotonic()
                os.kill(server.named(REPLICA)[index % 2], signal.SIGKILL)
                while num_serving(client) > 1:  # it is not known yet
                    time.sleep(0.02)
                while num_serving(client) < 2 and time.monotonic() - began < PATIENCE:
                    time.sleep(0.2)
                found.append(time.monotonic() - began)
                note(f"a killed replica of {model}: {found[-1]:.1f} s")
                time.sleep(2.0)
    finally:
        server.end()
    return found


def routings(options: argparse.Namespace) -> list[Row]:
    """A row for each way of routing; their answers are compared token by token."""
    try:
        asked = turns(options.requests, options.agents)
    except RequestError as error:
        note(f"routing is left out: {error}")
        return []
    arms = (routed(arm, asked, options.engines) for arm in agent_requests.ARMS)
    rows, answers = zip(*arms, strict=True)
    if any(each != answers[0] for each in answers):
        raise AssertionError("the answers depend on which replica was asked")
    return list(rows)


def routing_targets(rows: Sequence[Row]) -> list[Target]:
    """What affinity is to bring over round robin, and to leave of what one engine has."""
    by_arm = {row["arm"]: row for row in rows}
    what = (
        ("accepted tokens per step", "accepted_per_step", agent_requests.TURNS, LEAST_ACCEPTED),
        ("prompt tokens cached", "hit_rate", agent_requests.ONE, LEAST_HITS),
    )
    return [
        Target(
            f"{name}, affinity over {other}",
            by_arm[agent_requests.AFFINITY][key] / by_arm[other][key],
            least,
            "at least",
        )
        for name, key, other, least in what
        if rows
    ]


def tables(results: Sequence[Row]) -> list[str]:
    served_columns = (
        ("arm", "arm"),
        ("first token, ms (median)", "first_token_ms", 1),
        ("tokens/s", "tokens_per_second", 0),
        ("prompt tokens cached", "cached_share", 2),
        ("accepted tokens per step", "accepted_per_step", 2),
        ("requests", "requests"),
    )
    routed_columns = (
        ("routing", "arm"),
        ("prompt tokens cached", "hit_rate", 2),
        ("accepted tokens per step", "accepted_per_step", 2),
        ("requests of the busiest engine", "busiest"),
        ("requests", "routed"),
    )
    both = ("first_token_ms", served_columns), ("hit_rate", routed_columns)
    found = [([row for row in results if key in row], columns) for key, columns in both]
    return [table(*grid(rows, *columns)) for rows, columns in found if rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.sized("--agents", 8, 4, "at once")
    parser.sized("--turns", 6, 2, "of each agent")
    parser.sized("--streams", 100, 10, "one after another, for the time to the first token")
    parser.sized("--models", [EMBEDDED, "smollm2"], [EMBEDDED], "that die", type=names)
    parser.sized("--deaths", 6, 2, "of replicas of each")
    parser.sized("--requests", 160, 16, "of the recorded service, for routing")
    parser.sized("--engines", 4, 2, "that they are routed to")
    options = parser.parse_args(argv)
    settings = ("quick", "agents", "turns", "streams", "models", "deaths", "requests", "engines")
    report = Report("scale", chosen(options, *settings))
    report.results = [measured(arm, options) for arm in ARMS]
    again = {model: recoveries(model, options.deaths) for model in options.models}
    report.samples = [
        {"model": model, "recovery_seconds": seconds} for model in again for seconds in again[model]
    ]
    routed_rows = routings(options)
    by_arm = {row["arm"]: row for row in report.results}
    one, served_one = by_arm[ONE], by_arm[ONE_REPLICA]
    overhead = served_one["first_token_ms"] - one["first_token_ms"]
    share = served_one["tokens_per_second"] / one["tokens_per_second"]
    back = "seconds until a killed replica of {} serves again, {}"
    report.targets = [
        Target("ms that Serve adds to a first token", overhead, MOST_OVERHEAD_MS),
        Target("tokens/s, one replica over one process", share, LEAST_THROUGHPUT, "at least"),
        *(
            Target(back.format(model, name), of(seconds), MOST_RECOVERY_SECONDS)
            for model, seconds in again.items()
            for name, of in (("median", median), ("longest", max))
        ),
        *routing_targets(routed_rows),
    ]
    report.results += routed_rows
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
