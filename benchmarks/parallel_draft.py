"""Several tokens from one forward of a draft (PARD) beside a forward for each: length and speed.

Drafts are chains of 2 to 8 tokens that are verified whole, and two arms of each method leave the
choice to the planner, from a chain and from a tree. All arms answer the same prompts in turns with
plain decoding. The time of a draft is that of the proposer's whole call, catching up with what a
step committed included, measured in shuffled rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness import arguments, note, numbers, take_turns
from parallel_draft_report import (
    PARALLEL,
    PLAIN,
    PLANNED,
    SEQUENTIAL,
    arm,
    ratios,
    row_of,
    tables,
    targets,
)
from prompt_sets import SOURCES, load_prompts, spread
from report import Report

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig, parse_speculative_config
from paceline.engine.build import build_engine
from paceline.engine.compute_thread import COMPUTE
from paceline.llm import embedded_model
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.outputs import GenerationOutput
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request import TARGET_ORIGIN, Request, VerifyResult
from paceline.workbench.profile_steps import Task, measure

LENGTHS = (2, 3, 4, 5, 6, 7, 8)
TEMPERATURES = (0.0, 0.8)
KINDS = ("code", "prose", "edit")
MAX_MODEL_LEN = 512
PROMPT = 128
"""Tokens of a prompt at most, and before the drafts that are timed."""
KV_BYTES = 64 << 20
TREE = {"max_tree_nodes": 16, "max_branching": 4}
MOST_TOKENS = 8
"""What the planner may draft."""


def config_of(method: str, folder: str, length: int | str) -> dict[str, Any]:
    """Chains of a length, none of their nodes left out; or what the planner makes of a draft."""
    own: dict[str, Any] = {"method": method, "model": folder}
    if length in PLANNED:
        tree = TREE if length == PLANNED[1] else {}
        return {**own, "num_speculative_tokens": MOST_TOKENS, **tree}
    return {**own, "num_speculative_tokens": length, "min_accept_prob": 0.0}


def open_arms(options: argparse.Namespace, checkpoint: Checkpoint, stack: ExitStack) -> Any:
    """One engine per arm, all on one checkpoint."""
    wanted: dict[str, tuple[Any, str]] = {PLAIN: ([], "fixed")}
    for length in (*options.lengths, *PLANNED):
        for method, folder in options.drafts.items():
            planner = "auto" if length in PLANNED else "fixed"
            wanted[arm(method, length)] = (config_of(method, folder, length), planner)
    return {
        name: stack.enter_context(
            LLM(
                checkpoint,
                speculative_config=config,
                planner=planner,
                device=options.device,
                num_threads=options.threads,
                max_num_seqs=1,
                max_model_len=MAX_MODEL_LEN,
                kv_cache_memory=KV_BYTES,
                enable_prefix_caching=False,
                strict=True,
            )
        )
        for name, (config, planner) in wanted.items()
    }


def count(outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Tokens and counters of one answer; the same code for every arm."""
    (output,) = outputs
    if output.error is not None:
        raise output.error
    counters = output.completions[0].counters
    reached = counters.drafts_by_accepted
    depths = range(1, MOST_TOKENS + 1)
    return {
        "token_ids": output.token_ids,
        "num_steps": counters.num_steps,
        "num_drafts": counters.num_drafts,
        "by_depth": [sum(n for accepted, n in reached.items() if accepted >= d) for d in depths],
    }


def run_temperature(
    arms: Mapping[str, LLM],
    prompts: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
    temperature: float,
    report: Report,
) -> None:
    def generate(llm: LLM, max_tokens: int, prompt: tuple[int, ...]) -> Any:
        wish = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True
        )
        return llm.generate([list(prompt)], [wish])

    for llm in arms.values():
        generate(llm, options.max_tokens, prompts[0])
    runs: dict[str, Callable[[Any], Any]] = {
        name: partial(generate, llm, options.max_tokens) for name, llm in arms.items()
    }
    samples = take_turns(runs, prompts, options.repeat, count)
    lengths = (*options.lengths, *PLANNED)
    for length in lengths:
        for method in (SEQUENTIAL, PARALLEL):
            row = row_of(samples, method, length)
            report.results.append({"kind": "arm", "temperature": temperature, **row})
    for row in ratios(samples, lengths):
        report.results.append({"kind": "ratio", "temperature": temperature, **row})
    for sample in samples:
        facts = {name: value for name, value in sample.facts.items() if name != "token_ids"}
        kept = {"arm": sample.arm, "item": prompts.index(sample.item), "repeat": sample.repeat}
        times = {"seconds": sample.seconds, "error": sample.error}
        report.samples.append({**kept, "temperature": temperature, **times, **facts})


