"""The same requests through every way of serving, whose answers have to be the same to the byte.

One process with speculation and without it, replicas on Ray Serve, two servers behind SGLang's
router, and a pipeline of two stages that are some milliseconds apart are asked one after another,
several requests at once. Compared are texts, log-probabilities, why each sample ended, and usage.
Left out are names and times of answers, and what was cached. A stream counts as what its events
add up to: how many tokens come in one of them depends on time.

The router is no dependency: ``pip install sglang-router`` puts it where this looks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from typing import Any

import httpx
from harness import arguments, chosen, names, note
from load_client import bodies
from peers_models import MissingPeerError
from pipeline import delayed, stage
from report import Report, Row, Target, grid, table
from scale import served
from serve_peers import free_port, serving

ONE, PLAIN, REPLICAS = "one process", "one process, plainly", "replicas on Ray Serve"
ROUTER, STAGES = "two servers behind sglang-router", "two stages, far apart"
MODEL = "model"
LIMITS = ("--max-model-len", "1024", "--kv-cache-memory", "64M", "--threads", "1")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NOT_PASSED_ON = ("include_stop_str_in_output",)
"""Fields of chats that SGLang's router drops."""
NOT_THE_ANSWER = ("id", "created", "prompt_tokens_details")
GROW = ("text", "content")
"""Words that come in pieces."""
Asked = tuple[str, Mapping[str, Any]]
Way = Callable[[], AbstractContextManager[httpx.Client]]


# --- what is asked --------------------------------------------------------------------------------


