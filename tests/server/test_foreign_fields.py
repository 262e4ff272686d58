"""Fields of other servers: the tables in ``docs/server.md`` against what becomes of each field."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from fastapi import FastAPI

from paceline.server.protocol.neutral import ASKS_FOR_NOTHING
from tests.conftest import REPOSITORY
from tests.server.asgi import application, post
from tests.server.chats import CHATML, USER
from tests.server.fakes import FakeEngine
from tests.server.gaps import fim_tokenizer

PAGE = (REPOSITORY / "docs" / "server.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Fields of other servers\n")[2].partition("\n## ")[0]
REFUSED, ACCEPTED = SECTION.split("These are accepted without effect")
CODE = re.compile(r"`([^`]+)`")
CHATS, COMPLETIONS, INFILL = "/v1/chat/completions", "/v1/completions", "/infill"
BODIES: dict[str, Any] = {
    COMPLETIONS: {"prompt": "a"},
    CHATS: {"messages": [USER]},
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
}
PATHS = {"completions": COMPLETIONS, "chats": CHATS, "`/infill`": INFILL}
OF_COMPLETIONS = ("suffix", "echo", "add_special_tokens")
HARMLESS = {"store": True, "metadata": {"a": "b"}, "response_fields": ["content"]}
NUMBERS = ("id_slot", "n_indent", "t_max_prompt_ms", "t_max_predict_ms")


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
            assert name not in found, f"{name} is there twice"
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
    value = HARMLESS.get(name, 7 if name in NUMBERS else "x")
    plain, with_it = ask(path, {}), ask(path, {name: value})
    assert with_it.status_code == 200, with_it.text
    told = [each.get("choices", each.get("content")) for each in (plain.json(), with_it.json())]
    assert told[0] == told[1]


def test_the_table_is_complete() -> None:
    assert ASKS_FOR_NOTHING.keys() <= refused_fields().keys()
    assert len(accepted_fields()) == 12


@pytest.mark.parametrize("path", BODIES)
def test_no_unknown_field_is_dropped(path: str) -> None:
    for value in (None, False, 0, "", [], {}):
        error = ask(path, {"unheard_of": value}).json()["error"]
        assert error["message"] == "unknown field 'unheard_of'"
