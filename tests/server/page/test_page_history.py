"""Conversations that the browser keeps: list, search, files, bounds; and the settings' presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.browser import Page
from tests.server.page.page_server import STORY, OpenPage

pytestmark = pytest.mark.slow

MADE = """
const make = (id, updated, text = "Because.") => ({ id, title: `About ${id}`, updated, system: "",
  turns: [{ user: `Why ${id}?`, answer: { name: "Answer", text, reasoning: "", reason: "stop",
    isMarkdown: true, pieces: [["suffix", text.length]],
    tally: { tokens: 2, steps: 1, rate: null, acceptanceLength: 2,
      origins: [["suffix", 1]] } } }] });
const shelf = () => { const kept = {}; return new Proxy(kept, { get: (_, name) => ({
  setItem: (key, value) => { kept[key] = value; }, getItem: (key) => kept[key],
  removeItem: (key) => { delete kept[key]; } })[name] }); };
"""


def titles(page: Page) -> list[str]:
    return [node.text for node in page.all("#history-list .pick")]


def test_conversation_is_kept_and_opened_again(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.fill("system", "Be brief.")
    page.ask("What is a paceline?")
    assert script.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.one("#new-chat").click()
    page.ask("Another one")
    assert titles(page) == ["Another one", "What is a paceline?"]
    page.open(seen.url)
    assert page.one(".user").text == "Another one"
    page.all("#history-list .pick")[1].click()
    assert page.one(".user").text == "What is a paceline?"
    assert page.answer_text() == STORY
    assert "68 tokens" in page.one(".figures").text
    assert page.all(".text .o1") != []
    page.ask("Go on")
    roles = [message["role"] for message in script.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert titles(page) == ["What is a paceline?", "Another one"]


def test_a_page_that_is_loaded_again_goes_on_where_it_was(visit: OpenPage) -> None:
    """A new chat stays a new one, another tab begins with one, and what had arrived is there."""
    page = (seen := visit()).page
    page.ask("What is a paceline?")
    page.one("#new-chat").click()
    page.open(seen.url)
    assert page.all(".turn") == []
    page.send("endless")
    page.until(lambda: len(page.answer_text()) > 100)
    page.open(seen.url)
    assert page.one(".user").text == "endless"
    assert page.answer_text().startswith(STORY[:100])
    assert page.all(".end .resume") != []
    page.script("sessionStorage.clear()")  # as a tab that is opened
    page.open(seen.url)
    assert page.all(".turn") == []
    assert titles(page) == ["endless", "What is a paceline?"]


def test_a_new_chat_is_begun_where_conversations_are(visit: OpenPage) -> None:
    page = visit().page
    assert page.one("#prompt").get_attribute("placeholder") == "Write a message…"
    page.ask("What is a paceline?")
    page.one("#history #new-chat").click()
    assert page.all(".turn") == []
    assert page.focus() == "prompt"
    for width in (1000, 360):
        page.look(width=width)
        shown = [node for node in page.all(".new-chat") if node.is_displayed()]
        assert len(shown) == 1
        assert shown[0].rect["y"] == page.one("#history-toggle").rect["y"]


def test_conversations_are_searched_renamed_and_deleted(visit: OpenPage) -> None:
    page = (seen := visit()).page
    for text in ("Red apples", "Green pears"):
        page.one("#new-chat").click()
        page.ask(text)
    page.one("#search").send_keys("strongest red")
    assert titles(page) == ["Red apples"]
    page.script("document.querySelector('#history-list .rename').click()")
    page.type("Fruit{enter}")
    page.one("#search").clear()
    page.one("#search").send_keys(" ")
    page.until(lambda: titles(page) == ["Green pears", "Fruit"])
    page.script("document.querySelector('#history-list .delete').focus()")
    page.type("{enter}")
    assert titles(page) == ["Green pears", "Fruit"]
    page.type("{enter}")
    page.until(lambda: titles(page) == ["Fruit"])
    assert page.all(".turn") == []
    page.open(seen.url)
    assert titles(page) == ["Fruit"]


def test_what_is_deleted_while_it_is_answered_stays_deleted(visit: OpenPage) -> None:
    page = (seen := visit()).page
    page.ask("What is a paceline?")
    page.send("endless")
    page.until(lambda: page.answer_text())
    press = "document.querySelector('#history-list .delete').click()"
    page.script(f"{press}; {press}")
    page.until_idle()
    assert titles(page) == []
    page.open(seen.url)
    assert titles(page) == []


def test_an_answer_that_ends_while_a_name_is_typed_is_kept(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.ask("What is a paceline?")
    script.step_seconds = 0.05
    page.send("Go on")
    page.script("document.querySelector('#history-list .rename').click()")
    page.type("Wind")
    page.until(lambda: titles(page) == ["Wind"])
    page.open(seen.url)
    assert len(page.all(".turn")) == 2


def test_nothing_is_kept_where_that_is_not_wanted(visit: OpenPage) -> None:
    page = (seen := visit()).page
    page.one("[name=keep]").click()
    page.ask("A secret")
    page.open(seen.url)
    assert titles(page) == []
    assert "secret" not in page.script("return JSON.stringify(localStorage)")


def test_oldest_conversations_make_room(visit: OpenPage) -> None:
    found = visit().page.module(
        "store.js",
        MADE
        + """
        const many = new module.Store(shelf());
        for (let n = 0; n < 210; n += 1) many.save(make(`n${n}`, n));
        const large = new module.Store(shelf());
        for (let n = 0; n < 5; n += 1) large.save(make(`n${n}`, n, "x".repeat(1_200_000)));
        let room = 2;
        const small = new module.Store({ setItem: () => { if (!room--) throw new Error("full"); },
                                         removeItem: () => { room = 1; } });
        for (let n = 0; n < 3; n += 1) small.save(make(`n${n}`, n));
        return [many.all.length, many.all.at(-1).id, large.all.map(({ id }) => id),
                small.all.map(({ id }) => id),
                large.save(make("vast", 9, "x".repeat(4_000_000)))];
        """,
    )
    assert found == [200, "n10", ["n4", "n3", "n2"], ["n2", "n1"], False]


def test_exported_conversations_are_imported(visit: OpenPage, tmp_path: Path) -> None:
    page = (seen := visit()).page
    page.ask("What is a paceline?")
    text = page.module("store.js", "return module.fileOf(new module.Store().all);")
    file = tmp_path / "kept.json"
    file.write_text(text)
    page.script("localStorage.clear()")
    page.open(seen.url)
    assert titles(page) == []
    for said in ("1 conversation added.", "0 conversations added."):
        page.one("#import-file").send_keys(str(file))
        page.until(lambda said=said: page.one("#history-status").text == said)
    assert titles(page) == ["What is a paceline?"]
    page.one("#history-list .pick").click()
    assert page.answer_text() == STORY


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: "oops", "the file is not JSON"),
        (lambda file: file | {"format": "other"}, "the file.format is not one of"),
        (lambda file: file | {"version": 4}, "the file.version is not one of"),
        (lambda file: file | {"extra": 1}, "the file.extra is not a field"),
        (
            lambda file: file | {"conversations": [{"id": "../x"}]},
            "conversations[0].id is not an id",
        ),
        (lambda file: file | {"conversations": {}}, "the file.conversations is not a list"),
    ],
)
def test_other_files_are_refused(
    visit: OpenPage, tmp_path: Path, change: Any, problem: str
) -> None:
    page = visit().page
    made = change({"format": "paceline-conversations", "version": 1, "conversations": []})
    file = tmp_path / "kept.json"
    file.write_text(made if isinstance(made, str) else json.dumps(made))
    page.one("#import-file").send_keys(str(file))
    page.until(lambda: problem in page.one("#history-status").text)
    assert titles(page) == []


def test_presets_of_sampling(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    choose = """
      const field = document.querySelector("[name=preset]");
      field.value = arguments[0];
      field.dispatchEvent(new Event("change", { bubbles: true }));
    """
    sent = {}
    for name in ("Precise", "Balanced", "Creative", "Model defaults"):
        page.script(choose, name)
        page.ask(name)
        body = script.bodies[-1]
        sent[name] = {key: body[key] for key in ("temperature", "top_p", "min_p") if key in body}
    assert sent == {
        "Precise": {"temperature": 0},
        "Balanced": {"temperature": 0.7, "top_p": 0.95},
        "Creative": {"temperature": 1, "min_p": 0.05},
        "Model defaults": {},
    }
    page.fill("temperature", "0.3")
    assert page.one("#preset").get_attribute("value") == "Custom"
    page.script("document.querySelector('.settings details').open = true")
    page.fill("top-k", "40")
    page.script("document.getElementById('stop-texts').value = 'END\\nSTOP'")
    page.ask("Custom")
    body = script.bodies[-1]
    assert (body["temperature"], body["top_k"], body["stop"]) == (0.3, 40, ["END", "STOP"])
