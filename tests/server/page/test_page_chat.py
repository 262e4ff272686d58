"""The page's chat in a browser: answers, arms beside each other, stopping, errors, the key."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.server.app import create_app
from paceline.server.http.config import ServerConfig
from tests.server.fakes import ANSWER, FakeEngine
from tests.server.page.browser import Page
from tests.server.page.page_server import STORY, OpenPage, serving

pytestmark = pytest.mark.slow


def test_chat_end_to_end(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.ask("What is a paceline?")
    assert page.answer_text() == STORY
    drafted = {node.get_attribute("title").split(",")[0] for node in page.all(".text [class^=o]")}
    assert drafted == {"prompt_lookup", "suffix", "draft_model"}
    assert re.search(r"[\d.]+ tok/s\s+2.52 per step\s+68 tokens", page.one(".figures").text)
    body = script.bodies[-1]
    assert body.keys().isdisjoint({"temperature", "top_p", "max_tokens"})
    assert page.one("#temperature").get_attribute("placeholder") == "0.2"
    assert page.one("#min-p").get_attribute("placeholder") == "default"
    assert body["speculative"] == {"enabled": True}
    assert "seed" not in body
    page.ask("And then?")
    roles = [message["role"] for message in script.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert page.complaints() == []


def test_settings_are_sent_and_remembered(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.fill("temperature", "0.7")
    page.fill("seed", "5")
    page.fill("max-tokens", "9")
    page.one("[name=speculation]").click()
    page.ask("Shorter")
    assert "Stopped at the token limit" in page.one(".answer .end").text
    body = script.bodies[-1]
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.7, 5, 9)
    assert body["speculative"] == {"enabled": False}
    page.open(seen.url)
    assert page.one("#temperature").get_attribute("value") == "0.7"
    assert not page.one("[name=speculation]").is_selected()


def test_settings_that_were_not_changed_follow_the_defaults(visit: OpenPage) -> None:
    """Nothing but choices is remembered; a mode that the model left no choice about is none."""
    page = (seen := visit(has_template=False)).page
    page.ask("Once upon a time")
    page.fill("seed", "5")
    page.one("[name=colours]").click()
    kept = page.script("return JSON.parse(localStorage.getItem('paceline-choices'))")
    assert kept == {"seed": "5", "colours": False}
    page.fill("seed", "")
    page.one("[name=colours]").click()
    assert page.script("return localStorage.getItem('paceline-choices')") == "{}"
    seen.script.has_template = True
    page.open(seen.url)
    assert page.one("[name=mode]:checked").get_attribute("value") == "chat"


def test_drafted_tokens_are_marked_everywhere_unless_switched_off(visit: OpenPage) -> None:
    """In an answer as Markdown and as tokens, in both arms of a comparison, and in a schema's."""
    page = visit().page
    lines = """
      const marked = [...document.querySelectorAll(".text .o1, .text .o2, .text .o3")]
        .map((node) => getComputedStyle(node).textDecorationLine);
      const drawn = getComputedStyle(document.querySelector(".markdown"), "::highlight(o1)");
      return [...new Set([...marked, drawn.textDecorationLine])];
    """
    page.ask("What is a paceline?")
    page.one("[name=compare]").click()
    page.ask("differ")
    page.one("#tab-schema").click()
    page.one("#schema-send").click()
    page.until(lambda: page.all("#schema-parsed pre"))
    assert page.script(lines) == ["underline"]
    page.one("#tab-chat").click()
    assert page.one("#legend").is_displayed()
    page.one("[name=colours]").click()
    assert page.script(lines) == ["none"]
    assert not page.one("#legend").is_displayed()


def test_arms_beside_each_other(visit: OpenPage) -> None:
    page, script = (seen := visit(step_seconds=0.03)).page, seen.script
    page.one("[name=compare]").click()
    page.ask("The same twice")
    # The second clock starts with the second arm: the first one takes 27 steps.
    first_after = re.search(r"([\d,]+) ms to first", page.one(".figures").text)
    assert first_after
    assert float(first_after[1].replace(",", "")) < 700
    verdict = page.verdict()
    assert re.fullmatch(r"Same text(, and|\. Over \d+ rounds:) .*\.", verdict), verdict
    told = re.search(r"([\d.]+)x faster \(([\d.]+)x to ([\d.]+)x\)", verdict)
    if told:  # else the machine was too busy to say so
        assert 1 < float(told[1]) <= float(told[3]) <= round(68 / 27, 2)
    on, off, *more = script.bodies
    assert (on["speculative"], off["speculative"]) == ({"enabled": True}, {"enabled": False})
    assert on["seed"] == off["seed"]
    assert on["cache_salt"] != off["cache_salt"]
    assert len(more) >= 4  # Short answers are asked for again, the arms by turns.
    assert [body["speculative"]["enabled"] for body in more[:4]] == [False, True, True, False]
    assert {body["seed"] for body in script.bodies} == {on["seed"]}
    assert len({body["cache_salt"] for body in script.bodies}) == len(script.bodies)
    assert len(page.all(".turn .answer")) == 2
    del script.bodies[:]
    page.ask("differ")
    # Another comparison begins with the other arm.
    assert [body["speculative"]["enabled"] for body in script.bodies] == [False, True]
    assert page.verdict() == f"The texts differ from character {STORY.index('wind') + 1} on."


