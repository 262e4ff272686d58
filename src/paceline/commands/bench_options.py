"""The options of ``paceline bench`` by vLLM's names, and the dataset that they describe.

Knows no server and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.commands.options import (
    JSON_HELP,
    EngineOptions,
    ModelOptions,
    SpeculationOptions,
    chat_template_kwargs,
    option,
)
from paceline.commands.resolve import values_of

if TYPE_CHECKING:
    from paceline.workbench.serving.datasets import DatasetConfig

DATASETS = "random, sonnet, sharegpt, spec_bench, custom"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DatasetOptions:
    """Which prompts are sent, and how answers are chosen."""

    dataset_name: str = option("random", f"Which prompts: {DATASETS}.")
    dataset_path: str | None = option(None, "The file of every dataset but random.")
    num_prompts: int = option(1000, "How many.", min=1)
    random_input_len: int = option(1024, "Random: tokens of a prompt.", min=1)
    random_output_len: int = option(128, "Random: tokens of an answer.", min=1)
    random_range_ratio: float = option(0.0, "Random: lengths vary by this share, up and down.")
    random_prefix_len: int = option(0, "Random: further tokens, equal in all prompts.", min=0)
    sonnet_input_len: int = option(550, "Sonnet: most tokens of a prompt.", min=1)
    sonnet_output_len: int = option(150, "Sonnet: tokens of an answer.", min=1)
    sonnet_prefix_len: int = option(200, "Sonnet: tokens equal in all prompts.", min=0)
    sharegpt_output_len: int | None = option(
        None, "ShareGPT: tokens (default: as in the file).", min=1
    )
    custom_output_len: int = option(256, "Custom: tokens where a row has none of its own", min=1)
    spec_bench_output_len: int = option(256, "Spec-Bench: tokens of an answer.", min=1)
    spec_bench_category: str | None = option(None, "Spec-Bench: this category alone.")
    disable_shuffle: bool = option(False, "Take the rows of files in their order.")
    seed: int = option(0, "Of prompts, arrivals and the first answer's sampling.", min=0)
    temperature: float = option(0.0, "0 is greedy.")
    ignore_eos: bool | None = option(None, "Go on to the length (default: if random).", both=True)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServerOptions:
    """Which server, and what it is asked."""

    backend: str = option("openai", "What it speaks: openai (completions) or openai-chat.")
    base_url: str | None = option(None, "Its address, instead of host and port.")
    host: str = option("127.0.0.1", "Its host.")
    port: int = option(8000, "Its port.")
    model: str | None = option(None, "Its model's name (default: the first that it lists).")
    tokenizer: str | None = option(
        None,
        "Folder of the tokenizer that measures prompts (default: the server's /tokenize, or "
        "words).",
    )
    api_key: str | None = option(None, "Sent as bearer (default: OPENAI_API_KEY).")
    header: list[str] | None = option(
        None, "A further header; give it once for each.", metavar="KEY=VALUE"
    )
    extra_body: str | None = option(None, "JSON object of further fields of every request.")
    top_p: float | None = option(None, "Sent if given.")
    top_k: int | None = option(None, "Sent if given.")
    min_p: float | None = option(None, "Sent if given.")
    ready_check_timeout_sec: float = option(600.0, "Wait so long; 0: no trial request.", min=0)
    request_timeout_sec: float = option(21600.0, "A request that takes longer has failed.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrafficOptions:
    """When requests arrive."""

    request_rate: float = option(float("inf"), "Requests per second; inf sends all at once.")
    burstiness: float = option(1.0, "1 is a Poisson process, less is burstier, more is steadier.")
    max_concurrency: int | None = option(None, "Most requests at once.", min=1)
    trace_path: str | None = option(None, "CSV of time, prompt tokens, output tokens to replay.")
    num_warmups: int = option(0, "Requests before the measured ones.", min=0)
    compare_with: str | None = option(None, "A second server, measured in turns.", metavar="URL")
    compare_extra_body: str | None = option(None, "Its --extra-body (default: the same).")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchServeOptions(TrafficOptions, DatasetOptions, ServerOptions):
    """Options of ``paceline bench serve``."""

    metric_percentiles: str = option("99", "Percentiles, with commas between.")
    goodput: list[str] | None = option(
        None,
        "A limit that good requests keep, for ttft, tpot or e2el; give it once for each.",
        metavar="KEY:MS",
    )
    save_result: bool = option(False, "Write the figures as JSON.")
    save_detailed: bool = option(False, "With every request's lengths, times and text.")
    result_filename: str | None = option(
        None, "Write them to this file (default: named by backend, model and date)."
    )
    json: bool = option(False, JSON_HELP)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchThroughputOptions(EngineOptions, SpeculationOptions, DatasetOptions, ModelOptions):
    """Options of ``paceline bench throughput``."""

    chat: bool = option(False, "Put prompts into the chat template.")
    default_chat_template_kwargs: str | None = chat_template_kwargs()
    compare: bool = option(False, "Plainly and speculatively, in turns; exit 1 if outputs differ.")
    json: bool = option(False, JSON_HELP)


def dataset_config(options: DatasetOptions) -> DatasetConfig:
    """The dataset that the options describe; ``ConfigError`` where there is none such."""
    from paceline.workbench.serving.datasets import DatasetConfig

    return DatasetConfig(**values_of(options, DatasetConfig))


def wants_ignore_eos(options: DatasetOptions) -> bool:
    """Whether answers go on to their length: random prompts have no natural end."""
    if options.ignore_eos is None:
        return options.dataset_name == "random"
    return options.ignore_eos
