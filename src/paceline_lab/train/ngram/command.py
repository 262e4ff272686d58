"""``paceline train ngram``: from options to a training, and its figures on the screen."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from paceline.cli.model_argument import needed_model
from paceline.cli.options import JSON_HELP, argument, option
from paceline.cli.terminal import Screen, printable, table
from paceline.core.checks import memory_bytes

if TYPE_CHECKING:
    from paceline_lab.train.ngram.config import NgramTrainingConfig
    from paceline_lab.train.ngram.train import (
        NgramAcceptance,
        NgramReport,
        NgramTrainingResult,
    )


_RENAMED = ("model", "max_size", "json")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrainNgramOptions:
    """Options of ``paceline train ngram``."""

    model: str | None = argument(
        None,
        "Target model, whose tokenizer reads the texts (default: with traces only, the model of "
        "the traces).",
    )
    target: str | None = option(None, "The same as MODEL.")
    output: str = option(..., "File to write.", "-o")
    traces: list[str] | None = option(
        None,
        "Folder written by paceline trace, whose answers are learnt; can be given several times.",
    )
    text: list[str] | None = option(
        None, "File or folder of text to learn; can be given several times."
    )
    exclude: list[str] | None = option(
        None,
        "Glob pattern of files to leave out, relative to their folder; can be given several times.",
    )
    stdlib: bool = option(False, "Also learn Python's standard library.", both=True)
    order: int = option(4, "Length of the longest n-grams, 2 to 5 tokens.")
    soft_labels: bool = option(
        False,
        "Learn the traced probabilities of the likeliest tokens instead of only the tokens.",
        both=True,
    )
    top_k: int = option(8, "Maximum number of continuations kept per context.")
    max_size: str = option(
        "64M", "Maximum size of the file, e.g. 512K or 64M. The least useful entries are dropped."
    )
    import_uzu: str | None = option(
        None, "Convert a model.bin of uzu or lalamo instead of training."
    )
    import_llama: str | None = option(None, "Start from the counts of a llama.cpp lookup cache.")
    export_llama: str | None = option(None, "Also write the counts as a llama.cpp lookup cache.")
    held_out_tokens: int = option(
        16_384, "Tokens of whole texts that are held out and never learnt."
    )
    seed: int = option(0, "Seed of the held-out split.")
    json: bool = option(False, JSON_HELP)


def train_ngram_command(options: TrainNgramOptions) -> int:
    """The work of ``paceline train ngram``."""
    from paceline_lab.train.ngram.train import train_ngram

    result, screen = train_ngram(_config(options)), Screen(json=options.json)
    screen.say(
        f"{printable(str(result.file))}: {result.num_ngrams} n-grams in {result.num_bytes} bytes; "
        f"{result.num_tokens} tokens learnt in {result.seconds:.1f} s"
    )
    if result.report is not None:
        _show(result, result.report, screen)
    if options.json:
        screen.document(asdict(result) | {"file": str(result.file)})
    return 0


def _config(options: TrainNgramOptions) -> NgramTrainingConfig:
    from paceline_lab.train.ngram.config import NgramTrainingConfig

    values = {each.name: getattr(options, each.name) for each in fields(options)}
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name not in _RENAMED and value is not None
    }
    is_of_traces = options.traces and not options.text and not options.stdlib
    if options.model is not None:
        values["target"] = options.model
    elif options.target is None and not is_of_traces:
        values["target"] = needed_model(None, "paceline train ngram")
    return NgramTrainingConfig(**values, max_bytes=memory_bytes(options.max_size))


def _show(result: NgramTrainingResult, report: NgramReport, screen: Screen) -> None:
    hits = ", ".join(f"order {order} {share:.1%}" for order, share in report.hit_rates.items())
    screen.say(f"\n{report.num_tokens} held-out tokens; longest known n-grams: {hits}")
    screen.say(f"cross-entropy {report.cross_entropy:.3f} nats per token")
    rows = {"trained model": report.acceptance, **result.others}
    screen.say(
        "\n" + table([{"accepted among its candidates": n} | _cells(a) for n, a in rows.items()])
    )


def _cells(acceptance: NgramAcceptance) -> dict[str, str]:
    from paceline_lab.train.ngram.train import CANDIDATES

    names = ["drafted", *(f"top {most}" for most in CANDIDATES)]
    shares = (acceptance.drafted, *acceptance.accepted)
    return {name: f"{share:.1%}" for name, share in zip(names, shares, strict=True)}
