"""KV cache events as a router gets them: the format, gaps, replay, eviction, a flush, an engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.cache.block_pool import BlockPool, chain_hash, salt_hash
from paceline.config.kv_events import KVEventsConfig, parse_kv_events
from paceline.core.errors import ConfigError
from paceline.core.installation import install_command
from paceline.models.backend import BLOCK_SIZE
from paceline.server.engine_process.kv_events import END, KVEventPublisher, publish_kv_events

msgspec = pytest.importorskip("msgspec", reason="paceline[events] is not installed")
zmq = pytest.importorskip("zmq", reason="paceline[events] is not installed")

FIRST, SECOND = list(range(BLOCK_SIZE)), list(range(100, 100 + BLOCK_SIZE))
WAIT_MS = 30_000


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """As subscribers of vLLM declare it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """A router's side: batches as they come, and those that it missed."""

    def __init__(self, config: KVEventsConfig) -> None:
        self.repeated_topic = [config.topic.encode()] if config.encoding == "map" else []
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.SUB)
        self.live.subscribe(config.topic)
        self.live.connect(config.endpoint)
        self.asks = self._context.socket(zmq.DEALER)
        self.asks.connect(config.replay_endpoint)

    def take(self) -> tuple[bytes, int, bytes]:
        assert self.live.poll(WAIT_MS), "no message came"
        topic, number, payload = self.live.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    def replay(self, start: int) -> dict[int, bytes]:
        """What is kept from a number on."""
        self.asks.send_multipart((b"", start.to_bytes(8, "big")))
        found = {}
        while self.asks.poll(WAIT_MS):
            _, *topic, number, payload = self.asks.recv_multipart()
            assert topic == self.repeated_topic
            if number == END:
                assert payload == b""
                return found
            found[int.from_bytes(number, "big")] = payload
        raise AssertionError("the replay did not end")

    def events(self, at_least: int) -> list[Any]:
        """All events from the start, once there are so many."""
        while True:
            batches = map(batch_of, self.replay(0).values())
            found = [event for batch in batches for event in batch.events]
            if len(found) >= at_least:
                return found


def batch_of(payload: bytes) -> Batch:
    return msgspec.msgpack.decode(payload, type=Batch)


def config_at(folder: Path, **fields: Any) -> KVEventsConfig:
    """In the array encoding: typed subscribers of vLLM's earlier versions check the shape, too."""
    where = {"endpoint": f"ipc://{folder}/out", "replay_endpoint": f"ipc://{folder}/again"}
    return KVEventsConfig(True, **where | {"encoding": "array"} | fields)


@contextmanager
def published(config: KVEventsConfig) -> Iterator[tuple[KVEventPublisher, Subscriber]]:
    publisher, subscriber = KVEventPublisher(config, BLOCK_SIZE), Subscriber(config)
    try:
        yield publisher, subscriber
    finally:
        subscriber._context.destroy(linger=0)
        publisher.close()


