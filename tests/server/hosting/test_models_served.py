"""Two real models behind one ``paceline serve``, called by a client that users have."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paceline.loading.catalogue import embedded_model
from tests.programs import module
from tests.server.served import LIMITS
from tests.server.test_serve import KEY, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
watch = module("server_process")
TARGET, DRAFT = embedded_model("target"), embedded_model("draft")
OPTIONS = (TARGET, DRAFT, *LIMITS, "--threads", "1")
NAMES = ("embedded", "draft")
PROMPT = "def add(a, b):"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=120, max_retries=0)


def complete(client: openai.OpenAI, model: str, **fields: Any) -> str:
    wish = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    if not wish.get("stream"):
        return client.completions.create(model=model, **wish).choices[0].text
    return "".join(each.choices[0].text for each in client.completions.create(model=model, **wish))


def running(url: str) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{url}/api/ps", headers=HEADERS, timeout=60).json()
    return {each["name"].removesuffix(":latest"): each for each in answer["models"]}


def engines(pid: int) -> list[int]:
    """The processes of a server's engines."""
    found = watch.descendants(pid)
    return [c for c in found if Path(f"/proc/{c}/comm").read_text().strip() == watch.ENGINE_NAME]


def pause() -> None:
    time.sleep(0.05)


def test_requests_to_both_at_once_get_the_answers_that_each_gives_alone() -> None:
    alone = {}
    for name, folder in zip(NAMES, (TARGET, DRAFT), strict=True):
        with started(folder, *LIMITS, "--threads", "1") as (_, url):
            alone[name] = complete(client_of(url), name)
    assert alone["embedded"] != alone["draft"]
    with started(*OPTIONS) as (process, url):
        client = client_of(url)
        assert [card.id for card in client.models.list()] == ["embedded", "draft", DRAFT]
        assert list(running(url)) == ["embedded"]
        with ThreadPoolExecutor(12) as pool:
            asked = [(NAMES[i % 2], i % 3 == 0) for i in range(24)]
            told = [*pool.map(lambda a: (a[0], complete(client, a[0], stream=a[1])), asked)]
        assert all(text == alone[name] for name, text in told)
        assert list(running(url)) == [*NAMES]
        with pytest.raises(openai.NotFoundError, match="available: embedded, draft"):
            complete(client, "other")
        first, other = sorted(engines(process.pid))
        stream = client.completions.create(
            model="embedded", prompt=PROMPT, max_tokens=480, stream=True
        )
        next(iter(stream))
        os.kill(other, signal.SIGKILL)
        assert [each.choices[0].finish_reason for each in stream][-1] in ("stop", "length")
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        while httpx.get(f"{url}/v1/models/draft", headers=HEADERS).json()["state"] != "ready":
            pause()
        assert complete(client, "draft") == alone["draft"]
        assert first in engines(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_memory_budget_decides_who_stays(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    broken = str(tmp_path / "broken")
    with started(*OPTIONS) as (_, url):
        size = running(url)["embedded"]["reserved"]
    budget = ("--memory-budget", str(int(1.5 * size)), "--served-model-name", "small=draft")
    with started(TARGET, DRAFT, broken, *OPTIONS[2:], *budget) as (_, url):
        client = client_of(url)
        first = complete(client, "embedded")
        text = complete(client, "small", stream=True)
        assert list(running(url)) == ["small"]
        with pytest.raises(openai.InternalServerError, match="broken cannot be loaded"):
            complete(client, "broken")
        assert complete(client, "embedded") == first
        assert list(running(url)) == ["embedded"]
        asked = {"model": "small", "prompt": "", "keep_alive": "2h"}
        answer = httpx.post(f"{url}/api/generate", json=asked, headers=HEADERS, timeout=60)
        assert answer.json()["done_reason"] == "load"
        assert not running(url)["small"]["expires_at"].startswith("2300")
        assert complete(client, "small") == text


def test_a_budget_that_the_first_model_passes_is_an_error_at_the_start() -> None:
    with (
        pytest.raises(AssertionError, match=r"model embedded needs .* GiB of memory"),
        started(*OPTIONS, "--memory-budget", "1M"),
    ):
        pass


def test_a_request_without_a_model_is_for_the_first() -> None:
    with started(*OPTIONS, "--max-loaded-models", "1", "--keep-alive", "1") as (_, url):
        body = {"prompt": PROMPT, "max_tokens": 4}
        told = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60)
        assert told.json()["model"] == "embedded"
        while running(url):
            pause()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        body = {"prompt": PROMPT, "model": "draft"}
        told = httpx.post(f"{url}/tokenize", json=body, headers=HEADERS, timeout=60)
        assert told.json()["count"] > 0
