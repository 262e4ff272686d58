"""The options that commands share, as frozen dataclasses from which Typer's signatures are made.

Owns names, defaults, help texts and environment variables. Knows no model and imports nothing slow:
every command's ``--help`` reads it, which is why no dataclass here has equality or a text form:
making these takes a third of its time.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from paceline.cli.options.config_file import take_config_file, without_overruled
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
from paceline.core.errors import ConfigError

JSON_HELP = "Print one line of JSON on stdout, and everything else on stderr."
MODEL_HELP = "Folder, GGUF file, hub id, or a name that paceline models lists."
TRACE_HELP = "Write the phases of each step to this file, for Perfetto or chrome://tracing."

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
    for each in _in_order(options):
        default = empty if each.default is MISSING else each.default
        declared: Any = Annotated[hints[each.name], each.metadata["declare"](each.name)]
        parameters.append(inspect.Parameter(each.name, kind, default=default, annotation=declared))

    def command(context: typer.Context, **values: Any) -> None:
        refuse_empty_variables(context)
        body(_with_model(options(**without_overruled(context, values)), context.command_path))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _in_order(options: type[Any]) -> list[Field[Any]]:
    """The fields as help lists them: arguments, a command's own options, those that it shares."""
    shared = {field.name for base in options.__mro__[1:] for field in _fields_of(base)}

    def rank(field: Field[Any]) -> tuple[bool, bool]:
        is_option = isinstance(field.metadata["declare"](field.name), OptionInfo)
        return is_option, is_option and field.name in shared

    return sorted(_fields_of(options), key=rank)


def _fields_of(options: type[Any]) -> tuple[Field[Any], ...]:
    return fields(options) if is_dataclass(options) else ()


