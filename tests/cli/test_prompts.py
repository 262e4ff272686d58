"""Prompts from files and as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from paceline.api.llm import embedded_model
from paceline.cli.explain import ExplainOptions
from paceline.cli.options import RunOptions
from paceline.cli.prompts import Encoder, Prompt, encoder_of, read_prompts
from paceline.core.errors import ConfigError, RequestError, TemplateError
from paceline.text.tokenizer import Tokenizer
from paceline_lab.trace.command import TraceOptions

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def write(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def test_each_kind_of_row(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "a", "kind": "code"},
        "",
        {"id": 3, "question": "b\u2028c"},
        {"turns": ["d", "e"]},
        {"prompt": [5, 6]},
        {"messages": CHAT},
    )
    assert read_prompts(path) == [
        Prompt("a", "code"),
        Prompt("b\u2028c"),
        Prompt("d"),
        Prompt((5, 6)),
        Prompt(tuple(CHAT)),
    ]


def test_a_line_separator_inside_a_text_ends_no_row(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "b\u2028c"}', '{"prompt": "d"}')
    assert [prompt.content for prompt in read_prompts(path)] == ["b\u2028c", "d"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": "unfinished', "not JSON"),
        ('["a"]', "a row is an object, not list"),
        ({"text": "a"}, "one of prompt, question, turns, messages"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": ["a"]}, "prompt must be a text, or token ids, that is not empty"),
        ({"prompt": []}, "prompt must be a text"),
        ({"prompt": [True]}, "prompt must be a text"),
        ({"question": [1]}, "question must be a text that is not empty"),
        ({"turns": []}, "turns must be a list"),
        ({"turns": [1]}, "turns must be a list"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hello"]}, "role and content"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_row_names_its_line(tmp_path: Path, row: object, problem: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(RequestError, match=r"prompts\.jsonl, line 2: ") as error:
        read_prompts(path)
    assert problem in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00"])
def test_a_file_without_prompts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"prompts\.jsonl"):
        read_prompts(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read prompts"):
        read_prompts(tmp_path / "none.jsonl")


class TestEncoder:
    plain = Tokenizer.from_folder(embedded_model("target"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% if enable_thinking is defined %}<quiet>{% endif %}"

    @property
    def chatty(self) -> Tokenizer:
        encoder = tokenizers.Tokenizer.from_str(self.plain.to_json())
        return Tokenizer(encoder, chat_templates={"default": self.template})

    def text(self, encoder: Encoder, content: object) -> str:
        return encoder.tokenizer.decode(encoder.encode(content))  # type: ignore[arg-type]

    def test_texts_are_chats_where_there_is_a_template(self) -> None:
        assert self.text(Encoder(self.chatty), "hi") == "[user]hi"
        assert self.text(Encoder(self.chatty, chat=False), "hi") == "hi"
        assert self.text(Encoder(self.chatty, system="Brief!"), "hi") == "[system]Brief![user]hi"
        assert self.text(Encoder(self.chatty, system="Other"), CHAT) == self.text(
            Encoder(self.chatty), CHAT
        )
        assert self.text(Encoder(self.plain), "hi") == "hi"

    def test_messages(self) -> None:
        assert self.text(Encoder(self.chatty), CHAT) == "[system]Be brief.[user]Hello"

    def test_commands_tell_the_template_what_they_are_told(self) -> None:
        for options, text in (
            (RunOptions(), "[user]hi"),
            (RunOptions(no_thinking=True), "[user]hi<quiet>"),
            (RunOptions(default_chat_template_kwargs='{"enable_thinking": 0}'), "[user]hi<quiet>"),
            (ExplainOptions(prompt="", default_chat_template_kwargs='{"a": 0}'), "[user]hi"),
            (
                TraceOptions(
                    model="",
                    prompts="",
                    output="",
                    system="Brief!",
                    default_chat_template_kwargs='{"enable_thinking": 0}',
                ),
                "[system]Brief![user]hi<quiet>",
            ),
        ):
            assert self.text(encoder_of(self.chatty, options), "hi") == text

    def test_thinking_is_the_templates_variable(self) -> None:
        assert self.text(Encoder(self.chatty, thinking=False), "hi") == "[user]hi<quiet>"

    def test_a_chat_needs_a_template(self) -> None:
        with pytest.raises(TemplateError):
            Encoder(self.plain, chat=True).encode("hi")
        with pytest.raises(RequestError, match="--no-chat"):
            Encoder(self.chatty, chat=False).encode(CHAT)

    def test_token_ids_are_themselves(self) -> None:
        for encoder in (Encoder(None), Encoder(self.chatty), Encoder(self.plain, chat=False)):
            assert encoder.encode((7, 5)) == [7, 5]

    def test_texts_need_a_tokenizer(self) -> None:
        for content in ("hi", "", CHAT):
            with pytest.raises(ConfigError, match="no tokenizer"):
                Encoder(None).encode(content)

    def test_errors_say_which_prompt(self) -> None:
        prompts = [Prompt("fine"), Prompt("lone \ud800")]
        with pytest.raises(RequestError, match="prompt 2: "):
            Encoder(self.plain).encode_all(prompts)
