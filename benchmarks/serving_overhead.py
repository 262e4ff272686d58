"""What it costs an engine to be served: over HTTP, from a process of its own, and from a thread.

Four ways to the same engine: `LLM.generate` with all prompts as one batch; a server, asked over
HTTP for streams by a client in a third process; `EngineClient`, on which the server stands, with
the engine in a process of its own; and `AsyncLLM`, a thread of the process that serves. The last
two turn every piece into the JSON of a streamed chunk. The arms run in turns whose order is
reversed every other time; the overhead is an arm's seconds over those of the first, less one. With
one token per prompt it is that of the first token. Where the engine needs all cores, what the
server's process computes is taken from the engine: its CPU time is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from harness import Sample, arguments, note, numbers, pair_up, paired_ratio, take_turns
from report import Report, Target, number, table
from serving_http import Answer, HttpPair, Served, read

from paceline import AsyncLLM, SamplingParams
from paceline.server.engine.client import EngineClient

INSIDE, HTTP, PROCESS, THREAD = "in process", "HTTP", "own process", "thread"
SERVED = (HTTP, PROCESS, THREAD)
MAX_MODEL_LEN = 1024
PROMPT_TOKENS = 32
WANTED, WANTED_MS = 1.05, 3.0

Item = tuple[int, int]
"""Prompts at once, tokens of each answer."""
Tokens = list[list[int]]


def engine(model: str | None, threads: int | None, most: int) -> AsyncLLM:
    """What every arm runs; made here, or by the engine's process from this function's name."""
    return AsyncLLM(
        model,
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
    tokens, text = 0, ""
    async with client.generate(prompt, params) as generation:
        async for piece in generation:
            rendered(piece.text, piece.finish_reason)
            tokens, text = tokens + len(piece.token_ids), text + piece.text
    return tokens, text


async def from_thread(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> Answer:
    tokens, text = 0, ""
    async for step in llm.astream(prompt, params):
        rendered(step.text, step.finish_reason)
        tokens, text = tokens + len(step.token_ids), text + step.text
    return tokens, text


async def at_once(ask: Callable[..., Awaitable[Answer]], served: Any, item: Item) -> list[Answer]:
    params = params_of(item[1])
    return await asyncio.gather(*(ask(served, prompt, params) for prompt in prompts_of(item[0])))


def inside(llm: AsyncLLM, item: Item) -> list[Answer]:
    outputs = llm.generate(prompts_of(item[0]), params_of(item[1]))
    return [(len(output.token_ids), output.text) for output in outputs]


def count(http: HttpPair, came: list[Answer] | Served) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if isinstance(came, Served):
        facts["cpu_seconds"] = http.cpu_seconds()
        came = [read(raw) for raw in came.raw]
    return {**facts, "output_tokens": sum(tokens for tokens, _ in came), "answers": came}


def run(options: argparse.Namespace, items: Sequence[Item]) -> list[Sample]:
    most = max(concurrency for concurrency, _ in items)
    factory = partial(engine, options.model, options.threads, most)
    interval = options.stream_interval_ms / 1e3
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        llm = stack.enter_context(factory())
        client = EngineClient(factory, stream_interval=interval)
        runner.run(client.start())
        stack.callback(lambda: runner.run(client.close()))
        http = HttpPair(factory, interval)
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
        return take_turns(arms, items, options.repeat, partial(count, http))


def summary(samples: Sequence[Sample], arm: str, item: Item) -> dict[str, Any]:
    """One row: a way of serving beside the engine's own speed."""
    row: dict[str, Any] = {"arm": arm, "concurrency": item[0], "max_tokens": item[1]}
    cell = [sample for sample in samples if sample.item == item]
    error = next((sample.error for sample in cell if sample.failed), None)
    if error is not None:
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


def targets(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Target]:
    """What a client of the server meets; the other ways say where it comes from."""
    rows = {(r["concurrency"], r["max_tokens"]): r for r in results if r["arm"] == HTTP}
    busiest = rows[max(options.concurrency), options.max_tokens]
    first = rows[1, 1]
    done = all("error" not in row for row in results)
    share = sum(bool(row.get("identical")) for row in results) / len(results)
    name = f"seconds over the engine's own, {busiest['concurrency']} at once"
    return [
        Target(name, busiest.get("ratio", {}).get("value"), WANTED),
        Target(
            "milliseconds added to the first token, one at a time",
            first.get("overhead_ms"),
            WANTED_MS,
        ),
        Target("share of rows with identical answers", share if done else None, 1.0, "at least"),
    ]


def tables(results: Sequence[dict[str, Any]]) -> list[str]:
    headers = ["served from", "at once", "tokens each", "engine tok/s", "tok/s", "ratio"]
    headers += ["95 % interval", "added ms", "server's CPU s per 1,000 tokens", "identical"]
    rows = []
    for row in results:
        ratio = row.get("ratio", {})
        rows.append(
            [
                *(row[key] for key in ("arm", "concurrency", "max_tokens")),
                number(row.get("engine_tokens_per_second"), 1),
                number(row.get("tokens_per_second"), 1),
                number(ratio.get("value"), 3),
                f"{number(ratio.get('low'), 3)} to {number(ratio.get('high'), 3)}",
                number(row.get("overhead_ms")),
                number(row.get("server_cpu_seconds_per_1000_tokens"), 3),
                row.get("error") or ("yes" if row["identical"] else "NO"),
            ]
        )
    return [table(headers, rows)]


def raw(sample: Sample) -> dict[str, Any]:
    """A sample as it is kept: everything but the answers themselves."""
    facts = {name: value for name, value in sample.facts.items() if name != "answers"}
    return {**asdict(sample), "facts": facts}


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 16], help="prompts at once")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: 200, quick: 64)")
    parser.add_argument("--repeat", type=int, help="of every run (default: 15, quick: 5)")
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--stream-interval-ms", type=float, default=20.0, help="of the server")
    parser.add_argument("--threads", type=int, help="of the engine (default: its own choice)")
    options = parser.parse_args(argv)
    options.max_tokens = options.max_tokens or (64 if options.quick else 200)
    options.repeat = options.repeat or (5 if options.quick else 15)
    items = [(1, 1), *((count, options.max_tokens) for count in options.concurrency)]
    note(f"{options.repeat} turns of {items} (prompts, tokens)")
    samples = run(options, items)
    settings = ("quick", "concurrency", "max_tokens", "repeat", "threads", "stream_interval_ms")
    config = {name: getattr(options, name) for name in settings}
    config["model"] = "embedded" if options.model is None else Path(options.model).name
    name = "serving_overhead" if options.model is None else "serving_overhead_model"
    report = Report(name, config)
    report.samples = [raw(sample) for sample in samples]
    report.results = [summary(samples, arm, item) for item in items for arm in SERVED]
    report.targets = targets(report.results, options)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
