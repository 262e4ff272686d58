"""The built-in chat templates, and the choice of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from paceline.core.errors import ConfigError
from paceline.text.chat_templates import BUILT_IN, chosen_template
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import begin_texts, byte_level_json

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
]
WRITTEN = {
    "plain": "<s>System: Be brief.\n\nUser: Hello.\n\nAssistant: Hi.\n\n"
    "User: And now?\n\nAssistant:",
    "alpaca": "<s>Be brief.\n\n### Instruction:\nHello.\n\n### Response:\nHi.\n\n"
    "### Instruction:\nAnd now?\n\n### Response:\n",
    "chatml": "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
    "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>user\nHello."
    "<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n<start_of_turn>user\nAnd now?"
    "<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello. [/INST] Hi. </s>"
    "<s>[INST] And now? [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<s><|system|>\nBe brief.</s>\n<|user|>\nHello.</s>\n<|assistant|>\nHi.</s>\n"
    "<|user|>\nAnd now?</s>\n<|assistant|>\n",
}


def tokenizer(*, adds_bos: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_special_tokens(["<s>"])
    if adds_bos:
        begin_texts(backend, "<s>")
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_writes_a_chat(name: str) -> None:
    chats = tokenizer()
    chats.set_chat_template(chosen_template(name))
    assert chats.apply_chat_template(CHAT) == WRITTEN[name]


def test_a_text_begins_as_the_model_wants_it() -> None:
    chats = tokenizer(adds_bos=False)
    chats.set_chat_template(BUILT_IN["plain"])
    assert chats.apply_chat_template(CHAT[1:2]) == "User: Hello.\n\nAssistant:"
    closed = chats.apply_chat_template(CHAT[1:2], add_generation_prompt=False)
    assert closed == "User: Hello.\n\n"


def test_a_file_is_a_template_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}!")
    chats = tokenizer()
    chats.set_chat_template(chosen_template(str(path)))
    assert chats.apply_chat_template(CHAT) == "Be brief.!"


def test_a_template_that_refuses_a_short_chat_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ raise_exception('no system message') }}")
    assert chosen_template(str(path)) == path.read_text()


def test_what_is_no_template_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'chatlm', which is not a file; built in: plain, alp"):
        chosen_template("chatlm")
    path = tmp_path / "broken.jinja"
    path.write_text("{% for %}")
    with pytest.raises(ConfigError, match="is not a valid template: "):
        chosen_template(str(path))
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        chosen_template(str(path))
