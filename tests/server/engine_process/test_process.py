"""When the pieces of answers leave the engine's process, and the threads that submit prompts.

The tests hold the clock. No thread waits for another prompt's grammar, or for nobody.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import MagicMock

from hypothesis import given
from hypothesis import strategies as st

from paceline.request.sampling_params import SamplingParams
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.engine_process.client import EngineClient
from paceline.server.engine_process.messages import Piece
from paceline.server.engine_process.process import (
    BODY_INTERVAL,
    NUM_GRAMMAR_SUBMITTERS,
    PATIENCE,
    EngineServer,
    Entry,
    Outbox,
    joined,
)
from tests.server import factories
from tests.server.engine_process.test_engine_client import opened, run, tokens

INTERVAL = 20.0


@dataclass
class Sent:
    """An outbox, its clock and the messages that left it, each with its time."""

    interval: float = INTERVAL
    at: float = 1000.0
    messages: list[tuple[float, list[Entry]]] = field(default_factory=list)
    begun: set[tuple[int, int]] = field(default_factory=set)
    in_one_body: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        def send(entries: list[Entry]) -> None:
            self.messages.append((self.at, entries))

        self.outbox = Outbox(send, self.interval, lambda: self.at)

    def step(self, *entries: Entry, lasts: float = 0.0) -> None:
        """The first piece of a sample and its last are edges, as in the engine's process."""
        self.at += lasts
        edges = set()
        for handle, each in entries:
            key, has_ended = (handle, each.sample), each.finish_reason is not None
            if has_ended or key not in self.begun:
                edges.add(key)
            self.begun = self.begun - {key} if has_ended else self.begun | {key}
        unread = {(handle, each.sample) for handle, each in entries if handle in self.in_one_body}
        self.outbox.put(entries, edges, unread)

    def tokens(self) -> list[list[int]]:
        """Of single messages, whoever they are for."""
        return [[t for _, each in entries for t in each.token_ids] for _, entries in self.messages]


def piece(
    token: int, handle: int = 0, index: int = 0, end: str | None = None, logprobs: Any = None
) -> Entry:
    origins = [f"origin {token}"]
    return handle, Piece(index, [token], origins, f"<{token}>", logprobs or [], end)


def test_first_at_once_then_together_then_the_end_at_once() -> None:
    sent = Sent()
    for token in range(30):
        sent.step(piece(token), lasts=3)
    sent.step(piece(30, end="stop"), lasts=1)
    between = [list(range(start, start + 7)) for start in (1, 8, 15, 22)]
    assert sent.tokens() == [[0], *between, [29, 30]]
    origins = ["origin 29", "origin 30"]
    last = Piece(0, [29, 30], origins, "<29><30>", [], finish_reason="stop")
    assert sent.messages[-1][1] == [(0, last)]


def test_all_answers_share_one_message_and_edges_do_not_wait_for_it() -> None:
    sent = Sent()
    sent.step(piece(1, 1), piece(2, 2))
    sent.step(piece(3, 1), piece(4, 2), lasts=5)
    sent.step(piece(5, 1), piece(6, 2, end="length"), piece(7, 3), lasts=5)
    sent.step(piece(8, 1), piece(9, 3), lasts=10)
    assert sent.tokens() == [[1, 2], [4, 6, 7], [3, 5, 8, 9]]


def test_answers_in_one_body_are_told_of_less_often_than_streams() -> None:
    sent = Sent(interval=BODY_INTERVAL / 5, in_one_body={1})
    for token in range(10):
        sent.step(piece(token, 0), piece(100 + token, 1), lasts=BODY_INTERVAL / 5)
    sent.step(piece(10, 0), piece(110, 1, end="stop"), lasts=BODY_INTERVAL / 5)
    told = [t for tokens in sent.tokens() for t in tokens if t >= 100]
    assert told == list(range(100, 111))
    of_body = [[t for t in tokens if t >= 100] for tokens in sent.tokens()]
    assert [len(tokens) for tokens in of_body] == [1, 0, 0, 0, 0, 5, 0, 0, 0, 0, 5]
    assert [[t for t in tokens if t < 100] for tokens in sent.tokens()] == [[t] for t in range(11)]


def test_slow_steps_are_not_delayed() -> None:
    sent = Sent()
    for token in range(5):
        sent.step(piece(token), lasts=INTERVAL)
    assert sent.tokens() == [[0], [1], [2], [3], [4]]
    assert sent.outbox.remind() is None


