"""The page in a browser: its live view and schemas, themes, keyboard, phone."""

from __future__ import annotations

import pytest

from tests.server.page.browser import CONTRAST, FIRST_PAINT, LAYOUT_SHIFTS
from tests.server.page.page_server import OpenPage

pytestmark = pytest.mark.slow


def test_live_view_shows_the_counters(visit: OpenPage) -> None:
    page = visit().page
    page.one("#tab-live").click()
    page.until(lambda: len(page.all("#by-proposer tr")) == 3)
    page.until(lambda: page.all("#rate-chart polyline") != [], seconds=20)
    tiles = dict(tile.text.split("\n")[:2] for tile in page.all(".tile"))
    assert 0 < float(tiles["Output"]) < 200
    assert tiles["KV cache"].endswith("%")
    assert len(page.all("#by-position tr")) == 6
    assert len(page.all("#cost-chart circle")) == 6
    assert len(page.all("#cost-chart rect")) >= 5
    assert page.one(".key").text.split("\n")[0] == "schedule"
    assert page.complaints() == []


def test_live_view_begins_with_the_last_minutes(visit: OpenPage) -> None:
    page = visit().page
    page.one("#tab-live").click()
    page.until(lambda: page.all("#live .tile"))
    points = "return document.querySelector('#rate-chart polyline').points.numberOfItems"
    assert page.script(points) >= 200
    assert "tok/s" in page.one("#rate-chart").get_attribute("aria-label")
    assert page.one("#rate-chart").text.split("\n")[-6:] == [
        *("-5 min", "-4 min", "-3 min", "-2 min", "-1 min", "now"),
    ]
    assert float(page.all(".tile")[2].text.split("\n")[1]) > 0


def test_figures_of_a_span(visit: OpenPage) -> None:
    """Counters that grow by known amounts, a restart, and a span without a step."""
    page = visit().page
    found = page.module(
        "figures.js",
        """
        const stats = (output, steps, restarts = 0) => ({
            restarts, tokens: { output }, speculation: { steps }, widths: { 1: steps },
            phases: { forward: steps / 100 } });
        const history = new module.History();
        history.push(0, stats(100, 10));
        history.push(2, stats(180, 50));
        const busy = [history.rate, history.span.counts.speculation.steps, history.rates];
        history.push(9, { ...stats(240, 50), output_history: [[20, 0], [9, 100], [1, 200]] });
        const late = [history.rate, history.rates];
        history.push(10, stats(0, 0, 1));
        const span = history.span;
        return { busy, late, restarted: [history.samples.length, history.rate, span.name],
                 widths: module.widthShares({ widths: { 4: 1, 2: 3, 8: 0 } }),
                 phases: module.phaseShares(stats(0, 50)) };
        """,
    )
    assert found["busy"] == [40, 40, [[0, 40]]]
    assert found["late"] == [40, [[-9, 100 / 11], [-1, 12.5], [0, 40]]]
    assert found["restarted"] == [1, None, "since startup"]
    assert found["widths"] == [[2, 0.75], [4, 0.25]]
    assert found["phases"] == [["forward", 10, 1]]


def test_text_is_shared_among_its_tokens(visit: OpenPage) -> None:
    page = visit().page
    found = page.module(
        "tally.js",
        """
        const splitter = new module.Splitter();
        const token = (text, origin) => ({ id: 0, text, origin });
        const take = (text) => splitter.take(text).map((piece) => [piece.text, piece.origin]);
        splitter.push([token("ab", "x"), token("", "y"), token("cd", "z")]);
        const held = [take("abc"), take("d")];
        splitter.push([token("<think>", "x"), token("e", "y")]);
        return [...held, take("e"), take("rest")];
        """,
    )
    assert found == [
        [["ab", "x"], ["c", "z"]],
        [["d", "z"]],
        [["e", "y"]],
        [["rest", ""]],
    ]


