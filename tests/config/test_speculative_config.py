"""Speculative configurations: what is taken, what is refused and how."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline.config import LOOSENING_KEYS, METHODS, SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import DraftModelConfig, SuffixConfig
from paceline.core.errors import ConfigError


def test_json_object_list_and_alias() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
    (config,) = parse_speculative_config(text)
    assert config == SpeculativeConfig("prompt_lookup", None, 4, prompt_lookup_max=3)
    two = parse_speculative_config([config, {"method": "draft_model", "model": "x"}])
    assert [c.method for c in two] == ["prompt_lookup", "draft_model"]
    assert parse_speculative_config([]) == parse_speculative_config("[]") == ()
    assert parse_speculative_config({"max_tree_depth": 6})[0].num_speculative_tokens == 6
    assert parse_speculative_config({"method": "self", "bits": 3})[0].dtype == "int3"


@pytest.mark.parametrize("key", LOOSENING_KEYS)
def test_keys_that_loosen_acceptance_are_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match="the target did not choose"):
        parse_speculative_config({"method": "ngram", key: 0.5})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{", "not JSON"),
        ("3", "object or a list"),
        pytest.param("[" * 100_000, "not JSON", id="deep"),
        pytest.param("9" * 5000, "not JSON", id="long"),
        ("[3]", "must be an object"),
        ({"methd": "ngram"}, "unknown speculative key 'methd'; allowed: method, model"),
        (
            {"method": "grammar", "k": 4},
            "num_speculative_tokens, max_tree_nodes, max_branching, min_accept_prob, "
            r"max_tree_depth \(method grammar\)$",
        ),
        ({"model": "x", "k": 4}, r"vocab_replacements, bits, max_tree_depth \(method draft_model"),
        ({"method": "magic"}, "allowed: prompt_lookup, suffix.* plugins .*: none"),
        ({"method": ["ngram"]}, "allowed: prompt_lookup"),
        ({"method": "draft_model"}, 'needs "model"'),
        ({"method": "draft_model", "model": 3}, "allowed: a string"),
        ({"num_speculative_tokens": "4"}, "whole numbers"),
        ({"num_speculative_tokens": 4.5}, "whole numbers"),
        ({"num_speculative_tokens": True}, "whole numbers"),
        ({"num_speculative_tokens": 0}, "from 1 to 64"),
        ({"min_accept_prob": 1.5}, "from 0.0 to 1.0"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_max is 3"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "from 1 to 256"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.1}, "from 0.0 to 1.0"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "from 0 to"),
        ({"method": "suffix", "options": {"a": 1}}, "options is for plugins; suffix"),
        ({"options": []}, "must be an object"),
        ({"max_branching": "4"}, "whole numbers"),
        ({"dtype": "int5"}, "allowed: auto"),
        ({"method": "self", "bits": 5}, "bits is 5; allowed: 8, 4, 3, 2"),
        ({"method": "self", "bits": "3"}, "bits is '3'; allowed:"),
        ({"method": "self", "bits": 3, "dtype": "int4"}, "give one of them"),
        ({"deterministic": "yes"}, "true and false"),
        ({"use_heterogeneous_vocab": 1}, "use_heterogeneous_vocab is 1; allowed: true"),
        ({"method": "suffix", "use_heterogeneous_vocab": True}, 'for method "draft_model"'),
        ({"model": "x", "vocab_replacements": [["a", "b"]]}, "needs use_heterogeneous_vocab"),
        ({"model": "x", "vocab_replacements": "ab"}, "must be a list of"),
        ({"model": "x", "vocab_replacements": [["", "b"]]}, "is not empty"),
        ({"model": "x", "vocab_replacements": [["a", 1]]}, "must be a list of"),
        ({"model": "x", "vocab_replacements": [["\ud800", "b"]]}, "must be a list of"),
        ({"model": "x", "vocab_replacements": [["a", "\udfff"]]}, "must be a list of"),
    ],
)
def test_what_is_wrong_is_said(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_speculative_config(source)


def test_replacements_come_as_lists() -> None:
    text = '{"model": "x", "use_heterogeneous_vocab": true, "vocab_replacements": [["a", "b"]]}'
    (config,) = parse_speculative_config(text)
    assert config.vocab_replacements == (("a", "b"),)
    assert hash(config) == hash(parse_speculative_config(text)[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_a_small_configuration_of_its_own(method: str) -> None:
    values = {"draft_layers": 2} if method == "self" else {"model": "x"}
    (config,) = parse_speculative_config({"method": method, **values})
    assert type(config) is METHODS[method].config
    assert len(fields(config)) <= 15
    assert config == SpeculativeConfig(method, **values)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_class_serves_its_methods_alone() -> None:
    assert SuffixConfig() == SpeculativeConfig("suffix") != SpeculativeConfig("ngram")
    with pytest.raises(ConfigError, match="SuffixConfig is not for draft_model; DraftModelConfig"):
        SuffixConfig("draft_model", "x")
    with pytest.raises(ConfigError, match="no field 'prompt_lookup_max'"):
        DraftModelConfig(model="x", prompt_lookup_max=3)


@pytest.mark.parametrize("config", [SpeculativeConfig, SuffixConfig])
def test_a_misspelt_key_is_refused_with_those_of_the_method(config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config("suffix", max_tre_nodes=4)
    message = str(caught.value)
    assert "no field 'max_tre_nodes' (did you mean max_tree_nodes?); allowed: method" in message
    assert "vocab_replacements" not in message  # which is another method's
    with pytest.raises(ConfigError, match="no field 'options'"):
        SpeculativeConfig("suffix", options={})


def test_a_key_of_another_method_is_checked_and_named(caplog: pytest.LogCaptureFixture) -> None:
    usual = {"method": "suffix", "dtype": "auto", "draft_layers": None}
    assert parse_speculative_config(usual) == (SuffixConfig(),)
    assert not caplog.messages
    assert parse_speculative_config({"method": "suffix", "draft_layers": 2}) == (SuffixConfig(),)
    assert caplog.messages == [
        'draft_layers is for method "self"; suffix has no such key, and drafts without it'
    ]
    with pytest.raises(ConfigError, match="draft_layers is 0; allowed: whole numbers"):
        parse_speculative_config({"method": "suffix", "draft_layers": 0})


def test_the_page_says_what_each_method_drafts() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "proposers.md"
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines()]
    told = [(row[1], row[2].strip()) for row in rows if len(row) == 6]
    for name, method in METHODS.items():
        assert any(f"`{name}`" in shown and text == method.help for shown, text in told), name