def test_interval_zero_sends_every_step() -> None:
    sent = Sent(interval=0.0)
    for token in range(5):
        sent.step(piece(token, 0), piece(token + 10, 1))
    assert sent.tokens() == [[token, token + 10] for token in range(5)]


def test_a_step_that_takes_long_holds_nothing_up() -> None:
    sent = Sent()
    sent.step(piece(0))
    sent.step(piece(1), lasts=4)
    assert sent.outbox.remind() == PATIENCE * INTERVAL - 4
    sent.at += PATIENCE * INTERVAL - 4
    assert sent.outbox.remind() is None
    assert sent.tokens() == [[0], [1]]


def test_what_waits_is_sent_when_the_engine_ends() -> None:
    sent = Sent()
    sent.step(piece(0))
    sent.step(piece(1))
    sent.outbox.flush()
    sent.outbox.flush()
    assert sent.tokens() == [[0], [1]]


def test_log_probs_are_joined_in_order() -> None:
    told = [(token, -0.5, 1, ()) for token in range(3)]
    assert joined([piece(i, logprobs=[told[i]])[1] for i in range(3)]).logprobs == told


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.lists(st.tuples(st.integers(0, 3), st.booleans()))),
        max_size=40,
    ),
    st.sampled_from([0.0, 20.0]),
)
def test_nothing_is_lost_or_late_or_out_of_order(steps: Any, interval: float) -> None:
    """Random steps of a few samples that begin, end and begin again."""
    sent, made, token = Sent(interval, in_one_body={2, 3}), defaultdict[int, list[int]](list), 0
    born: dict[int, float] = {}
    for lasts, samples in steps:
        entries = []
        for handle in dict.fromkeys(handle for handle, _ in samples):
            token += 1
            made[handle].append(token)
            born[token] = sent.at + lasts
            entries.append(piece(token, handle, end="stop" if (handle, True) in samples else None))
        sent.step(*entries, lasts=lasts)
        sent.outbox.remind()
    sent.at += PATIENCE * interval
    assert sent.outbox.remind() is None
    came = defaultdict[int, list[int]](list)
    for at, entries in sent.messages:
        assert len({(handle, each.sample) for handle, each in entries}) == len(entries)
        for handle, each in entries:
            came[handle] += each.token_ids
            # The clock of this test stands still between steps: one of them may be added.
            assert all(at - born[t] <= PATIENCE * interval + 50 for t in each.token_ids)
    assert came == made


def test_its_thread_sends_what_no_step_does() -> None:
    arrived = threading.Event()
    outbox = Outbox(lambda entries: entries[0][1].token_ids == [1] and arrived.set(), 0.001)
    outbox.start()
    outbox.put([piece(0)], {(0, 0)})
    outbox.put([piece(1)], ())
    assert arrived.wait(30)


def test_an_answer_through_the_engine_comes_in_fewer_pieces() -> None:
    """The last one does not wait until the interval is over."""

    async def story() -> list[list[int]]:
        factory = partial(factories.paper, 0.001)
        client = EngineClient(factory, stream_interval=1e5)
        await client.start()
        try:
            async with client.generate([[7]], [SamplingParams(max_tokens=40)]) as generation:
                return [list(piece.token_ids) async for piece in generation]
        finally:
            await client.close()

    assert asyncio.run(story()) == [[7], [7] * 39]


SHAPED = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))


def test_grammars_that_take_for_ever_hold_up_no_others() -> None:
    async def story() -> None:
        async with opened(factories.paper_with_grammars) as client:
            shaped = [asyncio.create_task(tokens(client, SHAPED)) for _ in range(64)]
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                assert await tokens(client) == [7, 7, 7]
                await client.stats()
            assert not any(task.done() for task in shaped)
            for task in shaped:
                task.cancel()
            await asyncio.gather(*shaped, return_exceptions=True)

    run(story())


def test_a_prompt_that_was_aborted_while_it_waited_is_not_submitted() -> None:
    channel, engine = MagicMock(), MagicMock()
    asked = ("generate", 0, [[7]], [SHAPED], "", "", None, False)
    channel.__iter__.return_value = [asked, ("abort", 0)]
    server = EngineServer(channel, engine)
    is_free = threading.Event()
    for _ in range(NUM_GRAMMAR_SUBMITTERS):
        server._grammar_pool.submit(is_free.wait)
    server.serve()
    is_free.set()
    server._grammar_pool.shutdown()
    engine.submit.assert_not_called()
    channel.send.assert_called_once_with(("reply", 0, None, None))