def number(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def test_a_chain_its_eviction_and_a_flush_reach_a_subscriber(tmp_path: Path) -> None:
    with published(config_at(tmp_path)) as (publisher, subscriber):
        pool = BlockPool(3)
        pool.observer = publisher
        blocks = pool.allocate(2) or []
        first = pool.publish(blocks[0], salt_hash(""), FIRST)
        second = pool.publish(blocks[1], first, SECOND)
        assert pool.publish(blocks[1], first, SECOND) == second  # known: nothing to tell
        pool.release(blocks)
        pool.allocate(1)  # the chain's end goes
        pool.clear_index()
        cleared, *told, removed, again = subscriber.events(4)
    assert isinstance(cleared, AllBlocksCleared)  # a new engine knows nothing
    assert isinstance(again, AllBlocksCleared)
    assert removed == BlockRemoved([number(second)])
    assert [h for event in told for h in event.block_hashes] == [number(first), number(second)]
    assert [t for event in told for t in event.token_ids] == FIRST + SECOND
    assert told[0].parent_block_hash is None
    assert {event.block_size for event in told} == {BLOCK_SIZE}


def test_a_gap_in_the_numbers_is_filled_by_a_replay(tmp_path: Path) -> None:
    with published(config_at(tmp_path, topic="kv@a")) as (publisher, subscriber):
        while not subscriber.live.poll(20):  # until the subscription has arrived
            publisher.cleared()
        topic, seen, payload = subscriber.take()
        assert topic == b"kv@a"
        while subscriber.live.poll(100):
            _, seen, payload = subscriber.take()
        missed = subscriber.replay(0)
        assert missed[seen] == payload
        assert sorted(missed) == list(range(seen + 1))
        publisher.stored(chain_hash(b"", FIRST), None, FIRST, None)
        _, following, payload = subscriber.take()
        assert following == seen + 1
        batch = batch_of(payload)
        assert batch.data_parallel_rank == 0
        assert batch.events == [
            BlockStored([number(chain_hash(b"", FIRST))], None, FIRST, BLOCK_SIZE, None)
        ]
        assert list(subscriber.replay(following)) == [following]
        assert subscriber.replay(following + 1) == {}


def test_only_the_newest_batches_are_kept(tmp_path: Path) -> None:
    with published(config_at(tmp_path, buffer_steps=2)) as (publisher, subscriber):
        for _ in range(4):  # each in a batch of its own
            before = max(subscriber.replay(0), default=-1)
            publisher.cleared()
            while max(subscriber.replay(0), default=-1) == before:
                pass
        kept = subscriber.replay(0)
        assert len(kept) == 2
        assert max(kept) >= 4 - 1


def test_events_are_maps_as_in_newer_vllm(tmp_path: Path) -> None:
    with published(config_at(tmp_path, encoding="map", topic="kv")) as (publisher, subscriber):
        publisher.stored(b"k" * 16, b"p" * 16, FIRST, "sql")
        events: list[Any] = []
        while len(events) < 2:
            batches = map(msgspec.msgpack.decode, subscriber.replay(0).values())
            events = [event for _, told, _ in batches for event in told]
    assert events[1] == {
        "type": "BlockStored",
        "block_hashes": [number(b"k" * 16)],
        "parent_block_hash": number(b"p" * 16),
        "token_ids": FIRST,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "sql",
    }


def test_an_engine_tells_what_its_prompts_leave_behind(tmp_path: Path) -> None:
    config, prompt = config_at(tmp_path), list(range(5, 5 + 2 * BLOCK_SIZE + 3))
    with LLM("embedded", speculative_config=[], kv_cache_memory=1 << 22) as llm:
        publisher = llm.call(lambda engine: publish_kv_events(engine.kv, config))
        subscriber = Subscriber(config)
        llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0))
        llm.flush_prefix_cache()
        _, *stored, last = subscriber.events(3)
        subscriber._context.destroy(linger=0)
        publisher.close()
    assert [t for event in stored for t in event.token_ids] == prompt[: 2 * BLOCK_SIZE]
    assert isinstance(last, AllBlocksCleared)


def test_a_place_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with published(config_at(tmp_path)), pytest.raises(ConfigError, match="name another endpoint"):
        KVEventPublisher(config_at(tmp_path, endpoint="tcp://*:no"), BLOCK_SIZE)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("events"))):
        KVEventPublisher(KVEventsConfig(True), BLOCK_SIZE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"max_queue_size": 4}', "allowed: an object of enable_kv_cache_events, publisher"),
        ('{"publisher": "kafka"}', "publisher is 'kafka'; allowed: zmq, null"),
        ('{"endpoint": 5557}', "endpoint is 5557"),
        ('{"enable_kv_cache_events": 1}', "allowed: true and false"),
        ('{"buffer_steps": 0}', "buffer_steps is 0"),
    ],
)
def test_configurations_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_kv_events(text)


@pytest.mark.parametrize(
    "text",
    [None, "{}", '{"enable_kv_cache_events": true, "publisher": "null"}'],
)
def test_without_a_wish_there_are_no_events(text: str | None) -> None:
    assert parse_kv_events(text) is None


def test_vllms_keys_are_taken() -> None:
    config = parse_kv_events(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",'
        ' "replay_endpoint": null, "topic": "kv@pod@model"}'
    )
    assert config is not None
    assert (config.topic, config.replay_endpoint) == ("kv@pod@model", "")
