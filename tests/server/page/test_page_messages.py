"""What can be done with messages in a browser: copy, regenerate, edit, continue."""

from __future__ import annotations

import pytest

from tests.server.page.browser import Page
from tests.server.page.page_server import STORY, OpenPage

pytestmark = pytest.mark.slow

COPIES = """
window.copied = [];
Object.defineProperty(navigator, "clipboard", {
  value: { writeText: async (text) => window.copied.push(text) }
});
"""


def copied(page: Page) -> list[str]:
    found: list[str] = page.script("return window.copied")
    return found


def test_messages_and_code_are_copied(visit: OpenPage) -> None:
    text = "Look:\n\n```python\nx = 1\n```"
    page = visit(text=text).page
    page.script(COPIES)
    page.ask("Show me")
    page.until(lambda: page.all(".code-block .copy"))
    page.one(".code-block .copy").click()
    page.one(".end .copy").click()
    page.one(".said .copy").click()
    page.until(lambda: len(copied(page)) == 3)
    assert copied(page) == ["x = 1\n", text, "Show me"]


def test_answer_is_regenerated(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.ask("One")
    page.ask("Two")
    page.all(".end .again")[0].click()
    page.until(lambda: len(page.all(".turn")) == 1)
    page.until_idle()
    assert [message["content"] for message in script.bodies[-1]["messages"]] == ["One"]
    assert page.answer_text() == STORY


def test_speed_of_a_repetition_is_labelled(visit: OpenPage) -> None:
    """An answer that the server has given before is drafted from that: no speed for new text."""
    page = (seen := visit()).page
    page.ask("One")
    assert "repeating" not in page.one(".figures").text
    assert page.all(".remark") == []
    page.one(".end .again").click()
    page.until_idle()
    assert "tok/s, repeating" in page.one(".figures").text
    assert page.one(".remark").text.startswith("It was drafted from an earlier answer")
    page.open(seen.url)
    assert "tok/s, repeating" in page.one(".figures").text
    assert page.one(".remark").text.startswith("It was drafted from an earlier answer")
    page.one("[name=speculation]").click()
    page.one(".end .again").click()
    page.until_idle()
    assert "repeating" not in page.one(".figures").text
    assert page.all(".remark") == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "0", "without randomness, the same prompt always gets the same answer."),
        ("seed", "5", "with a fixed seed, the same prompt always gets the same answer."),
    ],
)
def test_an_answer_that_cannot_differ_says_so(
    visit: OpenPage, field: str, value: str, words: str
) -> None:
    page = visit().page
    page.fill(field, value)
    page.one("[name=speculation]").click()
    page.ask("One")
    assert page.all(".remark") == []
    page.one(".end .again").click()
    page.until_idle()
    assert words in page.one(".remark").text
    assert "speed" not in page.one(".remark").text


def test_how_much_of_an_answer_is_a_repetition(visit: OpenPage) -> None:
    found = visit().page.module(
        "repeats.js",
        """
        const { repetition, whySame } = module;
        return [repetition("abcd", ["xy", "abcd"]), repetition("abcd", ["abxy"]),
                repetition("abcd", ["axyz", ""]), repetition("abcd", ["abcdef"]),
                repetition("", [""]), whySame({}, { temperature: 0.2 }, null),
                whySame({}, { temperature: 0 }, null) !== "",
                whySame({ temperature: 1 }, { temperature: 0 }, null)];
        """,
    )
    assert found == ["whole", "part", "", "whole", "", "", True, ""]


def test_message_is_edited_and_sent_again(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.ask("One")
    page.ask("Two")
    page.all(".said .edit")[0].click()
    page.type("{escape}")
    assert page.all(".editor") == []
    page.all(".said .edit")[1].click()
    page.type(" and more{enter}")
    page.until(lambda: page.one(".user").text == "Two and more")
    page.until_idle()
    said = [message["content"] for message in script.bodies[-1]["messages"]]
    assert said == ["One", STORY, "Two and more"]
    assert len(page.all(".turn")) == 2


@pytest.mark.parametrize("has_template", [True, False])
def test_cut_answer_is_continued(visit: OpenPage, has_template: bool) -> None:
    page, script = (seen := visit(has_template=has_template)).page, seen.script
    page.ask("Warm up")
    assert page.all(".end .resume") == []
    page.fill("max-tokens", "9")
    page.ask("Shorter")
    cut = page.answer_text()
    page.fill("max-tokens", "256")
    page.one(".end .resume").click()
    page.until(lambda: len(page.answer_text()) > len(cut))
    page.until_idle()
    body = script.bodies[-1]
    if has_template:
        assert page.answer_text() == STORY
        assert body["messages"][-1] == {"role": "assistant", "content": cut}
        assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
        assert "68 tokens" in page.one(".figures").text
    else:
        assert body["prompt"] == "Shorter" + cut
    assert page.all(".end .resume") == []
