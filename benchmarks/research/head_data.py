"""What a chat model's head is trained on: prompts that the model writes itself, and its answers.

`prompts` samples after the chat template's user tag, where a chat model writes what a user might
ask; `answers` lets it answer them, half greedily and half at a temperature; `traces` makes of these
what ``paceline train head`` and ``paceline train ngram`` read; `vocabulary` writes the tokens, so
that answered prompts can be read without the model. No prompt is used that a benchmark asks: that
is part of a public question, or in which one of them occurs. All files are compressed JSON lines,
and a command that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prompt_sets import data_folder, questions

from paceline import LLM, SamplingParams
from paceline.loading.checkpoint import model_fingerprint
from paceline.request.traces import Trace, TraceWriter
from paceline.text.token_pieces import token_pieces

BATCH = 192
PROMPT_TOKENS, ANSWER_TOKENS = 200, 256
LEAST_CHARS = 12
RUN = 3
"""Words by which texts are looked up."""
TEMPERATURES = (0.0, 0.8)
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands where the user's text begins in a rendered template."""
USER = "user\n"
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
    """A text's words: punctuation, white space and case do not count."""
    return " ".join(re.findall(r"\w+", text.lower()))


class Questions:
    """What benchmarks ask: finds texts that hold one of the questions or are part of one.

    A text of fewer than :data:`RUN` words is part of a question only if it is all of it.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._holding: dict[str, set[str]] = defaultdict(set)
        self._beginning: dict[str, set[str]] = defaultdict(set)
        for text in map(plain, texts):
            for run in _runs(text):
                self._holding[run].add(text)
            self._beginning[_runs(text)[0]].add(text)

    def overlap(self, text: str) -> bool:
        """Whether the text is one of the questions, holds one, or is part of one."""
        text = plain(text)
        wholes = self._holding.get(_runs(text)[0], ())
        parts = (part for run in _runs(text) for part in self._beginning.get(run, ()))
        return any(_holds(each, text) for each in wholes) or any(_holds(text, p) for p in parts)


def _runs(words: str) -> list[str]:
    """Every :data:`RUN` words in a row; fewer words are one run."""
    every = words.split()
    return [" ".join(every[i : i + RUN]) for i in range(max(1, len(every) - RUN + 1))]


def _holds(words: str, others: str) -> bool:
    return f" {others} " in f" {words} "


def is_usable(text: str, questions: Questions) -> bool:
    """Whether a prompt is long enough, and no benchmark asks it."""
    return len(text.strip()) >= LEAST_CHARS and not questions.overlap(text)


def opening(llm: LLM) -> list[int]:
    """What the template puts before a user's first words."""
    rendered = llm.tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    return llm.tokenizer.encode(rendered[: rendered.index(MARK)], add_special_tokens=False)


def write_prompts(llm: LLM, output: Path, count: int) -> None:
    rows, known_questions = read(output), Questions(questions(data_folder()))
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
            if found.finish_reason == "stop" and is_usable(text, known_questions):
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


def write_vocabulary(llm: LLM, output: Path) -> None:
    """What :func:`asked` reads: each token's bytes as characters; of special tokens nothing."""
    found = token_pieces(llm.tokenizer, llm.tokenizer.vocab_size)
    pieces = [None if piece is None else piece.decode("latin-1") for piece in found]
    append(output, [{"pieces": pieces}])


def asked(prompt_ids: Sequence[int], pieces: Sequence[str | None]) -> str:
    """The user's text, which special tokens and a line with his name stand around."""
    parts = [""]
    for piece in (pieces[token] for token in prompt_ids):
        if piece is None:
            parts.append("")
        else:
            parts[-1] += piece
    (text,) = (part.removeprefix(USER) for part in parts if part.startswith(USER))
    return text.encode("latin-1").decode("utf-8")


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
    parser.add_argument("what", choices=("prompts", "answers", "traces", "vocabulary"))
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
        elif options.what == "vocabulary":
            write_vocabulary(llm, options.output)
        else:
            write_traces(llm, options.answers, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