# --- the time of a draft --------------------------------------------------------------------------


class TimedDraft:
    """A proposer's calls for one greedy request of which each step accepts one drafted token."""

    def __init__(self, proposer: Proposer, length: int) -> None:
        self._proposer = proposer
        self._budget = DraftBudget([length], [length])
        self._ids = iter(range(1 << 30))
        self._begin()

    def _begin(self) -> None:
        tokens = [7 * i % 1000 + 4 for i in range(PROMPT)]
        wish = SamplingParams(temperature=0.0)
        self._request = Request(next(self._ids), tokens, PROMPT, wish, 0, MAX_MODEL_LEN)
        self._proposer.propose([self._request], self._budget)  # reads the prompt

    def run(self) -> float:
        request = self._request
        if len(request.token_ids) > 2 * PROMPT:
            self._proposer.finish(request)
            self._begin()
            request = self._request
        began = time.perf_counter()
        (tree,) = self._proposer.propose([request], self._budget)
        seconds = time.perf_counter() - began
        emitted = [*tree.token_ids[:1], 5]
        request.token_ids += emitted
        result = VerifyResult([0], emitted, [TARGET_ORIGIN] * len(emitted))
        self._proposer.observe(request, result)
        return seconds


def draft_times(checkpoint: Checkpoint, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a draft of each method and length."""
    config = EngineConfig(
        device=options.device,
        num_threads=options.threads,
        max_num_seqs=1,
        max_model_len=MAX_MODEL_LEN,
        strict=True,
    )
    built, tasks = build_engine(checkpoint, config), {}
    for method, folder in options.drafts.items():
        for length in options.lengths:
            wanted = parse_speculative_config(config_of(method, folder, length))
            (proposer,) = built.proposers_for(wanted)
            tasks[method, length] = Task(TimedDraft(proposer, length).run)
    return [
        {"kind": "time", "method": method, "length": length, "draft_ms": timing.ms}
        for (method, length), timing in measure(tasks, options.seconds).items()
    ]


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--lengths", type=numbers, help="drafted tokens (default: 2 to 8)")
    parser.add_argument("--num-prompts", type=int, help="of each kind (default: 4, quick: 1)")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: 96, quick: 24)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each prompt (default: 1)")
    parser.add_argument("--seconds", type=float, help="of timed drafts (default: 8, quick: 1)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    parser.add_argument(
        "--parallel-draft",
        required=True,
        help="folder of a draft that paceline train draft --parallel wrote for the embedded target",
    )
    options = parser.parse_args(argv)
    quick = {"lengths": [2, 4], "num_prompts": 1, "max_tokens": 24, "seconds": 0.5}
    full = {"lengths": [*LENGTHS], "num_prompts": 4, "max_tokens": 96, "seconds": 8.0}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.drafts = {SEQUENTIAL: embedded_model("draft"), PARALLEL: options.parallel_draft}
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    checkpoint, source = load_checkpoint(embedded_model("target")), load_prompts(options.prompts)
    shown = ("lengths", "num_prompts", "max_tokens", "repeat", "seconds", "quick")
    config = {name: getattr(options, name) for name in shown}
    report = Report("parallel_draft", {**config, "prompts": source.source, "kinds": KINDS})
    note("timing drafts")
    report.results += COMPUTE.call(partial(draft_times, checkpoint, options))
    with ExitStack() as stack:
        arms = open_arms(options, checkpoint, stack)
        texts = [t for kind in KINDS for t in spread(source.kind(kind), options.num_prompts)]
        prompts = [tuple(arms[PLAIN].encode(text)[-PROMPT:]) for text in texts]
        for temperature in TEMPERATURES:
            note(f"answering at temperature {temperature:g}")
            run_temperature(arms, prompts, options, temperature, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
