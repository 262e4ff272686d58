"""From options to what the Python API takes.

Imports nothing slow: a server resolves its options in a process that never needs torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.build.default_drafts import default_speculative_config, draft_at, is_embedded
from paceline.cli.options import (
    COMPARED_TOKENS,
    DEFAULTS,
    AnswerOptions,
    EngineOptions,
    RunOptions,
    SamplingOptions,
    ShapeOptions,
    SpeculationOptions,
    limit_of,
)
from paceline.config import DTYPES, SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import (
    HEAD_METHODS,
    SelfDraftConfig,
    check_method,
    config_class,
)
from paceline.core.checks import check_choice
from paceline.core.errors import ConfigError, PacelineError
from paceline.loading.catalogue import embedded_model, embedded_ngram_model
from paceline.request.sampling_params import SamplingParams
from paceline.request.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from paceline.api.llm import LLM


COMPARED = SamplingParams(max_tokens=COMPARED_TOKENS, temperature=0.0)
"""What runs are compared with where the options leave it open."""
ADAPTER = "adapter"
"""The name of what ``--lora`` of a command that answers prompts says."""
NO_MEMORY = "no drafts out of earlier answers: each prompt is measured as if it were new"


def speculative_config(options: SpeculationOptions, model: str) -> tuple[SpeculativeConfig, ...]:
    """The proposers that the options name: drafts join those of the model, a method is alone."""
    if options.no_speculation:
        return ()
    if options.speculative_config is not None:
        single = {"--method": options.method, "--draft": options.draft}
        if given := [name for name, value in single.items() if value]:
            raise ConfigError(
                f"--speculative-config names all proposers: put what {', '.join(given)} says into "
                "it, or leave it out"
            )
        configs = parse_speculative_config(options.speculative_config)
    elif options.method is not None:
        configs = _by_method(options.method, options.draft or [], model)
    else:
        configs = _without_twins(default_speculative_config(model), _named_drafts(options))
    k = options.num_speculative_tokens
    return configs if k is None else tuple(replace(c, num_speculative_tokens=k) for c in configs)


def _named_drafts(options: SpeculationOptions) -> tuple[SpeculativeConfig, ...]:
    return tuple(map(named_draft, dict.fromkeys(options.draft or ())))


def _without_twins(
    usual: Iterable[SpeculativeConfig], named: tuple[SpeculativeConfig, ...]
) -> tuple[SpeculativeConfig, ...]:
    """Both, without what the model brings and is named as well."""
    known = {_same_draft(each) for each in named}
    return (*(each for each in usual if _same_draft(each) not in known), *named)


def _same_draft(config: SpeculativeConfig) -> tuple[str, str | None]:
    place = config.model
    return config.method, None if place is None else os.path.realpath(place)


def _by_method(name: str, drafts: Sequence[str], model: str) -> tuple[SpeculativeConfig, ...]:
    """One method, once for each draft, or without any."""
    method = check_method(name)
    config = config_class(method)
    if drafts and not config.takes_model:
        raise ConfigError(
            f"--method {method} takes no --draft; that is for draft models, heads and ngram_model"
        )
    if not drafts and is_embedded(model) and method in ("draft_model", "ngram_model"):
        own = {"draft_model": embedded_model("draft"), "ngram_model": embedded_ngram_model()}
        drafts = [own[method]]
    if not drafts and config.needed_model:
        raise ConfigError(f"--method {method} needs --draft: {config.needed_model}")
    return tuple(_draft_by(method, each) for each in drafts) or (_draft_by(method, None),)


def _draft_by(method: str, draft: str | None) -> SpeculativeConfig:
    values: dict[str, Any] = {"method": method} | ({} if draft is None else {"model": draft})
    if method == "draft_model":  # which is translated only where it has to be
        values["use_heterogeneous_vocab"] = True
    (config,) = parse_speculative_config(values)
    return config


def named_draft(draft: str) -> SpeculativeConfig:
    """A draft that is named by itself: n-grams, a head, or a model of any vocabulary."""
    if is_ngram_model(draft):
        return _draft_by("ngram_model", draft)
    with suppress(OSError, ValueError, PacelineError):
        head = draft_at(Path(os.path.expanduser(draft)))
        if head.method != "draft_model":
            return replace(head, model=draft)
    return _draft_by("draft_model", draft)


def is_ngram_model(path: str) -> bool:
    """Whether a file begins as ``paceline train ngram`` lets it."""
    place = Path(os.path.expanduser(path))
    with suppress(OSError, ValueError):
        if place.is_file():
            from paceline.proposers.ngram_model import MAGIC  # by numpy, which is slow

            with place.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
    return False


def method_of(draft: str) -> str:
    """The method of a draft that is named by itself: a head's where it says that it is one."""
    method = named_draft(draft).method
    return method if method in HEAD_METHODS else "draft_model"


