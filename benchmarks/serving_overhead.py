"""What it costs an engine to be served: over HTTP, from a process of its own, and from a thread.

Four ways to the same engine: `LLM.generate` with all prompts as one batch; a server, asked over
HTTP for streams by a client in a third process; `EngineClient`, on which the server stands, with
the engine in a process of its own; and `AsyncLLM`, a thread of the process that serves. The last
two turn every piece into the JSON of a streamed chunk. The arms run in turns whose order is
reversed every other time; the overhead is an arm's seconds over those of the first, less one. With
one token per prompt it is that of the first token. The client times itself, from its first byte to
the last that comes, since its process is not the server's. Where the engine needs all cores, what
the server's process computes is taken from the engine: its CPU time is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from harness import (
    Report,
    Row,
    Sample,
    Target,
    arguments,
    chosen,
    first_error,
    grid,
    identical_target,
    interval,
    note,
    numbers,
    pair_up,
    paired_ratio,
    raw,
    table,
    take_turns,
    verdict,
)
from server_process import HTTP as HTTP_PROCESS
from server_process import ServerProcess

from paceline import AsyncLLM, SamplingParams
from paceline.server.engine_process.client import EngineClient
from paceline_lab.bench.client import BACKENDS, Outcome, new_session, send
from paceline_lab.bench.runs import run_load

ENDING_SECONDS = PATIENCE = 30.0
Answer = tuple[int, str]
"""Number of tokens, text."""
Timed = tuple[float, list[Outcome]]
"""A client's seconds, and what it was answered."""


# --- a client in a process of its own -------------------------------------------------------------


def ask(port: int, pipe: Pipe) -> None:
    """The client's process: bodies come through the pipe; seconds and answers to them go back."""

    async def answered() -> None:
        async with new_session({}, PATIENCE) as session:
            url = f"http://127.0.0.1:{port}{BACKENDS['openai']}"
            while bodies := pipe.recv():
                outcomes, seconds = await run_load(
                    partial(send, session, url), bodies, [0.0] * len(bodies)
                )
                pipe.send((seconds, outcomes))

    asyncio.run(answered())


def read(outcome: Outcome) -> Answer:
    """What a stream brought; ``RuntimeError`` for an error instead of an answer."""
    if outcome.error:
        raise RuntimeError(outcome.error)
    return outcome.output_len, outcome.text


class HttpPair:
    """A server and its client, processes of their own."""

    def __init__(self, options: argparse.Namespace, most: int) -> None:
        words = [options.model] if options.model else []
        words += ["--threads", str(options.threads)] if options.threads else []
        self._server = ServerProcess(
            *(*words, "--no-speculation", "--no-enable-prefix-caching"),
            *("--max-num-seqs", str(most), "--max-model-len", str(MAX_MODEL_LEN)),
            *("--stream-interval-ms", str(options.stream_interval_ms)),
        )
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._client = context.Process(target=ask, args=(self._server.port, theirs))
        self._client.start()
        self._cpu = 0.0

    def answers(self, prompts: Sequence[list[int]], length: int) -> Timed:
        """Greedy answers of exactly that many tokens to all prompts at once, not yet looked at."""
        wishes = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [{"prompt": each, **wishes, **stream} for each in prompts]
        self._pipe.send([json.dumps(body).encode() for body in bodies])
        timed: Timed = self._pipe.recv()
        return timed

    def cpu_seconds(self) -> float:
        """What the server's own process has computed since the last call, its engine's not."""
        pid = self._server.pids[HTTP_PROCESS]
        tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
        before, self._cpu = self._cpu, sum(int(t.read_text().split()[0]) for t in tasks) / 1e9
        return self._cpu - before

    def close(self) -> None:
        self._pipe.send([])
        self._client.join(ENDING_SECONDS)
        self._client.kill()
        self._server.end()


INSIDE, HTTP, PROCESS, THREAD = "in process", "HTTP", "own process", "thread"
SERVED = (HTTP, PROCESS, THREAD)
MAX_MODEL_LEN = 1024
PROMPT_TOKENS = 32
WANTED, WANTED_MS = 1.05, 3.0

Item = tuple[int, int]
"""Prompts at once, tokens of each answer."""
Tokens = list[list[int]]


# --- the other ways -------------------------------------------------------------------------------


def engine(model: str | None, threads: int | None, most: int) -> AsyncLLM:
    """What every arm runs; made here, or by the engine's process from this function's name."""
    return AsyncLLM(
        model or "embedded",
        speculative_config=[],
        num_threads=threads,
        max_num_seqs=most,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    )


