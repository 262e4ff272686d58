"""Where and how an engine tells others what it caches. Owns the checks; knows no socket."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from paceline.core.checks import (
    check_settings,
    check_switch,
    check_text,
    one_of,
    setting,
    whole,
)
from paceline.core.errors import ConfigError

OPTION = "--kv-events-config"
PUBLISHERS = ("zmq", "null")
ENCODINGS = ("map", "array")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Where and how events are published, by vLLM's names.

    Raises:
        ConfigError: a value is not acceptable.
    """

    enable_kv_cache_events: bool = setting(False, "Publish events at all.", check_switch)
    publisher: str = setting("zmq", "null publishes nothing.", one_of(PUBLISHERS))
    endpoint: str = setting(
        "tcp://*:5557",
        "An address with * or ::, ipc:// or inproc:// is listened on, another one connected to.",
        check_text,
    )
    replay_endpoint: str = setting(
        "",
        "Listened on for subscribers that missed something; empty: nothing is repeated.",
        check_text,
    )
    buffer_steps: int = setting(10_000, "Batches that are kept for them.", whole(1, 1 << 30))
    hwm: int = setting(
        100_000,
        "Most batches that wait for a slow subscriber, which misses those beyond them.",
        whole(0, 1 << 30),
    )
    topic: str = setting("", "What each message begins with.", check_text)
    encoding: str = setting(
        "map",
        "Of an event: map as in vLLM 0.26 and later, or array as in earlier ones. The key is ours.",
        one_of(ENCODINGS),
    )

    def __post_init__(self) -> None:
        check_settings(self)


def parse_kv_events(text: str | None) -> KVEventsConfig | None:
    """The configuration in JSON; None where it asks for no events."""
    if text is None:
        return None
    allowed = [each.name for each in fields(KVEventsConfig)]
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{OPTION} {text!r} is not valid JSON: {error}") from error
    if not isinstance(given, dict) or not given.keys() <= set(allowed):
        raise ConfigError(f"{OPTION} is {text}; allowed: an object of {', '.join(allowed)}")
    config = KVEventsConfig(**{name: value for name, value in given.items() if value is not None})
    is_wanted = config.enable_kv_cache_events and config.publisher != "null"
    return config if is_wanted else None
