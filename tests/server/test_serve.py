"""``paceline serve`` as a user starts it, called by the client that users have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

import paceline
from paceline.commands.serve import default_names, server_config
from paceline.commands.serve_options import ServeOptions
from paceline.models.embedded import embedded_model

SOURCE = str(Path(paceline.__file__).parent.parent)
KEY = "a-key"
PROMPT = "def add(a, b):"


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its address, once it answers; it must be gone in the end."""
    settings = {n: v for n, v in os.environ.items() if not n.startswith("PACELINE_")}
    settings |= {"PYTHONPATH": SOURCE, "PACELINE_API_KEY": f"other-key {KEY}"}
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
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(**wishes, suffix="x")
    with pytest.raises(openai.NotFoundError, match="served is embedded"):
        client.completions.create(**(wishes | {"model": "other"}))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def check_imports(pid: int) -> None:
    """The process that speaks HTTP must start quickly and stay small."""
    libraries = Path(f"/proc/{pid}/maps")
    if libraries.exists():
        assert "pydantic" in libraries.read_text()
        assert "torch" not in libraries.read_text()


def check_draining(process: subprocess.Popen[str], client: openai.OpenAI, url: str) -> None:
    """A stream that began before the signal is complete; what comes after it is refused."""
    stream = client.completions.create(
        model="embedded",
        prompt=PROMPT,
        max_tokens=600,
        stream=True,
        extra_body={"ignore_eos": True, "disable_spec_decode": True},
    )
    next(stream)
    process.send_signal(signal.SIGTERM)
    for _ in range(100):
        if httpx.get(f"{url}/health").status_code == 503:
            break
    with pytest.raises(openai.InternalServerError, match="takes no new requests"):
        client.completions.create(model="embedded", prompt="a")
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert process.wait(10) == 0


def test_a_server_from_its_start_to_its_end() -> None:
    with started() as (process, url):
        assert httpx.get(f"{url}/health").status_code == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            check_client(client)
            check_imports(process.pid)
            check_draining(process, client, url)


def test_a_model_is_asked_for_by_the_name_it_was_given(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    assert default_names(str(folder)) == ("some-model", str(folder))
    assert default_names("org/model") == ("org/model",)
    assert default_names(None) == default_names(embedded_model("target")) == ("embedded",)


def test_the_interval_of_streams_is_given_in_milliseconds() -> None:
    assert server_config(ServeOptions()).stream_interval == 0.02
    assert server_config(ServeOptions(stream_interval_ms=0)).stream_interval == 0
