"""The page against axe-core's rules, in every view, both themes, and on a phone.

`make page` installs axe-core; without it, or without a browser, these tests skip.
"""

from __future__ import annotations

import pytest

from tests.server.page.browser import Page
from tests.server.page.page_server import OpenPage, Visit
from tests.server.page.test_page import WEB
from tests.server.page.test_page_tools import drop, problem

AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
RUN = """
const done = arguments[arguments.length - 1];
axe.run().then(({ violations }) => done(violations.flatMap(({ id, nodes }) =>
  nodes.map(({ target, failureSummary }) => `${id}: ${target}: ${failureSummary}`))));
"""
MARKDOWN = """# Riders

A *line* with `code`, [a link](https://example.org), and $x^2$.

| one | two |
|---|---|
| 1 | 2 |

```python
def draft(line):  # who leads
    return [rider.name for rider in line if rider.speed > 30.5]
```

1. first
2. second

> quoted
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed; `make page` does that"),
]


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with what is shown, one line for each element."""
    page.script(AXE.read_text())
    found: list[str] = page.driver.execute_async_script(RUN)
    return found


def answered(visit: Visit) -> None:
    visit.page.ask("Say it")
    visit.page.until(lambda: visit.page.all(".code-block code span"))


def compared(visit: Visit) -> None:
    opened(visit)
    visit.page.one("[name=compare]").click()
    if visit.page.one("#settings-toggle").is_displayed():
        visit.page.one("#settings-toggle").click()
    visit.page.ask("What is a paceline?")
    visit.page.one(".toggle").click()


def failed(visit: Visit) -> None:
    visit.page.ask("fail")


def live(visit: Visit) -> None:
    visit.page.one("#tab-live").click()
    visit.page.until(lambda: visit.page.all("#rate-chart polyline") != [], seconds=20)


def schema(visit: Visit) -> None:
    visit.page.one("#tab-schema").click()
    visit.page.one("#schema-send").click()
    visit.page.until(lambda: "Complete JSON" in visit.page.one("#schema-parsed").text)


def opened(visit: Visit) -> None:
    """The settings, those of sampling among them."""
    if visit.page.one("#settings-toggle").is_displayed():
        visit.page.one("#settings-toggle").click()
    visit.page.script("document.querySelector('.settings details').open = true")


def card(visit: Visit) -> None:
    visit.page.one("#model").click()


def helped(visit: Visit) -> None:
    visit.page.one("#help-open").click()


def attached(visit: Visit) -> None:
    """A file that is too long."""
    drop(visit.page, ("long.txt", "x" * 300_000))
    visit.page.until(lambda: problem(visit.page))


def listed(visit: Visit) -> None:
    """The conversations, one of them about to be deleted."""
    visit.page.ask("One")
    if visit.page.one("#history-toggle").is_displayed():
        visit.page.one("#history-toggle").click()
    visit.page.one("#history-list .delete").click()


STATES = [answered, compared, failed, live, schema, opened, listed, card, helped, attached]


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing(visit: OpenPage, state: object, theme: str, width: int) -> None:
    text = MARKDOWN if state is answered else None
    seen = visit(theme=theme, width=width, **({"text": text} if text else {}))
    assert callable(state)
    state(seen)
    assert violations(seen.page) == []


def test_axe_finds_what_is_wrong(visit: OpenPage) -> None:
    """The check itself, on a button without a name."""
    page = visit().page
    page.script("document.querySelector('main').append(document.createElement('button'))")
    assert any(found.startswith("button-name") for found in violations(page))
