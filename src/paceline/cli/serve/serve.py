"""``paceline serve``: from options to a running server.

Owns which process imports what: the engine is built in a process of its own, by a function that
travels there by name, so that this one never imports torch.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.cli.options.options import (
    EngineOptions,
    ModelOptions,
    ReplicaOptions,
    SpeculationOptions,
    argument,
    chat_template,
    chat_template_kwargs,
    named_adapters,
    option,
)
from paceline.cli.options.resolve import (
    engine_options,
    named_folders,
    speculative_config,
)
from paceline.cli.serve.serve_models import (
    check_is_there,
    memory_budget,
    models_on_disk,
    served_names,
    stored_bytes,
)
from paceline.cli.terminal.display import printable
from paceline.config import SpeculativeConfig
from paceline.config.kv_events import KVEventsConfig, parse_kv_events
from paceline.config.template_options import parse_template_options
from paceline.core.checks import memory_bytes, seconds_of
from paceline.core.errors import ConfigError
from paceline.core.installation import install_command
from paceline.loading.fetching import named_model
from paceline.request.sampling_params import POOLINGS
from paceline.text.chat_templates import BUILT_IN, PLAIN, chosen_template

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.server.engine_process.client import EngineClient
    from paceline.server.hosting.models import Offer
    from paceline.server.http.config import ServerConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServeOptions(ReplicaOptions, SpeculationOptions, ModelOptions):
    """Options of ``paceline serve``."""

    more_models: list[str] | None = argument(
        None, "Further models, loaded when a request asks for them. MODEL is loaded at the start."
    )
    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 means all addresses of this machine."
    )
    port: int = option(8000, "Port to listen on; 0 chooses a free one.")
    served_model_name: list[str] | None = option(
        None,
        "Name by which requests ask for the model; can be given several times (default: MODEL).",
    )
    api_key: list[str] | None = option(
        None, "Key that clients must send; can be given several times."
    )
    allowed_origins: list[str] | None = option(
        None,
        "Origin whose pages may call the server from a browser, or * for any; can be given "
        "several times.",
    )
    allowed_hosts: list[str] | None = option(
        None,
        "Host name that requests may use too, such as that of a proxy, or * for any; can be "
        "given several times.",
    )
    max_queue: int = option(
        256, "Maximum number of waiting samples; further requests get status 429."
    )
    max_body_size: str = option("8M", "Maximum size of a request, e.g. 512K or 8M.")
    request_timeout: float = option(1800.0, "Maximum seconds per request; 0 is no limit.")
    receive_timeout: float = option(
        30.0,
        "Seconds within which the headers of a request must arrive, and again as many for its "
        "body.",
    )
    hang_timeout: float = option(
        60.0, "Seconds without a sign of life after which the engine is restarted."
    )
    max_engine_restarts: int = option(
        5, "How often an engine that died is restarted before the server gives up."
    )
    drain_timeout: float = option(
        30.0, "Seconds that running requests get to finish when the server stops."
    )
    stream_interval_ms: float = option(
        20.0,
        "Combine tokens that come within this time into one event of a stream; 0 sends every step.",
    )
    metrics_prefix: str = option(
        "paceline", "Prefix of the metrics' names; vllm makes dashboards for vLLM work."
    )
    chat_template: str | None = chat_template()
    default_chat_template_kwargs: str | None = chat_template_kwargs()
    tool_call_parser: str = option(
        "auto",
        "Format in which the model writes tool calls: auto, hermes, llama, qwen3_coder, "
        "mistral, ...",
    )
    reasoning_parser: str = option(
        "auto",
        "Format in which the model marks its thoughts: auto, none, deepseek_r1, granite, "
        "mistral, ...",
    )
    all_models: bool = option(
        False,
        "Also serve every local model that paceline models lists, loaded when a request asks "
        "for it.",
    )
    memory_budget: str | None = option(
        None,
        "Memory for all loaded models together, e.g. 8GiB or 50%. The least recently used model "
        "is unloaded to make room (default with several models: four fifths of the machine's "
        "memory).",
    )
    max_loaded_models: int | None = option(None, "Maximum number of models loaded at once.")
    keep_alive: str = option(
        "-1",
        "How long an idle model stays loaded, in seconds or as 5m or 1h30m; -1 means for ever.",
    )
    kv_events_config: str | None = option(
        None,
        'Publish which prefixes are cached, in the format of vLLM: {"enable_kv_cache_events": '
        'true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"}.',
    )
    lora: list[str] | None = named_adapters()
    allow_runtime_lora_updating: bool = option(
        False, "Let requests load and unload adapters from folders on this machine."
    )
    pooling: str | None = option(
        None,
        f"How hidden states become the embedding of a text: {', '.join(POOLINGS)} "
        "(default: what the model's files say, or else mean).",
    )


def serve_command(options: ServeOptions) -> int:
    """The work of ``paceline serve`` without ``--replicas``."""
    try:
        from paceline.server.http.tracing import install_trace_logging
        from paceline.server.run import run
    except ImportError as error:
        raise ConfigError(
            f"serving needs a package that is not installed ({error}): {install_command()}"
        ) from error
    install_trace_logging()
    models = served_models(options)
    config = server_config(options, models)
    first, others = clients(options, models, config)
    run(first, config, announce, others)
    return 0


def clients(
    options: ServeOptions, models: Mapping[str, tuple[str, ...]], config: ServerConfig
) -> tuple[EngineClient, list[Offer]]:
    """The client of the first model, not started, and the others."""
    from paceline.server.engine_process.client import EngineClient
    from paceline.server.engine_process.life import Pulse, Restarts
    from paceline.server.hosting.models import Offer
    from paceline.server.http.tracing import install_trace_logging

    events = parse_kv_events(options.kv_events_config)
    if events is not None and len(models) > 1:
        raise ConfigError("--kv-events-config publishes one model's cache: serve a single model")
    first, *others = models
    taken = {name for names in models.values() for name in names}
    adapters = named_folders(options.lora or (), taken)

    def client(model: str) -> EngineClient:
        speculative = speculative_config(options, model)
        return EngineClient(
            engine_factory(options, model, speculative, options.chat_template, events),
            configure_logging=install_trace_logging,
            stream_interval=config.stream_interval,
            restarts=Restarts(config.max_engine_restarts),
            pulse=Pulse(config.hang_timeout, config.step_timeout),
            adapters=adapters if model == first else None,
        )

    offers = [Offer(client(each), models[each], stored_bytes(each)) for each in others]
    return client(first), offers


def served_models(options: ServeOptions) -> dict[str, tuple[str, ...]]:
    """The models that may be loaded, the first at the start, each with its names.

    Raises:
        ConfigError: the names cannot be given.
        ModelLoadError: a model is not there.
    """
    named = [options.model, *(options.more_models or ())]
    for model in named[1:]:
        check_is_there(model)
    if options.all_models:
        named += models_on_disk(named)
    return served_names(named, options.served_model_name or ())


def engine_factory(
    options: EngineOptions,
    model: str,
    speculative: tuple[SpeculativeConfig, ...],
    chat_template: str | None,
    events: KVEventsConfig | None = None,
) -> Callable[[], LLM]:
    """What builds the engine in its process, with the chat template that ``--chat-template`` names.

    A model of the catalogue is fetched before, since that process ignores interrupts.
    """
    template = None if chat_template is None else chosen_template(chat_template)
    settings = engine_options(options)
    named_model(model)
    return partial(build_engine, model, speculative, settings, template, events)


def build_engine(
    model: str,
    speculative: tuple[SpeculativeConfig, ...],
    options: Mapping[str, Any],
    chat_template: str | None = None,
    events: KVEventsConfig | None = None,
    lora: Mapping[str, str] | None = None,
) -> LLM:
    """The engine, in the process that it lives in.

    Args:
        chat_template: a Jinja source in place of the model's own; a model without either gets the
            plain one.
        events: how it tells others what it caches; None: not at all.
        lora: folders of adapters by their names.
    """
    from paceline.api.llm import LLM

    llm = LLM(model, speculative_config=speculative, lora=lora, **options)
    tokenizer = llm.checkpoint.tokenizer
    if tokenizer is not None and chat_template is not None:
        tokenizer.set_chat_template(chat_template)
    elif tokenizer is not None and not tokenizer.has_chat_template:
        log.warning(
            "%s has no chat template: chats are written as plain text (User: ... Assistant:); "
            "--chat-template chooses one",
            llm.model,
        )
        tokenizer.set_chat_template(BUILT_IN[PLAIN], is_fallback=True)
    if events is not None:
        from paceline.server.engine_process.kv_events import publish_kv_events

        llm.call(lambda engine: publish_kv_events(engine.kv, events))
    return llm


def server_config(options: ServeOptions, models: Mapping[str, tuple[str, ...]]) -> ServerConfig:
    """
    Args:
        models: with their names, the first one first.

    Raises:
        ConfigError: a value is not acceptable.
    """
    from paceline.server.http.config import ServerConfig

    given = {
        each.name: getattr(options, each.name)
        for each in fields(ServerConfig)
        if hasattr(options, each.name)
    }
    return ServerConfig(
        **given
        | {
            "served_model_names": next(iter(models.values())),
            "memory_budget": memory_budget(options.memory_budget, len(models) > 1),
            "max_loaded_models": options.max_loaded_models or math.inf,
            "keep_alive": seconds_of(options.keep_alive),
            "api_keys": tuple(options.api_key or ()),
            "allowed_origins": tuple(options.allowed_origins or ()),
            "allowed_hosts": tuple(options.allowed_hosts or ()),
            "max_body_bytes": memory_bytes(options.max_body_size),
            "stream_interval": options.stream_interval_ms / 1e3,
            "default_chat_template_kwargs": parse_template_options(
                options.default_chat_template_kwargs
            ),
        }
    )


def announce(line: str) -> None:
    with suppress(OSError):  # a full disk behind standard error stops no server
        print(printable(line), file=sys.stderr, flush=True)
