"""``paceline run-batch``: files, exit codes and continuing; once with a real engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.core.installation import install_command
from paceline.request.sampling_params import SamplingParams
from tests.adapters import adapter_folder, adapter_tensors
from tests.cli.conftest import Result
from tests.server.chats import THINKING, USER, chat_tokenizer
from tests.server.fakes import FakeEngine
from tests.toy import toy_folder, toy_tensors

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
        "paceline.server.engine_process.client.EngineClient",
        lambda factory, adapters: FakeEngine(state="ready", adapters=adapters),
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


def test_rows_choose_an_adapter_by_their_model(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    model = str(toy_folder(tmp_path / "toy"))
    lora = {
        f"a{seed}": str(adapter_folder(tmp_path / str(seed), adapter_tensors(toy_tensors(), seed)))
        for seed in (1, 2)
    }
    wish: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    names, prompt = ("base", "a1", "a2", "a3"), [7, 8, 9]
    body = {"prompt": prompt, "return_token_ids": True, **wish}
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for name in names:
            row = {"custom_id": name, "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**row, "body": {"model": name, **body}}) + "\n")
    how = [each for name, folder in lora.items() for each in ("--lora", f"{name}={folder}")]
    call = ("run-batch", model, str(source), "--served-model-name", "base")
    result = cli(*call, *how, "--max-num-seqs", "4", "--json")
    assert (result.code, result.document["answered"]) == (1, 3), result.err
    answers = read(source.with_name("in.out.jsonl"))
    got = [answers[name]["response"]["body"]["choices"][0]["token_ids"] for name in names[:3]]
    with LLM(model, lora=lora, speculative_config=[]) as llm:
        outputs = llm.generate([prompt] * 3, SamplingParams(**wish), lora=[None, "a1", "a2"])
    assert got == [list(each.token_ids) for each in outputs]
    assert len({str(each) for each in got}) == 3
    assert answers["a3"]["response"]["status_code"] == 404
    clash = cli(*call, "--lora", f"base={lora['a1']}")
    assert clash.code == 2
    assert "gives an adapter the name of a model, 'base'" in clash.err


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

    def client(factory: Callable[..., Any], adapters: dict[str, str]) -> FakeEngine:
        factories.append(factory)
        return FakeEngine(state="ready")

    monkeypatch.setattr("paceline.server.engine_process.client.EngineClient", client)
    result = cli("run-batch", str(batch), "--chat-template", "no-such-template")
    assert result.code == 2
    assert "--chat-template is 'no-such-template'" in result.err
    assert cli("run-batch", str(batch), "--chat-template", "chatml").code == 0
    with factories[0]() as llm:
        assert "<|im_start|>user" in llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello."}]
        )


def test_every_chat_of_a_batch_is_told_the_options_of_the_template(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine("Yes.", chat_tokenizer(THINKING), state="ready")
    monkeypatch.setattr(
        "paceline.server.engine_process.client.EngineClient", lambda factory, adapters: engine
    )
    source = tmp_path / "chats.jsonl"
    body = {"model": "fake", "messages": [USER]}
    asked = ({}, {"chat_template_kwargs": {"enable_thinking": True}})
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body | more}
        for i, more in enumerate(asked)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = ("run-batch", str(source), "--served-model-name", "fake")
    result = cli(*call, "--default-chat-template-kwargs", '{"enable_thinking": false}')
    assert result.code == 0, result.err
    prompts = [engine.tokenizer.decode(each.token_ids) for each in engine.calls]
    assert ["<think>\n\n</think>" in prompt for prompt in prompts] == [True, False]


@pytest.mark.parametrize("how", [("--ray",), ("--replicas", "2"), ("--ray-address", "auto")])
def test_without_ray_it_says_what_to_install(
    cli: Cli, batch: Path, how: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paceline.ray.batch", None)
    result = cli("run-batch", str(batch), *how)
    assert result.code == 2
    assert install_command("ray") in result.err
