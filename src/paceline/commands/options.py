"""The options that commands share, as frozen dataclasses from which Typer's signatures are made.

Owns names, defaults, help texts and environment variables. Knows no model and imports nothing slow:
every command's ``--help`` reads it, which is why no dataclass here has equality or a text form:
making these takes a third of its time.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from paceline.commands.config_file import take_config_file, without_overruled
from paceline.config import (
    BACKENDS,
    DTYPES,
    KV_DTYPES,
    METHODS,
    PLANNERS,
    EngineConfig,
    environment_name,
)
from paceline.config.methods import DEFAULT_METHOD, EMBEDDED_METHOD
from paceline.config.template_options import parse_template_options
from paceline.errors import ConfigError

JSON_HELP = "Print one line of JSON on stdout, and the rest on stderr."
TRACE_HELP = "Write the steps' phases to this file, which Perfetto and chrome://tracing open."

Options = TypeVar("Options")
DEFAULTS = EngineConfig()
"""What an engine is built with where nothing is said."""


def option(default: Any, help: str, *names: str, both: bool = False, **more: Any) -> Any:
    """A field that is an option, and that an environment variable of its long name fills too.

    Args:
        default: ``...`` where it must be given.
        names: a short name, or a long one that is not the field's with dashes.
        both: ``--no-`` before the name turns a switch off.
        more: for :func:`typer.Option`.
    """

    def declare(name: str) -> Any:
        own = [f"--{name.replace('_', '-')}"] if all(n[:2] != "--" for n in names) else []
        *short, long = *names, *own
        flags = (*short, f"{long}/--no-{long[2:]}" if both else long)
        variable = environment_name(long)
        return typer.Option(*flags, help=help, envvar=variable, show_envvar=False, **more)

    return _field(default, declare)


def argument(default: Any, help: str) -> Any:
    """A field that is an argument, and that ``PACELINE_<NAME>`` fills too."""

    def declare(name: str) -> Any:
        variable = environment_name(name)
        return typer.Argument(metavar=name.upper(), help=help, envvar=variable, show_envvar=False)

    return _field(default, declare)


def _field(default: Any, declare: Callable[[str], Any]) -> Any:
    return field(default=MISSING if default is ... else default, metadata={"declare": declare})


def takes(options: type[Options], body: Callable[[Options], None]) -> Callable[..., None]:
    """A function with a parameter for each option, which hands the filled dataclass to ``body``."""
    hints = get_type_hints(options)
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [inspect.Parameter("context", kind, annotation=typer.Context)]
    for each in fields(options):  # type: ignore[arg-type]
        default = empty if each.default is MISSING else each.default
        declared: Any = Annotated[hints[each.name], each.metadata["declare"](each.name)]
        parameters.append(inspect.Parameter(each.name, kind, default=default, annotation=declared))

    def command(context: typer.Context, **values: Any) -> None:
        refuse_empty_variables(context)
        body(options(**without_overruled(context, values)))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def refuse_empty_variables(context: typer.Context) -> None:
    """Take no variable that is set and empty for one that is not set.

    Click does, so that an empty ``PACELINE_API_KEY`` would serve everybody. An option that the
    command line gives reads no variable.

    Raises:
        ConfigError: an option of the running command would read such a variable.
    """
    for parameter in context.command.params:
        variable = parameter.envvar
        source = context.get_parameter_source(parameter.name or "")
        if not isinstance(variable, str) or (source and source.name == "COMMANDLINE"):
            continue
        if variable in os.environ and not os.environ[variable].strip():
            raise ConfigError(
                f"the variable {variable} is set and empty; give it a value, or unset it "
                f"(env -u {variable})"
            )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelOptions:
    """Which model."""

    model: str | None = argument(
        None, "Folder, GGUF file, name or hub id (default: the embedded model)."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EngineOptions:
    """How the engine is built."""

    dtype: str = option(DEFAULTS.dtype, f"Arithmetic: {', '.join(DTYPES)}.")
    device: str = option(DEFAULTS.device, "Torch device.")
    max_num_seqs: int | None = option(
        None, f"Most prompts at once (default: {DEFAULTS.max_num_seqs}; with --compare: 1)."
    )
    max_num_batched_tokens: int = option(
        DEFAULTS.max_num_batched_tokens, "Most rows of one forward."
    )
    max_step_ms: float | None = option(
        None, "Keep steps this short while a prompt is read beside others."
    )
    max_model_len: int | None = option(None, "Context limit (default: the model's own).")
    weight_memory: str | None = option(
        None,
        "Memory for weights, e.g. 6G; layers, or experts, beyond that are read from disk when they "
        "are needed (default: what there is).",
    )
    packed_space: str | None = option(
        None,
        "Disk for models that were packed to be read from it, e.g. 60G; those not used for the "
        "longest go (default: half of what is free).",
    )
    kv_cache_memory: str | None = option(None, "Memory for keys and values, e.g. 512M or 2G.")
    kv_cache_dtype: str = option(
        DEFAULTS.kv_cache_dtype, f"Keys and values: {', '.join(KV_DTYPES)}."
    )
    enable_prefix_caching: bool = option(
        DEFAULTS.enable_prefix_caching,
        "Reuse what an earlier prompt with the same beginning has computed.",
        both=True,
    )
    load_format: str = option(
        DEFAULTS.load_format, "mmap reads weights when needed, memory at once."
    )
    threads: int | None = option(None, "Threads that compute.")
    pipeline_parallel_size: int | None = option(
        None, "Parts of the layers, each in a process; the first is this one."
    )
    pipeline_stage: list[str] | None = option(
        None,
        "HOST:PORT where `paceline stage` listens, for each further part (default: on this "
        "machine). May be given several times.",
        metavar="<str>",
    )
    backend: str = option(DEFAULTS.backend, f"Kernels of the CPU: {', '.join(BACKENDS)}.")
    objective: str = option(
        "throughput",
        'What drafts are chosen for: throughput, latency, or {"tpot_ms": 20} to keep a time per '
        "token.",
    )
    planner: str = option(
        DEFAULTS.planner, f"{' or '.join(PLANNERS)}: verify what pays, or all that was drafted."
    )
    strict: bool = option(
        DEFAULTS.strict, "Fail, instead of decoding plainly, if a draft is unusable."
    )
    config: str | None = option(
        None,
        "A JSON or YAML file of options by their long names; what the command line and the "
        "environment say comes first.",
        is_eager=True,
        callback=take_config_file,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReplicaOptions(EngineOptions):
    """How many engines there are, and where."""

    replicas: int | None = option(
        None, "Engines, each in a process of its own that Ray runs (needs the extra ray)."
    )
    ray_address: str | None = option(
        None, "With --replicas: the Ray cluster to join, e.g. auto (default: one is started here)."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SpeculationOptions:
    """Who drafts."""

    speculative_config: str | None = option(
        None,
        'Proposers as JSON: {"method": "suffix", "num_speculative_tokens": 8}, or a list of such '
        "objects.",
    )
    method: str | None = option(
        None,
        f"One proposer: {', '.join(METHODS)}, or a plugin's (default: {DEFAULT_METHOD}; "
        f"for the embedded model {EMBEDDED_METHOD} too, for others the drafts that lie beside "
        "them).",
    )
    draft: list[str] | None = option(
        None,
        "A draft that joins the others, or with --method drafts alone: a smaller model of whatever "
        "vocabulary, a head, or a file of n-grams; folder, file, name or hub id. May be given "
        "several times.",
        metavar="<str>",
    )
    num_speculative_tokens: int | None = option(
        None, "Most tokens along one path of a draft.", "-k"
    )
    no_speculation: bool = option(False, "Decode plainly, whatever else is configured.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: int | None = option(
        None,
        "Most tokens of one answer (default: what the context leaves; 256 for --compare, --explain "
        "and verify).",
        "-n",
    )
    temperature: float | None = option(
        None,
        "0 is greedy: always the likeliest token. What is left out of this and the next three is "
        "as the model's makers say, or greedy for --compare, --explain and verify.",
    )
    top_p: float | None = option(None, "Likeliest tokens up to this share; 1 is all.")
    top_k: int | None = option(None, "This many likeliest tokens; 0 is all.")
    min_p: float | None = option(
        None, "Tokens at least this likely, relative to the likeliest; 0 is all."
    )
    seed: int | None = option(None, "Makes sampling repeatable (default: drawn once).")
    ignore_eos: bool = option(False, "Go on to --max-tokens past the model's own end.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AnswerOptions:
    """What an answer avoids, and what ends it."""

    stop: list[str] | None = option(
        None, "End the answer before this text; may be given several times."
    )
    repeat_penalty: float | None = option(
        None, "Divides the logits of tokens that the prompt or the answer has already; 1 is none."
    )
    presence_penalty: float | None = option(
        None, "Taken from the logits of tokens that the answer has already; 0 is none."
    )
    frequency_penalty: float | None = option(
        None, "Taken from them once for each time that the answer has them; 0 is none."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShapeOptions:
    """What an answer must look like."""

    json_schema: str | None = option(None, "Answers are JSON of the schema in this file.")
    regex: str | None = option(None, "Answers match this regular expression as a whole.")


def chat_template() -> Any:
    """The option ``--chat-template``."""
    return option(
        None,
        "A Jinja file, or a built-in template's name such as chatml, llama2 or plain (default: "
        "the model's own; plain where it has none).",
    )


def chat_template_kwargs() -> Any:
    """The option ``--default-chat-template-kwargs``."""
    return option(
        None,
        'Options of the chat template as JSON, e.g. {"enable_thinking": false}; what a request '
        "says comes first.",
        callback=_checked_template_options,
    )


def _checked_template_options(text: str | None) -> str | None:
    """Refused before a model is loaded."""
    parse_template_options(text)
    return text


def named_adapters() -> Any:
    """The option ``--lora`` of commands whose requests choose."""
    return option(
        None,
        "An adapter that requests can ask for, NAME=FOLDER as PEFT wrote it; may be given several "
        "times.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PromptOptions(ModelOptions):
    """What is asked."""

    prompt: str | None = option(None, "The prompt's text.", "-p")
    prompts: str | None = option(
        None,
        "A JSONL file: each row has prompt (a text or token ids), question, turns (the first is "
        "asked) or messages.",
    )
    chat: bool | None = option(
        None, "Put prompts into the model's chat template (default: if it has one).", both=True
    )
    system: str | None = option(
        None, "A system message before the prompt, for models that have a chat template."
    )
    no_thinking: bool = option(False, "Ask the chat template for an answer without thoughts.")
    default_chat_template_kwargs: str | None = chat_template_kwargs()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReportOptions:
    """What is reported."""

    compare: bool = option(
        False,
        "Run the prompts plainly and speculatively in turns; exit 1 if outputs differ where "
        "identity is promised.",
    )
    lora: str | None = option(
        None, "Answer with this adapter of the model: a folder as PEFT wrote it."
    )
    explain: bool = option(
        False, "Show the answer to one prompt step by step, as paceline explain does."
    )
    repeat: int | None = option(
        None,
        "Run the prompts this often (default: once; with --compare until the speed-up is certain, "
        "or for 20 seconds).",
        min=1,
    )
    trace: str | None = option(None, TRACE_HELP)
    json: bool = option(False, JSON_HELP)

    @property
    def repetitions(self) -> int:
        """Of the prompts, where something else does not say when it is enough."""
        return self.repeat or 1


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunOptions(
    EngineOptions,
    ReportOptions,
    SpeculationOptions,
    ShapeOptions,
    AnswerOptions,
    SamplingOptions,
    PromptOptions,
):
    """Options of ``paceline run``."""

    question: list[str] | None = argument(
        None, "The prompt, as -p says it too. Text that is piped in is put behind it."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IdentityOptions:
    """What is compared, and what passes."""

    num_tokens: int | None = option(
        None,
        "Go on until so many tokens are compared: prompts cut anew, all ways of sampling, drafts "
        "of several shapes, mixed in each batch.",
        min=1,
    )
    max_regret: float | None = option(
        None, "Largest regret that passes where identity is not promised (default: 0.5).", min=0.0
    )
    json: bool = option(False, JSON_HELP)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QualityOptions:
    """What arithmetic is measured, and on what."""

    quality: bool = option(False, "Measure the arithmetic instead: KL from float32.")
    text: str | None = option(None, "With --quality: a text file (default: the embedded prompts).")
    dtypes: str | None = option(
        None, "With --quality: a list with commas (default: all there are)."
    )
    llama: str | None = option(
        None,
        "With --quality: a Python with llama-cpp-python or xllamacpp. llama.cpp is then a row, on "
        "the same GGUF file, or on a folder's weights as Q8_0 and Q4_0.",
    )
    llama_kv_type: str | None = option(
        None,
        "With --llama: what llama.cpp keeps keys and values in: f16, or f32 without its flash "
        "attention (default: f16).",
    )
    text_tokens: int | None = option(
        None, "With --quality: tokens to score (default: 8192).", min=1
    )
    window: int | None = option(None, "With --quality: tokens of a window (default: 512).", min=2)
    stride: int | None = option(
        None,
        "With --quality: tokens scored per window (default: half the window); the rest are "
        "context.",
        min=1,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(
    EngineOptions,
    QualityOptions,
    IdentityOptions,
    SpeculationOptions,
    SamplingOptions,
    PromptOptions,
):
    """Options of ``paceline verify``."""

    planner: str = option(
        "fixed",
        "What is verified: fixed takes every draft up to its caps, as many as there can be; auto "
        "only what pays.",
    )
