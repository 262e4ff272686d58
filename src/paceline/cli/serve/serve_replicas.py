"""``paceline serve``: by this process, or with ``--replicas`` by an application on Ray."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paceline.cli.options.options import ReplicaOptions
from paceline.cli.serve.serve import (
    ServeOptions,
    announce,
    clients,
    serve_command,
    served_models,
    server_config,
)
from paceline.core.checks import check_number
from paceline.core.errors import ConfigError
from paceline.core.installation import install_command

if TYPE_CHECKING:
    from paceline.ray.replica import Served


def serve_or_replicate(options: ServeOptions) -> int:
    """The work of ``paceline serve``."""
    if options.replicas is None:
        if options.ray_address is not None:
            raise ConfigError("--ray-address needs --replicas: give their number")
        return serve_command(options)
    served = replicated(options, shares_machine=options.ray_address is None)
    from paceline.ray.run import run

    run(served, num_replicas(options), threads_of(options), options.ray_address, announce)
    return 0


def replicated(options: ServeOptions, *, shares_machine: bool) -> Served:
    """What each of the replicas serves that the options ask for.

    Args:
        shares_machine: all replicas are on this machine, whose memory they divide.

    Raises:
        ConfigError: Ray is not installed, or an option is not acceptable.
        PacelineError: the model is not there.
    """
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
        from paceline.cache.kv_room import DEFAULT_MEMORY_SHARE, free_memory

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
