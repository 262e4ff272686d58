"""A server under clients that abort, disconnect and read slowly, watched for what it loses.

Many streams at once draw from a set of requests whose answers are known: each has been run alone,
plainly, before. Every answer that completes must equal the known one in text, tokens, log-probs
and usage, whatever shared its batch, with speculation on, and what came of one that was given up
must be how the known one begins. Meanwhile the memory of the server's processes is read; in the
end no KV block, file or thread may be left over. Requests go out through the client of
``paceline bench serve``; those that are not even whole, through a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import aiohttp
from harness import Report, Row, Target, arguments, chosen, grid, note, number, table
from prompt_sets import load_prompts
from server_process import ENGINE, HTTP, Reading, ServerProcess, growth

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.api.outputs import Completion
from paceline.build.default_drafts import default_speculative_config
from paceline.config.speculative import SuffixConfig
from paceline_lab.bench.client import new_session

# --- requests whose answers are known -------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "is_open": {"type": "boolean"}},
    "required": ["name", "is_open"],
    "additionalProperties": False,
}
OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.9, "presence_penalty": 1.0, "logit_bias": {267: 3.0, 300: -5.0}},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.6, "logprobs": 0, "min_tokens": 12, "n": 3},
    {"temperature": 0.0, "stop": ["return", "\n\n"]},
    {"temperature": 0.9, "stop": ["e"], "include_stop_str_in_output": True},
    {"temperature": 0.8, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0.5, "structured_outputs": {"regex": "[a-z]{3,20} (yes|no)"}},
)
WITHOUT_FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""A server's own defaults are others than those of the Python API."""
LENGTHS = (1, 8, 24, 48, 96, 160)
LONG = {"temperature": 0.8, "n": 4, "logprobs": 5, "ignore_eos": True, "max_tokens": 200}
"""Answers too large for the buffers between server and client."""
PROMPT_CHARACTERS = (60, 200, 500)


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample of an answer, in what every way of asking can be compared by."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Known:
    """A request, and its answer.

    Attributes:
        body: fields of ``/v1/completions`` without those that do not change the answer.
        prompt_ids: the prompt, encoded.
    """

    body: Mapping[str, Any]
    prompt_ids: Sequence[int]
    choices: Sequence[Choice]


def bodies(count: int, source: str) -> list[dict[str, Any]]:
    """Distinct requests: options in turn, with prompts and lengths drawn from a fixed seed."""
    rng = random.Random(0)
    sets = load_prompts(source)
    prompts = [text for kind in ("code", "prose", "edit") for text in sets.kind(kind)]
    found = []
    for index in range(count):
        options = LONG if index % 16 == 15 else OPTIONS[index % len(OPTIONS)]
        body = {
            "prompt": rng.choice(prompts)[: rng.choice(PROMPT_CHARACTERS)],
            "seed": index,
            **WITHOUT_FILTERS,
            "max_tokens": rng.choice(LENGTHS),
            **options,
        }
        found.append(body)
    return found


def params(body: Mapping[str, Any]) -> SamplingParams:
    fields = {name: value for name, value in body.items() if name != "prompt"}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputs(**fields["structured_outputs"])
    return SamplingParams(**fields)


def answered(wanted: Sequence[Mapping[str, Any]], **engine: Any) -> list[Known]:
    """The answers, one request at a time, of an engine without speculation.

    Args:
        engine: options of :class:`~paceline.api.llm.LLM`.
    """
    found = []
    with LLM("embedded", speculative_config=[], **engine) as llm:
        for body in wanted:
            ids = llm.encode(body["prompt"])
            output = llm.generate(ids, params(body))
            found.append(Known(body, ids, [_choice(each) for each in output.completions]))
    return found


def _choice(completion: Completion) -> Choice:
    return Choice(
        completion.text,
        tuple(completion.token_ids),
        tuple(entry.logprob for entry in completion.logprobs),
        None if completion.finish_reason is None else str(completion.finish_reason),
        completion.stop_reason,
    )


# --- one request ----------------------------------------------------------------------------------

MANNERS = {
    "whole": 10,  # reads the answer as it comes
    "slow": 3,  # a few bytes, then a pause
    "abort": 4,  # resets the connection in mid-answer
    "leave": 2,  # closes it in mid-answer
    "half closed": 1,  # says that it will send no more, and reads on
    "deaf": 1,  # closes without having read anything
    "half a body": 2,  # leaves before its request is complete
    "refused": 1,  # sends what is answered with an error
}
"""How clients behave, and how often in proportion."""
RAW = ("half closed", "deaf", "half a body")
"""Manners of which no answer is expected."""
BUFFER = 4096
"""Bytes that a slow reader's socket and this program hold of what it has not read."""
PATIENCE = 300.0
"""Seconds for one request; longer is a lost answer."""


