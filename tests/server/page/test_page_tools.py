"""Files, shortcuts, the model's card, and comparisons that are kept, in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.browser import Page
from tests.server.page.page_server import STORY, OpenPage

pytestmark = pytest.mark.slow

SAVED = """
window.saved = [];
URL.createObjectURL = (blob) => {
  blob.text().then((text) => window.saved.push(text));
  return "#";
};
HTMLAnchorElement.prototype.click = function () { window.savedAs = this.download; };
"""
DROP = """
const carried = new DataTransfer();
for (const [name, content, type] of arguments[0]) {
  const part = typeof content === "string" ? content : Uint8Array.from(content);
  carried.items.add(new File([part], name, { type: type ?? "" }));
}
const how = { dataTransfer: carried, bubbles: true, cancelable: true };
const event = (kind) => new DragEvent(kind, how);
const target = document.querySelector(".talk");
const isTaken = !target.dispatchEvent(event("dragover"));
target.dispatchEvent(event("drop"));
return isTaken;
"""


def drop(page: Page, *files: tuple[str, str | list[int]] | tuple[str, list[int], str]) -> None:
    """Files of a name and a text, or bytes, and perhaps the type that the system gives them."""
    assert page.script(DROP, files)


def problem(page: Page) -> str:
    return str(page.one("#attach-problem").text)


def test_dropped_files_become_text_of_the_prompt(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.one("#prompt").send_keys("Compare:")
    drop(page, ("one.py", "x = 1\n"), ("notes", "a ``` b\r\n"))
    page.until(lambda: "notes" in page.value("prompt"))
    expected = "Compare:\n\none.py:\n\n```py\nx = 1\n```\n\nnotes:\n\n````\na ``` b\n````\n"
    assert page.value("prompt") == expected
    page.one("#send").click()
    page.until_idle()
    assert script.bodies[-1]["messages"][-1]["content"] == expected
    assert page.complaints() == []


def test_chosen_file_is_continued_as_it_is(visit: OpenPage, tmp_path: Path) -> None:
    page = visit(has_template=False).page
    page.ask("One")
    file = tmp_path / "story.txt"
    file.write_text("Once upon")
    page.one("#attach-file").send_keys(str(file))
    page.until(lambda: page.value("prompt") == "Once upon")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([("long.txt", "x" * 256_001)], "long.txt is 257 kB; the limit is 256 kB per file."),
        (
            [
                (
                    "photo.jpg",
                    [0xFF, 0xD8, 0xFF, 0xE0, 0, 16, *b"JFIF", *[1] * 300_000],
                    "image/jpeg",
                )
            ],
            "photo.jpg is an image, and the model reads text only. Describe the image, or paste "
            "the text in it.",
        ),
        (
            [("paper.pdf", [*b"%PDF-1.7\n", *[0xE2] * 300_000], "application/pdf")],
            "paper.pdf is a PDF, which this page cannot read. Open it, copy the text that "
            "matters, and paste it here.",
        ),
        (
            [("letter.docx", [*b"PK\3\4", 20, 0])],
            "letter.docx is an office document. Export it as plain text or CSV and add that, or "
            "paste its text here.",
        ),
        (
            [("tool", [0x7F, *b"ELF", 2, 1, 1, 0])],
            "tool is not text. You can add text files such as plain text, Markdown, CSV, JSON, or "
            "source code.",
        ),
        (
            [("old.txt", list("Straße".encode("latin-1")))],
            "old.txt is not encoded as UTF-8. Save it as UTF-8 and add it again.",
        ),
        ([(f"{n}.txt", "x") for n in range(11)], "You can add at most 10 files at once."),
    ],
)
def test_file_that_does_not_fit_is_explained(visit: OpenPage, files: list[Any], words: str) -> None:
    page = visit().page
    drop(page, *files)
    page.until(lambda: problem(page) == words)
    assert page.value("prompt") == ""
    drop(page, ("good.txt", "good"))
    page.until(lambda: "good.txt" in page.value("prompt"))
    assert problem(page) == ""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_files_of_any_system_are_read(visit: OpenPage, encoding: str) -> None:
    """With a byte order mark too, and whatever type the system takes them for."""
    page = visit().page
    drop(page, ("main.ts", list("// Straße\r\nlet x = 1\r\n".encode(encoding)), "video/mp2t"))
    page.until(lambda: page.value("prompt"))
    assert page.value("prompt") == "main.ts:\n\n```ts\n// Straße\nlet x = 1\n```\n"
    drop(page, ("icon.svg", list(b"<svg/>"), "image/svg+xml"))
    page.until(lambda: "<svg/>" in page.value("prompt"))


def test_conversation_is_saved_as_markdown(visit: OpenPage) -> None:
    page = visit().page
    page.script(SAVED)
    page.one("#save").click()
    page.fill("system", "Be brief.")
    page.ask("What is a paceline?")
    page.one("[name=compare]").click()
    page.ask("differ")
    page.one("#save").click()
    page.until(lambda: page.script("return window.saved.length"))
    (text,) = page.script("return window.saved")
    assert page.script("return window.savedAs") == "What-is-a-paceline.md"
    assert text.split("\n\n")[:6] == [
        "# What is a paceline?",
        "Model: example/rider-1b",
        "## System prompt",
        "Be brief.",
        "## You",
        "What is a paceline?",
    ]
    parts = ["### Speculation on", "### Speculation off", "*The texts differ from character"]
    assert [part for part in parts if part in text] == parts
    assert text.count(STORY) == 2


def test_both_answers_of_a_comparison_are_kept(visit: OpenPage) -> None:
    page = (seen := visit()).page
    page.one("[name=compare]").click()
    page.ask("What is a paceline?")
    verdict = page.verdict()
    assert verdict.startswith("Same text")
    page.open(seen.url)
    heads = [head.text for head in page.all(".pair .answer strong")]
    assert heads == ["Speculation on", "Speculation off"]
    texts = [text.get_attribute("textContent") for text in page.all(".answer .text")]
    assert texts == [STORY] * 2
    assert page.verdict() == verdict


def test_files_of_the_first_version_are_read(visit: OpenPage) -> None:
    """Their turns have one answer each; what is here already is not doubled."""
    tally = {"tokens": 1, "steps": 1, "rate": None, "acceptanceLength": 1, "origins": []}
    answer: dict[str, Any] = {"name": "Answer", "text": "Yes", "reasoning": "", "reason": "stop"}
    answer |= {"isMarkdown": True, "pieces": [["", 3]], "tally": tally}
    turns = [{"user": "Well?", "answer": answer}]
    kept = {"id": "a", "title": "Well?", "updated": 1, "system": "", "turns": turns}
    file = {"format": "paceline-conversations", "version": 1, "conversations": [kept]}
    found = visit().page.module(
        "store.js",
        f"""
        const file = {json.dumps(file)};
        localStorage.setItem("paceline-conversation-a", JSON.stringify(file.conversations[0]));
        const store = new module.Store();
        const again = store.add(module.parseFile(JSON.stringify(file)));
        return [again, store.all.length, store.get("a").turns[0].other, store.get("b")];
        """,
    )
    assert found == [0, 1, None, None]


def test_shortcuts(visit: OpenPage) -> None:
    page = visit().page
    page.ask("One")
    page.type("{up}")
    assert page.script("return document.activeElement.value") == "One"
    page.type(" more{enter}")
    page.until(lambda: page.one(".user").text == "One more")
    page.until_idle()
    page.script("document.getElementById('prompt').focus()")
    page.type("draft{up}")
    assert page.all(".editor") == []
    page.type("{control+k}")
    assert page.focus() == "search"
    page.type("{control+/}")
    assert page.one("#help").is_displayed()
    listed = page.one("#help-list").text
    assert "New chat" in listed
    assert "Ctrl" in listed
    page.type("{control+shift+o}")  # a dialog keeps the keyboard
    assert page.all(".turn") != []
    page.type("{escape}")
    assert not page.one("#help").is_displayed()
    page.one("#tab-live").click()
    page.type("{control+shift+o}")
    assert page.all(".turn") == []
    assert page.focus() == "prompt"


def test_search_opens_the_drawer_of_a_phone(visit: OpenPage) -> None:
    page = visit(width=360).page
    page.type("{control+k}")
    assert page.focus() == "search"
    page.type("{escape}")
    assert page.focus() == "history-toggle"
    assert not page.one("#history").is_displayed()
    page.one("#history-toggle").click()
    page.script("document.elementFromPoint(340, 100).click()")
    assert not page.one("#history").is_displayed()


def test_card_of_the_model(visit: OpenPage) -> None:
    page = visit(width=360).page
    page.one("#model").click()
    lines = page.one("#card").text.split("\n")
    assert lines[0] == "example/rider-1b"
    facts = dict(zip(lines[1:-1:2], lines[2:-1:2], strict=True))
    assert facts.pop("Promise").startswith("The same tokens as without speculation, bit for bit")
    assert facts == {
        "Architecture": "llama",
        "Parameters": "1.1 billion",
        "Context": "8,192 tokens",
        "Precision and backend": "file, native avx2",
        "Model": "rider-1b-q4_k_m",
        "Size": "668 MB",
        "Sampling": "temperature 0.2, top-p 0.9 (its model card)",
        "Proposers": "prompt_lookup, suffix, draft_model",
    }
    page.one("#card .close").click()
    assert not page.one("#card").is_displayed()
    assert page.focus() == "model"


def test_rows_of_buttons_fit_a_phone(visit: OpenPage) -> None:
    """With a conversation, its drawer open, and a problem with a file."""
    page = visit(width=360).page
    page.ask("A long title of a conversation that has to be cut somewhere")
    drop(page, ("long.txt", "x" * 256_001))
    page.until(lambda: problem(page))
    assert page.script("return document.documentElement.scrollWidth") <= 360
    row = ("settings-toggle", "history-toggle", "new-chat-narrow", "save")
    tops = {page.one(f"#{name}").rect["y"] for name in row}
    assert len(tops) == 1
    page.one("#history-toggle").click()
    assert page.one("#history").rect["width"] <= 0.86 * 360
    assert page.script("return document.documentElement.scrollWidth") <= 360
