"""Tokenizers from folders: the same ids as transformers, special tokens, templates, faults.

And encoders in which special tokens are mere text, and where the answer begins in a chat's prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

from paceline.api.llm import LLM, embedded_model
from paceline.core.errors import ModelLoadError, RequestError, TemplateError
from paceline.request.sampling_params import SamplingParams
from paceline.text.tokenizer import (
    LONGEST,
    Tokenizer,
    answer_opening,
    literal_backend,
    resume_point,
)
from tests.models.reference import save_model
from tests.text.vocabularies import (
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
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("adds", ["", "bos", "both"])
def test_tokenizer_json_alone_says_what_is_around_a_text(
    tmp_path: Path, adds: str, flag: bool | None
) -> None:
    """transformers 5.24.0 ignores both flags for LlamaTokenizer, GPT2Tokenizer, Qwen2Tokenizer,
    GemmaTokenizer, CohereTokenizer and PreTrainedTokenizerFast, with or without ``Fast``."""
    backend = tokenizers.Tokenizer.from_str(byte_fallback_json())
    single = {"": "$A", "bos": "<s> $A", "both": "<s> $A </s>"}[adds]
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    config = {} if flag is None else {"add_bos_token": flag, "add_eos_token": flag}
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    save_tokenizer(tmp_path, backend.to_str(), **roles, **config)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    bare = ours.encode("the", add_special_tokens=False)
    around = [1] * (adds != "") + bare + [2] * (adds == "both")
    assert ours.encode("the") == theirs.encode("the") == around
    assert ours.encode_literal("the", add_special_tokens=True) == around
    assert ours.encode_literal("the") == bare


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


JINJA, JSON = "chat_template.jinja", "chat_template.json"
DEFAULT = "additional_chat_templates/default.jinja"
TOOLS = "additional_chat_templates/tool_use.jinja"
OLD = json.dumps({"chat_template": "old"})


@pytest.mark.parametrize(
    ("entry", "files", "chosen"),
    [
        ("config", {}, "config"),
        ({"default": "config", "tool_use": "t"}, {}, "config"),
        ("config", {JINJA: "file", JSON: OLD}, "file"),
        ("config", {JSON: OLD}, "config"),
        (None, {JINJA: "file", DEFAULT: "additional"}, "additional"),
        (None, {JINJA: "file\n", TOOLS: "t"}, "file"),
        ([{"name": "default", "template": "a"}, {"name": "default", "template": "b"}], {}, "b"),
    ],
)
def test_template_of_the_same_place_as_in_transformers(
    tmp_path: Path, entry: Any, files: dict[str, str], chosen: str
) -> None:
    save_tokenizer(tmp_path, byte_fallback_json(), chat_template=entry)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == chosen
    assert ours.apply_chat_template(MESSAGES) == chosen


@pytest.mark.parametrize("entry", [None, "config"])
def test_additional_templates_alone_leave_no_default(tmp_path: Path, entry: str | None) -> None:
    save_tokenizer(tmp_path, byte_fallback_json(), chat_template=entry)
    (tmp_path / TOOLS).parent.mkdir()
    (tmp_path / TOOLS).write_text("tools")
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(TemplateError, match="no default chat template; it has tool_use"):
        tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "tools"


def test_template_of_the_processor_where_there_is_no_other(tmp_path: Path) -> None:
    """transformers' processors read this file, and its tokenizers do not."""
    save_tokenizer(tmp_path, byte_fallback_json())
    (tmp_path / JSON).write_text(OLD)
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES) == "old"


def test_roles_of_a_model_reach_its_template(tmp_path: Path) -> None:
    template = "{{ image_token }}{{ eos_token }}"
    save_tokenizer(
        tmp_path,
        byte_fallback_json(),
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
        chat_template=template,
    )
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES) == "<image></s>"


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


class Whole:
    """A step that cuts nothing. It is written in Python, so that no file can hold it."""

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        pass


