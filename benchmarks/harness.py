"""What every benchmark shares: its options, the turns in which arms run, and the statistics.

Knows nothing of what is measured. An arm that raises becomes a failed sample, which carries its
error and no number.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("auto", "public", "embedded")
"""Of prompts."""
PLAIN, CONTROL = "plain", "plain again"
"""The arm that others are compared with, and the same again, which shows the machine's unrest."""
COUNTED = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
"""Counters that every run of an arm reports."""
BOOTSTRAP_DRAWS = 2000
CONFIDENCE = 0.95


class Options(argparse.ArgumentParser):
    """A parser that knows that some options have another default in a quick run."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=(description or "").split("\n")[0])
        self._sizes: dict[str, tuple[Any, Any]] = {}

    def sized(self, name: str, whole: Any, quick: Any, text: str = "", **more: Any) -> None:
        """An option whose default depends on ``--quick``; numbers, unless ``type`` says more."""
        shown = [",".join(map(str, v)) if isinstance(v, list) else v for v in (whole, quick)]
        words = f"{text} (default: {shown[0]}, quick: {shown[1]})".strip()
        added = self.add_argument(name, help=words, **{"type": type(whole), **more})
        self._sizes[added.dest] = whole, quick

    def parse_args(self, *given: Any, **named: Any) -> Any:
        found = super().parse_args(*given, **named)
        for name, sizes in self._sizes.items():
            if getattr(found, name) is None:
                setattr(found, name, sizes[found.quick])
        return found


def arguments(description: str | None, prompts: bool = False) -> Options:
    """The options that every benchmark has.

    Args:
        prompts: its prompts can be chosen.
    """
    parser = Options(description)
    parser.add_argument("--quick", action="store_true", help="a reduced run, at most two minutes")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line on stdout")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    parser.add_argument(
        "--save", action="store_true", help="also write it to benchmarks/results/DEVICE/NAME.json"
    )
    if prompts:
        parser.add_argument("--prompts", choices=SOURCES, default="auto")
    return parser


def names(text: str) -> list[str]:
    """An option's value: words with commas between them."""
    return [word.strip() for word in text.split(",") if word.strip()]


def among(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these words."""
    known = list(allowed)

    def some(text: str) -> list[str]:
        found = names(text)
        for word in found:
            if word not in known:
                wrong = f"{word!r} is unknown; allowed: {', '.join(known)}"
                raise argparse.ArgumentTypeError(wrong)
        return found

    return some


def numbers(text: str) -> list[int]:
    """An option's value: whole numbers with commas between them."""
    return [int(word) for word in names(text)]


def chosen(options: argparse.Namespace, *settings: str) -> dict[str, Any]:
    """These options by name, for a report."""
    return {name: getattr(options, name) for name in settings}


def note(text: str) -> None:
    """Progress and warnings; standard output is kept for tables and the JSON line."""
    print(text, file=sys.stderr, flush=True)


# --- samples --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one arm on one item.

    Attributes:
        seconds: wall time; None when the run failed.
        facts: what was counted about its result, outside the measured time.
        error: why it failed; None when it did not.
    """

    arm: str
    item: Hashable
    repeat: int = 0
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None


def run_sample(
    arm: str,
    item: Hashable,
    run: Callable[[], Any],
    count: Callable[[Any], Mapping[str, Any]],
    repeat: int = 0,
) -> Sample:
    """Time one run, and count its result afterwards with the code that counts for every arm."""
    try:
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        return Sample(arm, item, repeat, seconds, dict(count(result)))
    except Exception as error:
        note(f"{arm}, {item}: failed: {error!r}")
        return Sample(arm, item, repeat, error=repr(error))


def first_error(samples: Iterable[Sample]) -> str | None:
    return next((sample.error for sample in samples if sample.failed), None)


def raw(sample: Sample, label: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as it is kept: everything but the tokens and texts themselves."""
    facts = {n: value for n, value in sample.facts.items() if n not in ("token_ids", "answers")}
    kept = {"arm": sample.arm, "item": sample.item, "repeat": sample.repeat}
    return {**label, **kept, "seconds": sample.seconds, **facts, "error": sample.error}


def take_turns(
    arms: Mapping[str, Callable[[Any], Any]],
    items: Sequence[Hashable],
    repeats: int,
    count: Callable[[Any], Mapping[str, Any]],
) -> list[Sample]:
    """Run every arm on every item; the order of the arms is reversed in every other turn.

    With two arms that is A B B A A B B A ..., so that a machine that drifts favours neither.
    """
    samples, turn = [], 0
    for repeat in range(repeats):
        for item in items:
            order = list(arms.items())
            for arm, run in order if turn % 2 == 0 else reversed(order):
                samples.append(run_sample(arm, item, lambda: run(item), count, repeat))  # noqa: B023
            turn += 1
    return samples


# --- statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """How often one duration fits into another, with a bootstrap interval.

    Attributes:
        value: sum over the items of the median numerator, over that of the denominator.
        low, high: percentile interval; items are drawn, then pairs within them.
        median: of the ratios of the single pairs.
    """

    value: float
    low: float
    high: float
    median: float
    pairs: int


Pairs = Sequence[tuple[float, float]]


def paired_ratio(items: Sequence[Pairs], draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> Ratio:
    """The ratio of paired durations, one sequence of (numerator, denominator) per item."""
    items = [pairs for pairs in items if pairs]
    if not items:
        raise ValueError("no pair of samples succeeded")
    rng = random.Random(seed)
    drawn = sorted(
        _ratio_of_sums([_redrawn(rng.choice(items), rng) for _ in items]) for _ in range(draws)
    )
    tail = (1 - CONFIDENCE) / 2
    single = [above / below for pairs in items for above, below in pairs]
    return Ratio(
        value=_ratio_of_sums(items),
        low=drawn[int(tail * draws)],
        high=drawn[min(draws - 1, int((1 - tail) * draws))],
        median=statistics.median(single),
        pairs=len(single),
    )


def _redrawn(pairs: Pairs, rng: random.Random) -> Pairs:
    return rng.choices(pairs, k=len(pairs))


def _ratio_of_sums(items: Sequence[Pairs]) -> float:
    above = sum(statistics.median(pair[0] for pair in pairs) for pairs in items)
    return above / sum(statistics.median(pair[1] for pair in pairs) for pairs in items)


def pair_up(samples: Iterable[Sample], above: str, below: str) -> list[list[tuple[float, float]]]:
    """Durations of two arms in the same turn, item by item; a turn with a failure is left out."""
    found: dict[Hashable, dict[int, dict[str, float]]] = {}
    for sample in samples:
        if sample.seconds is not None:
            turns = found.setdefault(sample.item, {})
            turns.setdefault(sample.repeat, {})[sample.arm] = sample.seconds
    return [
        [(turn[above], turn[below]) for turn in turns.values() if above in turn and below in turn]
        for turns in found.values()
    ]


def against_plain(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """One row: an arm against the plain one, whether their tokens are the same, or its error."""
    own = [sample for sample in samples if sample.arm == arm]
    plain = [sample for sample in samples if sample.arm == PLAIN]
    error = first_error([*own, *plain])
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
