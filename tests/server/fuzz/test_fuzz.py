"""Generated requests, careless and hostile ones, and answers that are right all the same."""

from __future__ import annotations

import asyncio
import functools
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from pydantic import ValidationError

from paceline.server.anthropic.request import AnthropicConversation
from paceline.server.app import create_app
from paceline.server.http.config import ServerConfig
from paceline.server.http.errors import to_api_error
from paceline.server.protocol.chat import ChatCompletionRequest
from tests.server.chats import CHATML
from tests.server.fakes import FakeEngine
from tests.server.fuzz.__main__ import run
from tests.server.fuzz.cases import cases
from tests.server.fuzz.judge import Answer, problems
from tests.server.fuzz.requests import CONTEXT, KEY, MAX_BODY_BYTES, Case
from tests.server.fuzz.values import NAME
from tests.server.llama_cpp.gaps import fim_tokenizer

COUNT = 600


@functools.cache
def application() -> Any:
    """With a scripted engine, which knows no grammars."""
    engine = FakeEngine(tokenizer=fim_tokenizer(CHATML), max_model_len=CONTEXT)
    engine.state = "ready"
    limits = {"max_body_bytes": MAX_BODY_BYTES, "api_keys": (KEY,)}
    return create_app(engine, ServerConfig(served_model_names=(NAME,), **limits))


async def ask(app: Any, case: Case) -> Answer:
    path, _, query = case.path.partition("?")
    sent: list[dict[str, Any]] = []
    body = [{"type": "http.request", "body": case.body}]

    async def receive() -> dict[str, Any]:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": case.method,
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in case.headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    headers = {name.lower(): value.decode() for name, value in sent[0]["headers"]}
    data = b"".join(message.get("body", b"") for message in sent)
    return Answer(sent[0]["status"], headers.get(b"content-type", ""), data)


def test_generated_requests_are_answered_rightly() -> None:
    async def all_of_them() -> list[str]:
        found = []
        for number, case in enumerate(cases(seed=1, count=COUNT)):
            if not case.raw:
                answer = await asyncio.wait_for(ask(application(), case), 60)
                told = [f"case {number} {case.name}: {each}" for each in problems(case, answer)]
                found += [f"{each}\n    {case.body[:300]!r}" for each in told]
        return found

    assert not asyncio.run(all_of_them())
    assert application().state.models.first.admission.num_unfinished == 0


RESULT = {"type": "tool_result", "tool_use_id": "a"}
MANY: list[dict[str, Any]] = [
    {"messages": [{}] * 9000},
    {"messages": [{"role": "user", "content": [{}, {}]}] * 9000},
    {"messages": [{"role": "user", "content": [{}] * 9000}]},
    {"messages": [{"role": "assistant", "tool_calls": [{}] * 128}]},
    {"tools": [{}] * 128},
    {"modalities": [3] * 9000},
    {"structured_outputs": {"choice": [3] * 1000}},
    {"guided_choice": [3] * 9000},
    {"speculative": {"method": [3] * 64}},
    {"stop": [3] * 32},
    {"stop_token_ids": ["3"] * 4000},
    {"metadata": {str(i): 1 for i in range(9000)}},
    {"logit_bias": {str(i): "a" for i in range(9000)}},
    {f"k{i}": 1 for i in range(9000)},
]


@pytest.mark.parametrize("fields", MANY, ids=lambda fields: str(fields)[:40])
def test_of_many_mistakes_the_first_is_told(fields: dict[str, Any]) -> None:
    """To look for a million of them, and tell each, would hold up everybody else."""
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(ValidationError) as refusal:
        ChatCompletionRequest.model_validate(body)
    assert refusal.value.error_count() <= 4
    assert len(to_api_error(refusal.value).message) < 300


@pytest.mark.parametrize(
    "body",
    [
        {"system": [{}] * 9000, "messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{}] * 9000}]}]},
    ],
    ids=["system", "result"],
)
def test_of_many_mistakes_in_a_message_of_anthropics_the_first_is_told(
    body: dict[str, Any],
) -> None:
    with pytest.raises(ValidationError) as refusal:
        AnthropicConversation.model_validate({"model": "a", **body})
    assert refusal.value.error_count() <= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_survives_twenty_thousand_requests() -> None:
    report = run(count=20_000, seed=0)
    assert not report.failures
    assert report.sent == 20_000
