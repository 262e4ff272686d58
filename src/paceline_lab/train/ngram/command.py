"""``paceline train ngram``: from options to a training, and its figures on the screen."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.cli.model_argument import needed_model
from paceline.cli.options import JSON_HELP, option
from paceline.cli.terminal import Screen, printable, table
from paceline.core.checks import memory_bytes
from paceline_lab.train.command import config_values, options_of
from paceline_lab.train.configs import NgramTrainingConfig

if TYPE_CHECKING:
    from paceline_lab.train.ngram.train import NgramAcceptance, NgramReport, NgramTrainingResult

MAX_SIZE = option(
    "64M", "Maximum size of the file, e.g. 512K or 64M. The least useful entries are dropped."
)
TrainNgramOptions = options_of(
    NgramTrainingConfig,
    without=("max_bytes",),
    more=[("max_size", str, MAX_SIZE), ("json", bool, option(False, JSON_HELP))],
)


def train_ngram_command(options: Any) -> int:
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


def _config(options: Any) -> NgramTrainingConfig:
    given = dict(vars(options))
    del given["json"]
    values = config_values(NgramTrainingConfig, given)
    values["max_bytes"] = memory_bytes(values.pop("max_size"))
    is_of_traces = values["traces"] and not values["text"] and not values["stdlib"]
    if values["target"] is None and not is_of_traces:
        values["target"] = needed_model(None, "paceline train ngram")
    return NgramTrainingConfig(**values)


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
