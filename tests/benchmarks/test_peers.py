"""The comparison with peers: the talk with workers, the rows and targets, and one short run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.programs import FOLDER, module
from tests.saying import paceline_says
from tests.text.vocabularies import byte_level_json

ENGINES = ("paceline", "llama.cpp")
WORKER = """
import os, sys
sys.path.insert(0, {folder!r})
from peers_worker import UnsupportedError, serve

class Engine:
    def __init__(self, options):
        if options.get("refuse"):
            raise UnsupportedError("not here")
    def describe(self): return {{"engine": "toy"}}
    def double(self, number):
        os.write(1, b"native code prints\\n")
        print("so does Python")
        return 2 * number
    def fail(self): raise ValueError("broken")
    def leave(self): os._exit(3)

serve(Engine)
"""


@pytest.fixture(autouse=True)
def _own_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module("peers_client"), "PEERS", tmp_path / ".peers")


def toy_engine(tmp_path: Path, python: str | None = None, **options: Any) -> Any:
    client = module("peers_client")
    (tmp_path / "toy.py").write_text(WORKER.format(folder=str(FOLDER)), encoding="utf-8")
    return client.Engine("toy", str(tmp_path / "toy.py"), "", (), python, lambda name: options)


# Workers


def test_a_worker_answers_and_survives_what_fails(tmp_path: Path) -> None:
    client, missing = module("peers_client"), module("peers_client").MissingPeerError
    worker = client.Worker(toy_engine(tmp_path), "any", 1)
    try:
        assert worker.facts == {"engine": "toy"}
        assert worker.ask("double", number=21) == 42
        with pytest.raises(client.WorkerError, match="broken"):
            worker.ask("fail")
        assert worker.ask("double", number=2) == 4
        used = worker.ask("usage")
        assert used["peak"] >= used["resident"] > 0
        with pytest.raises(client.WorkerError, match="ended"):
            worker.ask("leave")
    finally:
        worker.close()
    with pytest.raises(missing, match="not here"):
        client.Worker(toy_engine(tmp_path, refuse=True), "any", 1)


def test_an_absent_environment_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, models = module("peers_client"), module("peers_client")
    monkeypatch.setattr(models, "PYTHONS", {"llama": tmp_path / "absent"})
    with pytest.raises(models.MissingPeerError, match="make peers"):
        client.Worker(toy_engine(tmp_path, python="llama"), "any", 1)


def test_what_is_half_made_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = module("peers_client")
    monkeypatch.setattr(models, "ROOT", tmp_path)

    def broken(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("power cut")

    wanted = tmp_path / "file"
    with pytest.raises(RuntimeError):
        models.made(wanted, broken)
    assert not wanted.exists()
    assert models.made(wanted, lambda path: path.write_text("whole")).read_text() == "whole"
    assert models.made(wanted, broken) == wanted


def test_a_converted_model_says_what_its_folder_says(tmp_path: Path) -> None:
    models = module("peers_client")
    source = module("inflate").embedded_folder(draft=True)
    models.write_gguf(source, tmp_path / "draft.gguf")
    prompt = [300, 1000, 17, 42, 2000, 7]
    (a, a_text), (b, b_text) = (
        paceline_says(path, prompt) for path in (source, tmp_path / "draft.gguf")
    )
    assert (a - b).abs().max() < 1e-4
    assert a_text == b_text
    load = module("paceline.loading.checkpoint").load_checkpoint
    text = "def add(a, b):\n    return  a +\t12345 # it's\n\n"
    folder, file = (load(str(p)).tokenizer for p in (source, tmp_path / "draft.gguf"))
    assert folder.encode(text) == file.encode(text)


# Rows and targets


def forward(engine: str, width: int, seconds: float, context: int = 64) -> Any:
    harness = module("harness")
    return [harness.Sample(engine, ("forward", context, width), 0, seconds, {})]


def text(arm: str, index: int, seconds: float, tokens: list[int]) -> Any:
    facts = {"tokens": len(tokens), "first": seconds / 2, "token_ids": tokens}
    return module("harness").Sample(arm, ("generate", index), 0, seconds, facts)


def judged(samples: list[Any], facts: Any = None) -> dict[str, Any]:
    rows = module("peers").results_of(samples, facts or {}, {}, 0)
    roof = {"bytes_per_second": 1e9}
    return {t.name: t for t in module("peers").targets(rows, facts or {}, roof)}


def test_widths_are_compared_within_and_between_engines() -> None:
    samples = [
        *forward("paceline Q8_0", 1, 0.010),
        *forward("paceline Q8_0", 8, 0.012),
        *forward("llama.cpp Q8_0", 8, 0.060),
    ]
    facts = {"paceline Q8_0": {"weight_bytes": 8_000_000, "kv_bytes_per_token": 15_625}}
    found = judged(samples, facts)
    assert found["paceline Q8_0, T(8)/T(1), context 64"].value == pytest.approx(1.2)
    gain = found["verifying 8 tokens, paceline Q8_0 over llama.cpp Q8_0"]
    assert gain.value == pytest.approx(5)
    assert gain.met
    share = found["paceline Q8_0, share of the read bandwidth at width 1"]
    assert share.value == pytest.approx(0.9)  # 9 MB in 10 ms, of 1 GB/s
    assert not any("context 512" in name for name in found)  # was not measured
    assert not any("Q6_K" in name for name in found)


def test_the_default_is_compared_with_plain_decoding_of_the_same_engine() -> None:
    samples = [
        text("paceline Q8_0, plain", 0, 2.0, [1, 2, 3, 4]),
        text("paceline Q8_0, default", 0, 0.5, [1, 2, 9, 4]),
        text("llama.cpp Q8_0, plain", 0, 4.0, [1, 2, 3, 4]),
    ]
    found = judged(samples)
    assert found["speculation over plain, paceline Q8_0"].value == pytest.approx(4)
    assert found["plain decoding, paceline Q8_0 over llama.cpp Q8_0"].value == pytest.approx(2)
    rows = module("peers").results_of(samples, {}, {}, 0)
    row = module("peers").find(rows, engine="paceline Q8_0", mode="default")
    assert row["speedup"] == pytest.approx(4)
    assert row["identical"] is False


def test_a_failed_sample_is_no_number() -> None:
    failed = module("harness").Sample("paceline Q8_0", ("forward", 64, 8), 1, error="broken")
    samples = [*forward("paceline Q8_0", 1, 0.01), *forward("paceline Q8_0", 8, 0.01), failed]
    assert judged(samples)["paceline Q8_0, T(8)/T(1), context 64"].value is None
    report = module("peers")
    rows = report.results_of(samples, {}, {}, 0)
    assert any("broken" in part for part in report.tables(rows))


# The program


def toy_file(tmp_path: Path) -> Path:
    tokenizer = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="gpt-2")
    sizes = {"vocab_size": 600, "max_position_embeddings": 2048}
    convert("qwen3", tmp_path / "toy.gguf", metadata=tokenizer, changes=sizes)
    return tmp_path / "toy.gguf"


def quantiser(folder: Path) -> Path:
    """A folder of llama.cpp's tools whose quantiser copies."""
    folder.mkdir()
    tool = folder / "llama-quantize"
    tool.write_text('#!/bin/sh\ncp "$2" "$3"\n', encoding="utf-8")
    tool.chmod(0o755)
    return folder


