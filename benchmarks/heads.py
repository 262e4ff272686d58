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
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import speedup
from harness import (
    CONTROL,
    PLAIN,
    ROOT,
    Report,
    Row,
    Sample,
    Target,
    against_plain,
    among,
    arguments,
    chosen,
    first_error,
    geometric_mean,
    grid,
    identical_target,
    markdown,
    note,
    number,
    pair_up,
    paired_ratio,
    pick,
    ratio_cell,
    raw,
)
from peers_client import PEERS, Engine, MissingPeerError, Worker, made
from prompt_sets import NAMES, load_prompts, spread
from proposer_sets import described
from research.head_data import plain as plain_text
from research.head_data import read

from paceline.api.llm import embedded_model
from paceline.api.outputs import Completion, GenerationOutput
from paceline.build.default_drafts import EVERY_MODEL, draft_at, drafts_of
from paceline.cli.prompts import Encoder
from paceline.config import SpeculativeConfig
from paceline.config.speculative import HEAD_METHODS, without_memory
from paceline.loading.fetching import named_model
from paceline.request.engine_stats import SpeculationCounters

SUFFIX, NGRAM, TREE, MERGED = "suffix", "n-gram", "tree", "merged"
TEXTS = "suffix and n-gram"
NODES = "chain of as many nodes"
CHAINS = {f"chain of {length}": length for length in (2, 3, 4, 5)}
PEER = "llama.cpp"
EQUAL_NODES, EQUAL_TIME, BEST_SINGLE = "equal nodes", "equal milliseconds", "best single one"
LENGTHS = {0.0: 2.6, 0.8: 2.0}
"""Wanted of MT-bench, by temperature."""
SPEEDS = {False: {0.0: 1.6, 0.8: 1.25}, True: {0.0: 1.9, 0.8: 1.4}}
"""The same, by whether the model is inflated."""
SHOWN = 5
"""Depths in a table."""
BUSY = "prose, 8 requests"
"""A cell where drafts hardly pay."""


def count(outputs: Sequence[Any]) -> dict[str, Any]:
    """What other programs count, and how many drafts reached each depth and were accepted to it."""
    own = SpeculationCounters()
    for output in outputs:
        own.add(output.completions[0].counters)
    by_depth = {"reached": own.num_drafts_per_pos, "accepted": own.num_accepted_tokens_per_pos}
    return {**speedup.count(outputs), **by_depth}


def checked(samples: Sequence[Sample]) -> list[Sample]:
    """A sample of ours with other token ids than plain decoding's is a failed one."""
    plain = {(s.item, s.repeat): s.facts.get("token_ids") for s in samples if s.arm == PLAIN}
    wrong = "its token ids are not those of plain decoding"
    return [
        s
        if s.failed or s.arm == PEER or plain[s.item, s.repeat] in (None, s.facts["token_ids"])
        else replace(s, seconds=None, error=wrong)
        for s in samples
    ]


def rows_of(samples: Sequence[Sample], arms: Sequence[str]) -> list[dict[str, Any]]:
    """A cell: each arm against plain, then arms against each other: the other's seconds over ours.

    With llama.cpp the seconds of a token are compared, as its text may differ.
    """
    rows = arm_rows(samples, arms)
    speeds = {row["arm"]: row["speedup"]["value"] for row in rows if "error" not in row}

    def over(kind: str, ours: str, others: Iterable[str], runs: Sequence[Sample]) -> dict[str, Any]:
        others = [arm for arm in others if arm in arms]
        error = first_error(s for s in runs if s.arm in (ours, PLAIN, *others))
        if error is not None:
            return {"kind": kind, "ours": ours, "error": error}
        other = max(others, key=lambda arm: speeds.get(arm, 0.0))
        ratio = asdict(paired_ratio(pair_up(runs, other, ours)))
        return {"kind": kind, "ours": ours, "other": other, "speedup": ratio}

    found = [
        over(EQUAL_NODES, TREE, [NODES], samples),
        over(EQUAL_TIME, TREE, CHAINS, samples),
        over(BEST_SINGLE, MERGED, [SUFFIX, NGRAM, TREE], samples),
    ]
    if PEER in arms:
        per_token = [s if s.failed else _per_token(s) for s in samples]
        found += [over(PEER, ours, [PEER], per_token) for ours in (PLAIN, MERGED)]
    return [*rows, *found]


def arm_rows(samples: Sequence[Sample], arms: Iterable[str]) -> list[dict[str, Any]]:
    """Each arm against plain decoding, and what became of its drafts."""
    return [_arm_row(samples, arm) for arm in arms if arm not in (PLAIN, PEER)]


