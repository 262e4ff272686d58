"""How long another stream stands still while a server takes the first request of a kind.

Each run starts a server of its own, since what such a request needs of the vocabulary is made once.
One stream runs; then a chat comes, at the stream's first token or some seconds later, and is
awaited. A gap is the time between two events of the stream; the longest one from the request's
arrival to the answer's end counts. A chat with nothing special is the control.

    python benchmarks/first_requests.py --model FILE.gguf [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from harness import Sample, arguments, chosen, first_error, note, raw, run_sample
from load_client import SCHEMA
from load_server import ServerProcess
from report import Report, Row, Target, grid, table

WANTED_SECONDS = 0.1
SCHEMA_WISH = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "shop", "schema": SCHEMA}}
}
ARMS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "plain": ({}, 1.0),
    "a schema": (SCHEMA_WISH, 1.0),
    "a schema, at once": (SCHEMA_WISH, 0.0),
    "bad_words": ({"bad_words": ["shop"]}, 1.0),
}
"""Fields of the request, and the share of ``--later`` for which the stream runs before."""
STREAM = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
NO_END = 60.0
"""Seconds after which a stream that brings nothing is given up."""


class Stream(threading.Thread):
    """One stream and the moments at which its events come, from its first one to :meth:`end`."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.has_begun = threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=NO_END)
        self._is_over = threading.Event()

    def run(self) -> None:
        answer = posted(self._connection, "/v1/completions", {"prompt": "A story.", **STREAM})
        while not self._is_over.is_set() and (line := answer.readline()):
            if line.startswith(b"data: {"):
                self.times.append(time.perf_counter())
                self.has_begun.set()

    def end(self) -> None:
        self._is_over.set()
        self.join()
        self._connection.close()

    def longest_gap(self, began: float, ended: float) -> float:
        """Of the gaps that touch this time.

        Raises:
            ValueError: the stream was over before.
        """
        times = self.times
        return max(b - a for a, b in pairwise(times) if b >= began and a <= ended)


def posted(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
) -> http.client.HTTPResponse:
    head = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), head)
    return connection.getresponse()


def asked(port: int, wish: Mapping[str, Any]) -> None:
    """Let the request that comes while the stream runs be answered.

    Raises:
        RuntimeError: the answer is an error, or not by the schema.
    """
    message = {"role": "user", "content": "Name a shop and say whether it is open."}
    body = {"messages": [message], "max_tokens": 60, "temperature": 0, **wish}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=NO_END)
    answer = posted(connection, "/v1/chat/completions", body)
    document = json.load(answer)
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {document}")
    text = document["choices"][0]["message"]["content"]
    if wish is SCHEMA_WISH and set(json.loads(text)) != set(SCHEMA["required"]):
        raise RuntimeError(f"no answer by the schema: {text}")


def first_request(options: argparse.Namespace, arm: str) -> dict[str, float]:
    """A server from its start; what its stream had to wait for."""
    wish, share = ARMS[arm]
    words = [*([options.model] if options.model else []), "--max-model-len", "4608"]
    start = time.perf_counter()
    server = ServerProcess(*words, "--stream-interval-ms", "0")
    try:
        starting = time.perf_counter() - start
        stream = Stream(server.port)
        stream.start()
        if not stream.has_begun.wait(NO_END):
            raise RuntimeError("the stream did not begin")
        first_token = time.perf_counter() - start
        time.sleep(share * options.later)
        began = time.perf_counter()
        asked(server.port, wish)
        ended = time.perf_counter()
        stream.end()
        return {
            "gap": stream.longest_gap(began, ended),
            "answer": ended - began,
            "starting": starting,
            "first_token": first_token,
        }
    finally:
        server.end()


def summary(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    own = [sample for sample in samples if sample.arm == arm]
    error = first_error(own)
    if error is not None:
        return {"arm": arm, "error": error}
    names = ("gap", "answer", "starting", "first_token")
    return {"arm": arm, **{name: median(each.facts[name] for each in own) for name in names}}


def tables(rows: Sequence[Row]) -> list[str]:
    columns = (
        ("first request with", "arm"),
        ("longest gap, s", "gap", 3),
        ("its answer, s", "answer", 2),
        ("server starts, s", "starting", 2),
        ("start to first token, s", "first_token", 2),
    )
    return [table(*grid([row for row in rows if "error" not in row], *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="GGUF file or folder (default: the embedded model)")
    parser.add_argument("--label", default="", help="ends the name of the saved result")
    parser.sized("--rounds", 3, 1, "of every arm")
    parser.sized("--later", 3.0, 1.0, "seconds that the stream runs before the request")
    options = parser.parse_args(argv)
    name = "first_requests" + (f"-{options.label}" if options.label else "")
    model = {"model": Path(options.model).name if options.model else "embedded"}
    report = Report(name, model | chosen(options, "rounds", "later", "quick"))
    samples = []
    for number in range(options.rounds):
        for arm in ARMS:
            note(f"{arm}, {number + 1} of {options.rounds}")
            run = lambda: first_request(options, arm)  # noqa: E731, B023
            samples.append(run_sample(arm, "first", run, lambda facts: facts, number))
    report.results = [summary(samples, arm) for arm in ARMS]
    report.samples = [raw(sample, {}) | {"error": sample.error} for sample in samples]
    report.targets = [
        Target(f"longest gap in seconds, {row['arm']}", row.get("gap"), WANTED_SECONDS)
        for row in report.results
    ]
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