def backend() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer.from_file(f"{embedded_model('target')}/tokenizer.json")
    for text, special in (("<s>", True), ("<|x|>", False), ("<h1>", False), ("  ", False)):
        found.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)])
    return found


def test_what_becomes_a_token_and_what_does_not() -> None:
    usual = backend()
    (heading,) = usual.encode("<h1>").ids
    spaces = usual.encode("  ").ids
    literal = literal_backend(usual)
    assert [len(literal.encode(text).ids) > 1 for text in ("<s>", "<|x|>")] == [True, True]
    assert [literal.encode(text).ids for text in ("<h1>", "  ")] == [[heading], spaces]
    assert len(literal_backend(usual, {heading}).encode("<h1>").ids) > 1
    for text in ("<s>", "<|x|>"):  # the given encoder stays as it was
        assert len(usual.encode(text).ids) == 1


def test_the_vocabulary_is_not_read_again() -> None:
    """Not even where it could not be: a copy would be read from what the encoder writes."""
    usual = backend()
    usual.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Whole())
    assert literal_backend(usual).encode("two words").ids == usual.encode("two words").ids


# Thoughts are opened in the prompt, and left out of earlier answers, as Qwen's template has it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}x{% else %}y{% endif %}{% endif %}"
)


def opening_of(template: str) -> str:
    tokenizer = byte_level()
    tokenizer.set_chat_template(template)
    return tokenizer.decode(answer_opening(tokenizer), skip_special_tokens=False)


def test_an_opening_is_what_all_answers_have() -> None:
    assert opening_of(TEMPLATE) == "<|im_start|>assistant\n"
    assert opening_of("{{ messages[0].content }}") == ""
    assert opening_of("{% if add_generation_prompt %}a{% else %}b{% endif %}") == ""
    assert opening_of("{{ raise_exception('no') }}") == ""
    assert answer_opening(byte_level()) == answer_opening(None) == []


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([5, 1, 2, 9, 1, 2, 3], 4),
        ([5, 1, 2], 1),
        ([1, 2, 3], 0),
        ([5, 1, 3], 0),
        ([5, 1, 2, *range(3, LONGEST + 1)], 1),
        ([5, 1, 2, *range(3, LONGEST + 2)], 0),
        ([2], 0),
    ],
)
def test_it_is_looked_for_at_the_end(prompt: list[int], found: int) -> None:
    assert resume_point(prompt, [1, 2]) == found
    assert resume_point(prompt, []) == 0


def hybrid_folder(folder: Path) -> str:
    save_model("qwen3-5", folder, vocab_size=400)
    tokenizer = json.loads(byte_level_json())
    added = tokenizer["added_tokens"][0]
    number = max(tokenizer["model"]["vocab"].values()) + 1
    number = max(number, *(token["id"] + 1 for token in tokenizer["added_tokens"]))
    for shift, content in enumerate(("<|im_start|>", "assistant\n")):
        tokenizer["added_tokens"].append({**added, "id": number + shift, "content": content})
    options = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    save_tokenizer(folder, json.dumps(tokenizer), **options)
    return str(folder)


def test_the_next_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(hybrid_folder(tmp_path), dtype="float32", speculative_config=[]) as llm:
        assert isinstance(llm.tokenizer, Tokenizer)
        chat = [{"role": "user", "content": "one two three"}]
        llm.generate(chat, params)
        before = len(llm.encode(chat, add_generation_prompt=False))
        chat += [{"role": "assistant", "content": "four"}, {"role": "user", "content": "five"}]
        llm.generate(chat, params)
        assert llm.stats().num_cached_tokens == before
        (output,) = llm.generate([chat], params)  # the same again
        assert llm.stats().num_cached_tokens - before == len(llm.encode(chat)) - 3
    with LLM(str(tmp_path), dtype="float32", speculative_config=[]) as llm:
        (alone,) = llm.generate([chat], params)
    assert alone.token_ids == output.token_ids
