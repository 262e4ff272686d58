"""Speculation in a model whose layers lie in two processes, with a slow network between them.

Each arm has a stage of its own, which ``paceline stage`` serves, behind a proxy on the loopback
that hands on every byte some milliseconds later in either direction. The plain arm in stages, a
second one as control, and the default proposers take turns, and so does one process that
decodes plainly, which shows what the distance costs.

``--requests`` measures several requests at once instead, and the reading of a long prompt: steps
that are cut where that pays, so that stages compute at the same time, against whole ones.
"""

from __future__ import annotations

import argparse
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from harness import CONTROL, PLAIN, against_plain, arguments, chosen, names, note, numbers, raw
from prompt_sets import KINDS, load_prompts, spread
from proposer_sets import DEFAULT
from report import Report, Row, Target, identical_target, pick
from speedup import batches, behind_prompt, comparison, hugging_face, run_cell

from paceline import LLM
from paceline.api.llm import embedded_model
from paceline.build.default_drafts import default_speculative_config
from paceline.cli.options.prompts import Encoder
from paceline.cli.options.resolve import without_memory
from paceline.config import parse_speculative_config
from paceline.engine.engine import Engine

ALONE, OVERLAPPED = "one process", "overlapped"
PROMPT_TOKENS, READ_TOKENS = 64, 4
"""Of each of several requests, and that are made after a long prompt."""
MAX_MODEL_LEN = 1024
CHUNK = 1 << 16
WANTED, OVERLAP_WANTED = 1.8, 1.2


def hand_on(source: socket.socket, target: socket.socket, seconds: float) -> None:
    """Every byte so much later, until either end is closed."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        with suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.perf_counter()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)

    threading.Thread(target=deliver, daemon=True).start()
    data = b" "
    while data:
        try:
            data = source.recv(CHUNK)
        except OSError:
            data = b""
        waiting.put((time.perf_counter() + seconds, data))


@contextmanager
def delayed(address: str, seconds: float) -> Iterator[str]:
    """An address behind which another one is, so much further away."""
    host, _, port = address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    near, _ = server.accept()
                    far = socket.create_connection((host, int(port)))
                    for each in (near, far):
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for ends in ((near, far), (far, near)):
                        arguments = (*ends, seconds)
                        threading.Thread(target=hand_on, args=arguments, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def stage() -> Iterator[str]:
    """The address of a stage in a process of its own."""
    command = [sys.executable, "-m", "paceline", "stage", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def leave_whole(engine: Engine) -> None:
    """Let an engine whose model lies in stages cut no step."""
    engine.runner.decoder.ops.micro_batching.counts = ()


def open_arms(options: argparse.Namespace, stack: ExitStack) -> dict[str, LLM]:
    model = options.model or embedded_model("target")
    draft = parse_speculative_config({"model": options.draft}) if options.draft else ()
    drafts = without_memory((*default_speculative_config(model), *draft))
    arms = {}
    second = {OVERLAPPED: ()} if options.requests else {DEFAULT: drafts}
    for name, proposers in {PLAIN: (), **second, ALONE: (), CONTROL: ()}.items():
        more: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "num_threads": options.threads}
        if name != ALONE:
            address = stack.enter_context(stage())
            if options.delay_ms:
                address = stack.enter_context(delayed(address, options.delay_ms / 1e3))
            more |= {"pipeline_parallel_size": 2, "pipeline_stages": (address,)}
        note(f"opening {name}")
        more |= {"speculative_config": proposers, "enable_prefix_caching": False}
        arms[name] = stack.enter_context(LLM(model, strict=True, **more))
        if options.requests and name in (PLAIN, CONTROL):
            arms[name].call(leave_whole)
    return arms


def cells(
    options: argparse.Namespace, texts: Sequence[list[int]]
) -> Iterator[tuple[dict[str, Any], list[list[list[int]]], int]]:
    """What tells a cell from others of its kind of text, its groups of prompts, and the tokens."""
    if not options.requests:
        for temperature in (0.0, 0.8):
            yield {"temperature": temperature}, [[text] for text in texts], options.max_tokens
        return
    for count in options.requests:
        label = {"temperature": 0.0, "requests": count, "tokens": options.max_tokens}
        short = [text[-PROMPT_TOKENS:] for text in texts]
        yield label, batches(short, count), options.max_tokens
    long = list(islice(cycle(chain.from_iterable(texts)), MAX_MODEL_LEN - READ_TOKENS))
    label = {"temperature": 0.0, "requests": 1, "tokens": READ_TOKENS}
    yield label, [[long]], READ_TOKENS


def targets(results: Sequence[Row]) -> list[Target]:
    wanted: Row = {"arm": DEFAULT}
    name, least = "speed-up in two stages, greedy code, default configuration", WANTED
    if pick(results, arm=OVERLAPPED):
        wanted = {"arm": OVERLAPPED, "requests": 8}
        name, least = "speed-up of overlapped steps, code, 8 requests", OVERLAP_WANTED
    code = pick(results, kind="code", temperature=0.0, **wanted)
    value = code[0].get("speedup", {}).get("value") if code else None
    return [Target(name, value, least, "at least"), identical_target(results)]


def tables(results: Sequence[Row]) -> list[str]:
    keys = {"text": "kind", "temperature": "temperature", "delay, ms": "delay_ms"}
    if any("requests" in row for row in results):
        keys |= {"requests": "requests", "tokens": "tokens"}
    return [comparison(results, keys)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--model", help="inflated, a folder or a GGUF file (default: embedded)")
    parser.add_argument("--draft", help="a draft model beside the default proposers")
    parser.add_argument("--delay-ms", type=float, default=3.0, help="of each direction")
    parser.add_argument("--kinds", type=names, default=list(KINDS["public"]))
    parser.sized("--num-prompts", 6, 2, "of each kind")
    parser.sized("--max-tokens", 80, 32, "per prompt")
    parser.add_argument("--repeat", type=int, help="of every run (default: 1)", default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--requests", type=numbers, default=[], help="at once: see above")
    options = parser.parse_args(argv)
    if options.model == "inflated":
        options.model, options.draft = (str(hugging_face("0.5b", r)) for r in ("target", "draft"))
    shown = ("quick", "num_prompts", "max_tokens", "repeat", "threads", "delay_ms", "requests")
    settings = chosen(options, *shown)
    model = Path(options.model or "embedded").parent.name if options.draft else "embedded"
    name = "pipeline_overlap" if options.requests else "pipeline"
    report = Report(name, {"model": model, **settings})
    source = load_prompts(options.prompts)
    with ExitStack() as stack:
        arms = open_arms(options, stack)
        encode = Encoder(arms[PLAIN].tokenizer).encode
        for kind in options.kinds:
            texts = spread(source.kind(kind), options.num_prompts)
            prompts = [encode(text)[-(MAX_MODEL_LEN - options.max_tokens) :] for text in texts]
            for told, groups, tokens in cells(options, prompts):
                label = {"kind": kind, **told, "delay_ms": options.delay_ms}
                note(", ".join(f"{name} {value}" for name, value in label.items()))
                sized = argparse.Namespace(**{**vars(options), "max_tokens": tokens})
                samples = run_cell(arms, groups, sized, told["temperature"])
                if not options.requests:
                    samples = behind_prompt(samples)
                report.samples += [raw(sample, label) for sample in samples]
                report.results += [
                    {**label, **against_plain(samples, arm)} for arm in arms if arm != PLAIN
                ]
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