def _per_token(sample: Sample) -> Sample:
    return replace(sample, seconds=(sample.seconds or 0.0) / sample.facts["output_tokens"])


def _arm_row(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    row = against_plain(samples, arm)
    if "error" in row:
        return row
    own = [s.facts for s in samples if s.arm == arm]
    reached, accepted = (
        [sum(counts) for counts in zip_longest(*(facts[key] for facts in own), fillvalue=0)]
        for key in ("reached", "accepted")
    )
    drafted = sum(f["num_draft_tokens"] for f in own) / sum(f["num_steps"] for f in own)
    shares = [a / r for r, a in zip_longest(reached, accepted, fillvalue=0)]
    return {**row, "drafted_per_step": drafted, "accepted_share": shares}


def targets(results: Sequence[Row], inflated: bool) -> list[Target]:
    """What is aimed at; no value where it was not measured or a sample behind it failed."""
    found = []

    def aim(name: str, value: float | None, wanted: float) -> None:
        found.append(Target(name, value, wanted, "at least"))

    def ratios(**wanted: Any) -> list[float]:
        rows = pick(results, **wanted)
        return [] if any("error" in r for r in rows) else [r["speedup"]["value"] for r in rows]

    for temperature, length in LENGTHS.items():
        cell = {"set": "mt_bench", "temperature": temperature, "arm": MERGED}
        name = f"MT-bench at {temperature:g}, merged"
        lengths = [row.get("mean_acceptance_length") for row in pick(results, **cell)]
        aim(f"{name}: mean acceptance length", next(iter(lengths), None), length)
        speed = next(iter(ratios(**cell)), None)
        aim(f"{name}: speed over plain", speed, SPEEDS[inflated][temperature])
    if inflated:
        both = [ratios(set=name, temperature=0.0, arm=MERGED) for name in ("code", "edit")]
        value = min(both[0] + both[1]) if all(both) else None
        aim("code and edits, greedy, merged, the slower one: speed over plain", value, 2.0)
    single, chains = ratios(kind=BEST_SINGLE), ratios(kind=EQUAL_TIME)
    aim(f"tree over chain, {EQUAL_TIME}, geometric mean", geometric_mean(chains), 1.1)
    aim(f"merged over the {BEST_SINGLE}, geometric mean", geometric_mean(single), 1.08)
    aim(f"merged over the {BEST_SINGLE}, least", min(single, default=None), 0.98)
    busy = pick(results, set=BUSY, arm=MERGED)
    bounds = [row["speedup"]["high"] for row in busy if "error" not in row]
    aim(f"{BUSY}, merged: upper bound of the speed over plain", min(bounds, default=None), 0.99)
    peer = geometric_mean(ratios(kind=PEER, ours=MERGED))
    aim(f"merged over {PEER} plain, greedy, geometric mean", peer, 3.0)
    return [*found, identical_target([row for row in results if "arm" in row])]


def tables(results: Sequence[Row]) -> list[str]:
    """Speeds over plain decoding, what became of the drafts, and arms against each other."""
    rows = [row for row in results if "arm" in row]
    cell = (("prompts", "set"), ("temperature", "temperature"))
    drafts = grid(
        [row for row in rows if row["arm"] != CONTROL],
        *cell,
        ("drafts", "arm"),
        ("tokens per step", "mean_acceptance_length", 2),
        ("drafted per step", "drafted_per_step", 1),
        (f"accepted at depth 1 to {SHOWN}", _shares),
    )
    others = grid(
        [row for row in results if "kind" in row],
        *cell,
        ("compared", "kind"),
        ("ours", "ours"),
        ("other", lambda row: row.get("other") or row["error"]),
        ("ours over other", ratio_cell),
    )
    return [speedup.comparison(rows, dict(cell)), markdown(*drafts), markdown(*others)]


def _shares(row: Row) -> str:
    return " ".join(number(share, 2) for share in row.get("accepted_share", ())[:SHOWN]) or "-"


SETS = ("mt_bench", "code", "gsm8k", "edit", "prose")
TEMPERATURES = (0.0, 0.8)
BUSY_SET, BUSY_TEMPERATURE, BUSY_REQUESTS, BUSY_REPEATS = "prose", 1.0, 8, 4
REPETITIONS = 2
"""Of what an inflated model is made of: 135 million weights become half a billion."""
TRAINED_ON = sorted((ROOT / "benchmarks" / "data").glob("**/*-prompts*.jsonl.gz"))
"""Prompts of SmolLM2's own, which the answers are to, and those that only its head has learnt."""
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
    known = [each for each in options.sets if each in source.names]
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
    parser.sized("--sets", list(SETS), list(SETS[:2]), "of prompts", type=among(NAMES))
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
