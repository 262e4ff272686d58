"""The prompts of a benchmark, and when its requests arrive.

Prompts are random, or of sonnet, ShareGPT, Spec-Bench or a file of one's own. Every set is a
function of its configuration and the seed. Names and defaults are those of vLLM's benchmarks.
Requests arrive all at once, as a random process, or as a recorded trace says; times are seconds
since the run began.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError, RequestError
from paceline.text.prompt_files import Row, read_custom, read_lines, read_sharegpt
from paceline_lab.bench.client import Sample
from paceline_lab.bench.options import DatasetOptions
from paceline_lab.bench.token_counting import TokenCounter, text_of_length

SONNET_TASK = "Choose lines of the poem below, and write them again in another order:\n"
# Conversations outside of these are left out, as vLLM does.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048


def make_samples(
    options: DatasetOptions, counter: TokenCounter, count: int, seed: int
) -> list[Sample]:
    """So many samples; files with fewer rows are gone through again.

    Raises:
        RequestError: the file cannot be read or has no usable rows.
        BenchmarkError: the counter's server does not answer.
    """
    return MAKERS[options.dataset_name](options, counter, count, random.Random(seed))


def make_trace_samples(
    rows: Sequence[TraceRow], options: DatasetOptions, counter: TokenCounter, seed: int
) -> list[Sample]:
    """A random prompt for each request of a trace, with the lengths that it had.

    Raises:
        ConfigError: the dataset is another than ``random``.
        BenchmarkError: the counter's server does not answer.
    """
    if options.dataset_name != "random":
        raise ConfigError("--trace-path says how long prompts are: it needs --dataset-name random")
    rng = random.Random(seed)
    return [_random_sample(counter, rng, row.prompt_len, row.output_len) for row in rows]


def _random(
    options: DatasetOptions, counter: TokenCounter, count: int, rng: random.Random
) -> list[Sample]:
    prefix = ""
    if options.random_prefix_len:
        prefix, _ = text_of_length(counter, rng, options.random_prefix_len)
    samples = []
    for _ in range(count):
        own = _spread(rng, options.random_input_len, options.random_range_ratio)
        output_len = _spread(rng, options.random_output_len, options.random_range_ratio)
        length = options.random_prefix_len + own
        samples.append(_random_sample(counter, rng, length, output_len, prefix))
    return samples


def _spread(rng: random.Random, length: int, ratio: float) -> int:
    """A length within ``ratio`` of the wanted one, at least 1."""
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _random_sample(
    counter: TokenCounter, rng: random.Random, length: int, output_len: int, prefix: str = ""
) -> Sample:
    text, prompt_len = text_of_length(counter, rng, length, prefix)
    return Sample(text, prompt_len, output_len)


def _sonnet(
    options: DatasetOptions, counter: TokenCounter, count: int, rng: random.Random
) -> list[Sample]:
    """Prompts of random lines that share a task and their first lines."""
    # What every prompt begins with is counted with each line, and must not be.
    fixed = counter.count("")
    lines = [(f"{line}\n", counter.count(f"{line}\n") - fixed) for line in read_lines(options.path)]
    task = SONNET_TASK, counter.count(SONNET_TASK)
    if options.sonnet_input_len <= options.sonnet_prefix_len:
        raise ConfigError(
            f"--sonnet-input-len is {options.sonnet_input_len}; it must be above "
            f"--sonnet-prefix-len, which is {options.sonnet_prefix_len}"
        )
    prefix = _filled([task], iter(lines), options.sonnet_prefix_len)
    samples = []
    for _ in range(count):
        drawn = (rng.choice(lines) for _ in range(options.sonnet_input_len))
        chosen = _filled(prefix, drawn, options.sonnet_input_len)
        text = "".join(line for line, _ in chosen)
        samples.append(Sample(text, counter.count(text), options.sonnet_output_len))
    return samples


def _filled(
    begun: list[tuple[str, int]], lines: Iterator[tuple[str, int]], length: int
) -> list[tuple[str, int]]:
    """``begun`` and as many of the lines as fit into the length."""
    chosen, total = list(begun), sum(tokens for _, tokens in begun)
    for line in lines:
        total += line[1]
        if total > length:
            break
        chosen.append(line)
    return chosen


def _sharegpt(
    options: DatasetOptions, counter: TokenCounter, count: int, rng: random.Random
) -> list[Sample]:
    rows = _shuffled(read_sharegpt(options.path), options, rng)
    samples: list[Sample] = []
    for row in rows:
        if len(samples) == count:
            break
        wanted = options.sharegpt_output_len
        output_len = counter.count(row.answer or "") if wanted is None else wanted
        prompt_len = _length(counter, row)
        enough = prompt_len >= MIN_TOKENS and (wanted is not None or output_len >= MIN_TOKENS)
        fits = prompt_len <= MAX_PROMPT_TOKENS and prompt_len + output_len <= MAX_TOKENS
        if enough and fits:
            samples.append(Sample(row.prompt, prompt_len, output_len))
    if not samples:
        raise RequestError(
            f"{options.path}: every conversation is too short or too long; prompts have "
            f"{MIN_TOKENS} to {MAX_PROMPT_TOKENS} tokens, and {MAX_TOKENS} with their answer"
        )
    return _repeated(samples, count)


def _rows(
    options: DatasetOptions, counter: TokenCounter, count: int, rng: random.Random
) -> list[Sample]:
    """Rows of one's own, or those of Spec-Bench, which differ in the usual length of an answer."""
    is_own = options.dataset_name == "custom"
    usual = options.custom_output_len if is_own else options.spec_bench_output_len
    rows = read_custom(options.path, None if is_own else options.spec_bench_category)
    made = [
        Sample(row.prompt, _length(counter, row), row.output_len or usual)
        for row in _shuffled(rows, options, rng)[:count]
    ]
    return _repeated(made, count)


