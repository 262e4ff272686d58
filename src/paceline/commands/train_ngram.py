"""``paceline train ngram``: from options to a training, and its figures on the screen."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from paceline.commands.display import Screen, printable, table
from paceline.commands.resolve import memory_bytes
from paceline.commands.train_ngram_options import TrainNgramOptions
from paceline.models.embedded import embedded_model
from paceline.training.ngram.options import NgramTrainingConfig
from paceline.training.ngram.report import CANDIDATES, Acceptance, NgramReport
from paceline.training.ngram.train import NgramTrainingResult, train_ngram

_RENAMED = ("max_size", "table", "json")
CANDIDATE_HEADERS = ("drafted", *(f"top {most}" for most in CANDIDATES))


def train_ngram_command(options: TrainNgramOptions) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError, TrainingError, ModelLoadError: options, data or files cannot be used.
    """
    result, screen = train_ngram(_config(options)), Screen()
    screen.say(
        f"{printable(str(result.file))}: {result.num_ngrams} n-grams in {result.num_bytes} bytes; "
        f"{result.num_tokens} tokens learnt in {result.seconds:.1f} s"
    )
    if result.report is not None:
        _show(result, result.report, screen)
    if result.table:
        screen.say("\n" + _smoothings(result.table))
    if options.json:
        screen.say(json.dumps(_document(result)))
    return 0


def _config(options: TrainNgramOptions) -> NgramTrainingConfig:
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name not in _RENAMED and value is not None
    }
    if options.target is None and not (options.traces and not options.text and not options.stdlib):
        values["target"] = embedded_model("target")
    return NgramTrainingConfig(
        **values, max_bytes=memory_bytes(options.max_size), has_table=options.table
    )


def _show(result: NgramTrainingResult, report: NgramReport, screen: Screen) -> None:
    hits = ", ".join(f"order {order} {share:.1%}" for order, share in report.hit_rates.items())
    screen.say(f"\n{report.num_tokens} held-out tokens; longest known n-grams: {hits}")
    if report.cross_entropy is not None:
        screen.say(f"cross-entropy {report.cross_entropy:.3f} nats per token")
    rows = {"trained model": report.acceptance, **result.others}
    cells = [[name, *_cells(acceptance)] for name, acceptance in rows.items()]
    screen.say("\n" + table(("accepted among its candidates", *CANDIDATE_HEADERS), cells))


def _smoothings(reports: dict[tuple[int, str], NgramReport]) -> str:
    headers = ("order and smoothing", "nats", "longest known", *CANDIDATE_HEADERS)
    rows = []
    for (order, smoothing), report in reports.items():
        loss = "-" if report.cross_entropy is None else f"{report.cross_entropy:.3f}"
        known = f"{report.hit_rates[order]:.1%}"
        rows.append([f"{order} {smoothing}", loss, known, *_cells(report.acceptance)])
    return table(headers, rows)


def _cells(acceptance: Acceptance) -> list[str]:
    return [f"{share:.1%}" for share in (acceptance.drafted, *acceptance.accepted)]


def _document(result: NgramTrainingResult) -> dict[str, object]:
    plain = asdict(result) | {"file": str(result.file)}
    named = {f"{order} {name}": asdict(each) for (order, name), each in result.table.items()}
    return plain | {"table": named}
