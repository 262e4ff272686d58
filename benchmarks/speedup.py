"""Wall time of plain and speculative decoding, end to end.

The plain arm is an engine in which speculation was never configured, and a second such engine runs
as a control: its ratio shows what the machine's own unrest looks like. All arms get the same
prompts, in turns whose order is reversed every other time. A speed-up is plain seconds over
speculative seconds, the reading of the prompt included; prefix caches are off, so that every
repetition reads it again, and no proposer drafts from earlier answers.

The model is the embedded one, ``inflated`` (the embedded pair at half a billion parameters, made
where it is absent) or any folder or GGUF file. A model with a chat template is asked; others go on
with the text. Results of such models have files of their own, named by ``--name``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from harness import Sample, arguments, names, note, numbers, pair_up, paired_ratio, raw, take_turns
from peers_models import hugging_face
from prompt_sets import KINDS, PromptSets, load_prompts, spread
from proposer_sets import DEFAULT, described, for_speedup
from report import Report, Target, markdown, number, pick, ratio_cell, yes

from paceline import LLM, SamplingParams
from paceline.commands.prompts import Encoder
from paceline.commands.resolve import without_memory
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.engine.default_drafts import default_speculative_config
from paceline.llm import embedded_model
from paceline.models.checkpoint import load_checkpoint
from paceline.outputs import GenerationOutput

TEMPERATURES = (0.0, 0.8)
MAX_MODEL_LEN = 1024
WARM_UP_TOKENS = 16
PLAIN, CONTROL = "plain", "plain again"
WANTED = 1.5
COUNTED = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")


def proposers(options: argparse.Namespace) -> dict[str, tuple[SpeculativeConfig, ...]]:
    """The arms that speculate; each runs every prompt several times, so none remembers answers."""
    sources = for_speedup()
    if options.model is not None:
        own = default_speculative_config(options.model)
        draft = parse_speculative_config({"model": options.draft}) if options.draft else ()
        sources = {DEFAULT: (*own, *draft)}
    return {name: without_memory(parse_speculative_config(s)) for name, s in sources.items()}


def open_arms(options: argparse.Namespace, stack: ExitStack) -> dict[str, LLM]:
    """One engine per arm, all on one checkpoint."""
    checkpoint = load_checkpoint(options.model or embedded_model("target"))
    configs: dict[str, Any] = {PLAIN: [], **proposers(options), CONTROL: []}
    wanted = {PLAIN, CONTROL, DEFAULT, *(options.proposers or configs)}
    return {
        name: stack.enter_context(
            LLM(
                checkpoint,
                speculative_config=config,
                device=options.device,
                num_threads=options.threads,
                max_num_seqs=max(8, *options.concurrency),
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=False,
                strict=True,
            )
        )
        for name, config in configs.items()
        if name in wanted
    }


def count(outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Tokens and counters of a run; the same code for every arm."""
    facts: dict[str, Any] = {"output_tokens": 0, **dict.fromkeys(COUNTED, 0)}
    for output in outputs:
        if output.error is not None:
            raise output.error
        facts["output_tokens"] += len(output.token_ids)
        for name in COUNTED:
            facts[name] += getattr(output.completions[0].counters, name)
    return {**facts, "token_ids": [output.token_ids for output in outputs]}


def run_cell(
    arms: Mapping[str, LLM],
    groups: Sequence[Sequence[list[int]]],
    options: argparse.Namespace,
    temperature: float,
) -> list[Sample]:
    """All arms on all groups of prompts, in turns; a group runs as one batch."""

    def generate(llm: LLM, max_tokens: int, item: int) -> Any:
        wish = partial(SamplingParams, max_tokens=max_tokens, temperature=temperature)
        params = [wish(seed=item * 1000 + index) for index in range(len(groups[item]))]
        return llm.generate(groups[item], params)

    for _ in range(2):
        for llm in arms.values():
            generate(llm, WARM_UP_TOKENS, 0)
    runs: dict[str, Callable[[Any], Any]] = {
        name: partial(generate, llm, options.max_tokens) for name, llm in arms.items()
    }
    return take_turns(runs, range(len(groups)), options.repeat, count)


