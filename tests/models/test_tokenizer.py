"""Tokenizers from folders: the same ids as transformers, special tokens, templates, faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from paceline.errors import ModelLoadError, RequestError, TemplateError
from paceline.models.tokenizer import Tokenizer
from tests.models.vocabularies import (
    byte_fallback,
    byte_fallback_json,
    byte_level,
    byte_level_json,
    save_tokenizer,
)

TEXTS = ["", "the fox", "two  spaces\n\nand lines", "é€😀 日本", "<|im_start|>user</s>"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    spelled = tokenizer.decode(ids, skip_special_tokens=False)
    assert spelled.removeprefix("<s>").removeprefix(" ") == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("name", ["stories260k", "babyllama-tok105", "starter-target"])
def test_same_ids_as_transformers(shared_data: Path, name: str) -> None:
    folder = shared_data / "models" / name
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in ["Once upon a time", " leading", "é€😀", "def f(x):\n\treturn x", ""]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)


def test_special_tokens_are_skipped_even_if_normalised(shared_data: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "models" / "tinystories-656k")
    ids = tokenizer.encode("Once upon a time")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert "start_story" in tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.decode(ids[1:]) == "Once upon a time"


def test_roles_may_be_objects_or_in_the_map(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback_json(), bos_token={"content": "<s>"}, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "x"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize("backend_adds", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_bos(tmp_path: Path, backend_adds: bool, flag: bool | None) -> None:
    """The flag decides; without one the tokenizer's own way does. Never two of them."""
    backend = tokenizers.Tokenizer.from_str(byte_fallback_json())
    if backend_adds:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    config = {} if flag is None else {"add_bos_token": flag}
    save_tokenizer(tmp_path, backend.to_str(), bos_token="<s>", **config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    wants = backend_adds if flag is None else flag
    bare = tokenizer.encode("the", add_special_tokens=False)
    assert 1 not in bare
    assert tokenizer.encode("the") == [1] * wants + bare
    assert tokenizer.encode_literal("the", add_special_tokens=True) == [1] * wants + bare
    assert tokenizer.encode_literal("the") == bare


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    save_tokenizer(tmp_path, backend.to_str())
    text = "the quick brown fox jumps"
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fingerprint_is_the_vocabulary() -> None:
    assert byte_level().fingerprint == byte_level().fingerprint
    assert byte_level().fingerprint != byte_fallback().fingerprint
    raw = json.loads(byte_level_json())
    vocabulary = raw["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    swapped = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(raw)))
    assert swapped.vocab_size == byte_level().vocab_size
    assert swapped.fingerprint != byte_level().fingerprint


def test_ids_beyond_the_vocabulary() -> None:
    tokenizer = byte_level()
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.id_to_token(1 << 40) is None
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


def test_byte_tokens() -> None:
    assert byte_fallback().byte_of(3 + 0x41) == 0x41
    assert byte_fallback().byte_of(2) is None
    assert byte_level().byte_of(70) is None


def test_lone_surrogates_are_the_requests_fault() -> None:
    said = r"cannot be encoded: its character 1 is U\+D800, half of a surrogate pair"
    with pytest.raises(RequestError, match=said):
        byte_level().encode("a\ud800")
    with pytest.raises(RequestError, match=said):
        byte_level().encode_with_offsets("a\ud800")


# --- templates -----------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
PROMPT = CHAT + "{% if add_generation_prompt %}<assistant>{% endif %}"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_template_string(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback_json(), eos_token="</s>", chat_template=PROMPT)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(MESSAGES) == "<user>hi</s><assistant>"
    closed = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert closed == "<user>hi</s>"


def test_template_list_chooses_by_tools(tmp_path: Path) -> None:
    entries = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    save_tokenizer(tmp_path, byte_fallback_json(), chat_template=entries)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "add"}]) == "add"


def test_template_files_have_priority(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback_json(), chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("file {{ enable_thinking }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES, enable_thinking=False) == "file False"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "tools"
    assert tokenizer.template_mentions("enable_thinking")
    assert not tokenizer.template_mentions("reasoning_effort")
    assert tokenizer.template_knows("enable_thinking")
    assert not tokenizer.template_knows("thinking")


def test_no_template() -> None:
    assert not byte_level().has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        byte_level().apply_chat_template(MESSAGES)


# --- faults --------------------------------------------------------------------------------------


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b"{not json",
        b"\xff\xfe",
        b"[" * 200_000,
        byte_level_json().encode()[:2000],
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["a z"]}}',
    ],
    ids=["empty", "object", "list", "not-json", "not-utf8", "nested", "truncated", "bad-merge"],
)
def test_corrupt_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config", ["{", "[]", "3", '{"chat_template": 5}', '{"chat_template": [1]}']
)
def test_corrupt_tokenizer_config(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelLoadError):
        Tokenizer.from_folder(tmp_path)