def test_a_speed_up_beyond_the_saved_steps_is_not_claimed(visit: OpenPage) -> None:
    """The arm without speculation is held up, as if by others, ten times as long as a step is."""
    page = visit(step_seconds=0.001, plain_step_seconds=0.01).page
    page.one("[name=compare]").click()
    page.ask("The same twice")
    verdict = page.verdict()
    assert verdict.startswith("Same text")
    told = re.search(r"([\d.]+)x faster \(([\d.]+)x to ([\d.]+)x\)", verdict)
    assert told or "could not be measured" in verdict, verdict
    assert not told or float(told[1]) <= float(told[3]) <= round(68 / 27, 2)


def test_model_without_a_template_completes(visit: OpenPage) -> None:
    page, script = (seen := visit(has_template=False)).page, seen.script
    page.ask("Once upon a time")
    assert page.answer_text() == STORY
    assert script.bodies[-1]["prompt"] == "Once upon a time"
    assert "no chat template" in page.one("#mode-note").text
    page.ask("Another")
    assert [("messages" in body) for body in script.bodies] == [True, False, False]


@pytest.mark.parametrize("how", ["button", "escape"])
def test_answer_can_be_stopped(visit: OpenPage, how: str) -> None:
    page, script = (seen := visit()).page, seen.script
    page.send("endless")
    page.until(lambda: len(page.answer_text()) > 100)
    page.stop(by_key=how == "escape")
    page.until(lambda: script.ended == 1)
    assert script.completed == 0
    assert "Stopped." in page.one(".answer .end").text
    page.ask("Go on")
    assert page.answer_text() == STORY


@pytest.mark.parametrize(
    ("prompt", "title", "details", "kept"),
    [
        ("busy", "The server is busy", ["32 requests are waiting", "in 3 s"], False),
        ("refused", "The request was refused", ["not within 0 to 2 (field temperature)"], False),
        ("fail", "The server could not finish", ["the engine died", "kept"], True),
        ("lost", "The connection was lost", ["kept"], True),
    ],
)
def test_errors_are_shown_and_the_page_goes_on(
    visit: OpenPage, prompt: str, title: str, details: list[str], kept: bool
) -> None:
    page = visit().page
    page.ask(prompt)
    shown = page.one(".failure[role=alert]").text
    assert title in shown
    assert all(detail in shown for detail in details)
    assert page.answer_text().startswith("A paceline") == kept
    page.one(".failure button").click()
    page.until_idle()
    assert len(page.all(".turn")) == 1
    page.ask("What is a paceline?")
    assert page.answer_text() == STORY


def test_restart_of_the_engine_is_waited_for(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    script.ready = False
    page.ask("fail")
    page.until(lambda: "engine is not ready" in page.one("#banner").text)
    script.ready = True
    page.until(lambda: page.one("#banner").text == "The server is back.")
    page.until(lambda: not page.one("#banner").is_displayed())


def test_output_is_never_markup(visit: OpenPage) -> None:
    page = visit().page
    page.ask("markup")
    assert page.answer_text().startswith('<img src=x onerror="document.title=')
    assert page.all(".answer img, .text b, .markdown b") == []
    assert "broken" not in page.driver.title


def test_key_is_asked_for_and_kept_for_the_tab(visit: OpenPage) -> None:
    page = (seen := visit(key="let-me-in")).page
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.fill("key", "wrong")
    page.one("#key-form .primary").click()
    page.until(lambda: page.one("#key-dialog").is_displayed() and not page.value("key"))
    page.fill("key", "let-me-in")
    page.one("#key-form .primary").click()
    page.until(lambda: page.one("#model").text == "rider-1b")
    page.ask("What is a paceline?")
    assert page.answer_text() == STORY
    page.open(seen.url)
    page.until(lambda: page.one("#model").text == "rider-1b")
    assert page.script("return document.cookie") == ""
    assert "let-me-in" not in page.script("return JSON.stringify(localStorage)")


def test_page_of_the_whole_server_behind_a_password(browser: Any) -> None:
    """The real application over an engine without a model; its key as the browser's password."""
    engine = FakeEngine(state="ready")
    with serving(create_app(engine, ServerConfig(api_keys=("sesame",)))) as url:
        page = Page(browser)
        page.look()
        browser.get(url)
        assert page.all("#prompt") == []
        page.open(url.replace("//", "//anybody:sesame@"))
        page.until(lambda: page.one("#model").text == "fake")
        assert "no chat template" in page.one("#mode-note").text
        page.ask("Once upon a time")
        assert page.answer_text() == ANSWER
        assert page.all(".text .o1") != []
        page.one("#tab-live").click()
        page.until(lambda: len(page.all("#live .tile")) == 6)
        assert not page.one("#key-dialog").is_displayed()
