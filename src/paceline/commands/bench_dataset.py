"""What both benchmarks read off their dataset options. Knows no server and no engine."""

from __future__ import annotations

from dataclasses import fields

from paceline.commands.bench_options import DatasetOptions
from paceline.workbench.serving.datasets import DatasetConfig


def dataset_config(options: DatasetOptions) -> DatasetConfig:
    """The dataset that the options describe.

    Raises:
        ConfigError: there is none of this name, or its options do not fit it.
    """
    names = [each.name for each in fields(DatasetConfig)]
    return DatasetConfig(**{name: getattr(options, name) for name in names})


def wants_ignore_eos(options: DatasetOptions) -> bool:
    """Whether answers go on to their length: random prompts have no natural end."""
    if options.ignore_eos is None:
        return options.dataset_name == "random"
    return options.ignore_eos
