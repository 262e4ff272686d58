"""A stop string that spells a special token ends an answer at that token, whatever is asked how."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.chats import USER, ChatServer, chat_tokenizer

MARK = "<|pad|>"
CHAT = {"messages": [USER], "max_tokens": 50}
DOORS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "Hi", "stop": MARK, "max_tokens": 50}, "text"),
    "/v1/chat/completions": ({**CHAT, "stop": [MARK]}, "content"),
    "/v1/messages": ({**CHAT, "stop_sequences": [MARK]}, "text"),
    "/api/chat": ({"messages": [USER], "options": {"stop": [MARK]}}, "content"),
    "/api/generate": ({"prompt": "Hi", "options": {"stop": [MARK]}}, "response"),
}


def server() -> ChatServer:
    tokenizer = chat_tokenizer()
    mark = tokenizer.encode(MARK, add_special_tokens=False)
    assert tokenizer.is_special(mark[0])
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in ("It rains.", " Or not.")]
    return ChatServer([*texts[0], *mark, *texts[1]])


def texts_of(document: Any, name: str) -> str:
    """All strings under a key."""
    if isinstance(document, list):
        return "".join(texts_of(each, name) for each in document)
    if not isinstance(document, dict):
        return ""
    told = document.get(name)
    inner = "".join(texts_of(each, name) for each in document.values())
    return (told if isinstance(told, str) else "") + inner


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", DOORS)
def test_it_ends_there(path: str, streams: bool) -> None:
    body, name = DOORS[path]
    text = server().http.post(path, json={"model": "fake", **body, "stream": streams}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    documents = [json.loads(line) for line in lines if line.startswith("{")]
    assert "".join(texts_of(each, name) for each in documents) == "It rains."


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_it_is_kept_where_that_is_asked_for(path: str) -> None:
    body, name = DOORS[path]
    asked = {"model": "fake", **body, "include_stop_str_in_output": True}
    told = server().http.post(path, json=asked).json()
    assert texts_of(told, name) == f"It rains.{MARK}"
    choice = told["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", MARK)
    plain = server().http.post(path, json={"model": "fake", **body, "stop": None}).json()
    assert texts_of(plain, name) == "It rains. Or not."


@pytest.mark.parametrize(
    ("plain", "text", "met"),
    [("ins", "It ra", "ins"), (". Or", "It rains.", MARK), ("never", "It rains.", MARK)],
)
def test_a_plain_one_beside_it_works_too(plain: str, text: str, met: str) -> None:
    for stop in ([MARK, plain], [plain, MARK]):
        choice = server().post([USER], stop=stop)[1]["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"]) == (text, met)


def test_the_text_goes_on_behind_a_token_that_another_one_spells() -> None:
    choice = server().post([USER], stop=[f"{MARK}?", ". Or"])[1]["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("It rains", ". Or")


def test_a_message_says_which_sequence_it_was() -> None:
    body, _ = DOORS["/v1/messages"]
    told = server().http.post("/v1/messages", json={"model": "fake", **body}).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", MARK)
