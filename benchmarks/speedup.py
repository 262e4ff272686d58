"""Wall time of plain and speculative decoding, end to end.

The plain arm is an engine in which speculation was never configured, and a second such engine runs
as a control: its ratio shows what the machine's own unrest looks like. All arms get the same
prompts, in turns whose order is reversed every other time. A speed-up is plain seconds over
speculative seconds, the reading of the prompt included unless ``--after-first-token`` leaves it
out; prefix caches are off, so that every repetition reads it again, and no proposer drafts from
earlier answers.

The model is the embedded one, ``inflated`` (the embedded pair at half a billion parameters, made
where it is absent) or any folder or GGUF file. A model with a chat template is asked; others go on
with the text. Results of such models have files of their own, named by ``--name``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    CONTROL,
    COUNTED,
    PLAIN,
    Report,
    Row,
    Sample,
    Target,
    against_plain,
    among,
    arguments,
    chosen,
    grid,
    identical_target,
    markdown,
    names,
    note,
    numbers,
    pick,
    ratio_cell,
    raw,
    take_turns,
    yes,
)
from peers_client import hugging_face
from prompt_sets import KINDS, PromptSets, load_prompts, spread
from proposer_sets import DEFAULT, described, for_speedup

from paceline import LLM, SamplingParams
from paceline.api.llm import embedded_model
from paceline.api.outputs import GenerationOutput
from paceline.build.default_drafts import default_speculative_config
from paceline.cli.prompts import Encoder
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import without_memory
from paceline.loading.checkpoint import load_checkpoint

TEMPERATURES = (0.0, 0.8)
MAX_MODEL_LEN = 1024
WARM_UP_TOKENS = 16
WANTED = 1.5


def proposers(options: argparse.Namespace) -> dict[str, tuple[SpeculativeConfig, ...]]:
    """The arms that speculate; each runs every prompt several times, so none remembers answers."""
    sources = for_speedup()
    if options.model is not None:
        own = default_speculative_config(options.model)
        draft = parse_speculative_config({"model": options.draft}) if options.draft else ()
        sources = {DEFAULT: (*own, *draft)}
    return {name: without_memory(parse_speculative_config(s)) for name, s in sources.items()}


def open_arms(options: argparse.Namespace, stack: ExitStack) -> dict[str, LLM]:
    """The arms that are asked for."""
    configs: dict[str, Any] = proposers(options)
    wanted = {DEFAULT, *(options.proposers or configs)}
    return open_engines(
        options,
        {name: config for name, config in configs.items() if name in wanted},
        stack,
        num_threads=options.threads,
        max_num_seqs=max(8, *options.concurrency),
    )


def open_engines(
    options: argparse.Namespace, configs: Mapping[str, Any], stack: ExitStack, **more: Any
) -> dict[str, LLM]:
    """An engine per configuration and two plain ones, all on one checkpoint."""
    checkpoint = load_checkpoint(options.model or embedded_model("target"))
    more |= {"device": options.device, "max_model_len": MAX_MODEL_LEN, "strict": True}
    return {
        name: stack.enter_context(
            LLM(checkpoint, speculative_config=config, enable_prefix_caching=False, **more)
        )
        for name, config in {PLAIN: [], **configs, CONTROL: []}.items()
    }


def count(outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Tokens and counters of a run; the same code for every arm."""
    facts: dict[str, Any] = {"output_tokens": 0, **dict.fromkeys(COUNTED, 0)}
    facts["first_token_seconds"] = 0.0
    for output in outputs:
        if output.error is not None:
            raise output.error
        facts["output_tokens"] += len(output.token_ids)
        first = output.completions[0].time_to_first_token
        facts["first_token_seconds"] = max(facts["first_token_seconds"], first or 0.0)
        for name in COUNTED:
            facts[name] += getattr(output.completions[0].counters, name)
    return {**facts, "token_ids": [output.token_ids for output in outputs]}


