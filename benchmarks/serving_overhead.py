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
import multiprocessing
import random
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from harness import Sample, arguments, note, numbers, pair_up, paired_ratio, take_turns
from report import Report, Target, interval, number, table, verdict

from paceline import AsyncLLM, SamplingParams
from paceline.server.config import ServerConfig
from paceline.server.engine.client import EngineClient
from paceline.server.run import run as run_server

END = b"0\r\n\r\n"
ENDING_SECONDS = 30.0
Answer = tuple[int, str]
"""Number of tokens, text."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


# --- a server and a client, each a process of its own ---------------------------------------------


def serve(factory: Callable[[], Any], stream_interval: float, pipe: Connection) -> None:
    """The server's process: says on which port it listens, then serves until it is told to end."""
    config = ServerConfig(port=0, served_model_names=("m",), stream_interval=stream_interval)
    client = EngineClient(factory, stream_interval=stream_interval)
    run_server(client, config, pipe.send)


def ask(port: int, pipe: Connection) -> None:
    """The client's process: bodies come through the pipe, and the answers to them go back."""
    with asyncio.Runner() as runner:
        streams: list[Stream] = []
        while bodies := pipe.recv():
            pipe.send(runner.run(_answers(port, bodies, streams)))


async def _answers(port: int, bodies: Sequence[bytes], streams: list[Stream]) -> list[bytes]:
    while len(streams) < len(bodies):
        streams.append(await asyncio.open_connection("127.0.0.1", port))
    pairs = zip(streams, bodies, strict=False)
    return await asyncio.gather(*(_raw_answer(*stream, body) for stream, body in pairs))


async def _raw_answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> bytes:
    head = f"Host: m\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
    answer = b""
    while not answer.endswith(END):
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError(f"the server closed the connection after {answer!r:.300}")
        answer += data
    return answer


def read(answer: bytes) -> Answer:
    """What a stream brought.

    Raises: ValueError: an error instead of an answer, or an end that is none.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    data = b"".join(re.split(rb"\r\n[0-9a-f]+\r\n", b"\r\n" + body))
    events = data.removesuffix(b"\r\n").decode().split("\n\n")
    if not head.startswith(b"HTTP/1.1 200 ") or events[-2:] != ["data: [DONE]", ""]:
        raise ValueError(f"not the answer that was wanted: {answer!r:.200}")
    *documents, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(document["choices"][0]["text"] for document in documents)
    return last["usage"]["completion_tokens"], text


@dataclass(slots=True)
class Served:
    """What came back over HTTP, not yet looked at."""

    raw: list[bytes]


class HttpPair:
    """The two processes."""

    def __init__(self, factory: Callable[[], Any], stream_interval: float) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._server = context.Process(target=serve, args=(factory, stream_interval, theirs))
        self._server.start()
        theirs.close()
        port = int(ours.recv().split(" at http://127.0.0.1:")[1].split()[0])
        self._pipe, theirs = context.Pipe()
        self._client = context.Process(target=ask, args=(port, theirs))
        self._client.start()
        self._cpu = 0.0

    def answers(self, prompts: Sequence[list[int]], length: int) -> Served:
        """Greedy answers of exactly that many tokens to all prompts at once."""
        wishes = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        self._pipe.send(
            [json.dumps({"prompt": each, **wishes, **stream}).encode() for each in prompts]
        )
        return Served(self._pipe.recv())

    def cpu_seconds(self) -> float:
        """What the server's own process has computed since the last call, its engine's not."""
        tasks = Path(f"/proc/{self._server.pid}/task").glob("*/schedstat")
        before, self._cpu = self._cpu, sum(int(t.read_text().split()[0]) for t in tasks) / 1e9
        return self._cpu - before

    def close(self) -> None:
        self._pipe.send([])
        self._client.join(ENDING_SECONDS)
        self._server.terminate()
        self._server.join(ENDING_SECONDS)
        for process in (self._client, self._server):
            process.kill()


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
    async with client.generate([prompt], [params]) as generation:
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
                interval(ratio, 3),
                number(row.get("overhead_ms")),
                number(row.get("server_cpu_seconds_per_1000_tokens"), 3),
                verdict(row),
            ]
        )
    return [table(headers, rows)]


def raw(sample: Sample) -> dict[str, Any]:
    """A sample as it is kept: everything but the answers themselves."""
    facts = {name: value for name, value in sample.facts.items() if name != "answers"}
    return {**asdict(sample), "facts": facts}


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
