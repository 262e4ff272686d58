"""Pictures of the page for ``docs/images``: ``python -m tests.server.page.screenshots URL``.

The address is that of a ``paceline serve`` with the embedded model; it is kept busy for the
picture of the live view.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import httpx

from tests.server.page.browser import Page, open_browser

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
NUM_CLIENTS = 3
LIVE_SECONDS = 120
CODE = """def read_lines(path):
    with open(path) as file:
        for line in file:
            yield line


def write_lines(path, lines):
"""


def prompts() -> list[str]:
    lines = (files("paceline") / "embedded" / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@contextmanager
def load(url: str) -> Iterator[None]:
    """A few clients that send one completion after another."""
    done = threading.Event()

    def client(first: int) -> None:
        for prompt in itertools.islice(itertools.cycle(prompts()), first, None):
            if done.is_set():
                return
            body = {"prompt": prompt, "max_tokens": 200, "temperature": 0.6}
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    threads = [threading.Thread(target=client, args=[4 * i]) for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    yield
    done.set()
    for thread in threads:
        thread.join()


def save(page: Page, name: str) -> None:
    """Take a picture without the keyboard's focus in it."""
    page.script("document.activeElement.blur()")
    time.sleep(1.2)  # for a redrawn live view and the ends of transitions
    page.driver.save_screenshot(str(IMAGES / f"page-{name}.png"))


def ask(page: Page, text: str) -> None:
    """A prompt of several lines, put in at once: typed, each line would be sent."""
    next(button for button in page.all(".new-chat") if button.is_displayed()).click()
    page.script("document.getElementById('prompt').value = arguments[0]", text)
    page.one("#send").click()
    page.until_idle()


def chats(page: Page) -> None:
    page.fill("max-tokens", "110")
    ask(page, CODE)
    save(page, "light")
    page.look(theme="dark")
    save(page, "dark")
    page.look(width=390, height=780)
    ask(page, prompts()[7])
    save(page, "phone")
    page.look()
    page.one("[name=compare]").click()
    ask(page, prompts()[7])
    save(page, "compare")


def others(page: Page, url: str) -> None:
    page.look(height=1050)
    page.one("#tab-live").click()
    with load(url):
        time.sleep(LIVE_SECONDS)
        save(page, "live")
    page.look()
    page.one("#tab-schema").click()
    page.one("#schema-send").click()
    page.until(lambda: page.all("#schema-parsed pre"))
    save(page, "schema")


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with open_browser() as driver:
        page = Page(driver)
        page.look()
        page.open(sys.argv[1])
        ask(page, prompts()[0])  # the first answer of a process is not the usual one
        chats(page)
        others(page, sys.argv[1])


if __name__ == "__main__":
    main()
