"""``paceline serve``: which models it may load, and what it refuses before anything is loaded."""

from __future__ import annotations

import logging
import math
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import serve
from paceline.cli.serve import (
    build_engine,
    check_is_there,
    memory_budget,
    models_on_disk,
    served_names,
    stored_bytes,
)
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.installation import install_command
from paceline.loading.catalogue import CatalogueEntry, embedded_model

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
        (["--port", "99999"], "--port is 99999"),
        (["--max-body-size", "lots"], "'lots' is not an amount of memory"),
        (["--stream-interval-ms", "-1"], "'--stream-interval-ms': -1 is less than 0"),
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--metrics-prefix", "a b"], "--metrics-prefix is 'a b'"),
        (["--kv-events-config", "{"], "--kv-events-config '{' is not valid JSON"),
        (["--method", "magic"], "--method is 'magic'"),
        (
            ["--chat-template", "chatlm"],
            "error: --chat-template is 'chatlm', which is not a ",
        ),
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


TARGET, DRAFT = embedded_model("target"), embedded_model("draft")


def test_names_of_several_models() -> None:
    own = served_names(["embedded", DRAFT, "org/name"], ["small=draft", "tiny=draft"])
    assert own == {
        "embedded": ("embedded",),
        DRAFT: ("small", "tiny"),
        "org/name": ("org/name",),
    }
    assert served_names([DRAFT], ["a=b", "c"]) == {DRAFT: ("a=b", "c")}
    assert served_names(["ollama:llama3:8b"], []) == {
        "ollama:llama3:8b": ("llama3:8b", "ollama:llama3:8b")
    }


@pytest.mark.parametrize("given", ["small", "small=other", "=draft", "small="])
def test_a_name_must_say_which_of_several_models_it_means(given: str) -> None:
    with pytest.raises(ConfigError, match=r"it is NAME=MODEL, and the models are embedded, draft"):
        served_names(["embedded", DRAFT], [given])


def test_a_model_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="is named twice"):
        served_names([DRAFT, DRAFT], [])


def test_models_on_disk_are_those_that_are_here_and_not_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entries = [CatalogueEntry(name, path=path) for name, path in (("a", TARGET), ("b", DRAFT))]
    entries.append(CatalogueEntry("c", path=str(tmp_path / "missing")))
    monkeypatch.setattr(serve, "all_models", lambda: entries)
    assert models_on_disk(["x"]) == ["a", "b"]
    assert models_on_disk([TARGET]) == ["b"]


def test_what_is_not_there_is_refused() -> None:
    check_is_there(DRAFT)
    check_is_there("org/name")  # the hub may have it
    with pytest.raises(ModelLoadError, match="there is no model /none"):
        check_is_there("/none")


def test_sizes_are_those_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"a" * 10)
    (tmp_path / "b.safetensors").write_bytes(b"a" * 5)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "a.gguf"
    file.write_bytes(b"a" * 7)
    assert stored_bytes(str(file)) == 7
    assert stored_bytes(str(tmp_path)) == 22
    assert stored_bytes("org/name") == 0
    shards = [tmp_path / "split" / f"a-0000{i}-of-00002.gguf" for i in (1, 2)]
    shards[0].parent.mkdir()
    for shard in shards:
        shard.write_bytes(b"a" * 3)
    assert stored_bytes(str(shards[0])) == 6
    assert stored_bytes("embedded") == Path(TARGET, "model.safetensors").stat().st_size


def test_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "memory", lambda: (1000, 500))
    assert memory_budget("8GiB", False) == 8 << 30
    assert memory_budget("50%", False) == 500
    assert memory_budget(None, True) == 800
    assert memory_budget(None, False) == math.inf
    for wrong in ("0%", "101%", "lots", "-5%", "%"):
        with pytest.raises(ConfigError, match=r"not a share of memory|not an amount of memory"):
            memory_budget(wrong, True)