class LoadError(Exception):
    """An answer that is not the known one."""


@dataclass(slots=True)
class Answer:
    """What has arrived of an answer."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False


def varied(known: Known, rng: random.Random) -> dict[str, Any]:
    """The request with what must not change its answer."""
    body = {**known.body, "return_origins": True, "stream": rng.random() < 0.75}
    if rng.random() < 0.3:
        body["prompt"] = list(known.prompt_ids)
    if rng.random() < 0.7:
        body["cache_salt"] = str(rng.randrange(8))
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    match rng.randrange(6):
        case 0:
            body["speculative"] = {"enabled": False}
        case 1:
            body["speculative"] = {"num_speculative_tokens": rng.randrange(1, 5)}
        case 2:
            body["speculative"] = {"method": rng.choice(["suffix", "draft_model"])}
    return body


def slow_session() -> aiohttp.ClientSession:
    """Of a client whose socket and buffers hold little of what it has not read."""

    def small(address: Any) -> socket.socket:
        made = socket.socket(*address[:3])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        return made

    connector = aiohttp.TCPConnector(socket_factory=small)
    return aiohttp.ClientSession(connector=connector, read_bufsize=BUFFER)


async def ask(
    session: aiohttp.ClientSession, port: int, known: Known, manner: str, rng: random.Random
) -> None:
    """Send one request in one manner.

    Raises:
        LoadError: the answer is not the known one.
        aiohttp.ClientError, OSError, TimeoutError: it was lost.
    """
    body = varied(known, rng)
    if manner == "refused":
        body["temperature"] = -1.0
    if manner in RAW:
        await ask_for_nothing(port, json.dumps(body).encode(), manner, rng)
        return
    answer = Answer()
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with asyncio.timeout(PATIENCE), session.post(url, json=body) as response:
        answer.status = response.status
        await read(response, answer, manner, rng)
    check(known, answer, body, manner)


async def read(
    response: aiohttp.ClientResponse, answer: Answer, manner: str, rng: random.Random
) -> None:
    """Read an answer for as long as its reader has patience."""
    gives_up_at = rng.randrange(1, 6000) if manner in ("abort", "leave") else float("inf")
    pause = rng.choice([0.005, 0.02]) if manner == "slow" else 0.0
    connection = response.connection  # gone once all has been read
    async for data in response.content.iter_chunked(200 if pause else 1 << 16):
        answer.body += data
        if len(answer.body) >= gives_up_at:
            break
        await asyncio.sleep(pause)
    else:
        answer.is_complete = True
    if manner == "abort" and connection is not None and connection.transport is not None:
        # The other end sees an error rather than an end.
        made = connection.transport.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.transport.abort()


async def ask_for_nothing(port: int, data: bytes, manner: str, rng: random.Random) -> None:
    """Leave before the answer, or say that nothing more will be sent and take what comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
    writer.write(sent[: rng.randrange(1, len(sent))] if manner == "half a body" else sent)
    with suppress(OSError):
        if manner == "half closed" or (manner == "half a body" and rng.random() < 0.5):
            writer.write_eof()
        if manner == "half closed":
            async with asyncio.timeout(PATIENCE):
                await reader.read()
        else:
            await asyncio.sleep(rng.random() * 0.2)
        writer.close()
        await writer.wait_closed()


# --- what came back -------------------------------------------------------------------------------


def check(known: Known, answer: Answer, body: Mapping[str, Any], manner: str) -> None:
    """Compare what arrived with what is known.

    Raises:
        LoadError: they differ.
    """
    wanted = 400 if manner == "refused" else 200
    if answer.status not in ((wanted,) if answer.is_complete else (wanted, 0)):
        raise LoadError(f"status {answer.status}: {bytes(answer.body[:300])!r}")
    if manner == "refused" or not (answer.is_complete or body["stream"]):
        return
    found = documents(answer, body["stream"])
    parts: dict[int, list[dict[str, Any]]] = {}
    for document in found:
        if "error" in document:
            raise LoadError(f"an error instead of an answer: {document}")
        for part in document["choices"]:
            parts.setdefault(part["index"], []).append(part)
    _check_usage(known, found, body, answer.is_complete)
    if answer.is_complete and len(parts) != len(known.choices):
        raise LoadError(f"{len(parts)} samples instead of {len(known.choices)}")
    for index, found in parts.items():
        _compare(_joined(found), known.choices[index], answer.is_complete)