def _shuffled(rows: list[Row], options: DatasetOptions, rng: random.Random) -> list[Row]:
    if not options.disable_shuffle:
        rng.shuffle(rows)
    return rows


def _length(counter: TokenCounter, row: Row) -> int:
    if isinstance(row.prompt, str):
        return counter.count(row.prompt)
    return counter.count("\n".join(str(message.get("content", "")) for message in row.prompt))


def _repeated(samples: Sequence[Sample], count: int) -> list[Sample]:
    return [samples[index % len(samples)] for index in range(count)]


MAKERS: dict[str, Callable[..., list[Sample]]] = {
    "random": _random,
    "sonnet": _sonnet,
    "sharegpt": _sharegpt,
    "spec_bench": _rows,
    "custom": _rows,
}


_MICROSECONDS = 6


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a trace: when it came (seconds since the first), and its lengths in tokens."""

    time: float
    prompt_len: int
    output_len: int


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrivals with gamma-distributed gaps; a burstiness of 1 is a Poisson process.

    As in vLLM, the times are scaled so that the last request comes at ``count / rate``: otherwise
    the same rate would offer a few percent more or less load with every seed.

    Args:
        rate: requests per second; infinity means all at once.
        burstiness: the shape of the gamma distribution: lower is burstier, infinity is regular.

    Raises:
        ConfigError: the rate or the burstiness is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(
            f"--request-rate is {rate} and --burstiness {burstiness}; both must be above 0"
        )
    if math.isinf(rate) or not count:
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(gaps)
    scaled: list[float] = (times * (count / rate / times[-1])).tolist()
    return scaled


def read_trace(path: str | Path, count: int) -> list[TraceRow]:
    """The first rows of a CSV file: time (a date or seconds), prompt tokens, output tokens."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            rows = list(islice(_trace_rows(csv.reader(lines), path), count))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise RequestError(f"the trace {path} holds no requests")
    first = min(row.time for row in rows)
    relative = [TraceRow(row.time - first, row.prompt_len, row.output_len) for row in rows]
    return sorted(relative, key=lambda row: row.time)


def _trace_rows(lines: Iterable[list[str]], path: str | Path) -> Iterator[TraceRow]:
    for number, cells in enumerate(lines, start=1):
        if not cells or (number == 1 and not cells[-1].strip().isdecimal()):
            continue  # An empty line, or the names of the columns.
        try:
            time, prompt_len, output_len = cells
            seconds = _seconds(time)
            if not math.isfinite(seconds):
                raise ValueError(time)
            yield TraceRow(seconds, max(1, int(prompt_len)), max(1, int(output_len)))
        except ValueError as error:
            raise RequestError(
                f"{path}, line {number}: a row is a time, prompt tokens and output tokens, not "
                f"{','.join(cells)!r}"
            ) from error


def _seconds(text: str) -> float:
    """Seconds of a number or of a date; recorded dates have more decimals than Python reads."""
    try:
        return float(text)
    except ValueError:
        whole, point, decimals = text.strip().partition(".")
        date = datetime.fromisoformat(whole + point + decimals[:_MICROSECONDS])
        # Differences alone matter; without a zone they would depend on this machine's summer time.
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