def requests(count: int, source: str) -> list[Asked]:
    """Completions and chats, streamed and not, each with every kind of options in turn."""
    made = list[Asked]()
    for index, body in enumerate(bodies(count, source)):
        turn = index // 12  # after which the options begin again
        path, fields = (CHAT, as_chat(body)) if turn % 2 else (COMPLETIONS, dict(body))
        fields |= {"model": MODEL, "stream": turn // 2 % 2 == 1}
        if "min_tokens" in fields:
            fields["max_tokens"] = max(fields["min_tokens"], fields["max_tokens"])
        if fields["stream"]:
            fields["stream_options"] = {"include_usage": True}
        made.append((path, fields))
    return made


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same wishes in the words of chats."""
    own = ("prompt", "logprobs", "structured_outputs", *NOT_PASSED_ON)
    found = {name: value for name, value in body.items() if name not in own}
    found["messages"] = [{"role": "user", "content": body["prompt"]}]
    if "logprobs" in body:
        found |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    shape = body.get("structured_outputs", {})
    if "json" in shape:
        schema = {"name": "shape", "schema": shape["json"]}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif shape:
        found |= shape
    return found


# --- what is answered -----------------------------------------------------------------------------


def told(client: httpx.Client, asked: Asked) -> str:
    """What an answer says.

    Raises:
        RuntimeError: there is none, or a stream ended before its end.
    """
    path, body = asked
    response = client.post(path, json=body)
    if response.status_code != 200:
        raise RuntimeError(f"status {response.status_code}: {response.text[:300]}")
    if not body["stream"]:
        return said([response.json()])
    *events, end = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    if end != "[DONE]":
        raise RuntimeError(f"the stream ended with {end[:300]}")
    return said([json.loads(event) for event in events])


def said(documents: Sequence[Mapping[str, Any]]) -> str:
    """An answer, or the events of one, as text that can be compared."""
    by_index = [
        {**each, "choices": {str(choice["index"]): choice for choice in each.get("choices", ())}}
        for each in documents
    ]
    return json.dumps(_lasting(reduce(added, by_index)), sort_keys=True)


def added(before: Any, after: Any, name: str = "") -> Any:
    """What two events say together of the field with this name."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before | {key: added(before.get(key), value, key) for key, value in after.items()}
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    if isinstance(before, str) and isinstance(after, str) and name in GROW:
        return before + after
    return before if after is None else after


def _lasting(value: Any) -> Any:
    if isinstance(value, list):
        return [_lasting(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _lasting(each) for key, each in value.items() if key not in NOT_THE_ANSWER}


# --- ways of serving ------------------------------------------------------------------------------


@contextmanager
def routed(options: Sequence[str]) -> Iterator[httpx.Client]:
    port = free_port()
    command: list[object] = [sys.executable, "-m", "sglang_router.launch_router", "--port", port]
    command += ["--host", "127.0.0.1", "--prometheus-port", free_port()]
    command += ["--policy", "round_robin", "--worker-startup-check-interval", 1]
    with served(*options) as one, served(*options) as other:
        command += ["--worker-urls", one.base_url, other.base_url]
        with serving(command, port) as url, httpx.Client(base_url=url, timeout=300) as client:
            body, until = {"model": MODEL, "prompt": "a", "max_tokens": 1}, time.monotonic() + 300
            while client.post(COMPLETIONS, json=body).status_code == 503:  # it knows no server yet
                if time.monotonic() > until:
                    raise MissingPeerError("the router found no server")
                time.sleep(0.5)
            yield client


@contextmanager
def in_stages(options: Sequence[str], seconds: float) -> Iterator[httpx.Client]:
    with (
        stage() as far,
        delayed(far, seconds) as address,
        served(*options, "--pipeline-stage", address) as client,
    ):
        yield client


def ways(options: argparse.Namespace) -> dict[str, Way]:
    """By name; the first one is what the others are compared with."""
    words = [*([options.model] if options.model else []), *LIMITS, "--served-model-name", MODEL]
    return {
        ONE: partial(served, *words),
        PLAIN: partial(served, *words, "--no-speculation"),
        f"{options.replicas} {REPLICAS}": partial(
            served, *words, "--replicas", str(options.replicas)
        ),
        ROUTER: partial(routed, words),
        STAGES: partial(in_stages, words, options.delay_ms / 1e3),
    }


def answers(way: Way, asked: Sequence[Asked], at_once: int) -> tuple[list[str], float]:
    """What each request is told, or why not; and the seconds."""

    def one(each: Asked) -> str:
        try:
            return told(client, each)
        except (RuntimeError, ValueError, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}"

    with way() as client, ThreadPoolExecutor(at_once) as pool:
        began = time.perf_counter()
        return list(pool.map(one, asked)), time.perf_counter() - began


def compared(
    name: str, asked: Sequence[Asked], found: Sequence[str], wanted: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row, and a failed sample for each answer that is none or another one."""
    samples: list[dict[str, Any]] = []
    for index, (request, own, other) in enumerate(zip(asked, found, wanted, strict=True)):
        if own != other or not own.startswith("{"):
            error = f"{own[:2000]} instead of {other[:2000]}"
            samples.append({"way": name, "request": [index, *request], "error": error})
    row = {"way": name, "requests": len(asked), "differing": len(samples)}
    row["digest"] = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    return row, samples


# --- the program ----------------------------------------------------------------------------------


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        ("served by", "way"),
        ("requests", "requests"),
        ("other answers", "differing"),
        ("digest of all answers", "digest"),
        ("seconds", "seconds", 0),
        ("load of the machine", "load", 1),
    )
    return [table(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--model", help="as paceline serve takes it (default: embedded)")
    parser.sized("--num-requests", 200, 48, "of which a half are chats, and a half are streamed")
    parser.sized("--replicas", 4, 2)
    parser.add_argument("--at-once", type=int, default=8, help="requests")
    parser.add_argument("--delay-ms", type=float, default=3.0, help="each way between the stages")
    parser.add_argument("--ways", type=names, help="words of names of those to run after the first")
    options = parser.parse_args(argv)
    shown = ("quick", "prompts", "num_requests", "replicas", "at_once", "delay_ms")
    model = {"model": options.model or "embedded"}
    report = Report("same_answers", {**model, **chosen(options, *shown)})
    asked, wanted = requests(options.num_requests, options.prompts), list[str]()
    for name, way in ways(options).items():
        if wanted and options.ways and not any(word in name for word in options.ways):
            continue
        note(name)
        try:
            found, seconds = answers(way, asked, options.at_once)
        except (MissingPeerError, RuntimeError) as error:
            report.results.append({"way": name, "requests": 0, "differing": len(asked)})
            report.samples.append({"way": name, "error": str(error)})
            continue
        wanted = wanted or found
        row, samples = compared(name, asked, found, wanted)
        report.results.append({**row, "seconds": seconds, "load": os.getloadavg()[0]})
        report.samples += samples
    different = sum(row["differing"] for row in report.results)
    report.targets = [Target("answers that are not one process's", different, 0)]
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
