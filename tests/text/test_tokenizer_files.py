"""Tokens that only the files beside tokenizer.json name: matched and left out as by transformers.

Recorded ids are those of transformers 5.24.0 with tokenizers 0.23.3, and 5.23.0 has the same.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken
from transformers import AutoTokenizer

from paceline.core.errors import ModelLoadError
from paceline.text.tokenizer import Tokenizer
from paceline.text.tokenizer_files import read_tokenizer_folder
from tests.text.vocabularies import (
    begin_texts,
    byte_fallback_json,
    byte_level_json,
    save_tokenizer,
)

TEXT = "the<x>and <x> of<y>an"
OWN = "<|tool|>"
"""A token that tokenizer.json adds and does not call special."""


def token(content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, **usual, "special": True, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TWO = ["<x>", "<y>"]
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "nothing": {},
    "declared": {CONFIG: {"added_tokens_decoder": {"297": token("<x>")}}},
    "declared-far": {CONFIG: {"added_tokens_decoder": {"999": token("<x>")}}},
    "declared-in-order-of-ids": {
        CONFIG: {"added_tokens_decoder": {"1000": token("<x>"), "999": token("<y>")}}
    },
    "declared-a-word": {CONFIG: {"added_tokens_decoder": {"297": token("<x>", special=False)}}},
    "declared-normalised": {
        CONFIG: {"added_tokens_decoder": {"297": token("<x>", special=False, normalized=True)}}
    },
    "declared-with-space": {CONFIG: {"added_tokens_decoder": {"297": token("<x>", rstrip=True)}}},
    "declared-of-the-vocabulary": {CONFIG: {"added_tokens_decoder": {"5": token("and")}}},
    "declared-otherwise": {CONFIG: {"added_tokens_decoder": {"296": token(OWN)}}},
    "declared-otherwise-and-named": {
        CONFIG: {"added_tokens_decoder": {"1": token("<s>", special=False)}, "bos_token": "<s>"}
    },
    "additional": {CONFIG: {"additional_special_tokens": TWO}},
    "additional-objects": {CONFIG: {"additional_special_tokens": [typed("<x>", lstrip=True)]}},
    "additional-none": {CONFIG: {"additional_special_tokens": None}},
    "extra": {CONFIG: {"extra_special_tokens": TWO}},
    "extra-roles": {CONFIG: {"extra_special_tokens": {"image_token": "<x>", "other": "<y>"}}},
    "extra-role-object": {CONFIG: {"extra_special_tokens": {"image_token": typed("<x>")}}},
    "extra-before-additional": {
        CONFIG: {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"]}
    },
    "empty-extra": {CONFIG: {"extra_special_tokens": {}, "additional_special_tokens": ["<y>"]}},
    "extra-own": {CONFIG: {"extra_special_tokens": [OWN]}},
    "extra-word": {CONFIG: {"extra_special_tokens": ["and"]}},
    "eos": {CONFIG: {"eos_token": "<x>"}},
    "eos-object": {CONFIG: {"eos_token": typed("<x>", lstrip=True)}},
    "eos-own": {CONFIG: {"eos_token": OWN}},
    "eos-word": {CONFIG: {"eos_token": "and"}},
    "mask-then-sep": {CONFIG: {"mask_token": "<x>", "sep_token": "<y>"}},
    "own-role": {CONFIG: {"image_token": "<x>"}},
    "own-role-object": {CONFIG: {"image_token": typed("<x>")}},
    "own-role-no-token": {CONFIG: {"image_token": token("<x>")}},
    "model-specific": {CONFIG: {"model_specific_special_tokens": {"image_token": "<x>"}}},
    "map-role": {MAP: {"eos_token": "<x>"}},
    "map-role-object": {MAP: {"pad_token": token("<x>", lstrip=True)}},
    "map-own-role": {MAP: {"image_token": "<x>"}},
    "map-additional": {MAP: {"additional_special_tokens": TWO}},
    "map-extra": {MAP: {"extra_special_tokens": ["<x>"]}},
    "map-extra-too": {
        CONFIG: {"additional_special_tokens": ["<y>"]},
        MAP: {"extra_special_tokens": ["<x>"]},
    },
    "map-additional-late": {
        CONFIG: {"additional_special_tokens": ["<y>"]},
        MAP: {"additional_special_tokens": ["<x>"]},
    },
    "map-extra-roles": {MAP: {"extra_special_tokens": {"image_token": "<x>"}}},
    "map-over-config": {CONFIG: {"eos_token": "</s>"}, MAP: {"eos_token": "<x>"}},
    "map-beside-declared": {CONFIG: {"added_tokens_decoder": {}}, MAP: {"eos_token": "<x>"}},
    "added": {ADDED: {"<x>": 999, "<y>": 998}},
    "added-special": {CONFIG: {"extra_special_tokens": ["<x>"]}, ADDED: {"<x>": 999}},
    "added-beside-declared": {CONFIG: {"added_tokens_decoder": {}}, ADDED: {"<x>": 999}},
    "split": {CONFIG: {"split_special_tokens": True, "extra_special_tokens": ["<x>"]}},
}
VOCABULARIES = {"pieces": byte_fallback_json, "bytes": byte_level_json}


def folder_of(folder: Path, vocabulary: str, case: str) -> Path:
    backend = tokenizers.Tokenizer.from_str(VOCABULARIES[vocabulary]())
    backend.add_tokens([AddedToken(OWN, special=False, normalized=False)])
    files = dict(CASES[case])
    save_tokenizer(folder, backend.to_str(), **files.pop(CONFIG, {}))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


RECORDED = {
    "nothing": ([291, 63, 283, 65, 295, 259, 63, 283, 65, 259, 274, 265, 63, 284, 65, 294], TEXT),
    "declared-in-order-of-ids": (
        [291, 298, 293, 273, 263, 259, 298, 259, 259, 274, 265, 297, 293, 273],
        "the and   of an",
    ),
    "eos-object": (
        [291, 297, 293, 273, 263, 297, 259, 259, 274, 265, 63, 284, 65, 294],
        "the and  of<y>an",
    ),
    "map-beside-declared": (
        [291, 63, 283, 65, 295, 259, 63, 283, 65, 259, 274, 265, 63, 284, 65, 294],
        TEXT,
    ),
}


@pytest.mark.parametrize("case", RECORDED)
def test_ids_and_texts_as_recorded(tmp_path: Path, case: str) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, "pieces", case))
    ids, text = RECORDED[case]
    assert tokenizer.encode(TEXT) == ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocabulary", ["pieces", pytest.param("bytes", marks=pytest.mark.slow)])
def test_same_as_transformers(tmp_path: Path, vocabulary: str, case: str) -> None:
    folder = folder_of(tmp_path, vocabulary, case)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, f" <y>{OWN} <x>and <s></s> the"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert read_tokenizer_folder(folder).special_tokens == theirs.special_tokens_map


def test_a_saved_tokenizer_is_read_back_as_it_was(tmp_path: Path) -> None:
    """A role may have an ordinary word of a GGUF vocabulary, and does not make it special."""
    backend = tokenizers.Tokenizer.from_str(byte_fallback_json())
    begin_texts(backend, "<s>")
    Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "and"}).save(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (295,))
    assert not tokenizer.is_special(295)
    assert tokenizer.encode("the") == [1, 291]


@pytest.mark.parametrize("case", ["extra", "split"])
def test_a_pickled_tokenizer_matches_the_same_tokens(tmp_path: Path, case: str) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, "pieces", case))
    assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (CONFIG, {"eos_token": 5}, "eos_token of the tokenizer must be text, or an object"),
        (CONFIG, {"eos_token": {"content": "<x>", "special": "yes"}}, "eos_token of the tokenizer"),
        (CONFIG, {"added_tokens_decoder": ["<x>"]}, "added_tokens_decoder of the tokenizer must"),
        (CONFIG, {"added_tokens_decoder": {"one": token("<x>")}}, "has a key that is not an id"),
        (CONFIG, {"added_tokens_decoder": {"1": {"special": True}}}, "and flags"),
        (CONFIG, {"extra_special_tokens": "<x>"}, "must be a list or an object of tokens"),
        (CONFIG, {"extra_special_tokens": [3]}, "extra_special_tokens of the tokenizer"),
        (ADDED, {"<x>": "3"}, "must give each token its id"),
    ],
)
def test_what_is_no_token_is_named(tmp_path: Path, file: str, content: Any, said: str) -> None:
    save_tokenizer(tmp_path, byte_fallback_json())
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=said):
        Tokenizer.from_folder(tmp_path)