def self_draft(layers: int | None, dtype: str | None) -> SelfDraftConfig:
    """The model itself with fewer layers, or in the precision that ``--draft-dtype`` names."""
    if dtype is not None:
        check_choice("--draft-dtype", dtype, DTYPES)
    return SelfDraftConfig(draft_layers=layers, dtype=dtype or "auto")


def named_folders(given: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Folders of adapters by their names, out of ``NAME=FOLDER``; no name may be ``taken``."""
    folders: dict[str, str] = {}
    for each in given:
        name, sign, folder = each.partition("=")
        if not (name and sign and folder):
            raise ConfigError(f"--lora is {each!r}; write NAME=FOLDER")
        if name in folders:
            raise ConfigError(f"--lora gives two adapters the name {name!r}: choose another")
        if name in taken:
            raise ConfigError(
                f"--lora gives an adapter the name of a model, {name!r}: choose another"
            )
        folders[name] = os.path.abspath(os.path.expanduser(folder))
    return folders


def values_of(options: Any, config: type[Any]) -> dict[str, Any]:
    """What the options say for the fields of a dataclass."""
    return {each.name: getattr(options, each.name) for each in fields(config)}


def sampling_params(
    options: SamplingOptions, seed: int, default: SamplingParams = COMPARED
) -> SamplingParams:
    """The parameters of every prompt, with one seed; ``default`` is for what options leave open."""
    said = values_of(options, SamplingOptions)
    if isinstance(options, AnswerOptions):
        said = values_of(options, AnswerOptions)
        said["repetition_penalty"] = said.pop("repeat_penalty")
    given = {name: value for name, value in said.items() if value is not None}
    if "max_tokens" in given:
        given["max_tokens"] = limit_of(given["max_tokens"])
    return replace(default, **{**given, "seed": seed})


def structured_outputs(options: ShapeOptions) -> StructuredOutputs | None:
    """What answers must match; None where they are free."""
    schema, regex = options.json_schema, options.regex
    if schema is None:
        return None if regex is None else StructuredOutputs(regex=regex)
    if regex is not None:
        raise ConfigError("--json-schema and --regex cannot be used together")
    try:
        if not schema.lstrip().startswith("{"):
            schema = Path(schema).read_text(encoding="utf-8-sig")
        parsed = json.loads(schema)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --json-schema {schema}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--json-schema is not valid JSON: {error}") from error
    return StructuredOutputs(json=parsed)


def engine_options(options: EngineOptions) -> dict[str, Any]:
    """Keyword arguments of :class:`~paceline.api.llm.LLM`; ``ConfigError`` where one is wrong."""
    values = values_of(options, EngineOptions)
    seqs = values["max_num_seqs"]
    del values["config"]  # read before any other option
    stages = tuple(values.pop("pipeline_stage") or ())
    if values["pipeline_parallel_size"] is None:
        values["pipeline_parallel_size"] = 1 + len(stages)
    return values | {
        "self_drafts": isinstance(options, SpeculationOptions)
        and not options.no_speculation
        and options.speculative_config is None
        and options.method is None
        and not options.draft,
        "max_num_seqs": DEFAULTS.max_num_seqs if seqs is None else seqs,
        "num_threads": values.pop("threads"),
        "pipeline_stages": stages,
    }


def adapter_of(options: RunOptions) -> str | None:
    """The name of the adapter that answers; None: the model as it is."""
    return None if options.lora is None else ADAPTER


def open_llm(options: RunOptions, speculative: tuple[SpeculativeConfig, ...]) -> LLM:
    """The model that the options name."""
    from paceline.api.llm import LLM

    adapters = {} if options.lora is None else {ADAPTER: options.lora}
    return LLM(
        options.model, speculative_config=speculative, lora=adapters, **engine_options(options)
    )