def run_cell(
    arms: Mapping[str, LLM],
    groups: Sequence[Sequence[list[int]]],
    options: argparse.Namespace,
    temperature: float,
    count: Callable[[Sequence[GenerationOutput]], Mapping[str, Any]] = count,
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


def behind_prompt(samples: Sequence[Sample]) -> list[Sample]:
    """The same with the time that passed from the first token on, which speculation can shorten."""
    return [
        sample
        if sample.seconds is None
        else replace(sample, seconds=sample.seconds - sample.facts["first_token_seconds"])
        for sample in samples
    ]


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
            timed = behind_prompt(samples) if options.after_first_token else samples
            report.samples += [raw(sample, label) for sample in samples]
            report.results += [
                {**label, **against_plain(timed, arm)} for arm in engines if arm != PLAIN
            ]


def targets(results: Sequence[Row]) -> list[Target]:
    wanted = {"kind": "code", "requests": 1, "temperature": 0.0, "arm": DEFAULT}
    code = pick(results, **wanted)
    value = code[0].get("speedup", {}).get("value") if code else None
    name = "speed-up, greedy code, default configuration, one request"
    return [Target(name, value, WANTED, "at least"), identical_target(results)]


def tables(results: Sequence[Row]) -> list[str]:
    """A line per kind of text, number of requests and temperature; a column per arm."""
    keys = {"text": "kind", "requests": "requests", "temperature": "temperature"}
    return [comparison(results, keys)]


def comparison(results: Sequence[Row], keys: Mapping[str, str], *last: Any) -> str:
    """A line per cell, which its keys (by header) tell from others; a column per arm."""
    arms = list(dict.fromkeys(row["arm"] for row in results))
    cells = dict.fromkeys(tuple(row[key] for key in keys.values()) for row in results)
    rows = []
    for cell in cells:
        here = pick(results, **dict(zip(keys.values(), cell, strict=True)))
        same = all(row.get("identical") for row in here)
        rows.append({**here[0], **{row["arm"]: row for row in here}, "same": yes(same)})
    return markdown(
        *grid(
            rows,
            *keys.items(),
            ("plain tok/s", "plain_tokens_per_second", 1),
            *(
                (
                    "control" if arm == CONTROL else arm,
                    lambda row, arm=arm: ratio_cell(row.get(arm, {})),
                )
                for arm in arms
            ),
            *last,
            ("identical", "same"),
        )
    )


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument(
        "--model", help="inflated, a name, a folder or a GGUF file (default: embedded)"
    )
    parser.add_argument("--draft", help="a draft model beside the default proposers")
    parser.add_argument("--name", help="of the results: speedup-NAME (default: speedup)")
    parser.add_argument("--kinds", type=names, default=list(KINDS["public"]), help="of prompts")
    several = among(for_speedup())
    parser.add_argument("--proposers", type=several, help="only these, beside the default")
    parser.add_argument("--concurrency", type=numbers, default=[4, 8], help="requests in a batch")
    parser.sized("--num-prompts", 16, 2, "of each kind")
    parser.sized("--max-tokens", 80, 48, "per prompt")
    parser.add_argument("--repeat", type=int, help="of every run (default: 1)", default=1)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--after-first-token", action="store_true", help="leave prompts out")
    options = parser.parse_args(argv)
    if options.model == "inflated":
        options.model, options.draft = (str(hugging_face("0.5b", r)) for r in ("target", "draft"))
        options.name = options.name or "inflated"
    if options.model and options.save and not options.name:
        parser.error("--save of another model needs --name")
    if options.model and options.proposers:
        parser.error("--proposers are for the embedded model: leave out --model, or them")
    options.source = load_prompts(options.prompts)
    for kind in options.kinds:
        if kind not in (allowed := options.source.names):
            parser.error(f"--kinds has {kind!r}; allowed: {', '.join(allowed)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = options.source
    with ExitStack() as stack:
        arms = open_arms(options, stack)
        config = {
            "model": Path(arms[PLAIN].model).name,
            "dtype": arms[PLAIN].config.dtype,
            "prompts": source.source,
            "prefix_caching": False,
            **chosen(options, "quick", "num_prompts", "max_tokens", "repeat", "concurrency"),
            "after_first_token": options.after_first_token,
            "proposers": {name: described(config) for name, config in proposers(options).items()},
        }
        report = Report(f"speedup-{options.name}" if options.name else "speedup", config)
        run_all(arms, source, options, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