def test_both_engines_read_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, models = module("peers_client"), module("peers_client")
    monkeypatch.setattr(models, "LLAMA_BIN", quantiser(tmp_path / "bin"))
    file = toy_file(tmp_path)
    for kind in client.KINDS:
        ours, theirs = (client.ENGINES[f"{name} {kind}"].files(str(file)) for name in ENGINES)
        assert ours["model"] == theirs["model"]
        assert Path(ours["model"]).name == f"target-{kind}.gguf"


def test_it_runs_on_a_file_and_absent_peers_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = module("peers_client")
    monkeypatch.setattr(models, "PYTHONS", dict.fromkeys(models.PYTHONS, tmp_path / "absent"))
    monkeypatch.setattr(models, "LLAMA_BIN", quantiser(tmp_path / "bin"))
    monkeypatch.setattr(module("peers"), "ROOF_MEGABYTES", 1)
    monkeypatch.setattr(module("peers"), "LONGEST_PROMPT", 1400)  # a token is a byte or two
    words = ["--quick", "--models", str(toy_file(tmp_path)), "--prompts", "embedded"]
    words += ["--threads", "1", "--max-tokens", "8", "--formats", "Q8_0", "--json"]
    words += ["--engines", "paceline Q8_0,paceline Q6_K,llama.cpp Q8_0"]
    assert module("peers").main([*words, "--long-contexts", "1500,4000"]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rows = document["results"]
    assert {row["model"] for row in rows} == {"toy"}
    assert not any(row["engine"] == "paceline Q6_K" for row in rows)
    absent = [row for row in rows if row["engine"] == "llama.cpp Q8_0"]
    assert len(absent) == 1
    assert "make peers" in absent[0]["missing"]
    assert {row["measure"] for row in rows} >= {"forward", "prefill", "parallel", "generate"}
    assert all(row["identical"] for row in rows if row["measure"] == "generate")
    assert {row["context"] for row in rows if row["measure"] == "forward"} == {64, 1500}
    reasons = [row["missing"] for row in rows if "missing" in row]
    assert "the model ends at 2048 tokens" in reasons
    assert document["num_failed"] == 0
    assert set(document["config"]["engines"]["toy"]) == {"paceline Q8_0"}
    assert all(target["name"].startswith("toy: ") for target in document["targets"])


@pytest.mark.parametrize(
    ("words", "wrong"),
    [(["--engines", "nobody"], "nobody"), (["--models", "9b"], "9b"), (["--formats", "Q9"], "Q9")],
)
def test_what_is_unknown_is_refused(
    words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module("peers").options_of(words)
    assert wrong in capsys.readouterr().err