def test_schema_is_tried(visit: OpenPage) -> None:
    page, script = (seen := visit()).page, seen.script
    page.one("#tab-schema").click()
    page.one("#schema-send").click()
    page.until(lambda: "Complete JSON" in page.one("#schema-parsed").text)
    assert '"name": "Ishmael"' in page.one("#schema-parsed pre").text
    sent = script.bodies[-1]["response_format"]["json_schema"]["schema"]
    assert sent["required"] == ["name", "age", "occupation", "is_hero"]
    page.fill("schema-max", "3")
    page.one("#schema-send").click()
    page.until(lambda: "token limit" in page.one("#schema-parsed").text)
    limits = [(body.get("max_tokens"), "temperature" in body) for body in script.bodies]
    assert limits == [(None, False), (3, False)]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ('{\n  "type": oops\n}', "Not valid JSON: "),
        ("3", "A schema must be a JSON object."),
        ('{"unsupported": 1}', "unknown keyword 'unsupported'"),
    ],
)
def test_mistake_in_a_schema_is_explained(visit: OpenPage, schema: str, problem: str) -> None:
    page = visit().page
    page.one("#tab-schema").click()
    page.fill("schema-text", schema)
    page.one("#schema-send").click()
    page.until(lambda: page.one("#schema-error").text.startswith(problem))
    assert page.one("#schema-text").get_attribute("aria-invalid") == "true"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["chat", "live", "schema"])
def test_contrast_is_enough(visit: OpenPage, theme: str, view: str) -> None:
    """WCAG 2 AA: 4.5 to 1 for text."""
    page = visit(theme=theme).page
    assert page.is_dark() == (theme == "dark")
    if view == "chat":
        page.ask("fail")
    page.one(f"#tab-{view}").click()
    if view == "live":
        page.until(lambda: page.all("#live .tile") != [])
    page.script("document.activeElement.blur()")
    assert page.script(CONTRAST) == []


def test_theme_is_chosen_and_remembered(visit: OpenPage) -> None:
    page = (seen := visit(theme="light")).page
    page.one("#theme").click()
    assert page.is_dark()
    assert page.one("#theme").get_attribute("aria-pressed") == "true"
    page.open(seen.url)
    assert page.is_dark()
    page.one("#theme").click()
    assert not page.is_dark()


def test_keyboard_is_enough(visit: OpenPage) -> None:
    page = visit().page
    assert page.focus() == "prompt"
    page.type("First{shift+enter}second{enter}")
    page.until_idle()
    assert page.one(".user").text == "First\nsecond"
    page.script("document.getElementById('tab-chat').focus()")
    order = ["theme", "new-chat", "search", "transcript", "prompt", "send", "temperature", "seed"]
    assert [name for name in page.tab_through(32) if name in order][:8] == order
    page.script("document.getElementById('tab-chat').focus()")
    page.type("{right}")
    assert page.focus() == "tab-live"
    assert page.one("#live").is_displayed()
    page.type("{left}{left}")
    assert page.focus() == "tab-schema"
    assert page.unlabelled() == []


def test_no_keyboard_comes_up_on_a_phone_before_it_is_wanted(visit: OpenPage) -> None:
    """A field that takes the focus by itself calls up the keyboard, over half of the screen."""
    page = (seen := visit(width=360)).page
    assert page.focus() == ""
    page.one("#examples button").click()
    assert page.value("prompt") != ""
    page.one("#send").click()
    page.until_idle()
    page.one("#history-toggle").click()
    assert page.focus() == "new-chat"
    page.one("#new-chat").click()
    assert page.all(".turn") == []
    assert not page.one("#history").is_displayed()
    page.open(seen.url)
    page.one("#new-chat-narrow").click()
    assert page.focus() not in ("prompt", "search")


@pytest.mark.parametrize("view", ["chat", "live", "schema"])
def test_phone_needs_no_sideways_scrolling(visit: OpenPage, view: str) -> None:
    page = visit(width=360).page
    if view == "chat":
        page.one("#settings-toggle").click()
        page.one("[name=compare]").click()
        page.one("#settings-toggle").click()
        page.ask("What is a paceline? " + "Longwordwithoutanybreak" * 5)
    page.one(f"#tab-{view}").click()
    if view == "live":
        page.until(lambda: page.all("#live .tile") != [])
    assert page.script("return document.documentElement.scrollWidth") <= 360
    assert page.script("return document.getElementById(arguments[0]).scrollWidth", view) <= 360


def test_nothing_jumps_while_text_streams(visit: OpenPage) -> None:
    page = visit().page
    page.script(LAYOUT_SHIFTS)
    page.ask("What is a paceline?")
    assert page.script("return window.shifts") < 0.02


@pytest.mark.timing
def test_page_is_painted_at_once(visit: OpenPage) -> None:
    """Milliseconds to the first contentful paint, with nothing cached; the least of five visits."""
    page = (seen := visit()).page
    paints = []
    for _ in range(5):
        page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
        page.open(seen.url)
        paints.append(page.driver.execute_async_script(FIRST_PAINT))
    print(f"first contentful paint: {sorted(map(round, paints))} ms")
    assert 0 < min(paints) <= 500
