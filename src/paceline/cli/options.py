"""The options that commands share, as frozen dataclasses from which Typer's signatures are made.

Owns names, defaults, help texts and environment variables. Knows no model and imports nothing slow:
every command's ``--help`` reads it, which is why no dataclass here has equality or a text form:
making these takes a third of its time.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from paceline.cli.config_file import take_config_file, without_overruled
from paceline.config import METHODS, EngineConfig, SpeculativeConfig, environment_name
from paceline.config.speculative import DEFAULT_METHOD, EMBEDDED_METHOD
from paceline.config.template_options import parse_template_options
from paceline.core.errors import ConfigError, PacelineError
from paceline.request.sampling_params import SamplingParams

JSON_HELP = "Print one line of JSON on stdout, and everything else on stderr."
MODEL_HELP = "Folder, GGUF file, hub id, or a name that paceline models lists."
TRACE_HELP = "Write the phases of each step to this file, for Perfetto or chrome://tracing."

Options = TypeVar("Options")
_MARKED = re.compile(r"`(\w+)`")
DEFAULTS = EngineConfig()
"""What an engine is built with where nothing is said."""
UNLIMITED = 1 << 31
"""Tokens of an answer: more than any context holds."""
COMPARED_TOKENS = 256
"""Tokens per answer where runs are compared and the options leave it open."""
SEVERAL = "Can be given several times."


def option(
    default: Any, help: str, *names: str, both: bool = False, sets: str = "", **more: Any
) -> Any:
    """A field that is an option, and that an environment variable of its long name fills too.

    Args:
        default: ``...`` where it must be given.
        help: names of settings in backticks become those of the options that set them.
        names: a short name, or a long one that is not the field's with dashes.
        both: ``--no-`` before the name turns a switch off.
        sets: the setting that errors name where the option is wrong (default: the field's name).
        more: for :func:`typer.Option`.
    """

    def declare(name: str) -> Any:
        long = _long_name(name, names)
        flags = (
            *(each for each in names if each != long),
            f"{long}/--no-{long[2:]}" if both else long,
        )
        variable = environment_name(long)
        return typer.Option(*flags, help=help, envvar=variable, show_envvar=False, **more)

    return _field(default, declare, names=names, sets=sets)


def _long_name(field: str, names: Sequence[str]) -> str:
    """Of an option with these names of its own."""
    return next((name for name in names if name[:2] == "--"), f"--{field.replace('_', '-')}")


def argument(default: Any, help: str) -> Any:
    """A field that is an argument, and that ``PACELINE_<NAME>`` fills too."""

    def declare(name: str) -> Any:
        variable = environment_name(name)
        return typer.Argument(metavar=name.upper(), help=help, envvar=variable, show_envvar=False)

    return _field(default, declare)


def from_config(
    config: type[Any], name: str, note: str = "", *, default: Any = MISSING, **more: Any
) -> Any:
    """An option that sets a field of a configuration, whose help and default it has.

    Args:
        config: a dataclass of :func:`~paceline.core.checks.setting` fields.
        note: goes behind the help; one that begins with a bracket or a semicolon belongs to the
            last sentence.
        default: in place of the configuration's; None leaves it open.
        more: as of :func:`option`, and ``short``, a short name.
    """
    setting = next(each for each in fields(config) if each.name == name)
    help = setting.metadata["help"]
    if note.startswith(("(", ";")):
        help = f"{help[:-1]}{' ' * note.startswith('(')}{note}."
    elif note:
        help = f"{help} {note}"
    names = (more.pop("short"),) if "short" in more else ()
    default = setting.default if default is MISSING else default
    return option(default, help, *names, sets=name, **more)


def _field(default: Any, declare: Callable[[str], Any], **more: Any) -> Any:
    metadata = {"declare": declare, **more}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def takes(options: type[Options], body: Callable[[Options], None]) -> Callable[..., None]:
    """A function with a parameter for each option, which hands the filled dataclass to ``body``."""
    hints = get_type_hints(options)
    names = {setting: name for setting, (name, _) in _by_setting(options).items()}
    keyword_only, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [inspect.Parameter("context", keyword_only, annotation=typer.Context)]
    for each in _in_order(options):
        default = empty if each.default is MISSING else each.default
        info = each.metadata["declare"](each.name)
        info.metavar = info.metavar or _shown_type(hints[each.name])
        info.help = _MARKED.sub(lambda name: names.get(name[1], name[0]), info.help)
        declared: Any = Annotated[hints[each.name], info]
        parameters.append(
            inspect.Parameter(each.name, keyword_only, default=default, annotation=declared)
        )

    def command(context: typer.Context, **values: Any) -> None:
        refuse_empty_variables(context)
        given = options(**without_overruled(context, values))
        try:
            body(_with_model(given, context.command_path))
        except PacelineError as error:
            raise _in_options(error, given) from error

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _by_setting(options: type[Any]) -> dict[str, tuple[str, Field[Any]]]:
    """What is typed for each setting, ``--threads`` for ``num_threads``, and the option's field."""
    return {
        each.metadata["sets"] or each.name: (_long_name(each.name, each.metadata["names"]), each)
        for each in _fields_of(options)
        if "sets" in each.metadata
    }


def _in_options(error: PacelineError, given: Any) -> PacelineError:
    """The error with options in place of settings, if it is about one that an option sets.

    One of those that it names is given: a speculative configuration, which may come as JSON, has
    settings of the same names.
    """
    known = _by_setting(type(given))
    if error.param not in known:
        return error
    # Of the others only those with an underscore cannot be ordinary words.
    names = [name for name in known if "_" in name or name == error.param]
    longest_first = map(re.escape, sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.'\"-])({'|'.join(longest_first)})(?![\w'\"])")
    fields = [known[name][1] for name in pattern.findall(str(error))]
    if all(getattr(given, each.name) == each.default for each in fields):
        return error
    told = pattern.sub(lambda name: known[name[0]][0], str(error))
    return ConfigError(told, error.param)


@cache
def variables_of(options: type[Any]) -> frozenset[str]:
    """The environment variables that fill these options."""
    return frozenset(each.metadata["declare"](each.name).envvar for each in _fields_of(options))


def _shown_type(hint: Any) -> str | None:
    """What stands for the value of an option in its help; None where there is none."""
    types = {item for part in (hint, *get_args(hint)) for item in (part, *get_args(part))}
    return next((f"<{kind.__name__}>" for kind in (int, float, str) if kind in types), None)


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
    from paceline.cli.model_argument import with_model  # which --help need not wait for

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


def engine_option(name: str, note: str = "", **more: Any) -> Any:
    """An option that sets a field of :class:`~paceline.config.EngineConfig`."""
    return from_config(EngineConfig, name, note, **more)


def automatic(number: int | None) -> int | None:
    """0 and -1 leave it to Paceline, as in llama.cpp and vLLM."""
    return None if number in (0, -1) else number


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EngineOptions:
    """How the engine is built: fields of :class:`~paceline.config.EngineConfig`."""

    dtype: str = engine_option("dtype")
    device: str = engine_option("device")
    max_num_seqs: int | None = engine_option(
        "max_num_seqs",
        f"(default: {DEFAULTS.max_num_seqs}; with --compare: 1)",
        default=None,
        callback=automatic,
    )
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens")
    max_step_ms: float | None = engine_option("max_step_ms")
    max_model_len: int | None = engine_option("max_model_len", callback=automatic)
    weight_memory: str | None = engine_option("weight_memory")
    packed_space: str | None = engine_option("packed_space")
    kv_cache_memory: str | None = engine_option("kv_cache_memory")
    kv_cache_dtype: str = engine_option("kv_cache_dtype")
    enable_prefix_caching: bool = engine_option("enable_prefix_caching", both=True)
    load_format: str = engine_option("load_format")
    threads: int | None = engine_option("num_threads", callback=automatic)
    pipeline_parallel_size: int | None = engine_option("pipeline_parallel_size", default=None)
    pipeline_stage: list[str] | None = engine_option("pipeline_stages", SEVERAL, default=None)
    backend: str = engine_option("backend")
    objective: str = engine_option("objective", default="throughput")
    planner: str = engine_option("planner")
    strict: bool = engine_option("strict")
    config: str | None = option(
        None,
        "JSON or YAML file of options, by their long names. The command line and the environment "
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
        "Draft to use in addition to the default ones, or instead of them with --method: a "
        "smaller model with any vocabulary, a head, or an n-gram file, as a folder, file, "
        f"name or hub id. {SEVERAL}",
    )
    num_speculative_tokens: int | None = from_config(
        SpeculativeConfig, "num_speculative_tokens", default=None, short="-k"
    )
    no_speculation: bool = option(
        False, "Turn speculative decoding off, whatever else is configured."
    )


def token_limit(default: int | None, note: str = "") -> Any:
    """The option ``--max-tokens``; as in llama.cpp and Ollama, -1 and -2 are no limit."""
    return from_config(
        SamplingParams,
        "max_tokens",
        f"; -1 means no limit {note}".rstrip(),
        default=default,
        short="-n",
        callback=_unlimited,
    )


def _unlimited(tokens: int | None) -> int | None:
    if tokens in (-1, -2):
        return UNLIMITED
    if tokens is not None and not 1 <= tokens <= UNLIMITED:
        raise ConfigError(
            f"--max-tokens is {tokens}; allowed: whole numbers from 1, and -1 for as many tokens "
            "as the context holds"
        )
    return tokens


def limit_of(tokens: int) -> int | None:
    """What ``--max-tokens`` says, as sampling parameters have it: None is no limit."""
    return None if tokens == UNLIMITED else tokens


def sampling_option(name: str, note: str = "", default: Any = None, **more: Any) -> Any:
    """An option that sets a field of ``SamplingParams``; None leaves it open."""
    return from_config(SamplingParams, name, note, default=default, **more)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SamplingOptions:
    """How tokens are chosen: fields of ``SamplingParams``."""

    max_tokens: int | None = token_limit(None, f"(default: {COMPARED_TOKENS})")
    temperature: float | None = sampling_option("temperature", "(default: 0)")
    top_p: float | None = sampling_option("top_p")
    top_k: int | None = sampling_option("top_k")
    min_p: float | None = sampling_option("min_p")
    seed: int | None = sampling_option("seed")
    ignore_eos: bool = sampling_option("ignore_eos", default=False)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AnswerOptions(SamplingOptions):
    """How an answer is sampled, what it avoids, and what ends it."""

    max_tokens: int | None = token_limit(
        None,
        f"(default: what the context leaves; with --compare or --explain: {COMPARED_TOKENS})",
    )
    temperature: float | None = sampling_option(
        "temperature",
        "This and the next three options default to what the model's makers recommend, or else "
        "to those of llama.cpp; with --compare or --explain, the temperature defaults to 0.",
    )
    stop: list[str] | None = sampling_option("stop", SEVERAL)
    repeat_penalty: float | None = sampling_option("repetition_penalty")
    presence_penalty: float | None = sampling_option("presence_penalty")
    frequency_penalty: float | None = sampling_option("frequency_penalty")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShapeOptions:
    """What an answer must look like."""

    json_schema: str | None = option(
        None,
        "Constrain answers to JSON that matches this schema, a file or the JSON itself.",
        sets="structured_outputs.json",
    )
    regex: str | None = option(
        None,
        "Constrain answers to match this regular expression as a whole.",
        sets="structured_outputs.regex",
    )


def _checked_template_options(text: str | None) -> str | None:
    """Refused before a model is loaded."""
    parse_template_options(text)
    return text


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TemplateOptions:
    """What chat templates are given."""

    default_chat_template_kwargs: str | None = option(
        None,
        'Options of the chat template as JSON, e.g. {"enable_thinking": false}. Requests can '
        "override them.",
        callback=_checked_template_options,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RequestedModelOptions(TemplateOptions):
    """By which names requests ask for a model and its adapters, and how their chats are written."""

    served_model_name: list[str] | None = option(
        None, f"Name by which requests ask for the model (default: MODEL). {SEVERAL}"
    )
    lora: list[str] | None = option(
        None, f"Adapter that requests can ask for, as NAME=FOLDER in PEFT format. {SEVERAL}"
    )
    chat_template: str | None = option(
        None,
        "Jinja file, or the name of a built-in template such as chatml, llama2 or plain "
        "(default: the model's own, or plain if it has none).",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuestionOptions:
    """A prompt behind the model."""

    question: list[str] | None = argument(
        None, "The prompt, the same as -p. Text from a pipe is appended to it."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChatOptions(TemplateOptions):
    """How a prompt becomes a chat."""

    chat: bool | None = option(
        None, "Apply the model's chat template to prompts (default: if it has one).", both=True
    )
    system: str | None = option(None, "System message, for models with a chat template.")
    no_thinking: bool = option(False, "Ask the chat template to turn thinking off.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PromptOptions(ModelOptions):
    """What is asked."""

    prompt: str | None = option(None, "Text of the prompt.", "-p")
    prompts: str | None = option(
        None,
        "JSONL file of prompts. Each row has prompt (text or token ids), question, turns (only "
        "the first is used) or messages.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReportOptions:
    """What is reported."""

    compare: bool = option(
        False,
        "Run plain and speculative decoding in turns on the prompts, and compare them. The exit "
        "code is 1 if outputs differ where they must be identical.",
    )
    lora: str | None = option(
        None, "Answer with this adapter of the model, a folder in PEFT format."
    )
    explain: bool = option(
        False, "Show step by step how one prompt is answered, like paceline explain."
    )
    repeat: int | None = option(
        None,
        "How many times to run the prompts (default: once; with --compare until the speed-up is "
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
    ChatOptions,
    QuestionOptions,
    PromptOptions,
):
    """Options of ``paceline run``."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(
    EngineOptions, SpeculationOptions, SamplingOptions, ChatOptions, QuestionOptions, ModelOptions
):
    """Options of ``paceline explain``."""

    prompt: str | None = option(None, "Text of the prompt.", "-p")
    max_tokens: int | None = token_limit(64)
    steps: str | None = option(None, "Show only these steps, e.g. 3-10 (default: all).")
    plot: str | None = option(
        None, "Plot costs, widths and draft tokens to a .png, .svg or .pdf file."
    )
    trace: str | None = option(None, TRACE_HELP)
    json: bool = option(False, JSON_HELP)
