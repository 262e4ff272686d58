"""The options of the commands, as frozen dataclasses from which Typer's signatures are made.

Owns names, defaults, help texts and environment variables. Knows no model and imports nothing slow:
every command's ``--help`` reads it, which is why no dataclass here has equality or a text form:
making these takes a third of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from paceline.commands.config_file import take_config_file
from paceline.config import BACKENDS, DTYPES, KV_DTYPES, METHODS, PLANNERS, environment_name

TRACE_HELP = "Write the steps' phases to this file, which Perfetto and chrome://tracing open."

# Typer reads a default out of the dataclass, so options here only carry names and help.


def option(*names: str, help: str, **more: Any) -> Any:
    """A Typer option that also reads its environment variable, named after its long name."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    return typer.Option(*names, help=help, envvar=environment_name(long), show_envvar=False, **more)


def argument(name: str, *, help: str) -> Any:
    """A Typer argument that also reads ``PACELINE_<NAME>``."""
    return typer.Argument(metavar=name, help=help, envvar=environment_name(name), show_envvar=False)


ChatTemplate = Annotated[
    str | None,
    option(
        "--chat-template",
        help="A Jinja file, or a built-in template's name such as chatml, llama2 or plain "
        "(default: the model's own; plain where it has none).",
    ),
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EngineOptions:
    """How the engine is built."""

    dtype: Annotated[str, option("--dtype", help=f"Arithmetic: {', '.join(DTYPES)}.")] = "auto"
    device: Annotated[str, option("--device", help="Torch device.")] = "cpu"
    max_num_seqs: Annotated[
        int | None,
        option("--max-num-seqs", help="Most prompts at once (default: 32; with --compare: 1)."),
    ] = None
    max_num_batched_tokens: Annotated[
        int, option("--max-num-batched-tokens", help="Most rows of one forward.")
    ] = 512
    max_step_ms: Annotated[
        float | None,
        option("--max-step-ms", help="Keep steps this short while a prompt is read beside others."),
    ] = None
    max_model_len: Annotated[
        int | None, option("--max-model-len", help="Context limit (default: the model's own).")
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        option("--kv-cache-memory", help="Memory for keys and values, e.g. 512M or 2G."),
    ] = None
    kv_cache_dtype: Annotated[
        str, option("--kv-cache-dtype", help=f"Keys and values: {', '.join(KV_DTYPES)}.")
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool,
        option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse what an earlier prompt with the same beginning has computed.",
        ),
    ] = True
    load_format: Annotated[
        str, option("--load-format", help="mmap reads weights when needed, memory at once.")
    ] = "mmap"
    threads: Annotated[int | None, option("--threads", help="Threads that compute.")] = None
    backend: Annotated[
        str, option("--backend", help=f"Kernels of the CPU: {', '.join(BACKENDS)}.")
    ] = "auto"
    objective: Annotated[
        str,
        option(
            "--objective",
            help='What drafts are chosen for: throughput, latency, or {"tpot_ms": 20} to keep a '
            "time per token.",
        ),
    ] = "throughput"
    planner: Annotated[
        str,
        option(
            "--planner",
            help=f"{' or '.join(PLANNERS)}: verify what pays, or all that was drafted.",
        ),
    ] = "auto"
    strict: Annotated[
        bool, option("--strict", help="Fail, instead of decoding plainly, if a draft is unusable.")
    ] = False
    config: Annotated[
        str | None,
        option(
            "--config",
            is_eager=True,
            callback=take_config_file,
            help="A JSON or YAML file of options by their long names; what the command line and "
            "the environment say comes first.",
        ),
    ] = None


DEFAULT_METHOD, EMBEDDED_METHOD = "suffix", "ngram_model"
"""Who drafts for any model, and who for the embedded one as well, where nothing was said."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SpeculationOptions:
    """Who drafts."""

    speculative_config: Annotated[
        str | None,
        option(
            "--speculative-config",
            help='Proposers as JSON: {"method": "suffix", "num_speculative_tokens": 8}, '
            "or a list of such objects.",
        ),
    ] = None
    method: Annotated[
        str | None,
        option(
            "--method",
            help=f"One proposer: {', '.join(METHODS)}, or a plugin's (default: {DEFAULT_METHOD}; "
            f"for the embedded model {EMBEDDED_METHOD} too, for others the drafts that lie beside "
            "them).",
        ),
    ] = None
    draft: Annotated[
        str | None,
        option(
            "--draft", help="Draft model: folder, GGUF file, name or hub id; ngram_model's file."
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        option("-k", "--num-speculative-tokens", help="Most tokens along one path of a draft."),
    ] = None
    no_speculation: Annotated[
        bool, option("--no-speculation", help="Decode plainly, whatever else is configured.")
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: Annotated[int, option("--max-tokens", help="Most tokens of one answer.")] = 256
    temperature: Annotated[
        float, option("--temperature", help="0 is greedy: always the likeliest token.")
    ] = 0.0
    top_p: Annotated[float, option("--top-p", help="Likeliest tokens up to this share.")] = 1.0
    top_k: Annotated[int, option("--top-k", help="This many likeliest tokens; 0 is all.")] = 0
    min_p: Annotated[
        float, option("--min-p", help="Tokens at least this likely, relative to the likeliest.")
    ] = 0.0
    seed: Annotated[
        int | None, option("--seed", help="Makes sampling repeatable (default: drawn once).")
    ] = None
    ignore_eos: Annotated[
        bool, option("--ignore-eos", help="Go on to --max-tokens past the model's own end.")
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShapeOptions:
    """What an answer must look like."""

    json_schema: Annotated[
        str | None, option("--json-schema", help="Answers are JSON of the schema in this file.")
    ] = None
    regex: Annotated[
        str | None, option("--regex", help="Answers match this regular expression as a whole.")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PromptOptions:
    """What is asked."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    prompt: Annotated[str | None, option("-p", "--prompt", help="The prompt's text.")] = None
    prompts: Annotated[
        str | None,
        option(
            "--prompts",
            help="A JSONL file: each row has prompt (a text or token ids), question, turns (the "
            "first is asked) or messages.",
        ),
    ] = None
    chat: Annotated[
        bool | None,
        option(
            "--chat/--no-chat",
            help="Put prompts into the model's chat template (default: if it has one).",
        ),
    ] = None
    no_thinking: Annotated[
        bool, option("--no-thinking", help="Ask the chat template for an answer without thoughts.")
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReportOptions:
    """What is reported."""

    compare: Annotated[
        bool,
        option(
            "--compare",
            help="Run the prompts plainly and speculatively in turns; exit 1 if outputs differ "
            "where identity is promised.",
        ),
    ] = False
    explain: Annotated[
        bool,
        option(
            "--explain",
            help="Show the answer to one prompt step by step, as paceline explain does.",
        ),
    ] = False
    repeat: Annotated[int, option("--repeat", min=1, help="Run the prompts this often.")] = 1
    trace: Annotated[str | None, option("--trace", help=TRACE_HELP)] = None
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunOptions(
    EngineOptions,
    ReportOptions,
    SpeculationOptions,
    ShapeOptions,
    SamplingOptions,
    PromptOptions,
):
    """Options of ``paceline run``."""
