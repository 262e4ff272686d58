"""``paceline serve``: what it refuses before anything is loaded. Serving is in tests/server."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.serve import build_engine
from paceline.core.installation import install_command

pytest.importorskip("uvicorn")

HELLO = [{"role": "user", "content": "Hello."}]


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """The command sets up the process's logging, which is this test's process here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "port is 99999"),
        (["--max-body-size", "lots"], "'lots' is not an amount of memory"),
        (["--max-queue", "-1"], "max_queue is -1"),
        (["--metrics-prefix", "a b"], "metrics_prefix"),
        (["--kv-events-config", "{"], "--kv-events-config '{' is not valid JSON"),
        (["--method", "magic"], "magic"),
        (["--chat-template", "chatlm"], "built in: plain, alpaca, chatml, gemma, llama2"),
        (["--api-key", ""], "API key is empty"),
        (
            ["--default-chat-template-kwargs", "{"],
            "--default-chat-template-kwargs '{' is not valid JSON",
        ),
        (["--default-chat-template-kwargs", "[1]"], "allowed: an object such as"),
        (["--default-chat-template-kwargs", '{"tools": []}'], "holds 'tools', which each request"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
    ],
)
def test_options_are_refused(cli, arguments: list[str], message: str) -> None:
    result = cli("serve", *arguments)
    assert result.code == 2
    assert message in result.err


def test_a_model_that_is_not_there_ends_the_command(cli, tmp_path: Path) -> None:
    result = cli("serve", str(tmp_path / "none"), "--port", "0")
    assert result.code == 2
    assert "there is no model " in result.err.splitlines()[-1]


def test_options_come_from_a_file(cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "server.json"
        file.write_text(f'{{"port": {port}, "api_key": ["k"], "max-queue": 4, "threads": 1}}')
        result = cli("serve", "--config", file)
    assert f"cannot listen on 127.0.0.1:{port}" in result.err


@pytest.mark.parametrize("keys", ["null", "[]", '""', '[""]', '["k", ""]'])
def test_a_file_that_names_no_key_is_refused(cli, tmp_path: Path, keys: str) -> None:
    file = tmp_path / "server.json"
    file.write_text(f'{{"api_key": {keys}}}')
    result = cli("serve", "--config", file)
    assert result.code == 2
    assert "is empty" in result.err


def test_without_its_packages_the_command_says_what_to_install(
    cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paceline.server.run", None)
    result = cli("serve", "embedded")
    assert result.code == 2
    assert install_command() in result.err


def test_a_model_without_a_chat_template_gets_the_plain_one_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with build_engine("embedded", (), {}) as llm:
        assert llm.tokenizer.apply_chat_template(HELLO) == "User: Hello.\n\nAssistant:"
        assert llm.tokenizer.has_fallback_template
    assert "has no chat template: chats are written as plain text" in caplog.text


def test_a_chat_template_that_was_chosen_is_the_models(caplog: pytest.LogCaptureFixture) -> None:
    with build_engine("embedded", (), {}, "{{ messages[0].content }}") as llm:
        assert llm.tokenizer.apply_chat_template(HELLO) == "Hello."
        assert not llm.tokenizer.has_fallback_template
    assert "chat template" not in caplog.text
