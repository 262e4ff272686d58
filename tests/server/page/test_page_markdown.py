"""Answers as Markdown in a browser: what is shown, what is refused, and how often it is drawn."""

from __future__ import annotations

import re

import pytest

from tests.server.page.browser import Page
from tests.server.page.page_server import OpenPage

pytestmark = pytest.mark.slow

SAMPLE = """# Sorting

A *stable* sort keeps **equal** items in order. It takes \\(n \\log n\\) steps for $n$ items,
and $5 or $6.

```python
def add(a, b):
    return a + b  # the sum
```

| name | cost |
|:-----|-----:|
| heap | 3 |

1. first
   - inner `code`

\\[
\\sum_{i=1}^{n} i = \\frac{n(n+1)}{2}
- 0
\\]

See [the page](https://example.org/a) or <mailto:a@example.org>."""
HOSTILE = {
    "script": "<script>document.title = 'broken'</script>",
    "handler": "<img src=x onerror=\"document.title='broken'\"> <svg/onload=alert(1)>",
    "link": "[a](javascript:document.title='broken') [b](JaVaScRiPt:alert(1)) [c](vbscript:x) "
    "[d](data:text/html,<script>alert(1)</script>) [e](&#106;avascript:alert(1)) [f](file:///etc)",
    "reference": '[a][x] ![b][x]\n\n[x]: javascript:alert(1) "onmouseover=alert(1)"',
    "title": '[a](https://example.org "\\" onmouseover=\\"document.title=1")',
    "image": "![cat](https://example.org/cat.png) ![](http://example.org/1x1.gif)",
    "href": "$\\href{javascript:alert(1)}{x}$ $$\\url{javascript:alert(1)}$$ "
    "\\(\\href{https://e.org}{y}\\)",
    "graphics": "$\\includegraphics{https://example.org/x.png}$ $\\class{a}{b}$ "
    "$\\style{color:red}{b}$",
    "macro": "$\\def\\a{\\a\\a}\\a$ $\\newcommand{\\b}{\\b\\b\\b}\\b$",
    "braces": "$" + "{" * 1900 + "x" + "}" * 1900 + "$",
    "roots": "$" + "\\sqrt" * 500 + "x$",
    "quotes": ">" * 4000 + " deep",
    "lists": "\n".join("  " * depth + "- x" for depth in range(100)),
    "brackets": "[" * 4000 + "a" + "](https://example.org)" * 300,
    "emphasis": "*a **b " * 2000,
    "fence": '```"><img src=x onerror=alert(1)>\n<b>\n```\n```html\n<script>alert(1)</script>\n```',
    "entities": "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x onerror=alert(1)&#62;",
}
LEFT_OVER = """
return [...document.querySelectorAll(".answer *")].filter((node) =>
  /^(script|img|iframe|object|embed|style|link|form|input|base|video|audio|source)$/i.test(node.localName)
  || node.getAttributeNames().some((name) => /^(on.*|style|src)$/i.test(name))
  || (node.hasAttribute("href") && !/^(https?:\\/\\/|mailto:)/.test(node.getAttribute("href")))
).map((node) => node.outerHTML.slice(0, 100));
"""


def shown(page: Page) -> str:
    return page.one(".markdown").text


def test_markdown_is_shown_with_code_and_formulae(visit: OpenPage) -> None:
    page = visit(text=SAMPLE).page
    page.ask("Say it")
    page.until(lambda: page.all(".markdown table"))
    found = {name: len(page.all(f".markdown {name}")) for name in ("em", "strong", "ol ul", "math")}
    assert found == {"em": 1, "strong": 1, "ol ul": 1, "math": 3}
    assert page.one(".markdown h3").text == "Sorting"
    assert page.one(".code-block .hl-keyword").text == "return"
    assert "and $5 or $6." in shown(page)
    assert page.one(".markdown td.right").text == "3"
    links = page.all(".markdown a")
    assert [link.get_attribute("rel") for link in links] == ["noopener noreferrer"] * 2
    assert page.answer_text() == SAMPLE
    assert page.complaints() == []


