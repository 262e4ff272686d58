"""Models mark their thoughts in several ways; each of them is told from the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.models.tokenizer import Tokenizer
from paceline.server.chat.reasoning import FORMATS, reasoning_format
from paceline.server.config import REASONING_PARSERS
from tests.server.chats import CHATML, ChatServer, chat_tokenizer

# gpt-oss's thoughts are messages of their own: test_harmony.py.
NAMES = [name for name in REASONING_PARSERS if name not in ("auto", "none", "openai_gptoss")]


def test_every_name_has_its_format() -> None:
    assert sorted(FORMATS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_by_its_name(name: str) -> None:
    form = FORMATS[name]
    for opening, closing in zip(form.opening, form.closing, strict=True):
        server = ChatServer(f"{opening} Hm. {closing}\nYes.", reasoning_parser=name)
        status, body = server.post()
        assert status == 200, body
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize("name", NAMES)
def test_a_family_by_its_template(name: str) -> None:
    form = FORMATS[name]
    template = f"{CHATML}{{# {form.opening[0]} {form.closing[0]} #}}"
    assert reasoning_format("auto", chat_tokenizer(template)) == form
    assert reasoning_format("none", chat_tokenizer(template)) is None
    assert reasoning_format("auto", chat_tokenizer()) is None


def test_formats_begin_behind_the_marks_of_the_family() -> None:
    server = ChatServer("{}", reasoning_parser="granite")
    status, body = server.post(response_format={"type": "json_object"})
    assert status == 200, body
    after = server.grammar.after
    assert after.closing == FORMATS["granite"].closing
    assert replace(server.grammar, after=None).kind == "json_object"


def test_marks_that_a_vocabulary_calls_special_are_shown() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [tokenizers.AddedToken(text, special=True) for text in ("[THINK]", "<other>")]
    backend.add_special_tokens(special)
    assert Tokenizer(backend).decode([1, 0, 2, 0]) == "[THINK]aa"
