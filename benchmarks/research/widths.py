"""What a forward takes by its rows, with several builds of the native kernels, in turns.

``--modules`` are files of the extension, the first being the one that others are compared with.
Each turn is a process of its own, which loads the model anew: in it the widths take turns, as
chains below one text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from harness import arguments, names, note, numbers
from report import Report

from paceline import LLM
from paceline.request.span import Span

REQUEST = 1 << 30
WITH_MODULE = """
import runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("paceline._native", sys.argv[1])
sys.modules[spec.name] = module = module_from_spec(spec)
spec.loader.exec_module(module)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program with another build of the extension, which is there before it is imported."""


def measure(
    engine: Any, context: int, widths: Sequence[int], rounds: int
) -> dict[int, list[float]]:
    """Milliseconds by rows; a forward of the same rows has come before each."""
    runner, kv = engine.runner, engine.runner.kv
    kv.open(REQUEST)
    kv.reserve(REQUEST, context)
    tokens = [100 + i % 3000 for i in range(context)]
    runner.forward(runner.pack([Span.chunk(REQUEST, 0, tokens, True)]))
    kv.commit(REQUEST, range(context))
    kv.reserve(REQUEST, max(widths))

    def forward(rows: int) -> float:
        drafted = list(range(200, 200 + rows))
        batch = runner.pack([Span(REQUEST, context, drafted, range(-1, rows - 1), range(rows))])
        began = time.perf_counter()
        runner.forward(batch, greedy=True)
        return (time.perf_counter() - began) * 1e3

    found: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(rounds):
        for width in widths:
            forward(width)
            found[width].append(forward(width))
    kv.free(REQUEST)
    return found


def turn(module: str, argv: Sequence[str]) -> dict[str, list[float]]:
    """The times with one build, out of another process."""
    command = [sys.executable, "-c", WITH_MODULE, module, __file__, *argv, "--inner"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--modules", type=names, default=[], help="by comma, in this order")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--widths", type=numbers, default=[1, 2, 3, 4, 5, 6, 8, 12, 16, 64])
    parser.add_argument("--inner", action="store_true", help="one turn, to stdout")
    parser.sized("--rounds", 40, 3, "of all widths, in each turn")
    parser.sized("--turns", 4, 1, "of each build")
    options = parser.parse_args(argv)
    if options.inner:
        with LLM(options.model, speculative_config=[], max_model_len=2048) as llm:
            sizes = options.context, options.widths, options.rounds
            print(json.dumps(llm._thread.call(lambda engine: measure(engine, *sizes))))
        return 0
    report = Report("widths", {"model": options.model, "context": options.context})
    own = list(argv) if argv is not None else sys.argv[1:]
    for number in range(options.turns):
        for build, module in enumerate(options.modules):
            found = turn(module, own)
            report.samples.append({"turn": number, "build": build, "ms": found})
    for width in options.widths:
        row: dict[str, Any] = {"rows": width}
        for build in range(len(options.modules)):
            own_turns = [each for each in report.samples if each["build"] == build]
            row[f"ms_{build}"] = median(median(each["ms"][str(width)]) for each in own_turns)
        row["ratio"] = row[f"ms_{len(options.modules) - 1}"] / row["ms_0"]
        note(", ".join(f"{key} {value:.2f}" for key, value in row.items()))
        report.results.append(row)
    return report.finish(options, [])


if __name__ == "__main__":
    sys.exit(main())
