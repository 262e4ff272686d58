"""How far the greedy texts of Paceline and of llama.cpp agree, on the same GGUF file.

Both go on from the same token ids. Where two texts part, both tokens are judged by the file's own
weights in float32 (reference ops): the regret of a token is by how many nats it is less likely than
the likeliest one. The text of float32 itself is a third arm: it says how early rounding alone makes
texts part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
from fidelity import add_tool_options, files_of, quantised
from harness import arguments, note
from peers_models import MissingPeerError
from prompt_sets import load_prompts, spread
from report import Report, number, table

from paceline import LLM, SamplingParams
from paceline.cli.options.prompts import Encoder
from paceline.core.errors import PacelineError
from paceline.loading.checkpoint import load_checkpoint
from paceline.workbench.llama_peer import LlamaPeer
from paceline.workbench.quality import REFERENCE, Window, engine_arm

PACELINE, PEER = "paceline", "llama.cpp"
Text = list[int]
Row = dict[str, Any]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    add_tool_options(parser)
    parser.add_argument("--dtype", default="auto", help="Paceline's (default: auto)")
    parser.sized("--num-prompts", 50, 2)
    parser.sized("--max-tokens", 200, 16, "per prompt")
    parser.set_defaults(made=[])
    options = parser.parse_args(argv)
    options.formats = options.formats or ["file"]
    return options


def prompts_of(options: argparse.Namespace) -> list[str]:
    """Questions where the public sets are present, the embedded prompts where they are not."""
    found = load_prompts(options.prompts)
    sets = [found.sets["mt_bench"]] if found.source == "public" else found.sets.values()
    return spread(list(chain.from_iterable(sets)), options.num_prompts)


def first_difference(own: Text, other: Text) -> int | None:
    """Index of the first token in which two texts differ; None where they are the same."""
    pairs = zip(own, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))
    return None if at == len(own) == len(other) else at


def until_end(text: Text, ends: Sequence[int]) -> Text:
    """A text up to its first end token, that included."""
    at = next((i for i, token in enumerate(text) if token in ends), len(text))
    return text[: at + 1]


def regrets(llm: LLM, prompt: Text, shared: Text, tokens: Sequence[int]) -> list[float]:
    """By how much each of these next tokens is less likely than the likeliest, in nats."""
    out = np.empty((1, llm.checkpoint.config.vocab_size), np.float32)
    before = [*prompt, *shared]
    piece = Window([*before, tokens[0]], len(before))
    llm.call(lambda engine: engine_arm(engine, piece, out))
    return [float(out.max() - out[0, token]) for token in tokens]


def samples_of(options: argparse.Namespace, path: Path) -> list[Row]:
    """Each pair of arms on each prompt: where they part, and the regret of both there."""
    source = load_checkpoint(path)
    prompts = [Encoder(source.tokenizer).encode(text) for text in prompts_of(options)]
    longest = max(map(len, prompts)) + options.max_tokens
    settings: dict[str, Any] = {
        "speculative_config": [],
        "num_threads": options.threads,
        "max_num_seqs": 1,
        "max_model_len": longest,
    }
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0, ignore_eos=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = stack.enter_context(LLM(source, dtype=options.dtype, **settings))
        exact = stack.enter_context(LLM(source, dtype=REFERENCE, backend="reference", **settings))
        size = {"vocab_size": source.config.vocab_size, "longest": longest}
        peer = LlamaPeer(str(options.llama), path, folder, threads=options.threads, **size)
        stack.callback(peer.close)
        arms: dict[str, Callable[[Text], Text]] = {
            PACELINE: lambda prompt: list(own.generate(prompt, params).token_ids),
            PEER: lambda prompt: peer.greedy(prompt, options.max_tokens),
            REFERENCE: lambda prompt: list(exact.generate(prompt, params).token_ids),
        }
        ends = source.config.eos_token_ids
        found = []
        for index, prompt in enumerate(prompts):
            note(f"{path.name}: prompt {index + 1} of {len(prompts)}")
            texts = {name: until_end(arm(prompt), ends) for name, arm in arms.items()}
            found += [{"prompt": index, **row} for row in compared(exact, prompt, texts)]
        return found


def compared(exact: LLM, prompt: Text, texts: Mapping[str, Text]) -> list[Row]:
    rows = []
    for (one, text), (two, other) in combinations(texts.items(), 2):
        at = first_difference(text, other)
        row: Row = {"arms": [one, two], "tokens": min(len(text), len(other)), "first": at}
        if at is not None and at < row["tokens"]:
            row["regret"] = regrets(exact, prompt, text[:at], (text[at], other[at]))
        rows.append({**row, "error": None})
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """Of one pair of arms: the share of equal texts, and where and how badly the others part."""
    firsts = [row["first"] for row in rows if row["first"] is not None]
    judged = [row["regret"] for row in rows if "regret" in row]
    both = list(zip(*judged, strict=True)) or [(), ()]
    return {
        "num_prompts": len(rows),
        "identical": (len(rows) - len(firsts)) / len(rows),
        "median_first": statistics.median(firsts) if firsts else None,
        "mean_regret": [statistics.fmean(each) if each else None for each in both],
        "max_regret": [max(each, default=None) for each in both],
    }


def tables(results: Sequence[Row]) -> list[str]:
    headers = ["file", "arms", "prompts", "same text", "first difference, median"]
    headers += ["mean regret, first arm", "second", "largest", "second"]
    cells = [
        [
            row["file"],
            " / ".join(row["arms"]),
            row["num_prompts"],
            f"{row['identical']:.0%}",
            number(row["median_first"], 0),
            *(number(each, 4) for each in (*row["mean_regret"], *row["max_regret"])),
        ]
        for row in results
    ]
    return [table(headers, cells)]


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    keys = ("quick", "formats", "dtype", "num_prompts", "max_tokens", "threads", "prompts")
    report = Report("greedy_agreement", {key: getattr(options, key) for key in keys})
    for model, source in files_of(options).items():
        for kind in options.formats:
            name = f"{model} {kind}"
            try:
                rows = samples_of(options, quantised(source, kind, options))
            except (PacelineError, MissingPeerError) as error:
                report.samples.append({"file": name, "error": str(error)})
                continue
            report.samples += [{"file": name, **row} for row in rows]
            for arms in combinations((PACELINE, PEER, REFERENCE), 2):
                own = [row for row in rows if row["arms"] == list(arms)]
                report.results.append({"file": name, "arms": list(arms), **summary(own)})
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
