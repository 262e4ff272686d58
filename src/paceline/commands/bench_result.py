"""The result of ``paceline bench serve`` as JSON with vLLM's keys, and the file of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.commands.bench_options import BenchServeOptions
from paceline.errors import ConfigError
from paceline.workbench.serving.bench import Arm
from paceline.workbench.serving.compare import Comparison
from paceline.workbench.serving.figures import DETAILED_KEYS, METRICS, parse_goodput
from paceline.writing import write_text


def check_shown(options: BenchServeOptions) -> None:
    """Raise :class:`ConfigError` unless the metrics, percentiles and limits are some."""
    shown_metrics(options)
    percentiles(options)
    goodput(options)


def shown_metrics(options: BenchServeOptions) -> list[str]:
    """The metrics to show, in their usual order."""
    wanted = {name.strip() for name in options.percentile_metrics.split(",") if name.strip()}
    if unknown := sorted(wanted - set(METRICS)):
        raise ConfigError(
            f"--percentile-metrics has {', '.join(unknown)}; allowed are {', '.join(METRICS)}"
        )
    return [name for name in METRICS if name in wanted]


def percentiles(options: BenchServeOptions) -> list[float]:
    """The percentiles to report."""
    text = options.metric_percentiles
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= each <= 100 for each in found):
        raise ConfigError(f"--metric-percentiles is {text!r}; write numbers like 50,90,99")
    return found


def goodput(options: BenchServeOptions) -> dict[str, float]:
    """The limits in milliseconds, also where several stand in one value."""
    return parse_goodput(" ".join(options.goodput or ()).replace(",", " ").split())


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that was measured.

    Attributes:
        counter: what measured the prompts' lengths when they were made.
    """

    options: BenchServeOptions
    arm: Arm
    counter: str
    comparison: Comparison | None = None
    date: datetime = field(default_factory=datetime.now)

    @property
    def arms(self) -> list[Arm]:
        return [self.arm] if self.comparison is None else [self.arm, self.comparison.theirs]

    def figures(self, arm: Arm) -> dict[str, Any]:
        """An arm's figures under vLLM's keys."""
        return arm.figures(percentiles(self.options), goodput(self.options))

    def document(self) -> dict[str, Any]:
        """What is saved: settings, figures, and the other arm under ``comparison``."""
        found = {**self._settings(), **self._kept(self.arm)}
        if self.comparison is not None:
            found["comparison"] = self._comparison(self.comparison)
        return found

    def _settings(self) -> dict[str, Any]:
        options, target = self.options, self.arm.target
        rate = options.request_rate
        return {
            "date": self.date.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": options.backend,
            "backend": options.backend,
            "label": options.label or options.backend,
            "base_url": target.url,
            "model_id": target.model,
            "tokenizer_id": self.counter,
            "num_prompts": len(self.arm.outcomes),
            "dataset_name": options.dataset_name,
            "trace_path": options.trace_path,
            "trace_speed": options.trace_speed,
            "temperature": options.temperature,
            "seed": options.seed,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": options.burstiness,
            "max_concurrency": options.max_concurrency,
            "extra_body": target.extra_body,
        }

    def _kept(self, arm: Arm) -> dict[str, Any]:
        dropped = () if self.options.save_detailed else DETAILED_KEYS
        return {name: each for name, each in self.figures(arm).items() if name not in dropped}

    def _comparison(self, found: Comparison) -> dict[str, Any]:
        return {
            "base_url": found.theirs.target.url,
            "model_id": found.theirs.target.model,
            "extra_body": found.theirs.target.extra_body,
            "block": found.block,
            "prefix_cache_flushed": found.flushed,
            "ratios": {name: ratio.document() for name, ratio in found.ratios().items()},
            "texts_compared": len(found.pairs),
            "texts_differing": found.differing,
            "figures": self._kept(found.theirs),
        }


def check_destination(options: BenchServeOptions) -> None:
    """Raise :class:`ConfigError` unless options that only a file obeys have one."""
    saves = options.save_result or options.append_result
    for name in ("result_dir", "result_filename"):
        if getattr(options, name) is not None and not saves:
            raise ConfigError(f"--{name.replace('_', '-')} needs --save-result or --append-result")


def save_result(document: Mapping[str, Any], options: BenchServeOptions) -> Path:
    """Write the document, or add it to the file as a line; returns where.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = Path(options.result_dir or ".") / (options.result_filename or _file_name(document))
    line = json.dumps(document) + "\n"
    if not options.append_result:
        write_text(path, line, ConfigError, make_folder=True)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _file_name(document: Mapping[str, Any]) -> str:
    """vLLM's pattern: label, rate, concurrency, model, date."""
    concurrency = document["max_concurrency"]
    limit = "" if concurrency is None else f"-concurrency{concurrency}"
    # The name comes from the server: it must not lead to another folder.
    model = re.sub(r"[^\w.-]", "_", str(document["model_id"]).split("/")[-1])
    rate, label, date = document["request_rate"], document["label"], document["date"]
    return f"{label}-{rate}qps{limit}-{model}-{date}.json"
