"""The bounded queue: who waits, who is sent away, and that places come back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.core.errors import RequestError, RequestFailedError
from paceline.server.hosting.serving import SampleQueue
from paceline.server.http.errors import ApiError
from paceline.server.openai import chat, completions
from tests.server.asgi import RawCall, application, call, complete, engine_of, post, refused
from tests.server.chats import USER, chat_tokenizer
from tests.server.fakes import FakeEngine

pytestmark = pytest.mark.usefixtures("skipped_time")
PATH = "/v1/completions"


def test_places_are_counted_and_come_back() -> None:
    admission = SampleQueue(max_num_seqs=2, max_queue=1)
    with admission.places(2), admission.places(1):
        assert admission.num_unfinished == 3
        with pytest.raises(ApiError) as refusal, admission.places(1):
            raise AssertionError("not reached")
        assert refusal.value.status == 429
        assert int(refusal.value.headers["Retry-After"]) >= 1
    assert admission.num_unfinished == 0
    with pytest.raises(ZeroDivisionError), admission.places(3):
        raise ZeroDivisionError
    assert admission.num_unfinished == 0


def test_more_than_there_are_places_is_refused_for_good() -> None:
    with pytest.raises(RequestError, match="4 samples; at most 3"), SampleQueue(2, 1).places(4):
        pass


def test_a_batch_that_is_too_large_is_refused_before_work_goes_into_it() -> None:
    app = application(FakeEngine(tokenizer=None))  # which cannot encode
    error = refused(app, PATH, {"prompt": ["a"] * 2000, "n": 2})
    assert "the request has 4000 samples; at most 264" in error["message"]


def test_a_full_queue_is_a_429_and_a_place_when_somebody_left() -> None:
    engine = FakeEngine(seconds_per_token=600)  # eight at once, as it says of itself
    app = application(engine, max_queue=0)
    body = json.dumps({"prompt": "a", "n": 8, "max_tokens": 100}).encode()

    async def calls() -> tuple[RawCall, RawCall]:
        first = RawCall(app, PATH, body)
        await first.until(lambda: engine.calls)
        second = RawCall(app, PATH, body)
        await second.task
        first.leaves.set()
        await first.task
        return first, second

    first, second = asyncio.run(calls())
    assert first.status == 499
    assert engine.calls[0].aborted
    assert second.status == 429
    error = json.loads(second.text)["error"]
    assert error["type"] == "rate_limit_error"
    assert error["code"] == "queue_full"
    assert dict(second.sent[0]["headers"])[b"retry-after"].isdigit()
    engine.seconds_per_token = 0.0
    assert complete(app, max_tokens=1, n=8)["choices"]
    assert "requests_rejected_total" in (text := call(app, "GET", "/metrics").text)
    assert 'paceline:requests_rejected_total{model_name="fake"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    engine = FakeEngine(seconds_per_token=0.05)
    app = application(engine)
    body = json.dumps({"prompt": ["a", "b"], "max_tokens": 300, "stream": stream}).encode()

    async def leave() -> RawCall:
        made = RawCall(app, PATH, body)
        await made.until(lambda: len(made.sent) > 3 if stream else len(engine.calls) == 2)
        made.leaves.set()
        await made.task
        return made

    asyncio.run(leave())
    assert [made.aborted for made in engine.calls] == [True, True]
    assert app.state.models.first.admission.num_unfinished == 0
    text = call(app, "GET", "/metrics").text
    assert 'request_success_total{finished_reason="abort",model_name="fake"} 2.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(stream: bool) -> None:
    engine = FakeEngine(answer=lambda prompt: [5] * 400, seconds_per_token=0.15)
    app = application(engine, request_timeout=0.4)
    body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": stream}).encode()

    async def late() -> RawCall:
        made = RawCall(app, PATH, body)
        await made.task
        return made

    made = asyncio.run(late())
    if stream:
        *told, last, done, _ = made.text.split("\n\n")
        assert len(told) == 2, "as many tokens as there was time for"
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert made.status == 504
        error = json.loads(made.text)["error"]
    assert error["code"] == "request_timeout"
    assert "0.4 s" in error["message"]
    assert engine.calls[0].aborted


def test_a_draining_server_takes_nothing_new() -> None:
    engine = FakeEngine(seconds_per_token=0.002)
    app = application(engine)

    async def drain() -> tuple[RawCall, Any]:
        made = RawCall(app, PATH, b'{"prompt": "a", "stream": true}')
        await made.until(lambda: len(made.sent) > 2)
        engine.drain()
        late = RawCall(app, PATH, b'{"prompt": "a"}')
        await late.task
        await made.task
        return made, late

    made, late = asyncio.run(drain())
    assert made.text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in made.text
    assert late.status == 503
    assert json.loads(late.text)["error"]["code"] == "draining"
    health = call(app, "GET", "/health")
    assert health.status_code == 503
    assert health.json()["error"]["message"] == "the server is draining"


@pytest.mark.parametrize(
    ("state", "status"), [("ready", 429), ("draining", 503), ("starting", 503)]
)
def test_who_is_not_taken_on_costs_no_work(
    state: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any) -> Any:
        raise AssertionError("work for a request that is refused")

    monkeypatch.setattr(completions, "encode_all", work)
    monkeypatch.setattr(chat, "prompt_text", work)
    engine = FakeEngine(tokenizer=chat_tokenizer())
    app = application(engine, max_queue=0)
    engine.state = state
    wishes: list[tuple[str, dict[str, Any]]] = [
        (PATH, {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [USER], "n": 2}),
    ]
    with app.state.models.first.admission.places(7):
        for path, body in wishes:
            response = post(app, path, body)
            assert response.status_code == status, response.text
            assert response.headers["retry-after"].isdigit()
            assert response.json()["error"]["code"] == ("queue_full" if status == 429 else state)
            assert post(app, path, {**body, "stream": True}).status_code == status


class Together(FakeEngine):
    """Refuses the token 9."""

    @asynccontextmanager
    async def generate(self, prompts: Any, *rest: Any, **options: Any) -> AsyncIterator[Any]:
        self.given = prompts
        if [9] in prompts:
            raise RequestError("refused")
        async with super().generate(prompts, *rest, **options) as generation:
            yield generation


def test_a_batch_is_given_to_the_engine_at_once_and_is_taken_on_or_refused_as_a_whole() -> None:
    app = application(Together(), request_timeout=60.0)
    choices = complete(app, ["a", "b", "c"], max_tokens=1)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    engine = Together()
    app = application(engine, request_timeout=60.0)
    assert post(app, PATH, {"prompt": [[5], [9], [6]]}).status_code == 400
    assert engine.given == [[5], [9], [6]]
    assert not engine.calls
    assert app.state.models.first.admission.num_unfinished == 0


def test_times_begin_when_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(serving: Any, texts: list[str], *_: Any) -> list[list[int]]:
        await asyncio.sleep(float(texts[0]))
        return [[5]]

    monkeypatch.setattr(completions, "encode_all", slow)
    app = application(request_timeout=30.0)
    complete(app, "20", max_tokens=1)
    text = call(app, "GET", "/metrics").text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        (total,) = re.findall(rf"paceline:{name}_sum\S* (\S+)", text)
        assert float(total) == pytest.approx(20)
    app = application(request_timeout=30.0)
    for stream in (False, True):
        assert post(app, PATH, {"prompt": "60", "stream": stream}).status_code == 504


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_is_counted_as_an_error(stream: bool) -> None:
    failing = FakeEngine(error_at=(2, RequestFailedError("out of memory")))
    hanging = FakeEngine(seconds_per_token=60)
    dead = FakeEngine(dies_at=0)
    for engine in (failing, hanging, dead):
        app = application(engine, request_timeout=30.0)
        post(app, PATH, {"prompt": "a", "stream": stream})
        text = call(app, "GET", "/metrics").text
        counts = re.findall(r'request_success_total{finished_reason="(\w+)".* 1.0', text)
        assert counts == ["error"]


def test_the_first_request_does_not_walk_through_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, spelled = application(), []
    tokenizer = engine_of(app).tokenizer
    original = type(tokenizer).id_to_token
    monkeypatch.setattr(
        type(tokenizer), "id_to_token", lambda *a: spelled.append(a) or original(*a)
    )
    complete(app, max_tokens=1)
    assert len(spelled) < 100


def test_metrics_tell_of_first_tokens_gaps_and_ends() -> None:
    app = application()
    complete(app, ["a", "b"], n=2, max_tokens=3)
    text = call(app, "GET", "/metrics").text
    assert 'time_to_first_token_seconds_count{model_name="fake"} 4.0' in text
    assert 'inter_token_latency_seconds_count{model_name="fake"} 8.0' in text
    assert 'request_success_total{finished_reason="length",model_name="fake"} 2.0' in text
    post(application(engine_of(app)), PATH, {"prompt": "a"})


def test_traces_reach_the_engine() -> None:
    app = application()
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    post(app, PATH, {"prompt": "a"}, headers=headers)
    post(app, PATH, {"prompt": "a"}, headers={"traceparent": "nonsense"})
    assert [made.trace_id for made in engine_of(app).calls] == [trace, ""]
