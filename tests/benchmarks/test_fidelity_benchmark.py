"""The fidelity benchmarks: their files and texts, their sums, and short runs beside a toy peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline_lab.quality import llama_peer_child
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.programs import module
from tests.text.vocabularies import byte_fallback_json

VOCAB = 600
CHILD = """
import json, struct, sys
for line in sys.stdin:
    task = json.loads(line)
    if "source" in task:
        out, answer = task["out"], {"vocab_size": VOCAB, "version": "toy"}
    elif "prompt" in task:
        answer = {"token_ids": [7] * task["max_tokens"]}
    else:
        rows = len(task["tokens"]) - task["first"]
        with open(out, "wb") as file:
            file.write(struct.pack(f"<{VOCAB}f", *range(VOCAB)) * rows)
        answer = {"rows": rows}
    print(json.dumps(answer), flush=True)
"""
QUANTIZE = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
shift $(($# - 3))
cp "$1" "$2"
"""


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options that name a small model, a toy llama.cpp and a quantiser that only copies."""
    (tmp_path / "child.py").write_text(CHILD.replace("VOCAB", str(VOCAB)), encoding="utf-8")
    monkeypatch.setattr(llama_peer_child, "__file__", str(tmp_path / "child.py"))
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "llama-quantize"
    tool.write_text(QUANTIZE, encoding="utf-8")
    tool.chmod(0o755)
    tokenizer = tokenizer_metadata(json.loads(byte_fallback_json()), "llama")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 512}
    convert("llama-tied", tmp_path / "toy.gguf", metadata=tokenizer, changes=sizes)
    words = [f"toy={tmp_path / 'toy.gguf'}", "--quick", "--json", "--threads", "1"]
    words += ["--llama", sys.executable, "--llama-bin", str(tmp_path / "bin")]
    return [*words, "--folder", str(tmp_path / "made"), "--prompts", "embedded"]


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_every_format_is_compared_with_llama_cpp_on_its_own_file(
    toys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--formats", "file,MXFP4", "--dtypes", "bfloat16", "--tokens", "90"]
    assert module("fidelity").main([*toys, *words]) == 0
    document = last_line(capsys)
    rows = document["results"]
    assert [(row["format"], row["arithmetic"]) for row in rows] == [
        (kind, name) for kind in ("file", "MXFP4") for name in ("float32", "bfloat16", "llama.cpp")
    ]
    for row in rows:
        own = [
            sample
            for sample in document["samples"]
            if all(sample[key] == row[key] for key in ("model", "format", "arithmetic"))
        ]
        assert {sample["text"] for sample in own} == {"prose", "code", "chat"}
        assert sum(sample["num_tokens"] for sample in own) == row["num_tokens"] == 90
        assert sum(sample["kl"] for sample in own) == pytest.approx(row["mean_kl"] * 90)
        assert set(row["tensor_types"]) == {"F32"}
    assert all(target["met"] for target in document["targets"])
    assert len(document["targets"]) == 2
    (call,) = (tmp_path / "bin" / "calls").read_text().splitlines()
    assert "--allow-requantize" in call
    assert "--tensor-type ffn_down=mxfp4" in call
    assert call.endswith(" Q8_0")


def test_a_file_that_cannot_be_made_is_a_failed_sample(
    toys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin" / "llama-quantize").unlink()
    assert module("fidelity").main([*toys, "--formats", "Q8_0"]) == 1
    document = last_line(capsys)
    assert document["results"] == []
    assert "llama-quantize" in document["samples"][0]["error"]


def test_texts_are_of_three_kinds_and_always_the_same() -> None:
    models = module("fidelity")
    found = models.texts("embedded")
    assert set(found) == {"prose", "code", "chat"}
    assert all(found.values())
    assert found == models.texts("embedded")


def test_made_models_are_kept_and_measured_too(
    toys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--formats", "file", "--dtypes", "bfloat16", "--tokens", "30", "--made", "wide"]
    assert module("fidelity").main([*toys, *words]) == 0
    rows = {(r["model"], r["arithmetic"]): r for r in last_line(capsys)["results"]}
    assert {model for model, _ in rows} == {"toy", "toy wide"}
    small, wide = (rows[model, "float32"]["perplexity"] for model in ("toy", "toy wide"))
    assert wide == pytest.approx(small, rel=1e-4)
    assert (tmp_path / "made" / "toy-wide.gguf").is_file()
