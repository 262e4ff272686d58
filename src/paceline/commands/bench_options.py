"""The options of ``paceline bench``, by vLLM's names. Imports nothing slow, for its ``--help``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import EngineOptions, SpeculationOptions, argument, option

DATASETS = "random, sonnet, sharegpt, spec_bench, custom"
METRICS = "ttft, tpot, itl, e2el"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DatasetOptions:
    """Which prompts are sent, and how answers are chosen."""

    dataset_name: Annotated[str, option("--dataset-name", help=f"Which prompts: {DATASETS}.")] = (
        "random"
    )
    dataset_path: Annotated[
        str | None, option("--dataset-path", help="The file of every dataset but random.")
    ] = None
    num_prompts: Annotated[int, option("--num-prompts", min=1, help="How many.")] = 1000
    random_input_len: Annotated[
        int, option("--random-input-len", min=1, help="Random: tokens of a prompt.")
    ] = 1024
    random_output_len: Annotated[
        int, option("--random-output-len", min=1, help="Random: tokens of an answer.")
    ] = 128
    random_range_ratio: Annotated[
        float,
        option("--random-range-ratio", help="Random: lengths vary by this share, up and down."),
    ] = 0.0
    random_prefix_len: Annotated[
        int,
        option("--random-prefix-len", min=0, help="Random: further tokens, equal in all prompts."),
    ] = 0
    sonnet_input_len: Annotated[
        int, option("--sonnet-input-len", min=1, help="Sonnet: most tokens of a prompt.")
    ] = 550
    sonnet_output_len: Annotated[
        int, option("--sonnet-output-len", min=1, help="Sonnet: tokens of an answer.")
    ] = 150
    sonnet_prefix_len: Annotated[
        int, option("--sonnet-prefix-len", min=0, help="Sonnet: tokens equal in all prompts.")
    ] = 200
    sharegpt_output_len: Annotated[
        int | None,
        option("--sharegpt-output-len", min=1, help="ShareGPT: tokens (default: as in the file)."),
    ] = None
    custom_output_len: Annotated[
        int,
        option("--custom-output-len", min=1, help="Custom: tokens where a row has none of its own"),
    ] = 256
    spec_bench_output_len: Annotated[
        int, option("--spec-bench-output-len", min=1, help="Spec-Bench: tokens of an answer.")
    ] = 256
    spec_bench_category: Annotated[
        str | None, option("--spec-bench-category", help="Spec-Bench: this category alone.")
    ] = None
    disable_shuffle: Annotated[
        bool, option("--disable-shuffle", help="Take the rows of files in their order.")
    ] = False
    seed: Annotated[
        int, option("--seed", min=0, help="Of prompts, arrivals and the first answer's sampling.")
    ] = 0
    temperature: Annotated[float, option("--temperature", help="0 is greedy.")] = 0.0
    ignore_eos: Annotated[
        bool | None,
        option("--ignore-eos/--no-ignore-eos", help="Go on to the length (default: if random)."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServerOptions:
    """Which server, and what it is asked."""

    backend: Annotated[
        str, option("--backend", help="What it speaks: openai (completions) or openai-chat.")
    ] = "openai"
    base_url: Annotated[
        str | None, option("--base-url", help="Its address, instead of host and port.")
    ] = None
    host: Annotated[str, option("--host", help="Its host.")] = "127.0.0.1"
    port: Annotated[int, option("--port", help="Its port.")] = 8000
    endpoint: Annotated[
        str | None, option("--endpoint", help="Its path (default: the backend's usual one).")
    ] = None
    model: Annotated[
        str | None, option("--model", help="Its model's name (default: the first that it lists).")
    ] = None
    tokenizer: Annotated[
        str | None,
        option(
            "--tokenizer",
            help="Folder of the tokenizer that measures prompts (default: the server's /tokenize, "
            "or words).",
        ),
    ] = None
    api_key: Annotated[
        str | None, option("--api-key", help="Sent as bearer (default: OPENAI_API_KEY).")
    ] = None
    header: Annotated[
        list[str] | None,
        option("--header", metavar="KEY=VALUE", help="A further header; give it once for each."),
    ] = None
    extra_body: Annotated[
        str | None, option("--extra-body", help="JSON object of further fields of every request.")
    ] = None
    top_p: Annotated[float | None, option("--top-p", help="Sent if given.")] = None
    top_k: Annotated[int | None, option("--top-k", help="Sent if given.")] = None
    min_p: Annotated[float | None, option("--min-p", help="Sent if given.")] = None
    ready_check_timeout_sec: Annotated[
        float,
        option("--ready-check-timeout-sec", min=0, help="Wait so long; 0: no trial request."),
    ] = 600.0
    request_timeout_sec: Annotated[
        float, option("--request-timeout-sec", help="A request that takes longer has failed.")
    ] = 21600.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrafficOptions:
    """When requests arrive."""

    request_rate: Annotated[
        float, option("--request-rate", help="Requests per second; inf sends all at once.")
    ] = float("inf")
    burstiness: Annotated[
        float,
        option("--burstiness", help="1 is a Poisson process, less is burstier, more is steadier."),
    ] = 1.0
    max_concurrency: Annotated[
        int | None, option("--max-concurrency", min=1, help="Most requests at once.")
    ] = None
    trace_path: Annotated[
        str | None,
        option("--trace-path", help="CSV of time, prompt tokens, output tokens to replay."),
    ] = None
    trace_speed: Annotated[
        float, option("--trace-speed", help="Replay so many times faster than recorded.")
    ] = 1.0
    num_warmups: Annotated[
        int, option("--num-warmups", min=0, help="Requests before the measured ones.")
    ] = 0
    compare_with: Annotated[
        str | None,
        option("--compare-with", metavar="URL", help="A second server, measured in turns."),
    ] = None
    compare_extra_body: Annotated[
        str | None,
        option("--compare-extra-body", help="Its --extra-body (default: the same)."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchServeOptions(TrafficOptions, DatasetOptions, ServerOptions):
    """Options of ``paceline bench serve``."""

    percentile_metrics: Annotated[
        str, option("--percentile-metrics", help=f"Shown, with commas between: {METRICS}.")
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[
        str, option("--metric-percentiles", help="Percentiles, with commas between.")
    ] = "99"
    goodput: Annotated[
        list[str] | None,
        option(
            "--goodput",
            metavar="KEY:MS",
            help="A limit that good requests keep, for ttft, tpot or e2el; give it once for each.",
        ),
    ] = None
    label: Annotated[
        str | None, option("--label", help="Begins the result's name (default: the backend).")
    ] = None
    save_result: Annotated[bool, option("--save-result", help="Write the figures as JSON.")] = False
    save_detailed: Annotated[
        bool, option("--save-detailed", help="With every request's lengths, times and text.")
    ] = False
    append_result: Annotated[
        bool, option("--append-result", help="Add a line to the file instead of replacing it.")
    ] = False
    result_dir: Annotated[str | None, option("--result-dir", help="Folder of the file.")] = None
    result_filename: Annotated[
        str | None, option("--result-filename", help="Its name (default: rate, model and date).")
    ] = None
    disable_tqdm: Annotated[bool, option("--disable-tqdm", help="No progress bar.")] = False
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchThroughputOptions(EngineOptions, SpeculationOptions, DatasetOptions):
    """Options of ``paceline bench throughput``."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    chat: Annotated[bool, option("--chat", help="Put prompts into the chat template.")] = False
    compare: Annotated[
        bool,
        option("--compare", help="Plainly and speculatively, in turns; exit 1 if outputs differ."),
    ] = False
    output_json: Annotated[
        str | None, option("--output-json", help="Write the figures to this file.")
    ] = None
    disable_tqdm: Annotated[bool, option("--disable-tqdm", help="No progress bar.")] = False
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False
