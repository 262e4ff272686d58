"""``paceline serve`` and ``paceline stage``: from options to running servers.

Owns which process imports what: the engine is built in a process of its own, by a function that
travels there by name, so that this one never imports torch. Owns which models may be loaded, too:
where they lie, under which names, and how large.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.build.default_drafts import is_embedded
from paceline.cli.options import (
    SEVERAL,
    EngineOptions,
    ModelOptions,
    ReplicaOptions,
    RequestedModelOptions,
    SpeculationOptions,
    argument,
    from_config,
    option,
)
from paceline.cli.settings import engine_options, named_folders, speculative_config
from paceline.cli.terminal import printable
from paceline.config import SpeculativeConfig
from paceline.config.kv_events import KVEventsConfig, parse_kv_events
from paceline.config.template_options import parse_template_options
from paceline.core.checks import check_number, memory_bytes, seconds_of
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.files import checked_path
from paceline.core.installation import install_command
from paceline.core.machine import memory
from paceline.loading.catalogue import EMBEDDED, LM_STUDIO, OLLAMA, all_models, find_model
from paceline.loading.fetching import is_hub_id, named_model
from paceline.loading.gguf.choice import sibling_shards
from paceline.server.http.config import ServerConfig
from paceline.text.chat_templates import BUILT_IN, PLAIN, chosen_template

if TYPE_CHECKING:
    from ray import serve

    from paceline.api.llm import LLM
    from paceline.ray.replica import Served
    from paceline.server.engine_process.client import EngineClient
    from paceline.server.hosting.models import Offer


DEFAULT_BUDGET = "80%"
"""Of the memory of this machine, for the models of a server that has several."""


_WEIGHTS = ("*.safetensors", "*.gguf")


log = logging.getLogger(__name__)


def server_option(name: str, note: str = "", **more: Any) -> Any:
    """An option that sets a field of :class:`ServerConfig`."""
    return from_config(ServerConfig, name, note, **more)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServeOptions(ReplicaOptions, SpeculationOptions, RequestedModelOptions, ModelOptions):
    """Options of ``paceline serve``."""

    more_models: list[str] | None = argument(
        None, "Further models, loaded when a request asks for them. MODEL is loaded at the start."
    )
    host: str = server_option("host")
    port: int = server_option("port")
    api_key: list[str] | None = server_option("api_keys", SEVERAL, default=None)
    allowed_origins: list[str] | None = server_option("allowed_origins", SEVERAL, default=None)
    allowed_hosts: list[str] | None = server_option("allowed_hosts", SEVERAL, default=None)
    max_queue: int = server_option("max_queue")
    max_body_size: str = server_option("max_body_bytes", default="8M")
    request_timeout: float = server_option("request_timeout")
    receive_timeout: float = server_option("receive_timeout")
    hang_timeout: float = server_option("hang_timeout")
    max_engine_restarts: int = server_option("max_engine_restarts")
    drain_timeout: float = server_option("drain_timeout")
    stream_interval_ms: float = server_option("stream_interval", default=20.0, min=0, max=10_000)
    metrics_prefix: str = server_option("metrics_prefix")
    tool_call_parser: str = server_option("tool_call_parser")
    reasoning_parser: str = server_option("reasoning_parser")
    all_models: bool = option(
        False,
        "Also serve every local model that paceline models lists, loaded when a request asks "
        "for it.",
    )
    memory_budget: str | None = server_option("memory_budget", default=None)
    max_loaded_models: int | None = server_option("max_loaded_models", default=None)
    keep_alive: str = server_option("keep_alive", default="-1")
    kv_events_config: str | None = option(
        None,
        'Publish which prefixes are cached, in the format of vLLM: {"enable_kv_cache_events": '
        'true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"}.',
    )
    allow_runtime_lora_updating: bool = server_option("allow_runtime_lora_updating")
    pooling: str | None = server_option("pooling")


def serve_or_replicate(options: ServeOptions) -> int:
    """The work of ``paceline serve``."""
    if options.replicas is None:
        if options.ray_address is not None:
            raise ConfigError("--ray-address needs --replicas: give their number")
        return serve_command(options)
    served = replicated(options, shares_machine=options.ray_address is None)
    from paceline.ray.application import run

    run(served, num_replicas(options), threads_of(options), options.ray_address, announce)
    return 0


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
        raise ConfigError(
            "--kv-events-config publishes the cache of one model: serve a single model"
        )
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
    """The names of each model that may be loaded; the first model is loaded at the start."""
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
    """The configuration of a server of these models, the first of which is loaded at the start."""
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


def default_names(model: str) -> tuple[str, ...]:
    """A model is asked for as it was named here, and by its folder's or file's name alone."""
    if is_embedded(model):
        return (EMBEDDED,)
    path = Path(model)
    # A folder may be called ".", and a file may be a link to one that has a hash for a name.
    named = path if path.is_file() else path.resolve()
    name = named.name if path.exists() else model.removeprefix(OLLAMA).removeprefix(LM_STUDIO)
    return tuple(dict.fromkeys((name, model)))


def served_names(models: Sequence[str], given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names of each model, by the values of ``--served-model-name``.

    Raises:
        ConfigError: a model is named twice, or a name does not say which of several models it is.
    """
    if twice := [model for model in models if models.count(model) > 1]:
        raise ConfigError(f"the model {twice[0]} is named twice")
    names = {model: default_names(model) for model in models}
    if len(models) == 1:
        return {model: tuple(given) or own for model, own in names.items()}
    chosen = dict.fromkeys(names, tuple[str, ...]())
    for each in given:
        name, sign, wanted = each.partition("=")
        meant = [model for model, own in names.items() if wanted in own]
        if not (name and sign and meant):
            known = ", ".join(own[0] for own in names.values())
            raise ConfigError(
                f"--served-model-name is {each!r}; with several models it is NAME=MODEL, and the "
                f"models are {known}"
            )
        chosen[meant[0]] += (name,)
    return {model: chosen[model] or own for model, own in names.items()}


