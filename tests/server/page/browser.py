"""A headless Chromium and what a person does with the page, in the words of the tests."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Texts whose contrast with what is behind them is below 4.5, as [text, ratio].
CONTRAST = """
const parse = (colour) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = ([r, g, b, a], under) =>
  [r, g, b].map((value, at) => value * a + under[at] * (1 - a));
const behind = (node) => {
  if (!node) return [255, 255, 255];
  const colour = parse(getComputedStyle(node).backgroundColor);
  return colour[3] === 1 ? colour.slice(0, 3) : over(colour, behind(node.parentElement));
};
const light = (rgb) => {
  const [r, g, b] = rgb.map((value) => value / 255)
    .map((share) => share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
  if (node.closest(".sr, .skip, :disabled + span, svg, option")) continue;
  const under = behind(node);
  const [a, b] = [light(over(parse(getComputedStyle(node).color), under)), light(under)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push([node.textContent.slice(0, 30), ratio]);
}
return found;
"""
LAYOUT_SHIFTS = """
window.shifts = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.shifts += entry.value;
}).observe({ type: "layout-shift" });
"""
FIRST_PAINT = """
const done = arguments[arguments.length - 1];
new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint");
  if (found.length) done(found[0].startTime);
}).observe({ type: "paint", buffered: true });
"""
UNLABELLED = """
return [...document.querySelectorAll("button, input, select, textarea")]
  .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length))
  .map((node) => node.outerHTML);
"""


@contextmanager
def open_browser() -> Iterator[Any]:
    """A driver of Debian's Chromium; skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and driver):
        pytest.skip("no chromium and chromedriver: apt install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # No sandbox: containers seldom allow one, and the page is ours.
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.add_argument("--hide-scrollbars")
    # An offer to keep the key would take the keyboard away from the page.
    kept = {"credentials_enable_service": False, "profile.password_manager_enabled": False}
    options.add_experimental_option("prefs", kept)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )
    try:
        yield chrome
    finally:
        chrome.quit()


class Page:
    """The page in a driver's only tab."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def look(self, *, theme: str = "light", width: int = 1280, height: int = 820) -> None:
        """Set the size of the window and the theme of the system; a narrow one is touched."""
        command = self.driver.execute_cdp_cmd
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        command("Emulation.setDeviceMetricsOverride", metrics)
        command("Emulation.setTouchEmulationEnabled", {"enabled": width < 500})
        scheme = {"name": "prefers-color-scheme", "value": theme}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.until(lambda: self.all("#legend *") or self.one("#key-dialog").is_displayed())

    # Looking

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        """The last match: with several answers, the one asked for last."""
        return self.all(selector)[-1]

    def script(self, source: str, *values: Any) -> Any:
        return self.driver.execute_script(source, *values)

    def module(self, name: str, body: str) -> Any:
        """What a function returns that is given one of the page's modules as ``module``."""
        source = f"const run = (module) => {{ {body} }};"
        return self.driver.execute_async_script(
            f"{source} import('/page/{name}').then((found) => arguments[0](run(found)));"
        )

    def answer_text(self) -> str:
        return (
            self.one(".answer")
            .find_elements("css selector", ".text")[-1]
            .get_attribute("textContent")
        )

    def verdict(self) -> str:
        return self.one(".verdict").text

    def value(self, name: str) -> str:
        return self.one(f"#{name}").get_attribute("value")

    def is_dark(self) -> bool:
        colour = self.script("return getComputedStyle(document.body).backgroundColor")
        return max(map(int, re.findall(r"\d+", colour))) < 128

    def focus(self) -> str:
        return self.script("return document.activeElement.id || document.activeElement.name || ''")

    def unlabelled(self) -> list[str]:
        return self.script(UNLABELLED)

    def complaints(self) -> list[str]:
        """What the browser logged as a warning or worse, violations of the policy included."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] in ("WARNING", "SEVERE")]

    # Doing

    def until(self, condition: Callable[[], Any], seconds: float = 15) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def until_idle(self) -> None:
        self.until(lambda: self.one("#send").is_displayed(), seconds=60)  # comparisons take 20

    def fill(self, name: str, value: str) -> None:
        node = self.one(f"#{name}")
        node.clear()
        node.send_keys(value, "\t")

    def send(self, text: str) -> None:
        self.one("#prompt").send_keys(text, "\n")
        self.until(lambda: self.one(".user").text == text)

    def ask(self, text: str) -> None:
        """Send a prompt and wait for the end of its answer."""
        turns = len(self.all(".turn"))
        self.one("#prompt").send_keys(text, "\n")
        self.until(lambda: len(self.all(".turn")) > turns)
        self.until_idle()

    def stop(self, *, by_key: bool) -> None:
        if by_key:
            self.type("{escape}")
        else:
            self.one("#stop").click()
        self.until_idle()

    def type(self, text: str) -> None:
        """Keys to whatever has the focus; names in braces are keys, after others that are held."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        chain = ActionChains(self.driver)
        for name, plain in re.findall(r"\{([^}]+)\}|([^{]+)", text):
            if plain:
                chain.send_keys(plain)
            else:
                *held, key = name.split("+")
                modifiers = [getattr(Keys, modifier.upper()) for modifier in held]
                for modifier in modifiers:
                    chain.key_down(modifier)
                chain.send_keys(_key(key))
                for modifier in modifiers:
                    chain.key_up(modifier)
        chain.perform()

    def tab_through(self, times: int) -> list[str]:
        """Names of what has the focus after each press of Tab."""
        seen = []
        for _ in range(times):
            self.type("{tab}")
            seen.append(self.focus())
        return seen


def _key(name: str) -> str:
    from selenium.webdriver.common.keys import Keys

    if len(name) == 1:
        return name
    arrows = {side: f"ARROW_{side.upper()}" for side in ("left", "right", "up")}
    return getattr(Keys, arrows.get(name, name.upper()))
