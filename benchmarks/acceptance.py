"""How much of what each proposer drafts the target takes, on several kinds of text.

Every output is compared with that of an engine in which speculation was never configured. What is
measured are counts, which do not depend on the machine's speed; no speed is claimed here. Ratios
are derived from counters that are summed over the prompts of a set.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness import Sample, arguments, names, note, run_sample
from prompt_sets import SOURCES, PromptSets, load_prompts, spread
from proposer_sets import described, for_acceptance
from report import Report, Target, number, table

from paceline import LLM, SamplingParams
from paceline.llm import embedded_model
from paceline.metrics import SpeculationCounters
from paceline.models.checkpoint import load_checkpoint
from paceline.outputs import GenerationOutput

TEMPERATURES = (0.0, 0.8)
BATCH = 8
MAX_MODEL_LEN = 1024
PLAIN = "plain"
EVERY_SET = "all"


def open_llm(options: argparse.Namespace, checkpoint: Any, speculative: Any = None) -> LLM:
    return LLM(
        checkpoint,
        speculative_config=speculative,
        device=options.device,
        max_num_seqs=BATCH,
        max_model_len=MAX_MODEL_LEN,
        planner="fixed",
        strict=True,
    )


def counters_of(outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Tokens and counters of each prompt; the same code for every arm."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return {
        "token_ids": [output.token_ids for output in outputs],
        "counters": [output.completions[0].counters for output in outputs],
    }


def summed(counters: Sequence[SpeculationCounters]) -> SpeculationCounters:
    """One set of counters out of several."""
    total = SpeculationCounters()
    for each in counters:
        total.add(each)
    return total


def summary(sample: Sample, plain: Sample) -> dict[str, Any]:
    """One row: ratios from the counters, and how many outputs equal those of plain decoding."""
    if sample.failed or plain.failed:
        return {"error": sample.error or plain.error}
    pairs = zip(sample.facts["token_ids"], plain.facts["token_ids"], strict=True)
    return {
        "prompts": len(plain.facts["token_ids"]),
        "identical": sum(one == other for one, other in pairs),
        **ratios(summed(sample.facts["counters"])),
    }


def ratios(total: SpeculationCounters) -> dict[str, Any]:
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_rate": total.acceptance_rate,
        "acceptance_per_position": [
            accepted / drafts if drafts else 0.0
            for accepted, drafts in zip(
                total.num_accepted_tokens_per_pos, total.num_drafts_per_pos, strict=True
            )
        ],
        "counters": asdict(total),
    }


def run_set(
    options: argparse.Namespace,
    engines: tuple[LLM, LLM],
    prompts: Sequence[list[int]],
    temperature: float,
) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """Every proposer on one set of prompts; the plain outputs come first."""
    plain_llm, llm = engines
    params = [
        SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=index)
        for index in range(len(prompts))
    ]
    plain = run_sample(PLAIN, "", lambda: plain_llm.generate(prompts, params), counters_of)
    yield plain, {}
    for name, speculative in for_acceptance().items():
        if options.proposers and name not in options.proposers:
            continue

        def run(speculative: Any = speculative) -> Any:
            llm.set_speculation(speculative)
            return llm.generate(prompts, params)

        sample = run_sample(name, "", run, counters_of)
        yield sample, {"proposer": name, **summary(sample, plain)}


def pooled(samples: Mapping[tuple[str, float], Sequence[Sample]]) -> Iterator[dict[str, Any]]:
    """A row per proposer and temperature over all sets."""
    for (name, temperature), group in samples.items():
        row = {"set": EVERY_SET, "temperature": temperature, "proposer": name}
        counters = [each for sample in group for each in sample.facts.get("counters", ())]
        yield {**row, "prompts": len(counters), **ratios(summed(counters))}


def raw(sample: Sample, label: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a sample: its counters; no time, because none is claimed."""
    kept = {"arm": sample.arm, **label, "error": sample.error}
    if not sample.failed:
        kept["output_tokens"] = [len(tokens) for tokens in sample.facts["token_ids"]]
        kept["counters"] = [asdict(counters) for counters in sample.facts["counters"]]
    return kept


def run_sets(
    options: argparse.Namespace, engines: tuple[LLM, LLM], source: PromptSets, report: Report
) -> None:
    """All sets at both temperatures; the prompts' ends where they are too long."""
    room = MAX_MODEL_LEN - options.max_tokens
    everything: dict[tuple[str, float], list[Sample]] = {}
    for name, texts in source.sets.items():
        if options.sets and name not in options.sets:
            continue
        chosen = spread(texts, options.num_prompts)
        prompts = [engines[0].encode(text)[-room:] for text in chosen]
        for temperature in TEMPERATURES:
            note(f"{name}, temperature {temperature}")
            label = {"set": name, "temperature": temperature}
            for sample, row in run_set(options, engines, prompts, temperature):
                report.samples.append(raw(sample, label))
                if row:
                    report.results.append({**label, **row})
                    everything.setdefault((sample.arm, temperature), []).append(sample)
    report.results += pooled(everything)


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    results = [row for row in results if row["set"] != EVERY_SET]
    done = all("error" not in row for row in results) and bool(results)
    identical = sum(row.get("identical", 0) for row in results)
    outputs = sum(row.get("prompts", 0) for row in results)
    share = identical / outputs if done else None
    return [Target("share of outputs identical to plain decoding", share, 1.0, "at least")]


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["set", "proposer", "temperature", "length", "rate", "per position", "identical"]
    rows = [
        [
            row["set"],
            row["proposer"],
            row["temperature"],
            number(row.get("mean_acceptance_length")),
            number(row.get("acceptance_rate")),
            " ".join(number(share) for share in row.get("acceptance_per_position", ())),
            row.get("error") or f"{row.get('identical', '')}/{row['prompts']}",
        ]
        for row in results
    ]
    return [table(headers, rows)]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--sets", type=names, help="only these sets of prompts")
    parser.add_argument("--proposers", type=names, help="only these, by the names in the table")
    parser.add_argument("--num-prompts", type=int, help="of each set (default: 16, quick: 4)")
    parser.add_argument("--max-tokens", type=int, help="per prompt (default: 64, quick: 32)")
    options = parser.parse_args(argv)
    options.num_prompts = options.num_prompts or (4 if options.quick else 16)
    options.max_tokens = options.max_tokens or (32 if options.quick else 64)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    checkpoint = load_checkpoint(embedded_model("target"))
    source = load_prompts(options.prompts)
    with open_llm(options, checkpoint) as plain, open_llm(options, checkpoint, "[]") as llm:
        report = Report(
            "acceptance",
            {
                "model": llm.model,
                "dtype": llm.config.dtype,
                "prompts": source.source,
                "quick": options.quick,
                "num_prompts": options.num_prompts,
                "max_tokens": options.max_tokens,
                "batch": BATCH,
                "promises_identity": llm.promises_identity,
                "proposers": {name: described(c) for name, c in for_acceptance().items()},
            },
        )
        run_sets(options, (plain, llm), source, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
