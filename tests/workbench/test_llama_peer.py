"""Weights written for llama.cpp, read back; and what is said when it cannot be run."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.build import build_engine
from paceline.errors import ConfigError, PacelineError
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.config import RopeConfig
from paceline.workbench import llama_peer_child
from paceline.workbench.llama_peer import peer_logits, write_gguf
from paceline.workbench.quality import engine_logits, measure, windows
from tests.toy import TOY, VOCAB, toy_tensors

pytest.importorskip("gguf")
QWEN = replace(TOY, architecture="qwen3")
LLAMA = replace(TOY, architecture="llama", qk_norm=False)


def checkpoint(config=QWEN) -> Checkpoint:
    tensors = toy_tensors()
    if not config.qk_norm:
        norms = ("q_norm.weight", "k_norm.weight")
        tensors = {name: t for name, t in tensors.items() if not name.endswith(norms)}
    return Checkpoint(config, tensors, None, "toy")


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen3", "llama"])
def test_what_is_written_is_the_model(config, tmp_path: Path) -> None:
    source = checkpoint(config)
    write_gguf(source, tmp_path / "model.gguf")
    found = load_checkpoint(tmp_path / "model.gguf", with_tokenizer=False)
    assert found.config.rope.theta == config.rope.theta
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "norm_eps", "max_position"):
        assert getattr(found.config, name) == pytest.approx(getattr(config, name))
    for name, tensor in source.tensors.items():
        assert torch.equal(found.tensors[name], tensor)


def test_models_without_a_conversion_are_refused(tmp_path: Path) -> None:
    yarn = replace(LLAMA, rope=RopeConfig(scaling="yarn"))
    for config in (TOY, yarn, replace(LLAMA, activation="gelu")):
        with pytest.raises(ConfigError, match="no conversion"):
            write_gguf(checkpoint(config), tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("python", "reason"),
    [("/no/such/python", "cannot be run"), (sys.executable, "no library of llama.cpp: install")],
)
def test_an_interpreter_that_cannot_do_it(python: str, reason: str, tmp_path: Path) -> None:
    pieces = windows([1, 2, 3], 3, 1)
    with pytest.raises(PacelineError, match=reason):
        peer_logits(python, tmp_path / "x.gguf", "F32", pieces, VOCAB, tmp_path, 1)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python without llama.cpp: a prefix, and a folder for packages."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv(llama_peer_child.LIBRARY_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return tmp_path


def add_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("no library")
    return path


def test_the_library_is_found_among_the_files_of_either_package(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, wanted = environment / "packages", list[Path]()
    for name, library in (("llama_cpp", "lib/libllama.so"), ("xllamacpp", "xllamacpp.abi3.so")):
        # It is only looked for: importing either package may fail.
        add_file(packages / name / "__init__.py").write_text("raise ImportError")
        wanted.append(add_file(packages / name / library))
    wanted.append(add_file(environment / "lib" / "libllama.dylib"))
    add_file(environment / "lib" / "libllava.so")
    importlib.invalidate_caches()
    assert list(llama_peer_child.libraries()) == wanted
    other = add_file(environment / "other" / "libllama.so")
    monkeypatch.setenv(llama_peer_child.LIBRARY_VARIABLE, str(other.parent))
    assert list(llama_peer_child.libraries()) == [other, *wanted]


def test_what_was_found_and_is_no_library_is_said(environment: Path) -> None:
    broken = add_file(environment / "lib" / "libllama.so")
    with pytest.raises(SystemExit, match=f"install llama-cpp-python or xllamacpp .*{broken}: "):
        llama_peer_child.opened(list(llama_peer_child.libraries()))
    with pytest.raises(SystemExit, match=f"looked in {environment / 'lib'}, "):
        llama_peer_child.opened([])


@pytest.mark.slow
def test_llama_cpp_agrees_in_float32(tmp_path: Path) -> None:
    python = os.environ.get("PACELINE_TEST_LLAMA")
    if not python:
        pytest.skip("PACELINE_TEST_LLAMA names no Python with llama.cpp")
    text = np.random.default_rng(3).integers(1, VOCAB, 90).tolist()
    pieces = windows(text, 64, 16)
    for config in (QWEN, LLAMA):
        source = checkpoint(config)
        path = tmp_path / f"{config.architecture}.gguf"
        write_gguf(source, path)
        found = peer_logits(python, path, "F32", pieces, VOCAB, tmp_path, 1)
        engine = build_engine(source, EngineConfig(dtype="float32", max_num_seqs=1)).engine
        own = np.concatenate(list(engine_logits(engine, pieces)))
        assert measure(text[1:], [own], found).max_kl < 1e-4
