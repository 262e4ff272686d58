"""Paceline's server beside llama.cpp's: the same weights, the same requests, in turns.

Both servers run at once, two threads each, and only one is asked at a time. ``paceline bench serve
--compare-with`` sends each of them the same blocks of requests in turns, at several numbers of
concurrent requests, first without speculation on both sides, then with a draft model on both.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import Report, Row, Target, arguments, chosen, grid, interval, note, numbers, table
from peers_client import LLAMA_BIN, MissingPeerError, gguf, hugging_face
from prompt_sets import load_prompts

CONTEXT = 1024
SLOTS = 16
THREADS = 2
START_SECONDS = 300.0
NO_PROMPT_CACHE = '{"cache_prompt": false}'
"""For llama.cpp, whose cache of prompts cannot be flushed between the blocks, as ours is."""
LLAMA_DRAFT = 4
"""Tokens that llama.cpp drafts; its own default is 3."""
WANTED = 1.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(command: Sequence[object], port: int) -> Iterator[str]:
    """Run a server until the block ends; gives its address once it is healthy.

    Raises:
        MissingPeerError: it ended, or was not ready in time.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
        try:
            wait_until_healthy(url, process)
            yield url
        except MissingPeerError as error:
            log.seek(0)
            tail = log.read()[-600:].decode(errors="replace")
            raise MissingPeerError(f"{error}: {tail}") from error
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise MissingPeerError(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise MissingPeerError(f"the server was not ready within {START_SECONDS:.0f} s")


def paceline_command(model: str, port: int, is_speculative: bool) -> list[object]:
    target = hugging_face(model, "target")
    words: list[object] = [sys.executable, "-m", "paceline", "serve", target, "--port", port]
    words += ["--threads", THREADS, "--max-num-seqs", SLOTS, "--max-model-len", CONTEXT]
    words += ["--served-model-name", "model"]
    if not is_speculative:
        return [*words, "--no-speculation"]
    draft = {"method": "draft_model", "model": str(hugging_face(model, "draft"))}
    # The prompts are served at every concurrency: nothing may be drafted from earlier answers.
    suffix = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    return [*words, "--speculative-config", json.dumps([suffix, draft])]


def llama_command(model: str, port: int, is_speculative: bool) -> list[object]:
    words: list[object] = [LLAMA_BIN / "llama-server", "-m", gguf(model, "target", "Q8_0")]
    words += ["--port", port, "-t", THREADS, "-tb", THREADS, "-np", SLOTS, "-c", SLOTS * CONTEXT]
    words += ["--no-webui", "--alias", "model"]
    if not is_speculative:
        return words
    draft = ["--spec-type", "draft-simple", "-md", gguf(model, "draft", "Q8_0")]
    return [*words, *draft, "--spec-draft-n-max", LLAMA_DRAFT]


def compared(ours: str, theirs: str, prompts: Path, concurrency: int, count: int) -> dict[str, Any]:
    """The document of one run of ``paceline bench serve``.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "paceline", "bench", "serve", "--base-url", ours]
    command += ["--compare-with", theirs, "--compare-extra-body", NO_PROMPT_CACHE]
    command += ["--dataset-name", "custom", "--dataset-path", prompts]
    command += ["--num-prompts", count, "--max-concurrency", concurrency, "--disable-shuffle"]
    command += ["--num-warmups", 2, "--ignore-eos", "--json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    document: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return document


def write_prompts(path: Path, count: int, tokens: int, source: str) -> str:
    """Prompts of code and prose in turns; returns where they come from."""
    sets = load_prompts(source)
    kinds = [sets.kind("code"), sets.kind("prose")]
    rows = [kinds[i % 2][(i // 2) % len(kinds[i % 2])] for i in range(count)]
    lines = [json.dumps({"prompt": text, "output_tokens": tokens}) for text in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sets.source


def run_side(
    report: Report, options: argparse.Namespace, prompts: Path, is_speculative: bool
) -> None:
    """All concurrencies with speculation on both sides, or on neither."""
    ports = free_port(), free_port()
    ours = paceline_command(options.model, ports[0], is_speculative)
    theirs = llama_command(options.model, ports[1], is_speculative)
    with serving(ours, ports[0]) as our_url, serving(theirs, ports[1]) as their_url:
        for concurrency in options.concurrency:
            what = "speculation" if is_speculative else "plain"
            note(f"{what}, {concurrency} at once")
            count = max(options.rounds * concurrency, options.least)
            document = compared(our_url, their_url, prompts, concurrency, count)
            report.results.append(summary(document, concurrency, is_speculative))
            report.samples.append(document)


def summary(document: Row, concurrency: int, speculation: bool) -> dict[str, Any]:
    comparison = document["comparison"]
    return {
        "speculation": speculation,
        "concurrency": concurrency,
        "paceline": figures(document),
        "llama.cpp": figures(comparison["figures"]),
        "ratio": comparison["ratios"].get("output_throughput", {}),
        "texts_compared": comparison["texts_compared"],
        "texts_differing": len(comparison["texts_differing"]),
    }


def figures(arm: Row) -> dict[str, Any]:
    wanted = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "failed")
    return {name: arm.get(name) for name in wanted}


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        ("speculation", lambda row: "draft model" if row["speculation"] else "none"),
        ("at once", "concurrency"),
        ("paceline tok/s", "paceline/output_throughput", 1),
        ("llama.cpp tok/s", "llama.cpp/output_throughput", 1),
        ("ratio", "ratio/value", 2),
        ("95 %", lambda row: interval(row["ratio"])),
        ("TTFT ms", "paceline/median_ttft_ms", 1),
        ("llama.cpp", "llama.cpp/median_ttft_ms", 1),
        ("TPOT ms", "paceline/median_tpot_ms", 1),
        ("llama.cpp", "llama.cpp/median_tpot_ms", 1),
    )
    return [table(*grid(results, *columns))]


def targets(results: Sequence[Row]) -> list[Target]:
    found = []
    for row in results:
        what = "with speculation" if row["speculation"] else "plain"
        name = f"output tok/s over llama.cpp's server, {what}, {row['concurrency']} at once"
        found.append(Target(name, row["ratio"].get("value"), WANTED, "at least"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--model", choices=["0.5b", "1.5b", "tiny"], default="0.5b")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2, help="requests per concurrent one")
    options = parser.parse_args(argv)
    options.least = 4 if options.quick else 8
    if options.quick:
        options.concurrency, options.max_tokens, options.rounds = [1, 8], 24, 1
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        most = max(options.rounds * max(options.concurrency), options.least)
        source = write_prompts(prompts, most, options.max_tokens, options.prompts)
        config = {"prompts": source, **chosen(options, "quick", "model", "max_tokens")}
        report = Report("serve_peers", config)
        for is_speculative in (False, True):
            run_side(report, options, prompts, is_speculative)
    report.targets.extend(targets(report.results))
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