def prompts_of(count: int) -> Tokens:
    rng = random.Random(0)
    return [[rng.randrange(4, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def params_of(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)


def rendered(text: str, finish_reason: str | None) -> str:
    """A chunk of a streamed completion."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "m"}
    return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"


async def from_process(client: EngineClient, prompt: list[int], params: SamplingParams) -> Answer:
    async with client.generate([prompt], [params]) as generation:
        return await taken(generation)


async def from_thread(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> Answer:
    return await taken(llm.astream(prompt, params))


async def taken(pieces: AsyncIterable[Any]) -> Answer:
    tokens, text = 0, ""
    async for piece in pieces:
        rendered(piece.text, piece.finish_reason)
        tokens, text = tokens + len(piece.token_ids), text + piece.text
    return tokens, text


async def at_once(ask: Callable[..., Awaitable[Answer]], served: Any, item: Item) -> list[Answer]:
    params = params_of(item[1])
    return await asyncio.gather(*(ask(served, prompt, params) for prompt in prompts_of(item[0])))


def inside(llm: AsyncLLM, item: Item) -> list[Answer]:
    outputs = llm.generate(prompts_of(item[0]), params_of(item[1]))
    return [(len(output.token_ids), output.text) for output in outputs]


def count(http: HttpPair, came: list[Answer] | Timed) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if isinstance(came, tuple):
        seconds, answers = came
        facts = {"cpu_seconds": http.cpu_seconds(), "client_seconds": seconds}
        came = [read(answer) for answer in answers]
    return {**facts, "output_tokens": sum(tokens for tokens, _ in came), "answers": came}


def run(options: argparse.Namespace, items: Sequence[Item]) -> list[Sample]:
    most = max(concurrency for concurrency, _ in items)
    factory = partial(engine, options.model, options.threads, most)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        llm = stack.enter_context(factory())
        client = EngineClient(factory, stream_interval=options.stream_interval_ms / 1e3)
        runner.run(client.start())
        stack.callback(lambda: runner.run(client.close()))
        http = HttpPair(options, most)
        stack.callback(http.close)
        arms: dict[str, Callable[[Any], Any]] = {
            INSIDE: partial(inside, llm),
            HTTP: lambda item: http.answers(prompts_of(item[0]), item[1]),
            PROCESS: lambda item: runner.run(at_once(from_process, client, item)),
            THREAD: lambda item: runner.run(at_once(from_thread, llm, item)),
        }
        for item in items:
            for arm in arms.values():
                arm(item)
        http.cpu_seconds()
        samples = take_turns(arms, items, options.repeat, partial(count, http))
    return [replace(s, seconds=s.facts.get("client_seconds", s.seconds)) for s in samples]


def summary(samples: Sequence[Sample], arm: str, item: Item) -> dict[str, Any]:
    """One row: a way of serving beside the engine's own speed."""
    row: dict[str, Any] = {"arm": arm, "concurrency": item[0], "max_tokens": item[1]}
    cell = [sample for sample in samples if sample.item == item]
    if (error := first_error(cell)) is not None:
        return {**row, "error": error}
    seconds = {
        name: median([s.seconds or 0.0 for s in cell if s.arm == name]) for name in (INSIDE, arm)
    }
    expected = next(s.facts["answers"] for s in cell if s.arm == INSIDE)
    tokens = item[0] * item[1]
    cpu = [s.facts["cpu_seconds"] for s in cell if s.arm == arm and "cpu_seconds" in s.facts]
    return {
        **row,
        "ratio": asdict(paired_ratio(pair_up(cell, arm, INSIDE))),
        "overhead_ms": (seconds[arm] - seconds[INSIDE]) * 1e3,
        "engine_tokens_per_second": tokens / seconds[INSIDE],
        "tokens_per_second": tokens / seconds[arm],
        "server_cpu_seconds_per_1000_tokens": median(cpu) / tokens * 1e3 if cpu else None,
        "identical": all(s.facts["answers"] == expected for s in cell),
    }


def targets(results: Sequence[Row], options: argparse.Namespace) -> list[Target]:
    """What a client of the server meets; the other ways say where it comes from."""
    rows = {(r["concurrency"], r["max_tokens"]): r for r in results if r["arm"] == HTTP}
    busiest = rows[max(options.concurrency), options.max_tokens]
    name = f"seconds over the engine's own, {busiest['concurrency']} at once"
    first = "milliseconds added to the first token, one at a time"
    return [
        Target(name, busiest.get("ratio", {}).get("value"), WANTED),
        Target(first, rows[1, 1].get("overhead_ms"), WANTED_MS),
        identical_target(results, "answers"),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        ("served from", "arm"),
        ("at once", "concurrency"),
        ("tokens each", "max_tokens"),
        ("engine tok/s", "engine_tokens_per_second", 1),
        ("tok/s", "tokens_per_second", 1),
        ("ratio", "ratio/value", 3),
        ("95 % interval", lambda row: interval(row.get("ratio", {}), 3)),
        ("added ms", "overhead_ms", 2),
        ("server's CPU s per 1,000 tokens", "server_cpu_seconds_per_1000_tokens", 3),
        ("identical", verdict),
    )
    return [table(*grid(results, *columns))]


# --- the program ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 16], help="prompts at once")
    parser.sized("--max-tokens", 200, 64, "per answer")
    parser.sized("--repeat", 15, 5, "of every run")
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--stream-interval-ms", type=float, default=20.0, help="of the server")
    parser.add_argument("--threads", type=int, help="of the engine (default: its own choice)")
    options = parser.parse_args(argv)
    items = [(1, 1), *((count, options.max_tokens) for count in options.concurrency)]
    note(f"{options.repeat} turns of {items} (prompts, tokens)")
    samples = run(options, items)
    settings = ("quick", "concurrency", "max_tokens", "repeat", "threads", "stream_interval_ms")
    config = chosen(options, *settings)
    config["model"] = "embedded" if options.model is None else Path(options.model).name
    name = "serving_overhead" if options.model is None else "serving_overhead_model"
    report = Report(name, config)
    report.samples = [raw(sample, {}) for sample in samples]
    report.results = [summary(samples, arm, item) for item in items for arm in SERVED]
    report.targets = targets(report.results, options)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
