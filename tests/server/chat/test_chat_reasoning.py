"""Models mark their thoughts in several ways; each of them is told from the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from paceline.server.chat.answer import Unwrapper, Wrapping
from paceline.server.chat.answer_formats import THOUGHT_FORMATS, reasoning_format
from paceline.server.chat.answer_parts import PlacedText
from paceline.server.http.config import REASONING_PARSERS
from paceline.text.tokenizer import Tokenizer
from tests.server.chats import CHATML, ChatServer, chat_tokenizer

# gpt-oss's thoughts are messages of their own: test_harmony.py.
NAMES = [name for name in REASONING_PARSERS if name not in ("auto", "none", "openai_gptoss")]


def test_every_name_has_its_format() -> None:
    assert sorted(THOUGHT_FORMATS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_by_its_name(name: str) -> None:
    form = THOUGHT_FORMATS[name]
    for opening, closing in zip(form.opening, form.closing, strict=True):
        server = ChatServer(f"{opening} Hm. {closing}\nYes.", reasoning_parser=name)
        status, body = server.post()
        assert status == 200, body
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        if form.answer:
            server.engine.answer = (
                f"{opening}Hm.{closing}\n{form.answer[0]}\nYes.\n{form.answer[1]}"
            )
            assert server.post()[1]["choices"][0]["message"] == message


@pytest.mark.parametrize("name", NAMES)
def test_a_family_by_its_template(name: str) -> None:
    form = THOUGHT_FORMATS[name]
    template = f"{CHATML}{{# {form.opening[0]} {form.closing[0]} {'...'.join(form.answer)} #}}"
    assert reasoning_format("auto", chat_tokenizer(template)) == form
    assert reasoning_format("none", chat_tokenizer(template)) is None
    assert reasoning_format("auto", chat_tokenizer()) is None


def test_formats_begin_behind_the_marks_of_the_family() -> None:
    server = ChatServer("{}", reasoning_parser="granite")
    status, body = server.post(response_format={"type": "json_object"})
    assert status == 200, body
    after = server.grammar.after
    assert after.closing == THOUGHT_FORMATS["granite"].closing
    assert replace(server.grammar, after=None).kind == "json_object"


def test_marks_that_a_vocabulary_calls_special_are_shown() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [tokenizers.AddedToken(text, special=True) for text in ("[THINK]", "<other>")]
    backend.add_special_tokens(special)
    assert Tokenizer(backend).decode([1, 0, 2, 0]) == "[THINK]aa"


WRAPPING = Wrapping("<answer>", "</answer>")


def unwrapped(pieces: Iterable[str], marks: Wrapping = WRAPPING) -> str:
    reader = Unwrapper(marks)
    told = [reader.push(PlacedText(each), final=False).text for each in pieces]
    return "".join(told) + reader.push(PlacedText(), final=True).text


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("\n<answer>\n Yes, \n<b>. \n</answer>\n", False, "Yes, \n<b>."),
        ("<answer>Yes.</answer> <tool_calls>", False, "Yes.<tool_calls>"),
        ("<answer>cut short \n</ans", False, "cut short \n</ans"),
        (" No <answer>, but </answer>.", False, " No <answer>, but </answer>."),
        ("<ans", False, "<ans"),
        ("", False, ""),
        ("\nYes.\n</answer>", True, "Yes."),
        ("<answer>Yes.</answer>|end|<b>|end|", False, "Yes.<b>"),
        ("No|end||end|.", False, "No."),
    ],
)
def test_marks_around_the_answer_are_taken_off(text: str, opened: bool, answer: str) -> None:
    marks = replace(WRAPPING, tail="|end|", opened=opened)
    assert unwrapped([text], marks) == answer
    assert unwrapped(text, marks) == answer


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<answer>", "</answer>", "|end|", "<", "|", "a", " ", "\n", ">"]),
        max_size=9,
    ),
    size=st.integers(1, 9),
    tail=st.sampled_from(["", "|end|"]),
)
def test_marks_are_taken_off_however_the_text_is_cut(
    parts: list[str], size: int, tail: str
) -> None:
    marks = replace(WRAPPING, tail=tail)
    text = "".join(parts)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert unwrapped(pieces, marks) == unwrapped([text], marks)


def test_the_prompt_may_open_the_answer() -> None:
    template = f"{CHATML}<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>"
    server = ChatServer("Yes.<|END_RESPONSE|>", template)
    assert server.post()[1]["choices"][0]["message"]["content"] == "Yes."


XTML = Wrapping("<open>", "<close>", "<tail>")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<open>Yes.<close><tail>", "Yes."),
        ("<open>Yes.<close>\n<call><tail>", "Yes.<call>"),
        ("<open>Yes.<tail>", "Yes."),  # the closing mark is missing
        ("<call>x<tail>", "<call>x"),
        ("<open>a <ta b<close> <tai", "a <ta b<tai"),
    ],
)
def test_a_mark_behind_all_of_an_answer_is_taken_off(text: str, words: str) -> None:
    assert unwrapped([text], XTML) == unwrapped(text, XTML) == words


def test_gigachats_mark_of_a_messages_end_is_no_word() -> None:
    template = CHATML.replace("<|im_start|>assistant\n", "assistant<|role_sep|>\n")
    template += "{# {{ tools }} function call <|message_sep|> #}"
    call = 'function call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}'
    server = ChatServer("Yes.<|message_sep|>\n\n", template)
    assert server.post()[1]["choices"][0]["message"]["content"] == "Yes."
    server.engine.answer = f"Yes.<|message_sep|>\n\n{call}<|message_sep|>\n\n"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    message = server.post(tools=tools)[1]["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
