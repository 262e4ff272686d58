"""``paceline run-batch``: files, exit codes and continuing; once with a real engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.conftest import Result
from tests.server.fakes import FakeEngine

Cli = Callable[..., Result]


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "batch.jsonl"
    body = {"model": "embedded", "prompt": "Once upon", "max_tokens": 4, "temperature": 0}
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.server.engine.client.EngineClient", lambda factory: FakeEngine(state="ready")
    )


def read(path: Path) -> dict[str, dict]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.usefixtures("fake")
def test_answers_lie_beside_the_requests_and_are_not_asked_for_again(cli: Cli, batch: Path) -> None:
    result = cli("run-batch", str(batch), "--json")
    assert result.code == 0, result.err
    target = batch.with_name("batch.out.jsonl")
    assert result.document == {
        "answered": 3,
        "failed": 0,
        "skipped": 0,
        "output_file": str(target),
    }
    assert read(target).keys() == {"r0", "r1", "r2"}
    again = cli("run-batch", "-i", str(batch), "-o", str(target), "--json")
    assert (again.code, again.document["skipped"]) == (0, 3)
    assert "3 answers are in" in again.err


@pytest.mark.usefixtures("fake")
def test_a_failed_request_is_an_exit_code(cli: Cli, batch: Path) -> None:
    result = cli("run-batch", str(batch), "--served-model-name", "other")
    assert result.code == 1
    assert "3 failed" in result.err
    answers = read(batch.with_name("batch.out.jsonl"))
    assert answers["r0"]["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the file of requests once"),
        (("{}", "-i", "{}"), "name the file of requests once"),
        (("{}", "-o", "{}"), "holds the requests"),
        (("{}.none",), "cannot read requests"),
    ],
)
def test_files_that_do_not_go_together(
    cli: Cli, batch: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = batch.read_bytes()
    result = cli("run-batch", *(each.format(batch) for each in arguments))
    assert (result.code, message in result.err) == (2, True), result.err
    assert list(batch.parent.iterdir()) == [batch]
    assert batch.read_bytes() == before


@pytest.mark.slow
def test_a_real_engine_answers(cli: Cli, batch: Path) -> None:
    result = cli("run-batch", str(batch), "--max-num-seqs", "2", "--json")
    assert result.code == 0, result.err
    answers = read(batch.with_name("batch.out.jsonl"))
    bodies = [answers[f"r{i}"]["response"]["body"] for i in range(3)]
    assert [body["usage"]["completion_tokens"] for body in bodies] == [4, 4, 4]
    assert len({body["choices"][0]["text"] for body in bodies}) == 1


def test_a_chat_template_can_be_chosen(
    cli: Cli, batch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories: list[Callable[..., Any]] = []

    def client(factory: Callable[..., Any]) -> FakeEngine:
        factories.append(factory)
        return FakeEngine(state="ready")

    monkeypatch.setattr("paceline.server.engine.client.EngineClient", client)
    result = cli("run-batch", str(batch), "--chat-template", "no-such-template")
    assert result.code == 2
    assert "chat_template is 'no-such-template'" in result.err
    assert cli("run-batch", str(batch), "--chat-template", "chatml").code == 0
    with factories[0]() as llm:
        assert "<|im_start|>user" in llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello."}]
        )


@pytest.mark.parametrize("how", [("--ray",), ("--replicas", "2"), ("--ray-address", "auto")])
def test_without_ray_it_says_what_to_install(
    cli: Cli, batch: Path, how: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paceline.ray.batch", None)
    result = cli("run-batch", str(batch), *how)
    assert result.code == 2
    assert "pip install 'paceline[ray]'" in result.err