def summary(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """One row: an arm against the plain one."""
    own = [sample for sample in samples if sample.arm == arm]
    plain = [sample for sample in samples if sample.arm == PLAIN]
    error = next((sample.error for sample in [*own, *plain] if sample.failed), None)
    if error is not None:
        return {"arm": arm, "error": error}
    expected = {(s.item, s.repeat): s.facts["token_ids"] for s in plain}
    steps = sum(sample.facts["num_steps"] for sample in own)
    tokens = sum(sample.facts["output_tokens"] for sample in own)
    return {
        "arm": arm,
        "speedup": asdict(paired_ratio(pair_up(samples, PLAIN, arm))),
        "plain_tokens_per_second": _rate(plain),
        "tokens_per_second": _rate(own),
        "output_tokens": tokens,
        "mean_acceptance_length": tokens / steps if steps else 0.0,
        "identical": all(s.facts["token_ids"] == expected[s.item, s.repeat] for s in own),
    }


def _rate(samples: Sequence[Sample]) -> float:
    tokens = sum(sample.facts["output_tokens"] for sample in samples)
    return tokens / sum(sample.seconds or 0.0 for sample in samples)


def batches(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Full batches; where there are too few prompts for one, they are repeated."""
    enough = [prompts[i % len(prompts)] for i in range(max(size, len(prompts)))]
    return [enough[i : i + size] for i in range(0, len(enough) - size + 1, size)]


def run_all(
    arms: Mapping[str, LLM], source: PromptSets, options: argparse.Namespace, report: Report
) -> None:
    """Each kind of text, one request at a time at both temperatures, then several, greedily."""
    encode = Encoder(arms[PLAIN].tokenizer).encode
    room = MAX_MODEL_LEN - options.max_tokens
    few = {name: arms[name] for name in (PLAIN, DEFAULT, CONTROL)}
    for kind in options.kinds:
        texts = spread(source.kind(kind), max(options.num_prompts, *options.concurrency))
        prompts = [encode(text)[-room:] for text in texts]
        single = [[prompt] for prompt in spread(prompts, options.num_prompts)]
        cells = [(1, temperature, arms, single) for temperature in TEMPERATURES]
        for requests in options.concurrency:
            cells.append((requests, 0.0, few, batches(prompts, requests)))
        for requests, temperature, engines, groups in cells:
            label = {"kind": kind, "requests": requests, "temperature": temperature}
            note(", ".join(f"{name} {value}" for name, value in label.items()))
            samples = run_cell(engines, groups, options, temperature)
            report.samples += [raw(sample, label) for sample in samples]
            report.results += [
                {**label, **summary(samples, arm)} for arm in engines if arm != PLAIN
            ]


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    done = bool(results) and all("error" not in row for row in results)
    identical = sum(bool(row.get("identical")) for row in results)
    wanted = {"kind": "code", "requests": 1, "temperature": 0.0, "arm": DEFAULT}
    code = [row for row in results if all(row[key] == value for key, value in wanted.items())]
    value = code[0]["speedup"]["value"] if code and "speedup" in code[0] else None
    return [
        Target("speed-up, greedy code, default configuration, one request", value, WANTED, _LEAST),
        Target(
            "share of rows with identical output",
            identical / len(results) if done else None,
            1.0,
            _LEAST,
        ),
    ]


_LEAST = "at least"


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per kind of text, number of requests and temperature; a column per arm."""
    arms = list(dict.fromkeys(row["arm"] for row in results))
    cells = dict.fromkeys((row["kind"], row["requests"], row["temperature"]) for row in results)
    rows = []
    for kind, requests, temperature in cells:
        here = pick(results, kind=kind, requests=requests, temperature=temperature)
        found = {row["arm"]: row for row in here}
        plain = number(here[0].get("plain_tokens_per_second"), 1)
        ratios = [ratio_cell(found.get(arm, {})) for arm in arms]
        identical = all(row.get("identical") for row in here)
        rows.append([kind, requests, temperature, plain, *ratios, yes(identical)])
    names = ["control" if arm == CONTROL else arm for arm in arms]
    headers = ["text", "requests", "temperature", "plain tok/s", *names, "identical"]
    return [markdown(headers, rows)]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--model", help="inflated, a folder or a GGUF file (default: embedded)")
    parser.add_argument("--draft", help="a draft model beside the default proposers")
    parser.add_argument("--name", help="of the results: speedup-NAME (default: speedup)")
    parser.add_argument("--kinds", type=names, default=list(KINDS["public"]))
    parser.add_argument("--proposers", type=names, help="only these, beside the default")
    parser.add_argument("--concurrency", type=numbers, default=[4, 8], help="requests in a batch")
    parser.sized("--num-prompts", 16, 2, "of each kind")
    parser.sized("--max-tokens", 80, 48, "per prompt")
    parser.add_argument("--repeat", type=int, help="of every run (default: 1)", default=1)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    options = parser.parse_args(argv)
    if options.model == "inflated":
        options.model, options.draft = (str(hugging_face("0.5b", r)) for r in ("target", "draft"))
        options.name = options.name or "inflated"
    if options.model and options.save and not options.name:
        parser.error("--save of another model needs --name")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = load_prompts(options.prompts)
    with ExitStack() as stack:
        arms = open_arms(options, stack)
        config = {
            "model": Path(arms[PLAIN].model).name,
            "dtype": arms[PLAIN].config.dtype,
            "prompts": source.source,
            "prefix_caching": False,
            **{name: getattr(options, name) for name in ("quick", *_SETTINGS)},
            "proposers": {name: described(config) for name, config in proposers(options).items()},
        }
        report = Report(f"speedup-{options.name}" if options.name else "speedup", config)
        run_all(arms, source, options, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


_SETTINGS = ("num_prompts", "max_tokens", "repeat", "concurrency")

if __name__ == "__main__":
    sys.exit(main())
