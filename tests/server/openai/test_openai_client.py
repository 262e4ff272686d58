"""What OpenAI's own package makes of the server: its strict models, errors, retries and helpers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from paceline.core.errors import EngineDeadError, RequestFailedError
from paceline.server.hosting import serving
from tests.server.chats import TOOLS, USER, WEATHER, ChatServer
from tests.server.served import KEY, NAME

CODE = "def add(a, b):\n    return"


class Person(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["reader", "writer"]


class weather(BaseModel):  # noqa: N801  (the tool's name)
    """Tells the weather."""

    city: str = Field(max_length=6)


@pytest.fixture
def client(served_url: str) -> Iterator[openai.OpenAI]:
    options: Any = {"max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(base_url=f"{served_url}/v1", api_key=KEY, **options) as found:
        yield found


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"temperature": -1}, openai.BadRequestError, None),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"api_key": "wrong"}, openai.AuthenticationError, "invalid_api_key"),
        ({"n": 8}, openai.RateLimitError, "queue_full"),
    ],
)
def test_refusals_have_their_classes(
    fields: dict[str, Any], kind: type[openai.APIStatusError], code: str | None
) -> None:
    server = ChatServer(api_keys=("right",), max_queue=0)
    key = fields.pop("api_key", "right")
    places = server.http.app.state.models.first.admission.places(1)  # type: ignore[attr-defined]
    create = server.openai.with_options(api_key=key).chat.completions.create
    full = places if kind is openai.RateLimitError else ExitStack()
    with full, pytest.raises(kind) as caught:
        create(**{"model": "fake", "messages": [USER], **fields})
    assert caught.value.code == code
    assert caught.value.body["message"]  # type: ignore[index]


@pytest.mark.parametrize("error", [EngineDeadError("it died"), RequestFailedError("it failed")])
def test_failures_have_theirs_whole_and_streamed(error: Exception) -> None:
    server = ChatServer()
    server.engine.error_at = (2, error)
    with pytest.raises(openai.InternalServerError, match=str(error)):
        server.ask()
    chunks: list[Any] = []
    with pytest.raises(openai.APIError, match=str(error)) as caught:
        chunks.extend(server.ask(stream=True))
    assert not isinstance(caught.value, openai.APIStatusError)
    assert caught.value.type == "server_error"


def let_client_sleep_by(sleep: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client alone: other threads of the process go on sleeping as usual."""
    monkeypatch.setattr(
        "openai._base_client.time", SimpleNamespace(**{**vars(time), "sleep": sleep})
    )


def test_a_full_queue_is_tried_again_when_the_server_said(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ChatServer(max_queue=0)
    admission = server.http.app.state.models.first.admission  # type: ignore[attr-defined]
    others, waits = ExitStack(), list[float]()
    with monkeypatch.context() as clock:  # a request that took 21 s: they take 5 s on average
        clock.setattr(serving, "time", SimpleNamespace(monotonic=iter((0.0, 21.0)).__next__))
        with admission.places(1):
            pass
    others.enter_context(admission.places(8))

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            others.close()

    let_client_sleep_by(sleep, monkeypatch)
    patient = server.openai.with_options(max_retries=3).chat.completions
    raw = patient.with_raw_response.create(model="fake", messages=[USER])
    assert raw.parse().choices[0].message.content == "It rains."
    assert raw.retries_taken == 2
    assert waits == [3, 3]


def test_what_is_wrong_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    let_client_sleep_by(lambda seconds: pytest.fail("waited"), monkeypatch)
    with pytest.raises(openai.BadRequestError):
        ChatServer().openai.with_options(max_retries=2).completions.create(
            model="fake", prompt="a", extra_body={"unheard_of": 1}
        )


def test_raw_responses(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=NAME, prompt=CODE, max_tokens=4)
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert json.loads(raw.text)["id"] == raw.parse().id
    streaming = client.completions.with_streaming_response
    with streaming.create(model=NAME, prompt=CODE, max_tokens=4, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_answers_are_read_into_the_callers_types(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=NAME, messages=[USER], response_format=Person, seed=3, logprobs=True, top_logprobs=2
    )
    choice = parsed.choices[0]
    assert isinstance(choice.message.parsed, Person)
    assert choice.logprobs is not None
    spelled = b"".join(bytes(t.bytes or ()) for t in choice.logprobs.content or ())
    assert spelled.removesuffix(b"<|endoftext|>").decode() == choice.message.content


def test_streams_of_the_helper_add_up(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {
        "model": NAME,
        "messages": [USER],
        "tools": [openai.pydantic_function_tool(weather)],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "seed": 4,
        "max_tokens": 64,
    }
    with client.chat.completions.stream(**wishes) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    [call] = whole.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, weather)
    plain = client.chat.completions.parse(**wishes, extra_body={"disable_spec_decode": True})
    [same] = plain.choices[0].message.tool_calls or ()
    assert same.function.arguments == call.function.arguments


def test_a_conversation_with_tools_goes_round() -> None:
    """What the package returns can be sent back as it is."""
    server = ChatServer(f"Let me see.\n{WEATHER}")
    message = server.ask(tools=TOOLS).choices[0].message
    [call] = message.tool_calls
    server.engine.answer = "It rains in Rome."
    told = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = server.ask([USER, message, told], tools=TOOLS)
    assert answer.choices[0].message.content == "It rains in Rome."
    assert f"of={call.id}" in server.prompt


def test_many_at_once_from_one_asynchronous_client(served_url: str) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model=NAME, prompt=CODE, max_tokens=8, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def twice() -> list[list[str]]:
        # Not strict: in the package's type a piece of a text has to say why it ended.
        async with openai.AsyncOpenAI(base_url=f"{served_url}/v1", api_key=KEY) as client:
            return [await asyncio.gather(*(ask(client, i) for i in range(12))) for _ in range(2)]

    first, second = asyncio.run(twice())
    assert first == second
    assert len(set(first)) > 6
