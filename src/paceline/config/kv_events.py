"""Where and how an engine tells others what it caches. Owns the checks; knows no socket."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError

OPTION = "--kv-events-config"
PUBLISHERS = ("zmq", "null")
ENCODINGS = ("map", "array")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Where and how events are published, by vLLM's names.

    Attributes:
        publisher: ``null`` publishes nothing.
        endpoint: an address with ``*`` or ``::``, ``ipc://`` or ``inproc://`` is listened on,
            another one connected to.
        replay_endpoint: listened on for subscribers that missed something; empty: nothing is
            repeated.
        buffer_steps: batches that are kept for them.
        hwm: most batches that wait for a slow subscriber, which misses those beyond them.
        topic: what each message begins with.
        encoding: of an event: ``map`` as in vLLM 0.26 and later, or ``array`` as in earlier ones.
            The key is ours.

    Raises:
        ConfigError: a value is not acceptable.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""
    encoding: str = "map"

    def __post_init__(self) -> None:
        check_choice("publisher", self.publisher, PUBLISHERS)
        check_choice("encoding", self.encoding, ENCODINGS)
        check_number("buffer_steps", self.buffer_steps, 1, 1 << 30)
        check_number("hwm", self.hwm, 0, 1 << 30)
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigError(f"{name} is {value!r}; allowed: a string")
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError("enable_kv_cache_events is neither true nor false")


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