def documents(answer: Answer, is_stream: bool) -> list[dict[str, Any]]:
    """The JSON that has arrived whole: of a stream each event's."""
    if not is_stream:
        return [json.loads(answer.body)]
    *events, rest = bytes(answer.body).split(b"\n\n")
    data = [each.removeprefix(b"data: ") for each in events if each.startswith(b"data: ")]
    if answer.is_complete and (rest or data.pop() != b"[DONE]"):
        raise LoadError("the stream ended without its end")
    return [json.loads(each) for each in data if each != b"[DONE]"]


def _check_usage(
    known: Known, documents: list[dict[str, Any]], body: Mapping[str, Any], is_complete: bool
) -> None:
    usage = documents[-1].get("usage") if documents else None
    if not is_complete or (usage is None and "stream_options" not in body and body["stream"]):
        return
    wanted = len(known.prompt_ids), sum(len(choice.token_ids) for choice in known.choices)
    if usage is None or (usage["prompt_tokens"], usage["completion_tokens"]) != wanted:
        raise LoadError(f"usage is {usage} instead of {wanted}")


def _joined(parts: list[dict[str, Any]]) -> Choice:
    logprobs = [part["logprobs"]["token_logprobs"] for part in parts if part["logprobs"]]
    return Choice(
        "".join(part["text"] for part in parts),
        tuple(token["id"] for part in parts for token in part["tokens"]),
        tuple(value for values in logprobs for value in values),
        parts[-1]["finish_reason"],
        parts[-1]["stop_reason"],
    )


def _compare(found: Choice, wanted: Choice, is_complete: bool) -> None:
    if is_complete or found.finish_reason is not None:
        same = found == wanted
    else:
        same = (
            wanted.text.startswith(found.text)
            and wanted.token_ids[: len(found.token_ids)] == found.token_ids
            and wanted.logprobs[: len(found.logprobs)] == found.logprobs
        )
    if not same:
        raise LoadError(f"{found} instead of {wanted}")


# --- the load -------------------------------------------------------------------------------------

MAX_MODEL_LEN = 512
KV_MEMORY = "10M"
"""Less than the streams could use: preemption is part of the load."""
CACHED_TOKENS = 16384
READING_SECONDS = 5.0
SETTLING_SECONDS = 30.0
WARM_UP = 0.2
"""Share of the time after which memory must not grow."""
GROWTH = 0.02
NUM_FIRST = 16
MEGABYTE = 1 << 20


@dataclass(slots=True)
class Load:
    """The clients of one server and what they met."""

    port: int
    known: Sequence[Known]
    ends_at: float
    done: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    async def stream(self, seed: int) -> None:
        """One client after the other, until time is up; most keep the connection of the last."""
        rng = random.Random(seed)
        while time.monotonic() < self.ends_at:
            async with new_session({}, PATIENCE) as session:
                while time.monotonic() < self.ends_at and rng.random() > 0.2:
                    await self._one(session, rng)

    async def _one(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        manner = rng.choices(list(MANNERS), list(MANNERS.values()))[0]
        index = rng.randrange(len(self.known))
        try:
            if manner == "slow":
                async with slow_session() as own:
                    await ask(own, self.port, self.known[index], manner, rng)
            else:
                await ask(session, self.port, self.known[index], manner, rng)
        except Exception as error:
            note(f"{manner}, request {index}: {error!r:.500}")
            shown = f"{type(error).__name__}: {error}"[:2000]
            self.failures.append({"manner": manner, "request": index, "error": shown})
        self.done[manner] += 1


async def watched(load: Load, server: ServerProcess, streams: int) -> list[Reading]:
    """Run the load; the server's readings meanwhile."""
    readings: list[Reading] = []

    async def watch() -> None:
        while True:
            readings.extend(server.readings())
            await asyncio.sleep(READING_SECONDS)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(load.stream(seed) for seed in range(streams)))
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return readings


def settled(server: ServerProcess, files: int) -> tuple[dict[str, Any], list[Reading]]:
    """What the server holds once nobody asks anything, or when patience is at its end."""
    deadline = time.monotonic() + SETTLING_SECONDS
    while True:
        stats, readings = server.stats(), server.readings()
        is_idle = not stats["running"] + stats["waiting"] and readings[0].files <= files
        if is_idle or time.monotonic() > deadline:
            return stats, readings
        time.sleep(0.2)


