"""A mixture that does not fit in memory: experts from a cache and from disk, beside llama.cpp.

Every engine runs in a process of its own, in a control group whose memory is a part of the file's
size: Paceline with ``--weight-memory``, plainly and with suffix matching, and llama.cpp, which maps
the file. They answer each prompt in turn. Before them, without a limit: Paceline with all weights
in memory, whose answers have to be the same. Times begin behind the prompt.

A model without a vocabulary, such as one that ``research/random_mixture.py`` makes, is given random
tokens. Its greedy answers soon repeat themselves, and so do the experts that they choose; so each
prompt is answered a second time at the highest temperature, where every token is as good as drawn
at random, and rows have in common what they have by chance. No text is like either.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Sample, arguments, chosen, first_error, names, raw
from peers_client import LLAMA, Worker
from prompt_sets import load_prompts, spread
from report import Report, Row, Target, grid, identical_target, markdown
from streaming import PLAIN, SUFFIX, SUFFIXES
from streaming_arms import DISK, answers_in_turns, engine_of, over, until_llama_stops

from paceline.loading.checkpoint import load_checkpoint

RESIDENT = "in memory"
ARMS = (RESIDENT, PLAIN, SUFFIX, LLAMA)
KINDS = ("humaneval", "prose")
GREEDY, DRAWN = "random prompt, greedy", "random tokens"
TEMPERATURES = {DRAWN: 100.0}
KV_CACHE = 64 << 20


def prompts_of(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Token ids of some prompts of each kind."""
    checkpoint, count = load_checkpoint(options.packed), options.num_prompts
    length = options.prompt_tokens
    if checkpoint.tokenizer is None:
        rng, vocab = random.Random(0), checkpoint.config.vocab_size
        drawn = [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
        return {GREEDY: drawn, DRAWN: drawn}
    texts, encode = load_prompts().sets, checkpoint.tokenizer.encode
    return {kind: [encode(t)[:length] for t in spread(texts[kind], count)] for kind in KINDS}


def run(options: argparse.Namespace, report: Report) -> None:
    prompts = prompts_of(options)
    items = [(kind, index) for index in range(options.num_prompts) for kind in prompts]
    limits = {"weight_memory": options.weight_memory << 20, "kv_cache_memory": KV_CACHE}
    files = [Path(options.gguf)] if options.gguf else []
    files += Path(options.packed).glob("*.safetensors")

    def opened(arm: str, group: Path | None) -> Worker:
        if arm == LLAMA:
            mapped = {"stays_mapped": True}
            return Worker(engine_of(arm), options.gguf, options.threads, group, **mapped)
        more: dict[str, Any] = {} if arm == RESIDENT else dict(limits)
        more["speculative"] = [SUFFIXES] if arm == SUFFIX else []
        return Worker(engine_of(arm), options.packed, options.threads, group, **more)

    def answered(worker: Worker, arm: str, item: tuple[str, int]) -> dict[str, Any]:
        tokens = prompts[item[0]][item[1]]
        if arm == LLAMA:
            return until_llama_stops(worker, tokens, options.llama_tokens)
        temperature = TEMPERATURES.get(item[0], 0.0)
        wish = {"max_tokens": options.max_tokens, "temperature": temperature}
        found: dict[str, Any] = worker.ask("answer", token_ids=tokens, **wish)
        return found

    arms = [arm for arm in options.arms if arm != LLAMA or options.gguf]
    limit = options.memory << 20
    samples, peaks = answers_in_turns(arms, RESIDENT, limit, files, opened, answered, items)
    report.samples = [raw(sample, {}) for sample in samples]
    report.results = rows(samples, peaks)


def rows(samples: Sequence[Sample], peaks: dict[str, int]) -> list[Row]:
    """Of each arm and kind the tokens per second behind the prompt, and what rounds say of it;
    llama.cpp's is greedy in all of them."""
    cells: dict[tuple[str, str], list[Sample]] = {}
    arms: dict[str, list[Sample]] = {}
    for sample in samples:
        arms.setdefault(sample.arm, []).append(sample)
        kind = sample.item[0]  # type: ignore[index]
        shown = GREEDY if sample.arm == LLAMA and kind == DRAWN else kind
        cells.setdefault((sample.arm, shown), []).append(sample)
    return [
        {"arm": arm, "kind": kind, "peak_bytes": peaks[arm]} | _found(cells[arm, kind], arms)
        for arm in arms
        for of, kind in cells
        if of == arm != DISK
    ]


def _found(cell: Sequence[Sample], arms: dict[str, list[Sample]]) -> dict[str, Any]:
    """Of a row, also what came from disk for a token."""
    error, facts = first_error(cell), [sample.facts for sample in cell]
    if error is not None:
        return {"error": error}
    sums = {name: sum(each.get(name, 0) for each in facts) for name in SUMMED}
    tokens = sum(each["tokens"] - 1 for each in facts)
    found: dict[str, Any] = {"tokens_per_second": tokens / sums["seconds"]}
    peer = over(cell, arms.get(LLAMA, []))
    if peer is not None:
        found["over_llama"] = peer
    if sums["bytes_read"]:
        found["bytes_per_token"] = sums["bytes_read"] / tokens
        found["waited"] = sums["seconds_waited"] / sums["seconds"]
        found["hit_rate"] = 1.0 - sums["experts_fetched"] / sums["experts_read"]
    said = {s.item: s.facts["token_ids"] for s in arms.get(RESIDENT, []) if not s.failed}
    if said and cell[0].arm != LLAMA:
        found["identical"] = all(s.facts["token_ids"] == said.get(s.item) for s in cell)
    return found


SUMMED = ("seconds", "bytes_read", "seconds_waited", "experts_read", "experts_fetched")


def targets(report: Report) -> list[Target]:
    streamed = [each for each in report.results if each["arm"] == PLAIN]
    over = [each["over_llama"] for each in streamed if "over_llama" in each]
    is_compared = any(each["arm"] == LLAMA for each in report.results)
    wanted = [Target("plain, over llama.cpp", min(over, default=None), 3.0, "at least")]
    peaks = [each["peak_bytes"] / (1 << 20) for each in streamed]
    most = float(report.config["memory"])
    return [
        *(wanted if is_compared else []),
        Target("peak of resident memory, MB", max(peaks, default=None), most),
        identical_target([r for r in report.results if "identical" in r], "answers"),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        *(("engine", "arm"), ("text", "kind"), ("tok/s", "tokens_per_second", 2)),
        *(("over llama.cpp", "over_llama", 2), ("found in memory", "hit_rate", 2)),
        ("MB from disk per token", lambda r: r["bytes_per_token"] / 1e6, 1),
        *(("of the time waited", "waited", 2),),
        ("peak, MB", lambda r: r["peak_bytes"] / (1 << 20), 0),
        ("identical", "identical"),
    )
    shown = [{"bytes_per_token": 0.0, **each} for each in results]
    return [markdown(*grid(shown, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--packed", required=True, help="folder that paceline convert wrote")
    parser.add_argument("--gguf", help="the file that it was made of, for llama.cpp")
    parser.add_argument("--name", required=True, help="of the model, for the result's file")
    parser.add_argument("--memory", type=int, required=True, help="of a control group, in MB")
    parser.add_argument("--weight-memory", type=int, required=True, help="of that, in MB")
    parser.add_argument("--arms", type=names, default=list(ARMS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="most of a prompt")
    parser.sized("--num-prompts", 3, 1, "of each kind")
    parser.sized("--max-tokens", 64, 16, "of each answer")
    parser.sized("--llama-tokens", 12, 4, "of llama.cpp's answers, which take long")
    options = parser.parse_args(argv)
    settings = ("memory", "weight_memory", "threads", "num_prompts", "max_tokens", "llama_tokens")
    report = Report(f"streaming_experts-{options.name}", chosen(options, "quick", *settings))
    report.config["model"] = Path(options.packed).name
    report.config["bytes"] = sum(f.stat().st_size for f in Path(options.packed).iterdir())
    run(options, report)
    report.targets = targets(report)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