def test_drafted_tokens_are_marked_in_markdown(visit: OpenPage) -> None:
    """Each character that a proposer drafted, and that is shown, lies in a range of its colour."""
    page = visit(text=SAMPLE).page
    page.ask("Say it")
    page.until(lambda: page.all(".markdown table"))
    marked = page.script(
        """return Object.fromEntries([...CSS.highlights].map(([name, ranges]) =>
             [name, [...ranges].map(({ startContainer: node, startOffset, endOffset }) =>
               node.data.slice(startOffset, endOffset))]))"""
    )
    spans = page.script(
        """return [...document.querySelectorAll(".text span[class^=o]")]
             .map((node) => [node.className, node.textContent])"""
    )
    for name in marked:
        drafted = "".join(text for kind, text in spans if kind == name)
        assert marked[name]
        assert all(text.strip() in drafted for text in marked[name])
    words = {word for kind, text in spans for word in re.findall(r"stable|items|first|order", text)}
    joined = " ".join(text for texts in marked.values() for text in texts)
    assert words
    assert all(word in joined for word in words)


def test_tokens_and_markdown_are_two_views(visit: OpenPage) -> None:
    page = (seen := visit(text=SAMPLE)).page
    page.ask("Say it")
    page.until(lambda: page.one(".markdown").is_displayed())
    assert not page.one(".answer .text").is_displayed()
    page.one(".answer .toggle").click()
    page.until(lambda: page.one(".answer .text").is_displayed())
    assert not page.one(".markdown").is_displayed()
    page.one("[name=rendered]").click()
    page.open(seen.url)
    page.ask("Again")
    assert page.one(".answer .text").is_displayed()
    page.one(".answer .toggle").click()
    page.until(lambda: page.all(".markdown table"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_markdown_stays_harmless(visit: OpenPage, name: str) -> None:
    page = visit(text=f"{HOSTILE[name]}\n\nThe end.", step_seconds=0).page
    title = page.driver.title
    page.fill("max-tokens", "100000")
    page.ask("Say it")
    page.until(lambda: "The end." in shown(page), seconds=20)
    assert page.script(LEFT_OVER) == []
    assert page.driver.title == title
    fetched = page.script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [url for url in fetched if "127.0.0.1" not in url] == []
    assert page.complaints() == []


def test_text_that_is_nested_too_deeply_is_shown_as_it_stands(visit: OpenPage) -> None:
    page = visit(text=">" * 100 + " deep").page
    page.ask("Say it")
    page.until(lambda: shown(page) == ">" * 100 + " deep")


def test_html_is_text_and_images_are_links(visit: OpenPage) -> None:
    page = visit(text=f"{HOSTILE['handler']} {HOSTILE['image']}").page
    page.ask("Say it")
    page.until(lambda: "onerror=" in shown(page))
    assert [(link.text, link.get_attribute("href")) for link in page.all(".markdown a")] == [
        ("cat", "https://example.org/cat.png"),
        ("image", "http://example.org/1x1.gif"),
    ]


def test_only_what_grows_is_drawn_again(visit: OpenPage) -> None:
    """Blocks that are complete keep their nodes, and drawing happens at most once per frame."""
    page = visit().page
    found = page.module(
        "rendered.js",
        """
        return (async () => {
          const view = new module.RenderedText();
          document.body.append(view.node);
          await view.show(true);
          const frame = () => new Promise((done) =>
            requestAnimationFrame(() => setTimeout(done, 60)));
          view.add("", "First.\\n\\nSecond ");
          await frame();
          const [first, second] = view.node.children;
          const before = view.draws;
          for (let word = 0; word < 500; word += 1) view.add("o1", "word ");
          await frame();
          const [again, other] = view.node.children;
          return [first === again, second === other, view.draws - before, other.textContent.length];
        })();
        """,
    )
    assert found == [True, False, 1, 2506]


def test_a_link_that_is_explained_later_is_found(visit: OpenPage) -> None:
    page = visit(text="See [the source][1].\n\nMore.\n\n[1]: https://example.org/").page
    page.ask("Say it")
    page.until(lambda: page.all(".markdown a"))
    assert page.one(".markdown a").text == "the source"
