"""Fields of other servers: the tables in ``docs/server.md`` against what becomes of each field."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from fastapi import FastAPI

from paceline.server.protocol.foreign import ASKS_FOR_NOTHING
from tests.conftest import REPOSITORY
from tests.server.asgi import application, post
from tests.server.chats import CHATML, THINKING, USER, ChatServer
from tests.server.fakes import ANSWER, FakeEngine
from tests.server.llama_cpp.gaps import fim_tokenizer

PAGE = (REPOSITORY / "docs" / "server.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Fields of other servers\n")[2].partition("\n## ")[0]
REFUSED, ACCEPTED = SECTION.split("These are accepted without effect")
CODE = re.compile(r"`([^`]+)`")
CHATS, COMPLETIONS, INFILL = "/v1/chat/completions", "/v1/completions", "/infill"
NATIVE = "/completion"
BODIES: dict[str, Any] = {
    COMPLETIONS: {"prompt": "a"},
    CHATS: {"messages": [USER]},
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
    NATIVE: {"prompt": "a"},
}
PATHS = {"completions": COMPLETIONS, "chats": CHATS, "`/infill`": INFILL, "`/completion`": NATIVE}
OF_COMPLETIONS = ("suffix", "echo", "add_special_tokens")
HARMLESS = {
    "dry_sequence_breakers": ["a"],
    "store": True,
    "metadata": {"a": "b"},
    "verbose": True,
}
NUMBERS = (
    *("id_slot", "n_indent", "t_max_prompt_ms", "t_max_predict_ms", "n_keep", "n_discard"),
    *("n_cache_reuse", "sse_ping_interval"),
)
TUNING = (
    *("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "adaptive_decay"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)
SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"]
# What /props of llama.cpp b11549 (xllamacpp 2026.10.11549) has in default_generation_settings.
LLAMA_CPP_PARAMS: dict[str, Any] = {
    "seed": 4294967295,
    "temperature": 0.800000011920929,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.949999988079071,
    "min_p": 0.05000000074505806,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.10000000149011612,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.10000000149011612,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.8999999761581421,
    "max_tokens": -1,
    "n_predict": -1,
    "n_keep": 0,
    "n_discard": 0,
    "ignore_eos": False,
    "stream": False,
    "n_probs": 0,
    "min_keep": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": [*SAMPLERS, "temperature"],
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}


def rows(part: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if "why" not in cells]


def refused_fields() -> dict[str, list[Any]]:
    """The values of each field that are accepted."""
    found: dict[str, list[Any]] = {}
    for _, cell, why in rows(REFUSED):
        assert why
        for field in cell.split("; "):
            name, *values = CODE.findall(field)
            assert name not in found, f"{name} appears twice"
            found[name] = [json.loads(value) for value in values]
    return found


def accepted_fields() -> list[tuple[str, str]]:
    return [
        (PATHS[place], name)
        for where, names, _ in rows(ACCEPTED)
        for place in where.split(", ")
        for name in CODE.findall(names)
    ]


@cache
def app() -> FastAPI:
    return application(FakeEngine(tokenizer=fim_tokenizer(CHATML)))


def ask(path: str, fields: dict[str, Any]) -> Any:
    return post(app(), path, {**BODIES[path], "max_tokens": 2, **fields})


@pytest.mark.parametrize(("name", "values"), refused_fields().items())
def test_a_field_of_others_is_refused_by_name_unless_it_asks_for_nothing(
    name: str, values: list[Any]
) -> None:
    for path in (CHATS,) if name in OF_COMPLETIONS else (CHATS, COMPLETIONS):
        for value in (*values, None):
            answer = ask(path, {name: value})
            assert answer.status_code == 200, answer.text
        answer = ask(path, {name: {"asks": "for something"}})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"].startswith(name)
        assert name in error["message"]


@pytest.mark.parametrize(("path", "name"), accepted_fields())
def test_a_field_without_effect_is_accepted_and_changes_nothing(path: str, name: str) -> None:
    value = HARMLESS.get(name, 7 if name in (*NUMBERS, *TUNING) else "x")
    plain, with_it = ask(path, {}), ask(path, {name: value})
    assert with_it.status_code == 200, with_it.text
    told = [each.get("choices", each.get("content")) for each in (plain.json(), with_it.json())]
    assert told[0] == told[1]


def test_the_table_is_complete() -> None:
    assert ASKS_FOR_NOTHING.keys() <= refused_fields().keys()
    assert len(accepted_fields()) == 40


@pytest.mark.parametrize("path", BODIES)
def test_what_llama_cpp_tells_of_itself_may_be_sent_back(path: str) -> None:
    answer = post(app(), path, {**BODIES[path], **LLAMA_CPP_PARAMS})
    assert answer.status_code == 200, answer.text


def test_thoughts_are_told_as_words_where_a_chat_asks_for_that() -> None:
    answer = "<think>Where?</think>In Rome."
    for asked, content in ((None, "In Rome."), ("deepseek", "In Rome."), ("none", answer)):
        told = ChatServer(answer, THINKING).post([USER], reasoning_format=asked)[1]
        assert told["choices"][0]["message"]["content"] == content


def test_an_earlier_refusal_and_another_role_are_words_of_the_conversation() -> None:
    server = ChatServer("It rains.")
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    status, body = server.post([USER, refused, {"role": "critic", "content": "Too short."}])
    assert status == 200, body
    assert "<|im_start|>assistant\nI will not.<|im_end|>" in server.prompt
    assert "<|im_start|>critic\nToo short.<|im_end|>" in server.prompt
    assert server.post([{"role": "x<|im_end|>", "content": "a"}])[0] == 400


def test_no_limit_and_a_whole_number_as_a_float() -> None:
    for body, told in (({"max_tokens": -1}, ANSWER), ({"max_tokens": 2.0}, ANSWER[:9])):
        answer = post(app(), COMPLETIONS, {"prompt": "a", **body})
        assert answer.json()["choices"][0]["text"].startswith(told[:4]), answer.text
    everything = post(app(), COMPLETIONS, {"prompt": "a", "max_tokens": -1}).json()
    assert everything["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("path", BODIES)
def test_no_unknown_field_is_dropped(path: str) -> None:
    for value in (None, False, 0, "", [], {}):
        error = ask(path, {"unheard_of": value}).json()["error"]
        assert error["message"] == "unknown field 'unheard_of'"
