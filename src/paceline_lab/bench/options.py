"""The options of ``paceline bench`` by vLLM's names, and the dataset that they describe.

Knows no server and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.options import (
    JSON_HELP,
    EngineOptions,
    ModelOptions,
    SpeculationOptions,
    TemplateOptions,
    option,
    sampling_option,
)
from paceline.core.checks import check_choice
from paceline.core.errors import ConfigError

DATASETS = ("random", "sonnet", "sharegpt", "spec_bench", "custom")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DatasetOptions:
    """Which prompts are sent, how long they are in tokens, and how answers are chosen.

    Raises:
        ConfigError: there is no such dataset, or it cannot be made as asked.
    """

    dataset_name: str = option("random", f"Source of the prompts: {', '.join(DATASETS)}.")
    dataset_path: str | None = option(None, "File of the dataset; random needs none.")
    num_prompts: int = option(1000, "Number of prompts.", min=1)
    random_input_len: int = option(1024, "Random: tokens per prompt.", min=1)
    random_output_len: int = option(128, "Random: tokens per answer.", min=1)
    random_range_ratio: float = option(0.0, "Random: lengths vary up and down by this fraction.")
    random_prefix_len: int = option(
        0, "Random: additional tokens at the beginning that all prompts share.", min=0
    )
    sonnet_input_len: int = option(550, "Sonnet: maximum tokens per prompt.", min=1)
    sonnet_output_len: int = option(150, "Sonnet: tokens per answer.", min=1)
    sonnet_prefix_len: int = option(200, "Sonnet: tokens that all prompts share.", min=0)
    sharegpt_output_len: int | None = option(
        None, "ShareGPT: tokens per answer (default: as in the file).", min=1
    )
    custom_output_len: int = option(
        256, "Custom: tokens per answer where a row does not say.", min=1
    )
    spec_bench_output_len: int = option(256, "Spec-Bench: tokens per answer.", min=1)
    spec_bench_category: str | None = option(None, "Spec-Bench: only this category.")
    disable_shuffle: bool = option(False, "Keep the order of the rows in the file.")
    seed: int = option(
        0, "Seed of the prompts, the arrivals and the sampling of the first answer.", min=0
    )
    temperature: float = sampling_option("temperature", default=0.0)
    ignore_eos: bool | None = option(
        None,
        "Continue to the full length past the model's end token (default: only for random).",
        both=True,
    )

    def __post_init__(self) -> None:
        check_choice("--dataset-name", self.dataset_name, DATASETS)
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise ConfigError("--dataset-name random reads no --dataset-path: name another")
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs --dataset-path FILE")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"--random-range-ratio is {self.random_range_ratio}; it must be from 0 up, below 1"
            )

    @property
    def path(self) -> str:
        assert self.dataset_path is not None
        return self.dataset_path


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServerOptions:
    """Which server, and what it is asked."""

    backend: str = option("openai", "API of the server: openai (completions) or openai-chat.")
    base_url: str | None = option(None, "URL of the server, instead of --host and --port.")
    host: str = option("127.0.0.1", "Host of the server.")
    port: int = option(8000, "Port of the server.")
    model: str | None = option(
        None, "Name of the model (default: the first one that the server lists)."
    )
    tokenizer: str | None = option(
        None,
        "Folder of the tokenizer that counts prompt tokens (default: the server's /tokenize, or "
        "else words).",
    )
    api_key: str | None = option(
        None, "Bearer token to send (default: the variable OPENAI_API_KEY)."
    )
    header: list[str] | None = option(
        None, "Additional header; can be given several times.", metavar="KEY=VALUE"
    )
    extra_body: str | None = option(None, "JSON object of additional fields for every request.")
    top_p: float | None = option(None, "Sent with every request if given.")
    top_k: int | None = option(None, "Sent with every request if given.")
    min_p: float | None = option(None, "Sent with every request if given.")
    ready_check_timeout_sec: float = option(
        600.0, "Seconds to wait until the server is ready; 0 skips the check.", min=0
    )
    request_timeout_sec: float = option(21600.0, "Seconds after which a request counts as failed.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrafficOptions:
    """When requests arrive."""

    request_rate: float = option(
        float("inf"), "Requests per second; inf sends all of them at once."
    )
    burstiness: float = option(
        1.0, "Spread of the arrivals: 1 is a Poisson process, less is burstier, more is steadier."
    )
    max_concurrency: int | None = option(None, "Maximum number of requests in flight.", min=1)
    trace_path: str | None = option(
        None, "CSV file of arrivals to replay: time, prompt tokens, output tokens."
    )
    num_warmups: int = option(0, "Requests to send before measuring.", min=0)
    compare_with: str | None = option(
        None, "URL of a second server, measured in turns with the first.", metavar="URL"
    )
    compare_extra_body: str | None = option(
        None, "The --extra-body of the second server (default: the same)."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchServeOptions(TrafficOptions, DatasetOptions, ServerOptions):
    """Options of ``paceline bench serve``."""

    metric_percentiles: str = option("99", "Percentiles to report, separated by commas.")
    goodput: list[str] | None = option(
        None,
        "Limit in milliseconds that a good request keeps, for ttft, tpot or e2el; can be given "
        "several times.",
        metavar="KEY:MS",
    )
    save_result: bool = option(False, "Write the results to a JSON file.")
    save_detailed: bool = option(
        False, "Include the lengths, times and text of every request in that file."
    )
    result_filename: str | None = option(
        None, "Name of that file (default: made of backend, model and date)."
    )
    json: bool = option(False, JSON_HELP)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchThroughputOptions(
    EngineOptions, SpeculationOptions, TemplateOptions, DatasetOptions, ModelOptions
):
    """Options of ``paceline bench throughput``."""

    chat: bool = option(False, "Apply the chat template to the prompts.")
    compare: bool = option(
        False,
        "Let plain and speculative decoding take turns; the exit code is 1 if outputs differ.",
    )
    json: bool = option(False, JSON_HELP)


def wants_ignore_eos(options: DatasetOptions) -> bool:
    """Whether answers go on to their length: random prompts have no natural end."""
    if options.ignore_eos is None:
        return options.dataset_name == "random"
    return options.ignore_eos