def _with_model(options: Any, command: str) -> Any:
    if not isinstance(options, ModelOptions):
        return options
    from paceline.cli.options.model_choice import with_model  # which --help need not wait for

    return with_model(options, command)


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
    """Which model.

    Attributes:
        model: in the work of a command that needs one, never None.
    """

    model: str = argument(None, MODEL_HELP)
    embedded: bool = option(False, "Short for MODEL embedded, the model included in Paceline.")

    @property
    def needs_model(self) -> bool:
        """Whether the command has nothing to do without a model."""
        return True


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EngineOptions:
    """How the engine is built."""

    dtype: str = option(DEFAULTS.dtype, f"Precision of the arithmetic: {', '.join(DTYPES)}.")
    device: str = option(DEFAULTS.device, "Device to run on, as torch names it.")
    max_num_seqs: int | None = option(
        None,
        "Maximum number of sequences that run at once (default: "
        f"{DEFAULTS.max_num_seqs}; with --compare: 1).",
    )
    max_num_batched_tokens: int = option(
        DEFAULTS.max_num_batched_tokens, "Maximum number of tokens in one forward pass."
    )
    max_step_ms: float | None = option(
        None, "Keep steps this short while a prompt is read and other requests are decoding."
    )
    max_model_len: int | None = option(
        None, "Maximum context length in tokens (default: the model's own)."
    )
    weight_memory: str | None = option(
        None,
        "Memory for weights, e.g. 6G. Layers or experts that do not fit are read from disk when "
        "they are needed (default: what is available).",
    )
    packed_space: str | None = option(
        None,
        "Disk space for models packed to be read from disk, e.g. 60G. The least recently used "
        "are deleted first (default: half of the free space).",
    )
    kv_cache_memory: str | None = option(None, "Memory for the KV cache, e.g. 512M or 2G.")
    kv_cache_dtype: str = option(
        DEFAULTS.kv_cache_dtype, f"Precision of the KV cache: {', '.join(KV_DTYPES)}."
    )
    enable_prefix_caching: bool = option(
        DEFAULTS.enable_prefix_caching,
        "Reuse the KV cache of earlier prompts that begin the same way.",
        both=True,
    )
    load_format: str = option(
        DEFAULTS.load_format,
        "How weights are read: mmap maps the file and reads when needed, memory reads "
        "everything at once.",
    )
    threads: int | None = option(None, "Number of compute threads.")
    pipeline_parallel_size: int | None = option(
        None,
        "Number of stages that the layers are split into. Each runs in a process, the first in "
        "this one.",
    )
    pipeline_stage: list[str] | None = option(
        None,
        "HOST:PORT of a `paceline stage`, one for each stage after the first (default: "
        "processes on this machine). Can be given several times.",
        metavar="<str>",
    )
    backend: str = option(DEFAULTS.backend, f"CPU kernels: {', '.join(BACKENDS)}.")
    objective: str = option(
        "throughput",
        'What the planner optimises: throughput, latency, or {"tpot_ms": 20} to keep a time per '
        "token.",
    )
    planner: str = option(
        DEFAULTS.planner,
        f"{' or '.join(PLANNERS)}: check the drafted tokens that pay, or all of them.",
    )
    strict: bool = option(
        DEFAULTS.strict, "Fail if a draft is unusable, instead of running without it."
    )
    config: str | None = option(
        None,
        "JSON or YAML file of options by their long names. The command line and the environment "
        "override it.",
        is_eager=True,
        callback=take_config_file,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReplicaOptions(EngineOptions):
    """How many engines there are, and where."""

    replicas: int | None = option(
        None, "Number of engines, each in its own process run by Ray (needs the extra ray)."
    )
    ray_address: str | None = option(
        None,
        "With --replicas: address of the Ray cluster to join, or auto (default: start one here).",
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
        f"How to draft: {', '.join(METHODS)}, or the name of a plugin (default: "
        f"{DEFAULT_METHOD}, plus {EMBEDDED_METHOD} for the embedded model and the "
        "drafts in the model's folder for others).",
    )
    draft: list[str] | None = option(
        None,
        "Draft to use in addition to the default ones, or as the only one with --method: a "
        "smaller model with any vocabulary, a head, or an n-gram file; given as folder, file, "
        "name or hub id. Can be given several times.",
        metavar="<str>",
    )
    num_speculative_tokens: int | None = option(
        None, "Maximum length of a draft in tokens, along one path.", "-k"
    )
    no_speculation: bool = option(
        False, "Turn speculative decoding off, whatever else is configured."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: int | None = option(
        None,
        "Maximum tokens per answer (default: what the context leaves; 256 for --compare, "
        "--explain and verify).",
        "-n",
    )
    temperature: float | None = option(
        None,
        "Sampling temperature; 0 always takes the likeliest token. This and the next three "
        "options default to what the model's makers recommend, and to greedy for --compare, "
        "--explain and verify.",
    )
    top_p: float | None = option(
        None, "Sample from the likeliest tokens that add up to this probability; 1 is all."
    )
    top_k: int | None = option(None, "Sample from this many of the likeliest tokens; 0 is all.")
    min_p: float | None = option(
        None, "Sample from tokens at least this likely relative to the likeliest one; 0 is all."
    )
    seed: int | None = option(None, "Seed that makes sampling repeatable (default: random).")
    ignore_eos: bool = option(False, "Continue to --max-tokens past the model's end token.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AnswerOptions:
    """What an answer avoids, and what ends it."""

    stop: list[str] | None = option(
        None, "Stop the answer before this text; can be given several times."
    )
    repeat_penalty: float | None = option(
        None,
        "Penalty on tokens that are in the prompt or the answer already, as a divisor of their "
        "logits; 1 is none.",
    )
    presence_penalty: float | None = option(
        None,
        "Penalty on tokens that are in the answer already, subtracted from their logits; 0 is "
        "none.",
    )
    frequency_penalty: float | None = option(
        None,
        "Penalty on tokens for each time they are in the answer already, subtracted from their "
        "logits; 0 is none.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShapeOptions:
    """What an answer must look like."""

    json_schema: str | None = option(
        None, "Constrain answers to JSON that matches the schema in this file."
    )
    regex: str | None = option(
        None, "Constrain answers to match this regular expression as a whole."
    )


def chat_template() -> Any:
    """The option ``--chat-template``."""
    return option(
        None,
        "Jinja file, or the name of a built-in template such as chatml, llama2 or plain "
        "(default: the model's own, or plain if it has none).",
    )


def chat_template_kwargs() -> Any:
    """The option ``--default-chat-template-kwargs``."""
    return option(
        None,
        'Options of the chat template as JSON, e.g. {"enable_thinking": false}. Requests can '
        "override them.",
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
        "Adapter that requests can ask for, as NAME=FOLDER in the PEFT format; can be given "
        "several times.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PromptOptions(ModelOptions):
    """What is asked."""

    prompt: str | None = option(None, "Text of the prompt.", "-p")
    prompts: str | None = option(
        None,
        "JSONL file of prompts. Each row has prompt (text or token ids), question, turns (only "
        "the first is used) or messages.",
    )
    chat: bool | None = option(
        None, "Apply the chat template of the model to prompts (default: if it has one).", both=True
    )
    system: str | None = option(
        None, "System message before the prompt, for models with a chat template."
    )
    no_thinking: bool = option(False, "Ask the chat template to turn thinking off.")
    default_chat_template_kwargs: str | None = chat_template_kwargs()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReportOptions:
    """What is reported."""

    compare: bool = option(
        False,
        "Let plain and speculative decoding take turns on the prompts, and compare them. The "
        "exit code is 1 if outputs differ where identity is promised.",
    )
    lora: str | None = option(
        None, "Answer with this adapter of the model, a folder in the PEFT format."
    )
    explain: bool = option(
        False, "Show how one prompt is answered, step by step, like paceline explain."
    )
    repeat: int | None = option(
        None,
        "How often to run the prompts (default: once; with --compare until the speed-up is "
        "certain, for at most 20 seconds).",
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
        None, "The prompt, the same as -p. Text from a pipe is appended to it."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IdentityOptions:
    """What is compared, and what passes."""

    num_tokens: int | None = option(
        None,
        "Continue until this many tokens are compared, with prompts cut in new places and all "
        "sampling methods and several draft shapes mixed in each batch.",
        min=1,
    )
    max_regret: float | None = option(
        None, "Largest regret that passes where identity is not promised (default: 0.5).", min=0.0
    )
    json: bool = option(False, JSON_HELP)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QualityOptions:
    """What arithmetic is measured, and on what."""

    quality: bool = option(False, "Measure the arithmetic instead, as KL divergence from float32.")
    text: str | None = option(
        None, "With --quality: text file to score (default: the embedded prompts)."
    )
    dtypes: str | None = option(
        None, "With --quality: precisions to measure, separated by commas (default: all)."
    )
    llama: str | None = option(
        None,
        "With --quality: a Python interpreter that has llama-cpp-python or xllamacpp. Adds rows "
        "for llama.cpp, on the same GGUF file or on the folder's weights as Q8_0 and Q4_0.",
    )
    llama_kv_type: str | None = option(
        None,
        "With --llama: precision of llama.cpp's KV cache, f16 or f32; f32 turns its flash "
        "attention off (default: f16).",
    )
    text_tokens: int | None = option(
        None, "With --quality: number of tokens to score (default: 8192).", min=1
    )
    window: int | None = option(None, "With --quality: tokens per window (default: 512).", min=2)
    stride: int | None = option(
        None,
        "With --quality: tokens scored per window; the rest is context (default: half the window).",
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
        "Which drafted tokens are checked: fixed checks as many as the limits allow, auto only "
        "those that pay.",
    )
