"""What a chat model's head is trained on: prompts that the model writes itself, and its answers.

`prompts` samples after the chat template's user tag, where a chat model writes what a user might
ask; `answers` lets it answer them, half greedily and half at a temperature; `traces` makes of these
what ``paceline train head`` reads. No prompt is used that occurs in MT-bench, by which heads are
judged, or in which one of its questions occurs. All files are compressed JSON lines, and a command
that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prompt_sets import data_folder

from paceline import LLM, SamplingParams
from paceline.loading.checkpoint import model_fingerprint
from paceline.request.traces import Trace, TraceWriter

BATCH = 192
PROMPT_TOKENS, ANSWER_TOKENS = 200, 256
LEAST_CHARS = 12
TEMPERATURES = (0.0, 0.8)
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands where the user's text begins in a rendered template."""
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def append(path: Path, rows: Sequence[Row]) -> None:
    with gzip.open(path, "at", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().lower()


def judged() -> set[str]:
    """The questions of MT-bench."""
    lines = (data_folder() / "prompts" / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines()
    return {plain(turn) for line in lines for turn in json.loads(line)["turns"]}


def is_usable(text: str, questions: set[str]) -> bool:
    """Whether a prompt is long enough, and neither holds a question nor is part of one."""
    text = plain(text)
    return len(text) >= LEAST_CHARS and not any(text in each or each in text for each in questions)


def opening(llm: LLM) -> list[int]:
    """What the template puts before a user's first words."""
    rendered = llm.tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    return llm.tokenizer.encode(rendered[: rendered.index(MARK)], add_special_tokens=False)


def write_prompts(llm: LLM, output: Path, count: int) -> None:
    rows, questions = read(output), judged()
    known = {plain(row["prompt"]) for row in rows}
    begin = opening(llm)
    seed = rows[-1]["seed"] + 1 if rows else 0
    while len(rows) < count:
        params = [
            SamplingParams(max_tokens=PROMPT_TOKENS, temperature=1.0, top_p=0.95, seed=seed + i)
            for i in range(BATCH)
        ]
        new = []
        for i, found in enumerate(llm.generate([list(begin)] * BATCH, params)):
            text = found.text.strip()
            if found.finish_reason == "stop" and is_usable(text, questions):
                if plain(text) not in known:
                    new.append({"prompt": text, "seed": seed + i})
                known.add(plain(text))
        append(output, new)
        rows, seed = rows + new, seed + BATCH
        print(f"{len(rows)} of {count} prompts", file=sys.stderr)


def write_answers(llm: LLM, prompts: Path, output: Path, count: int) -> None:
    """Prompts take the temperatures in turns."""
    rows, begin = read(prompts)[:count], len(read(output))
    for start in range(begin, len(rows), BATCH):
        batch = [row["prompt"] for row in rows[start : start + BATCH]]
        encoded = [llm.encode([{"role": "user", "content": text}]) for text in batch]
        params = [
            SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature, seed=start + i)
            for i, (_, temperature) in enumerate(zip(batch, turns(), strict=False))
        ]
        found = llm.generate(encoded, params)
        append(
            output,
            [
                {"prompt_ids": ids, "token_ids": each.token_ids, "temperature": one.temperature}
                for ids, each, one in zip(encoded, found, params, strict=True)
            ],
        )
        print(f"{start + len(batch)} of {len(rows)} answers", file=sys.stderr)


def turns() -> Iterator[float]:
    while True:
        yield from TEMPERATURES


def write_traces(llm: LLM, answers: Path, output: Path) -> None:
    """Without log-probabilities, which training a head does not read: they are no numbers."""
    meta = {
        "model": llm.model,
        "model_fingerprint": model_fingerprint(llm.checkpoint),
        "dtype": llm.config.dtype,
        "vocab_fingerprint": llm.tokenizer.fingerprint,
    }
    writer = TraceWriter(output, meta)
    traces = [
        trace(index, row["prompt_ids"], row["token_ids"]) for index, row in enumerate(read(answers))
    ]
    for start in range(writer.num_shards * BATCH, len(traces), BATCH):
        writer.write_shard(traces[start : start + BATCH])


def trace(number: int, prompt: Sequence[int], answer: Sequence[int]) -> Trace:
    """One without log-probabilities."""
    count = len(answer)
    return Trace(
        prompt_index=number,
        prompt_len=len(prompt),
        token_ids=np.array([*prompt, *answer], np.int32),
        logprobs=np.full(count, np.nan, np.float32),
        top_ids=np.zeros((count, 0), np.int32),
        top_logprobs=np.zeros((count, 0), np.float32),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prompts", "answers", "traces"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, help="which are answered")
    parser.add_argument("--answers", type=Path, help="of which traces are made")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(argv)
    with LLM(options.model, max_num_seqs=64) as llm:
        if options.what == "prompts":
            write_prompts(llm, options.output, options.count)
        elif options.what == "answers":
            write_answers(llm, options.prompts, options.output, options.count)
        else:
            write_traces(llm, options.answers, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