def models_on_disk(named: Iterable[str]) -> list[str]:
    """Names of models that are on this machine, besides those that are named already."""
    places = {place for model in named if (place := _place(model)) is not None}
    return [entry.name for entry in all_models() if entry.is_here and entry.place not in places]


def check_is_there(model: str) -> None:
    """Raises ModelLoadError: nothing is there, so that loading it later would fail."""
    if _place(model) is None and not is_hub_id(model):
        raise ModelLoadError(f"there is no model {model}; `paceline models` lists names")


def stored_bytes(model: str) -> int:
    """Bytes of a model's weights on disk; 0 where they cannot be found without opening it."""
    place = _place(model)
    if place is None:
        return 0
    if place.is_file():
        files = [shard for shard in sibling_shards(place) if shard.is_file()]
    else:
        files = [f for p in _WEIGHTS for f in place.glob(p)]
    return sum(file.stat().st_size for file in files)


def _place(model: str) -> Path | None:
    path, is_there = checked_path(model, ModelLoadError)
    if is_there:
        return path
    entry = find_model(model)
    return entry.place if entry is not None and entry.is_here else None


def memory_budget(text: str | None, is_shared: bool) -> float:
    """Bytes that loaded models may take: ``8GiB``, or ``50%`` of this machine's memory.

    Without a ``text`` it is unlimited, unless several models share the memory.
    """
    text = text or (DEFAULT_BUDGET if is_shared else None)
    if text is None:
        return math.inf
    if not text.strip().endswith("%"):
        return memory_bytes(text)
    share, (total, _) = text.strip()[:-1], memory()
    if not share.replace(".", "", 1).isdecimal() or not 0 < float(share) <= 100:
        raise ConfigError(f"{text!r} is not a share of memory; write 1% to 100%, or 8GiB")
    return math.inf if total is None else total * float(share) / 100


def replicated(options: ServeOptions, *, shares_machine: bool) -> Served:
    """What each replica serves; where all are on this machine, they divide its memory."""
    if options.kv_events_config is not None:
        raise ConfigError(
            "--kv-events-config publishes one engine's cache, and --replicas starts several; use "
            "one of the two"
        )
    if options.allow_runtime_lora_updating:
        raise ConfigError(
            "--allow-runtime-lora-updating would update only one of the --replicas; name all "
            "adapters with --lora"
        )
    try:
        from paceline.ray.replica import Served
    except ImportError as error:
        raise ConfigError(
            f"--replicas needs Ray Serve ({error}): {install_command('ray')}"
        ) from error
    models = served_models(options)
    config = server_config(options, models)
    own = as_replica(options, shares_machine)
    clients(own, models, config)  # what is wrong with them is said here, and models are fetched
    return Served(partial(clients, own, models, config), config)


Options = TypeVar("Options", bound=ReplicaOptions)


def as_replica(options: Options, shares_machine: bool) -> Options:
    """The options with which each engine is started: its part of what they do not say."""
    if options.pipeline_stage:
        raise ConfigError(
            "a stage serves one engine, and --replicas starts several: leave --pipeline-stage out"
        )
    own = replace(options, threads=threads_of(options))
    if options.kv_cache_memory is None and shares_machine:
        from paceline.cache.memory_needs import DEFAULT_MEMORY_SHARE, free_memory

        share = int(free_memory() * DEFAULT_MEMORY_SHARE / num_replicas(options))
        own = replace(own, kv_cache_memory=str(share))
    return own


def num_replicas(options: ReplicaOptions) -> int:
    count = 1 if options.replicas is None else options.replicas
    check_number("replicas", count, 1, 1 << 16)
    return count


def threads_of(options: ReplicaOptions) -> int:
    """Threads of each replica: its part of the cores, unless the options say."""
    from paceline.models.threads import cores

    return options.threads or max(1, cores() // num_replicas(options))


NOT_FOR_REPLICAS = ("host", "port", "ray_address")
"""Options of the process that Serve's own configuration replaces."""


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """See :func:`paceline.ray.build_app`."""
    from paceline.cli.model_argument import with_model
    from paceline.ray.application import application

    known = [field.name for field in fields(ServeOptions) if field.name not in NOT_FOR_REPLICAS]
    if unknown := sorted(set(args) - set(known)):
        raise ConfigError(f"args has {', '.join(unknown)}; allowed: {', '.join(known)}")
    options = with_model(ServeOptions(**args), "paceline serve")
    served = replicated(options, shares_machine=False)
    return application(served, num_replicas(options), threads_of(options))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StageOptions:
    """Where engines find it."""

    listen: str = option("127.0.0.1:7100", "HOST:PORT to listen on; port 0 chooses a free one.")


def stage_command(options: StageOptions) -> int:
    """The work of ``paceline stage``."""
    from paceline.stages.link import address_of, shown_address
    from paceline.stages.worker import listen

    host, port = address_of(options.listen)
    listen((host, port), lambda at: print(f"listening at {shown_address(host, at)}", flush=True))
    return 0
