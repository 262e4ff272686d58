"""``paceline serve`` as a user starts it, called by the client that users have."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

import paceline
from paceline.cli.serve import ServeOptions, default_names, served_models, server_config
from paceline.loading.catalogue import embedded_model
from paceline.server.engine_process.process import NAME
from tests.programs import module

SOURCE = str(Path(paceline.__file__).parent.parent)
KEY = "a-key"
PROMPT = "def add(a, b):"
LONG = {"prompt": PROMPT, "max_tokens": 600, "stream": True, "ignore_eos": True}


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its address, once it answers; it must be gone in the end."""
    settings = {n: v for n, v in os.environ.items() if not n.startswith("PACELINE_")}
    settings |= {"PYTHONPATH": SOURCE, "PACELINE_API_KEY": f"other-key {KEY}"}
    settings |= {"PACELINE_MODEL": "embedded"}  # where the options name none
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("paceline serves "):
                break
        assert lines[-1:], "the server ended without a word"
        assert " at http://" in lines[-1], "".join(lines)
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield process, lines[-1].split(" at ")[1].split()[0]
    finally:
        process.kill()
        process.wait()


def check_client(client: openai.OpenAI) -> None:
    """What the package makes of completions: it validates them, and raises its own errors."""
    assert [model.id for model in client.models.list()] == ["embedded"]
    wishes = {"model": "embedded", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**wishes, logprobs=1)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert len(whole.choices[0].logprobs.tokens) == 24
    plain = client.completions.create(**wishes, extra_body={"disable_spec_decode": True})
    assert plain.choices[0].text == whole.choices[0].text
    pieces = list(
        client.completions.create(**wishes, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(p.choices[0].text for p in pieces[:-1]) == whole.choices[0].text
    assert pieces[-1].choices == []
    assert pieces[-1].usage.completion_tokens == 24
    chat = client.chat.completions.create(
        model="embedded", messages=[{"role": "user", "content": "Hello."}], max_tokens=4
    )
    assert chat.usage.prompt_tokens > 0  # the plain template: the embedded model has none
    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle"):
        client.completions.create(**wishes, suffix="x")
    with pytest.raises(openai.NotFoundError, match="available: embedded"):
        client.completions.create(**(wishes | {"model": "other"}))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def check_imports(pid: int) -> None:
    """The process that speaks HTTP must start quickly and stay small."""
    libraries = Path(f"/proc/{pid}/maps")
    if libraries.exists():
        assert "pydantic" in libraries.read_text()
        assert "torch" not in libraries.read_text()


def health(url: str) -> int:
    return httpx.get(f"{url}/health", timeout=60).status_code


@contextmanager
def asked(url: str, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A connection on which a request has been sent, which the server has taken on."""
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=100)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    line.request("POST", "/v1/completions", json.dumps(body), headers)
    for _ in range(20):  # each is a few turns of the server's loop after the request was there
        health(url)
    yield line
    line.close()


def engine_of(server: int) -> int:
    """The process in which a server's engine lives."""
    watch = module("server_process")
    for pid in watch.descendants(server):
        if Path(f"/proc/{pid}/comm").read_text().strip() == NAME:
            return pid
    raise AssertionError("the server has no engine")


def check_draining(process: subprocess.Popen[str], client: openai.OpenAI, url: str) -> None:
    """What was sent before the signal is answered in full; what comes after it is refused."""
    engine = engine_of(process.pid)
    os.kill(engine, signal.SIGSTOP)  # so that the answer does not end before the signal
    with asked(url, LONG) as line:
        try:
            process.send_signal(signal.SIGTERM)
            while "draining" not in httpx.get(f"{url}/health", timeout=60).text:
                pass
            with pytest.raises(openai.InternalServerError, match="takes no new requests"):
                client.completions.create(model="embedded", prompt="a")
        finally:
            os.kill(engine, signal.SIGCONT)
        *_, last, done, _ = line.getresponse().read().decode().split("\n\n")
    choices = json.loads(last.removeprefix("data: "))["choices"]
    assert (choices[0]["finish_reason"], done) == ("length", "data: [DONE]")
    assert process.wait(60) == 0


def test_a_server_from_its_start_to_its_end() -> None:
    with started() as (process, url):
        assert health(url) == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            check_client(client)
            check_imports(process.pid)
            check_draining(process, client, url)


def test_a_model_is_asked_for_by_the_name_it_was_given(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    assert default_names(str(folder)) == ("some-model", str(folder))
    blob, link = tmp_path / "4665a5ea", tmp_path / "some-model.gguf"
    blob.write_bytes(b"")
    link.symlink_to(blob)
    assert default_names(str(link)) == ("some-model.gguf", str(link))
    assert default_names("org/model") == ("org/model",)
    assert default_names("embedded") == default_names(embedded_model("target")) == ("embedded",)


def test_the_interval_of_streams_is_given_in_milliseconds() -> None:
    for options, seconds in (
        (ServeOptions(model="embedded"), 0.02),
        (ServeOptions(model="embedded", stream_interval_ms=0), 0),
    ):
        assert server_config(options, served_models(options)).stream_interval == seconds
