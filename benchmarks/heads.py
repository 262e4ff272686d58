"""Heads that draft: as trees, as chains and together with text matching, against plain decoding.

Every arm is an engine of its own with the same planner, and the arms take turns on the same
prompts. No prompt is used that occurs in what the head was trained on. The tree is compared with
two chains: one that may have as many nodes, and the fastest of several lengths in each cell, which
stands for equal milliseconds. That choice is made on the times that judge, in the chain's favour.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import speedup
from harness import CONTROL, PLAIN, ROOT, arguments, chosen, names, note, raw
from heads_report import (
    BUSY,
    CHAINS,
    MERGED,
    NGRAM,
    NODES,
    PEER,
    SUFFIX,
    TEXTS,
    TREE,
    arm_rows,
    checked,
    count,
    rows_of,
    tables,
    targets,
)
from peers_client import Engine, Worker
from peers_models import PEERS, MissingPeerError, made
from prompt_sets import KINDS, load_prompts, spread
from proposer_sets import described
from report import Report
from research.head_data import plain as plain_text
from research.head_data import read

from paceline.api.llm import embedded_model
from paceline.api.outputs import Completion, GenerationOutput
from paceline.build.bundled_drafts import draft_at
from paceline.build.default_drafts import EVERY_MODEL, drafts_of
from paceline.cli.options.prompts import Encoder
from paceline.cli.options.resolve import without_memory
from paceline.config import SpeculativeConfig
from paceline.config.methods import HEAD_METHODS
from paceline.loading.fetching import named_model

SETS = ("mt_bench", "code", "gsm8k", "edit", "prose")
TEMPERATURES = (0.0, 0.8)
BUSY_SET, BUSY_TEMPERATURE, BUSY_REQUESTS, BUSY_REPEATS = "prose", 1.0, 8, 4
REPETITIONS = 2
"""Of what an inflated model is made of: 135 million weights become half a billion."""
TRAINED_ON = sorted((ROOT / "benchmarks" / "data").glob("smollm2-*.jsonl.gz"))
NO_PEER_HEAD = "its converter of heads needs the target as a Hugging Face folder, not as GGUF"


def proposers(
    head: SpeculativeConfig, others: Iterable[SpeculativeConfig]
) -> dict[str, tuple[SpeculativeConfig, ...]]:
    """The arms that speculate; of the ``others`` that come with the model, files of n-grams."""
    ngrams = tuple(config for config in others if config.method == "ngram_model")

    def chain(length: int) -> tuple[SpeculativeConfig]:
        one: Any = {"num_speculative_tokens": length, "max_tree_nodes": 0, "max_branching": 1}
        return (replace(head, **one),)

    arms = {
        SUFFIX: EVERY_MODEL,
        **({NGRAM: ngrams, TEXTS: (*EVERY_MODEL, *ngrams)} if ngrams else {}),
        TREE: (head,),
        NODES: chain(head.tree_nodes),
        **{name: chain(length) for name, length in CHAINS.items()},
        MERGED: (*EVERY_MODEL, head, *ngrams),
    }
    return {name: without_memory(configs) for name, configs in arms.items()}


class Llama:
    """llama.cpp, plain and greedy, in an engine's place; it ends where ours does."""

    def __init__(self, model: str, threads: int | None, stop: Sequence[int]) -> None:
        engine = Engine(PEER, "peers_llama.py", "", (), "llama", lambda name: {"model": name})
        self._worker, self._stop = Worker(engine, model, threads or os.cpu_count() or 1), stop
        self.close = self._worker.close

    def generate(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        task = {"mode": PLAIN, "max_tokens": params[0].max_tokens, "stop": list(self._stop)}
        answers = [self._worker.ask("generate", prompt={"token_ids": p}, **task) for p in prompts]
        ids = [answer["token_ids"] for answer in answers]
        return [
            GenerationOutput(prompt, [Completion(0, token_ids=own)])
            for prompt, own in zip(prompts, ids, strict=True)
        ]


def trained_text(files: Iterable[Path], tokenizer: Any) -> str:
    """Every prompt of these files, as one text that :func:`held_out` searches.

    Raises:
        ValueError: a file holds token ids of another tokenizer.
    """
    texts = []
    for row in (row for file in files for row in read(file)):
        if max(row.get("prompt_ids", [0])) >= tokenizer.vocab_size:
            raise ValueError("a file has ids of another tokenizer: name others by --trained-on")
        texts.append(row["prompt"] if "prompt" in row else tokenizer.decode(row["prompt_ids"]))
    return "\0".join(map(plain_text, texts))


def held_out(texts: Iterable[str], trained: str) -> list[str]:
    """The prompts whose text occurs nowhere in ``trained``; spaces and case do not count."""
    return [text for text in texts if plain_text(text) not in trained]


def prompts_of(options: argparse.Namespace, tokenizer: Any, config: dict[str, Any]) -> Any:
    """Token ids by set; the configuration hears how many are used and how many were left out."""
    source, encode = load_prompts(options.prompts), Encoder(tokenizer).encode
    trained, room = trained_text(options.trained_on, tokenizer), speedup.MAX_MODEL_LEN
    known = [each for each in options.sets if KINDS[source.source].get(each, each) in source.sets]
    texts = {name: held_out(source.kind(name), trained) for name in known}
    found = {
        name: [encode(text)[-(room - options.max_tokens) :] for text in own]
        for name, own in ((n, spread(t, options.prompts_per_set)) for n, t in texts.items())
    }
    config["prompts"], config["used"] = source.source, {n: len(own) for n, own in found.items()}
    config["left_out"] = {n: len(source.kind(n)) - len(own) for n, own in texts.items()}
    return found


def run_all(arms: Mapping[str, Any], prompts: Any, options: Any, report: Report) -> None:
    for name, temperature in ((name, each) for name in prompts for each in TEMPERATURES):
        note(f"{name}, temperature {temperature:g}")
        label = {"set": name, "temperature": temperature}
        here = {arm: llm for arm, llm in arms.items() if arm != PEER or temperature == 0}
        groups = [[prompt] for prompt in prompts[name]]
        samples = checked(speedup.run_cell(here, groups, options, temperature, count))
        report.samples += [raw(sample, label) for sample in samples]
        report.results += [{**label, **row} for row in rows_of(samples, list(here))]


def run_busy(arms: Mapping[str, Any], prompts: Any, options: Any, report: Report) -> None:
    """Many requests at once, of text that is hard to draft, where a head must not cost anything."""
    label = {"set": BUSY, "temperature": BUSY_TEMPERATURE}
    note(f"{BUSY}, temperature {BUSY_TEMPERATURE:g}")
    here = {arm: arms[arm] for arm in (PLAIN, SUFFIX, TREE, MERGED, CONTROL)}
    groups = speedup.batches(prompts[BUSY_SET], BUSY_REQUESTS)
    often = argparse.Namespace(**{**vars(options), "repeat": 1 if options.quick else BUSY_REPEATS})
    samples = checked(speedup.run_cell(here, groups, often, BUSY_TEMPERATURE, count))
    report.samples += [raw(sample, label) for sample in samples]
    report.results += [{**label, **row} for row in arm_rows(samples, here)]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--model", default="smollm2", help="a name, a file, or embedded")
    parser.add_argument("--head", help="its folder (default: what the model brings)")
    parser.add_argument("--inflated", action="store_true", help="both, at half a billion weights")
    parser.add_argument("--name", help="of the results: heads-NAME (default: the model's)")
    parser.sized("--sets", list(SETS), list(SETS[:2]), "of prompts", type=names)
    parser.add_argument("--trained-on", type=Path, nargs="*", default=TRAINED_ON)
    parser.add_argument("--peer", action="store_true", help=f"{PEER}, plain, on the same file")
    parser.sized("--prompts-per-set", 16, 1)
    parser.sized("--max-tokens", 128, 24, "per prompt")
    parser.add_argument("--repeat", type=int, help="of every run (default: 1)", default=1)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    options = parser.parse_args(argv)
    options.name = options.name or Path(options.model).stem + "-inflated" * options.inflated
    if options.model == "embedded":
        options.model = embedded_model("target")
    options.others = drafts_of(options.model)
    heads = [config for config in options.others if config.method in HEAD_METHODS]
    if not options.head and not heads:
        parser.error(f"{options.model} brings no head: name one by --head FOLDER")
    options.draft = draft_at(Path(options.head)) if options.head else heads[0]
    entry = named_model(options.model)
    options.model = str(entry.place) if entry else options.model
    return options


def inflate(options: argparse.Namespace) -> None:
    """Put the model and its head, every part of them repeated, in the place of both."""
    from research.inflate_gguf import write_widened
    from research.inflate_head import write_widened_head

    small, head, folder = Path(options.model), Path(options.draft.model), PEERS / "models"
    large, times = folder / options.name / "target.gguf", REPETITIONS

    def make(out: Path) -> None:
        write_widened(small, out, times, units=times, as_stored=True)

    options.model = str(made(large, make))
    wide = write_widened_head(head, large.parent / head.name, times)
    options.draft = replace(options.draft, model=str(wide))


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    if options.inflated:
        inflate(options)
    configs = proposers(options.draft, options.others)
    config = {
        "model": options.name,
        "head": Path(options.draft.model).name,
        "trained_on": [file.name for file in options.trained_on],
        **chosen(options, "quick", "inflated", "max_tokens", "repeat"),
        "proposers": {name: described(each) for name, each in configs.items()},
    }
    report = Report(f"heads-{options.name}", config)
    with ExitStack() as stack:
        more = {"num_threads": options.threads, "max_num_seqs": BUSY_REQUESTS}
        arms: dict[str, Any] = speedup.open_engines(options, configs, stack, **more)
        prompts = prompts_of(options, arms[PLAIN].tokenizer, config)
        if options.peer:
            report.results.append({"kind": f"{PEER}, EAGLE-3", "error": NO_PEER_HEAD})
            stop = arms[PLAIN].checkpoint.config.eos_token_ids
            try:
                peer = Llama(options.model, options.threads, stop)
                stack.callback(peer.close)
                arms = {**arms, PEER: peer}
            except MissingPeerError as error:
                report.results.append({"kind": PEER, "error": str(error)})
        run_all(arms, prompts, options, report)
        if BUSY_SET in prompts:
            run_busy(arms, prompts, options, report)
    report.targets = targets(report.results, options.inflated)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
