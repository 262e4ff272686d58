"""Answers that wait in memory, since their clients do not read or get them in one body: what waits
is bounded, for each request and in all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.core.errors import BusyError, SlowReaderError
from paceline.request.request import TokenLogprobs
from paceline.request.sampling_params import SamplingParams
from paceline.server.batch import batch_config, batch_handle
from paceline.server.engine_process.backlog import Backlog, Share, waiting_bytes
from paceline.server.engine_process.client import Answers
from paceline.server.engine_process.messages import Piece
from paceline.server.http.body import PART, WholeAnswer
from tests.server.asgi import RawCall, application, call
from tests.server.chats import USER, chat_tokenizer
from tests.server.fakes import Call, FakeEngine
from tests.server.live import Server, last_error, opened, run, until

ENDLESS = 10**6
CHAT = {"messages": [USER], "model": "fake", "max_tokens": 500}
DOORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 500}, '"code":"slow_reader"'),
    "chat": ("/v1/chat/completions", CHAT, '"code":"slow_reader"'),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 500}, "response.failed"),
    "anthropic": ("/v1/messages", CHAT, '{"type":"error","error":{"type":"timeout_error"'),
    "ollama": ("/api/chat", {"messages": [USER], "model": "fake"}, '{"error":"the client left'),
}


def piece(sample: int = 0, top: int = 0, **end: Any) -> Piece:
    logprobs = [TokenLogprobs(7, -0.5, 1, tuple((i, -0.5) for i in range(top)))] if top else []
    return Piece(sample, [7], ["target"], "x", logprobs, **end)


class Pushing(FakeEngine):
    """Tells all that it has at once, as an engine does that is faster than any client."""

    shares: list[Share | None]

    @asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        share: Share | None = None,
        **rest: Any,
    ) -> AsyncIterator[Any]:
        generation = Answers(params, share)
        self.shares = [*getattr(self, "shares", ()), share]
        calls = [Call(ids, wish, "", "") for ids, wish in zip(prompts, params, strict=True)]
        for number, given in enumerate(calls):
            for told in self.pieces(given, self.answer_ids(given.token_ids), number):
                generation.take(told)
        try:
            yield generation
        finally:
            if share is not None:
                share.close()


@pytest.mark.parametrize("top", [0, 20])
def test_what_waits_is_bounded_by_its_bytes_whatever_the_number_of_samples(top: int) -> None:
    async def story() -> None:
        backlog, errors = Backlog(most_bytes_of_request=100_000), list[Exception]()
        generation = Answers([SamplingParams(n=128)], backlog.of_stream(errors.append))
        most = 100_000 // waiting_bytes(piece(top=top))
        for number in range(most):
            generation.take(piece(number % 128, top))
        assert not errors
        generation.take(piece(5, top))
        assert isinstance(errors[0], SlowReaderError)
        assert "unread" in str(errors[0])
        assert backlog.num_bytes == 0, "nothing of it waits any more"
        with pytest.raises(SlowReaderError):
            await anext(generation)

    asyncio.run(story())


def test_a_reader_that_keeps_up_may_read_any_number_of_pieces() -> None:
    async def story() -> None:
        backlog, errors = Backlog(10_000, 10_000), list[Exception]()
        generation = Answers([SamplingParams()], backlog.of_stream(errors.append))
        for _ in range(1000):
            generation.take(piece())
            generation.take(piece())
            assert [(await anext(generation)).text, (await anext(generation)).text] == ["x", "x"]
        assert (errors, backlog.num_bytes) == ([], 0)

    asyncio.run(story())


def test_beyond_the_bound_of_all_the_slowest_is_dropped_and_its_neighbours_keep_theirs() -> None:
    async def story() -> None:
        backlog, dropped = Backlog(most_bytes=20 * waiting_bytes(piece())), list[int]()
        shares = [
            backlog.of_stream(lambda _, number=number: dropped.append(number)) for number in (0, 1)
        ]
        first, second = (Answers([SamplingParams(n=9)], share) for share in shares)
        for _ in range(15):
            first.take(piece())
        for _ in range(6):
            second.take(piece())
        assert dropped == [0]
        assert [(await anext(second)).text for _ in range(6)] == ["x"] * 6
        shares[1].close()
        assert backlog.num_bytes == 0

    asyncio.run(story())


@pytest.mark.usefixtures("skipped_time")
@pytest.mark.parametrize("reads_at_last", [True, False])
@pytest.mark.parametrize("door", DOORS)
def test_a_stream_that_is_not_read_ends_by_an_error_in_the_form_of_its_protocol(
    door: str, reads_at_last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path, body, told = DOORS[door]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = Pushing("word " * 200, chat_tokenizer(template), max_model_len=4096)
    app = application(engine, request_timeout=0.0)
    app.state.models.backlog.most_bytes_of_request = 10_000

    async def story() -> None:
        stream = RawCall(app, path, json.dumps({**body, "stream": True}).encode())
        stream.reads.clear()
        await stream.until(lambda: stream.num_offered)
        if reads_at_last:
            stream.reads.set()
        await stream.task  # though nobody reads: its client had its time for last words
        assert told in stream.text if reads_at_last else not stream.sent

    asyncio.run(story())
    assert app.state.models.first.admission.num_unfinished == 0
    assert app.state.models.backlog.num_bytes == 0
    assert "unread" in caplog.text
    text = call(app, "GET", "/metrics").text
    assert 'paceline:requests_dropped_total{model_name="fake"} 1.0' in text
    assert 'finished_reason="error",model_name="fake"} 1.0' in text


WHOLE_DOORS = {name: DOORS[name] for name in ("completions", "chat", "responses", "anthropic")}


@pytest.mark.parametrize("door", WHOLE_DOORS)
def test_an_answer_in_one_body_ends_by_an_error_where_it_takes_too_much(door: str) -> None:
    path, body, _ = WHOLE_DOORS[door]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = Pushing("word " * 200, chat_tokenizer(template), max_model_len=4096)
    app = application(engine)
    backlog = app.state.models.backlog
    backlog.most_bytes_of_answer = 10 * waiting_bytes(piece())
    response = call(app, "POST", path, json=body)
    assert response.status_code == 400, response.text
    assert "answer in one body takes" in response.text
    assert "or stream it" in response.text
    assert backlog.num_bytes == 0
    assert app.state.models.first.admission.num_unfinished == 0
    backlog.most_bytes_of_answer = 1 << 20
    response = call(app, "POST", path, json=body)
    assert response.status_code == 200, response.text
    assert backlog.num_bytes == 0


def test_what_an_answer_in_one_body_tells_of_its_prompts_counts() -> None:
    async def story() -> None:
        backlog, errors = Backlog(), list[Exception]()
        told = [None, *(piece(top=20).logprobs * 1000)]
        for made in (backlog.of_answer, backlog.of_prompt_and_stream):
            share = made(errors.append)
            share.put(piece(prompt_logprobs=told))
            assert share.num_bytes > 1000 * 20 * 100
            share.take(piece(prompt_logprobs=told))
            assert share.num_bytes > 1000 * 20 * 100, "it is kept until the request ends"
            share.close()
        assert (errors, backlog.num_bytes) == ([], 0)

    asyncio.run(story())


def test_the_largest_answer_in_one_body_goes_where_all_together_take_too_much() -> None:
    async def story() -> None:
        backlog, errors = Backlog(most_bytes=40 * waiting_bytes(piece())), list[Exception]()
        large, small = backlog.of_answer(errors.append), backlog.of_answer(errors.append)
        for _ in range(15):
            large.put(piece())
        for _ in range(6):
            small.put(piece())
        assert [type(error) for error in errors] == [BusyError]
        assert backlog.num_bytes == small.num_bytes > 0

    asyncio.run(story())


def test_the_answers_of_a_batch_may_be_of_any_size() -> None:
    engine = Pushing("word " * 200, state="ready")
    handle, _ = batch_handle(engine, batch_config(("fake",), {}))
    body = {"model": "fake", "prompt": "a", "max_tokens": 300, "logprobs": 5}

    async def ask() -> int:
        status, _ = await handle("/v1/completions", body)
        return status

    assert asyncio.run(ask()) == 200
    (share,) = engine.shares
    assert share is not None
    assert share.most > 1 << 50


BODY = b"[" + b"1," * (1 << 19) + b"1]"


def test_a_body_goes_out_as_its_client_takes_it_and_counts_until_then() -> None:
    async def story() -> None:
        backlog = Backlog()
        stuck = RawCall(WholeAnswer(BODY, backlog), "/", b"")
        stuck.reads.clear()
        await stuck.until(lambda: stuck.num_offered)
        assert backlog.num_bytes == len(BODY)
        stuck.reads.set()
        await stuck.task
        assert stuck.text.encode() == BODY
        assert max(len(each.get("body", b"")) for each in stuck.sent) <= PART
        assert (b"content-length", str(len(BODY)).encode()) in stuck.sent[0]["headers"]
        assert not stuck.sent[-1]["more_body"]
        assert backlog.num_bytes == 0

    asyncio.run(story())


def test_a_body_that_is_not_read_is_cut_off_where_too_much_waits() -> None:
    async def story() -> None:
        backlog = Backlog(most_bytes=len(BODY) + 100)
        stuck = RawCall(WholeAnswer(BODY, backlog), "/", b"")
        stuck.reads.clear()
        await stuck.until(lambda: stuck.num_offered)
        share = backlog.of_answer()
        share.put(piece())
        await stuck.task
        assert backlog.num_bytes == share.num_bytes

    asyncio.run(story())


async def _num_running(server: Server) -> int:
    return (await server.client.stats()).num_running


@pytest.mark.slow
def test_the_engine_forgets_whoever_does_not_read_while_others_are_served() -> None:
    async def story() -> None:
        async with opened() as server:
            # All tokens of whoever reads may wait: on a busy machine it reads late.
            server.models.backlog.most_bytes_of_request = 61 * waiting_bytes(piece())
            stuck, other = server.ask(max_tokens=ENDLESS), server.ask(max_tokens=60)
            await until(lambda: "x" in stuck.text)
            stuck.reads.clear()
            await other.task
            assert other.text.count('"text":"x"') == 60
            while await _num_running(server):
                await asyncio.sleep(0.005)
            assert server.client.num_generating == 0
            stuck.reads.set()
            await stuck.task
            assert last_error(stuck)["code"] == "slow_reader"
            await server.works()

    run(story())
