"""Tells routers which prefixes an engine has cached, as vLLM's KV cache events.

Owns the events' format and the two sockets: one publishes, one repeats what a subscriber missed.
Knows the block pool's observer, and nothing of models or requests. Needs pyzmq and msgspec, which
are imported where events are wanted.

A message has three parts: the topic, a sequence number of 8 bytes, the highest first, and a batch
``[time, events, data_parallel_rank]`` in MessagePack. A subscriber that finds a gap in the numbers
sends the first missing one to the other socket, and gets the messages from there on that are still
kept, then one with the number -1. The format is that of ``vllm/distributed/kv_events.py``: of vLLM
0.26, or with the encoding ``array`` of earlier ones, whose repeated messages lack the topic.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline.config.kv_events import OPTION, KVEventsConfig
from paceline.core.errors import ConfigError
from paceline.core.installation import install_command

if TYPE_CHECKING:
    from paceline.cache.kv_cache import KVCache

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""The number behind the last batch that is repeated."""
_HERE = "GPU"  # what vLLM calls the memory in which an engine computes, on CPUs too
_RANK = 0
_LINGER_MS = 1000
Event = dict[str, Any]


def publish_kv_events(kv: KVCache, config: KVEventsConfig) -> KVEventPublisher:
    """Publish what an engine caches from here on; on the engine's thread.

    Raises:
        ConfigError: it caches nothing, a package lacks, or an address cannot be listened on.
    """
    if not kv.prefix_caching:
        raise ConfigError(f"{OPTION} tells of cached prefixes, and the engine caches none")
    publisher = kv.pool.observer = KVEventPublisher(config, kv.block_size)
    return publisher


class KVEventPublisher:
    """Publishes what a prefix index tells it as a ``BlockObserver``; threads of its own send it.

    The first event says that nothing is cached, for subscribers who knew a predecessor.
    """

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        try:
            self._zmq = importlib.import_module("zmq")
            encoder = importlib.import_module("msgspec.msgpack").Encoder()
        except ImportError as error:
            raise ConfigError(
                f"{OPTION} needs pyzmq and msgspec ({error}): {install_command('events')}"
            ) from error
        self._encode = encoder.encode
        self._config = config
        self._topic, self._is_map = config.topic.encode(), config.encoding == "map"
        self._block_size = block_size
        self._context = self._zmq.Context()
        self._told: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()  # of what is kept
        self._threads = [_thread(self._publish, self._out())]
        if config.replay_endpoint:
            replay = self._socket(self._zmq.ROUTER, config.replay_endpoint, binds=True)
            self._threads.append(_thread(self._repeat, replay))
        self.cleared()
        for thread in self._threads:
            thread.start()

    # --- what the block pool tells -------------------------------------------------------------

    def stored(
        self, key: bytes, parent: bytes | None, token_ids: Sequence[int], adapter: str | None
    ) -> None:
        self._told.put(
            {
                "type": "BlockStored",
                "block_hashes": [_number(key)],
                "parent_block_hash": None if parent is None else _number(parent),
                "token_ids": list(token_ids),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": _HERE,
                "lora_name": adapter,
            }
        )

    def removed(self, key: bytes) -> None:
        event = {"type": "BlockRemoved", "block_hashes": [_number(key)], "medium": _HERE}
        self._told.put(event)

    def cleared(self) -> None:
        self._told.put({"type": "AllBlocksCleared"})

    def close(self) -> None:
        """Send what is left, and give back the addresses."""
        self._told.put(None)
        self._threads[0].join()
        self._context.term()  # which ends the other thread's wait, and waits for its socket

    # --- the sockets ---------------------------------------------------------------------------

    def _out(self) -> Any:
        address = self._config.endpoint
        binds = "*" in address or "::" in address or address.startswith(("ipc:", "inproc:"))
        return self._socket(self._zmq.PUB, address, binds)

    def _socket(self, kind: int, address: str, binds: bool) -> Any:
        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.sndhwm = self._config.hwm
        try:
            (socket.bind if binds else socket.connect)(address)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot use {address}: {error}; name another endpoint in {OPTION}"
            ) from error
        return socket

    def _publish(self, socket: Any) -> None:
        with socket:
            for number in count():
                told = self._taken()
                if events := [event for event in told if event is not None]:
                    shown = [self._shown(event) for event in _merged(events)]
                    part = number.to_bytes(8, "big"), self._encode([time.time(), shown, _RANK])
                    with self._lock:
                        self._kept.append(part)
                    socket.send_multipart((self._topic, *part))
                if len(events) < len(told):
                    return

    def _shown(self, event: Event) -> Any:
        return event if self._is_map else [*event.values()]

    def _taken(self) -> list[Event | None]:
        """The events since the last time, at least one; the end is None."""
        first = self._told.get()
        return [first, *(self._told.get() for _ in range(self._told.qsize()))]

    def _repeat(self, socket: Any) -> None:
        before = (self._topic,) if self._is_map else ()
        with socket:
            while True:
                try:
                    caller, *frames = socket.recv_multipart()
                except self._zmq.ContextTerminated:
                    return
                if len(frames) != 2 or len(frames[1]) != 8:
                    log.warning("a subscriber asked for KV events without a number of 8 bytes")
                    continue
                with self._lock:
                    kept = [part for part in self._kept if part[0] >= frames[1]]
                for part in (*kept, (END, b"")):
                    socket.send_multipart((caller, b"", *before, *part))


def _thread(target: Callable[[Any], None], socket: Any) -> threading.Thread:
    return threading.Thread(target=target, args=(socket,), name="paceline-kv-events", daemon=True)


def _number(key: bytes) -> int:
    """A block's hash as others have it: 64 bits."""
    return int.from_bytes(key[-8:], "big")


def _merged(events: Iterable[Event]) -> list[Event]:
    """The same events, fewer: a chain of blocks, or several that went, in one."""
    merged: list[Event] = []
    for event in events:
        last: Event = merged[-1] if merged else {"type": None}
        kind = event["type"] if event["type"] == last["type"] else None
        if kind == "BlockRemoved":
            last["block_hashes"] += event["block_hashes"]
        elif kind == "BlockStored" and event["parent_block_hash"] == last["block_hashes"][-1]:
            last["block_hashes"] += event["block_hashes"]
            last["token_ids"] += event["token_ids"]
        else:
            merged.append(event)
    return merged
