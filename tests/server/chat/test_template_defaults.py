"""Options of chat templates that a server gives to every chat, and what requests say instead."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.server.http.config import ServerConfig
from tests.server.chats import CHATML, THINKING, USER, ChatServer

SHOWN = CHATML + "<{{ enable_thinking }},{{ thinking }},{{ reasoning_effort }},{{ style }}>"
OFF = {"enable_thinking": False}
MESSAGES = {"messages": [USER], "max_tokens": 9}
CHAT = "/v1/chat/completions"


def told(defaults: dict[str, Any], path: str, body: dict[str, Any]) -> str:
    """What the template was told, with nothing where it was told nothing."""
    server = ChatServer("Yes.", SHOWN, default_chat_template_kwargs=defaults)
    response = server.http.post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    return server.prompt.rpartition("<")[2].removesuffix(">")


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        (CHAT, MESSAGES, "False,,,"),
        (CHAT, {**MESSAGES, "chat_template_kwargs": {"style": "old"}}, "False,,,old"),
        (CHAT, {**MESSAGES, "chat_template_kwargs": {"enable_thinking": True}}, "True,,,"),
        (CHAT, {**MESSAGES, "chat_template_kwargs": {"thinking": True}}, "True,True,,"),
        (CHAT, {**MESSAGES, "reasoning_effort": "high"}, "True,,high,"),
        (CHAT, {**MESSAGES, "reasoning_effort": "none"}, "False,False,none,"),
        ("/v1/responses", {"input": "Hi."}, "False,,,"),
        ("/v1/responses", {"input": "Hi.", "reasoning": {"effort": "low"}}, "True,,low,"),
        ("/v1/responses", {"input": "Hi.", "chat_template_kwargs": {"thinking": 1}}, "False,1,,"),
        ("/v1/messages", MESSAGES, "False,,,"),
        ("/v1/messages", {**MESSAGES, "thinking": {"type": "adaptive"}}, "True,True,,"),
        ("/v1/messages", {**MESSAGES, "thinking": {"type": "disabled"}}, "False,False,,"),
        ("/v1/messages", {**MESSAGES, "output_config": {"effort": "low"}}, "True,,low,"),
        ("/api/chat", {"messages": [USER]}, "False,,,"),
        ("/api/chat", {"messages": [USER], "think": True}, "True,True,,"),
        ("/api/chat", {"messages": [USER], "think": "low"}, "True,,low,"),
        ("/api/generate", {"prompt": "Hi."}, "False,,,"),
    ],
)
def test_requests_come_first(path: str, body: dict[str, Any], shown: str) -> None:
    assert told(OFF, path, body) == shown


@pytest.mark.parametrize(
    ("defaults", "own", "shown"),
    [
        ({"thinking": True, "style": "new"}, {}, ",True,,new"),
        ({"thinking": True}, {"chat_template_kwargs": {"enable_thinking": False}}, "False,False,,"),
        ({"thinking": True}, {"reasoning_effort": "none"}, "False,False,none,"),
        ({"thinking": True}, {"reasoning_effort": "low"}, ",True,low,"),
        ({"reasoning_effort": "none"}, {}, "False,False,none,"),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}, "True,True,high,"),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "high"}, ",,high,"),
        ({"style": "new"}, {"chat_template_kwargs": {"style": "old"}}, ",,,old"),
    ],
)
def test_a_requests_word_counts_under_all_names(
    defaults: dict[str, Any], own: dict[str, Any], shown: str
) -> None:
    assert told(defaults, CHAT, {**MESSAGES, **own}) == shown


def test_thoughts_are_read_where_there_are_some() -> None:
    server = ChatServer("<think>Hm.</think>Yes.", THINKING, default_chat_template_kwargs=OFF)
    assert server.ask().choices[0].message.content == "<think>Hm.</think>Yes."
    assert server.prompt.endswith("<think>\n\n</think>\n\n")
    on = server.ask(chat_template_kwargs={"enable_thinking": True}).choices[0].message
    assert (on.reasoning_content, on.content) == ("Hm.", "Yes.")


def test_prompts_that_are_only_looked_at_are_those_that_would_be_answered() -> None:
    server = ChatServer("Yes.", SHOWN, default_chat_template_kwargs=OFF)
    server.post()
    text, ids = server.prompt, server.engine.calls[-1].token_ids

    def look(path: str, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = server.http.post(path, json={"messages": [USER], **body}).json()
        return found

    assert look("/apply-template")["prompt"] == text
    assert look("/tokenize")["tokens"] == ids
    assert look("/v1/messages/count_tokens", model="fake")["input_tokens"] == len(ids)


@pytest.mark.parametrize("options", [[], {"messages": []}, {"bos_token": ""}, {1: 2}])
def test_options_that_a_server_cannot_have(options: Any) -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
        ServerConfig(default_chat_template_kwargs=options)


def test_a_template_that_does_not_know_an_option_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ChatServer("Yes.", THINKING, default_chat_template_kwargs={**OFF, "enable_thinkin": False})
    assert "the chat template of fake does not know enable_thinkin," in caplog.text
    assert caplog.text.count("does not know") == 1
