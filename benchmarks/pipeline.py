"""Speculation in a model whose layers lie in two processes, with a slow network between them.

Each arm has a stage of its own, which ``paceline stage`` serves, behind a proxy on the loopback
that hands on every byte some milliseconds later in either direction. The plain arm in stages, a
second one as control, and the default proposers take turns, and so does one process that
decodes plainly, which shows what the distance costs.
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
from pathlib import Path
from typing import Any

from harness import CONTROL, PLAIN, against_plain, arguments, chosen, names, note, raw
from prompt_sets import KINDS, load_prompts, spread
from proposer_sets import DEFAULT
from report import Report, Row, Target, identical_target, pick
from speedup import behind_prompt, comparison, hugging_face, run_cell

from paceline import LLM
from paceline.commands.prompts import Encoder
from paceline.commands.resolve import without_memory
from paceline.config import parse_speculative_config
from paceline.engine.default_drafts import default_speculative_config
from paceline.llm import embedded_model

ALONE = "one process"
MAX_MODEL_LEN = 1024
CHUNK = 1 << 16
WANTED = 1.8


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


def open_arms(options: argparse.Namespace, stack: ExitStack) -> dict[str, LLM]:
    model = options.model or embedded_model("target")
    draft = parse_speculative_config({"model": options.draft}) if options.draft else ()
    drafts = without_memory((*default_speculative_config(model), *draft))
    arms = {}
    for name, proposers in {PLAIN: (), DEFAULT: drafts, ALONE: (), CONTROL: ()}.items():
        more: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "num_threads": options.threads}
        if name != ALONE:
            far = stack.enter_context(stage())
            address = stack.enter_context(delayed(far, options.delay_ms / 1e3))
            more |= {"pipeline_parallel_size": 2, "pipeline_stages": (address,)}
        note(f"opening {name}")
        more |= {"speculative_config": proposers, "enable_prefix_caching": False}
        arms[name] = stack.enter_context(LLM(model, strict=True, **more))
    return arms


def targets(results: Sequence[Row]) -> list[Target]:
    code = pick(results, kind="code", temperature=0.0, arm=DEFAULT)
    value = code[0].get("speedup", {}).get("value") if code else None
    name = "speed-up in two stages, greedy code, default configuration"
    return [Target(name, value, WANTED, "at least"), identical_target(results)]


def tables(results: Sequence[Row]) -> list[str]:
    keys = {"text": "kind", "temperature": "temperature", "delay, ms": "delay_ms"}
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
    options = parser.parse_args(argv)
    if options.model == "inflated":
        options.model, options.draft = (str(hugging_face("0.5b", r)) for r in ("target", "draft"))
    shown = ("quick", "num_prompts", "max_tokens", "repeat", "threads", "delay_ms")
    settings = chosen(options, *shown)
    model = Path(options.model or "embedded").parent.name if options.draft else "embedded"
    report = Report("pipeline", {"model": model, **settings})
    source = load_prompts(options.prompts)
    with ExitStack() as stack:
        arms = open_arms(options, stack)
        encode = Encoder(arms[PLAIN].tokenizer).encode
        for kind in options.kinds:
            texts = spread(source.kind(kind), options.num_prompts)
            groups = [[encode(text)[-(MAX_MODEL_LEN - options.max_tokens) :]] for text in texts]
            for temperature in (0.0, 0.8):
                label = {"kind": kind, "temperature": temperature, "delay_ms": options.delay_ms}
                note(", ".join(f"{name} {value}" for name, value in label.items()))
                samples = behind_prompt(run_cell(arms, groups, options, temperature))
                report.samples += [raw(sample, label) for sample in samples]
                report.results += [
                    {**label, **against_plain(samples, arm)} for arm in arms if arm != PLAIN
                ]
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