def speculative() -> str:
    """The default proposers, whose store of earlier answers is full when the warm-up ends."""
    configs = (
        replace(config, suffix_decoding_max_cached_tokens=CACHED_TOKENS)
        if isinstance(config, SuffixConfig)
        else config
        for config in default_speculative_config("embedded")
    )
    return json.dumps([asdict(config) for config in configs])


def run(options: argparse.Namespace, known: Sequence[Known], report: Report) -> None:
    server = ServerProcess(
        *("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory", KV_MEMORY),
        *("--planner", options.planner, "--max-queue", str(8 * options.streams)),
        *("--speculative-config", speculative()),
    )
    try:
        asyncio.run(_each_once(server.port, known[:NUM_FIRST]))
        _, before = settled(server, 1 << 20)
        server.reset_clock()
        began = time.monotonic()
        load = Load(server.port, known, began + options.minutes * 60)
        readings = asyncio.run(watched(load, server, options.streams))
        seconds = time.monotonic() - began
        stats, after = settled(server, before[0].files)
        alarms = server.alarms
    finally:
        code = server.end()
    report.samples = [*map(asdict, readings), *load.failures, *({"error": a} for a in alarms)]
    if code:
        report.samples.append({"error": f"the server ended with code {code}"})
    warm_up = WARM_UP * options.minutes * 60
    report.results = [
        {"kind": "requests", "seconds": seconds, "done": dict(load.done), **_counted(stats)},
        *({"kind": "memory", **growth(readings, name, warm_up)} for name in (HTTP, ENGINE)),
    ]
    report.targets = [*targets(load, report.results), *leftovers(stats, before, after)]


async def _each_once(port: int, known: Sequence[Known]) -> None:
    """All kinds of requests, so that what is made once has been made."""

    async with new_session({}, PATIENCE) as session:
        rng = random.Random(0)
        await asyncio.gather(*(ask(session, port, each, "whole", rng) for each in known))


def _counted(stats: dict[str, Any]) -> dict[str, Any]:
    names = ("steps", "emitted", "draft_tokens", "accepted")
    speculation = {name: stats["speculation"][name] for name in names}
    return {"tokens": stats["tokens"], "preemptions": stats["preemptions"], **speculation}


def targets(load: Load, results: Sequence[Row]) -> list[Target]:
    return [
        Target("answers that were lost, mixed up or wrong", len(load.failures), 0),
        Target("whole answers", load.done["whole"] + load.done["slow"], 1, "at least"),
        *(
            Target(f"growth of the {row['process']} after warm-up", row.get("growth"), GROWTH)
            for row in results[1:]
        ),
    ]


def leftovers(
    stats: dict[str, Any], before: Sequence[Reading], after: Sequence[Reading]
) -> list[Target]:
    return [
        Target("KV blocks in use at the end", stats["kv"]["used"], 0),
        Target("engine restarts", stats["restarts"], 0),
        *(
            Target(f"files left open, {old.process}", new.files - old.files, 0)
            for old, new in zip(before, after, strict=True)
        ),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    def megabytes(name: str) -> Callable[[Row], str]:
        return lambda row: number(row[name] / MEGABYTE, 1) if name in row else "-"

    requests, *memory = results
    names = ("preemptions", "steps", "emitted", "draft_tokens", "accepted")
    columns = (
        ("memory", "process"),
        ("start MB", megabytes("resident_at_start")),
        ("warm MB", megabytes("resident_after_warm_up")),
        ("end MB", megabytes("resident_at_end")),
        ("growth", lambda row: row.get("error") or f"{row['growth']:+.2%}"),
        ("most files", "most_files"),
    )
    return [
        table(["clients that", "requests"], list(requests["done"].items())),
        table(names, [[requests[name] for name in names]]),
        table(*grid(memory, *columns)),
    ]


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.sized("--minutes", 10.0, 1.0, "of load")
    parser.add_argument("--streams", type=int, default=64, help="clients at once")
    parser.sized("--num-requests", 96, 32, "distinct ones")
    parser.add_argument(
        "--planner",
        choices=("auto", "fixed"),
        default="fixed",
        help="fixed drafts also where it does not pay, so that every step has something to undo",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    settings = ("quick", "prompts", "minutes", "streams", "num_requests", "planner")
    report = Report("load_server", chosen(options, *settings))
    note(f"{options.num_requests} requests, each alone and plainly")
    wanted = bodies(options.num_requests, options.prompts)
    known = answered(wanted, max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    note(f"{options.streams} streams for {options.minutes:g} minutes")
    run(options, known, report)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
