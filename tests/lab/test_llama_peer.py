"""Weights written for llama.cpp, read back; and what is said when it cannot be run."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from paceline.build.build import build_engine
from paceline.config import EngineConfig
from paceline.core.errors import ConfigError, PacelineError
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.layer_sizes import RopeConfig
from paceline.request.sampling_params import SamplingParams
from paceline_lab.quality import llama_peer_child
from paceline_lab.quality.llama_peer import LlamaPeer, write_gguf
from paceline_lab.quality.quality import engine_arm, measure, windows
from tests.arrays import arrays, same
from tests.toy import TOY, VOCAB, Job, run_jobs, toy_tensors

pytest.importorskip("gguf")
QWEN = replace(TOY, architecture="qwen3")
LLAMA = TOY.with_traits({"architecture": "llama", "attention.qk_norm": False})


def checkpoint(config=QWEN) -> Checkpoint:
    tensors = toy_tensors()
    if not config.attention.qk_norm:
        norms = ("q_norm.weight", "k_norm.weight")
        tensors = {name: t for name, t in tensors.items() if not name.endswith(norms)}
    return Checkpoint(config, arrays(tensors), None, "toy")


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen3", "llama"])
def test_what_is_written_is_the_model(config, tmp_path: Path) -> None:
    source = checkpoint(config)
    write_gguf(source, tmp_path / "model.gguf")
    found = load_checkpoint(tmp_path / "model.gguf", with_tokenizer=False)
    assert found.config.positions.rope.theta == config.positions.rope.theta
    for name in (
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "norms.eps",
        "max_position",
    ):
        value = attrgetter(name)
        assert value(found.config) == pytest.approx(value(config))
    for name, tensor in source.tensors.items():
        assert same(found.tensors[name], tensor)


def test_models_without_a_conversion_are_refused(tmp_path: Path) -> None:
    yarn = LLAMA.with_traits({"positions.rope": RopeConfig(scaling="yarn")})
    for config in (TOY, yarn, LLAMA.with_traits({"mlp.activation": "gelu"})):
        with pytest.raises(ConfigError, match="no conversion"):
            write_gguf(checkpoint(config), tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("python", "reason"),
    [("/no/such/python", "cannot be run"), (sys.executable, "no library of llama.cpp: install")],
)
def test_an_interpreter_that_cannot_do_it(python: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=reason):
        LlamaPeer(python, tmp_path / "x.gguf", tmp_path, vocab_size=VOCAB, longest=3, threads=1)


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


PEER = """
import json, os, struct, sys
for line in sys.stdin:
    task = json.loads(line)
    if "source" in task:
        out, answer = task["out"], {"vocab_size": 3, "version": "1"}
    elif task.get("prompt") == []:
        sys.exit("an empty prompt")
    elif "prompt" in task:
        answer = {"token_ids": [len(task["prompt"])] * task["max_tokens"]}
    else:
        wanted = task["tokens"][task["first"] - 1 : -1]
        with open(out, "wb") as file:
            for token in wanted:
                file.write(struct.pack("<3f", token, 0, 0))
        answer = {"rows": len(wanted)}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def toy_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that has no llama.cpp, but answers as one that has."""
    (tmp_path / "child.py").write_text(PEER, encoding="utf-8")
    monkeypatch.setattr(llama_peer_child, "__file__", str(tmp_path / "child.py"))


@pytest.mark.usefixtures("toy_child")
def test_one_process_answers_window_after_window(tmp_path: Path) -> None:
    source = tmp_path / "x.gguf"
    settings = {"vocab_size": 3, "longest": 8, "threads": 1}
    with LlamaPeer(sys.executable, source, tmp_path / "peer", **settings) as peer:
        assert peer.facts["version"] == "1"
        for text in ([5, 6, 7, 8], [1, 2, 3]):
            (piece,) = windows(text, 8, 7)
            out = np.empty((len(piece.targets), 3), np.float32)
            peer.logits(piece, out)
            assert out[:, 0].tolist() == text[:-1]
        assert peer.greedy([1, 2], 3) == [2, 2, 2]
        with pytest.raises(PacelineError, match="an empty prompt"):
            peer.greedy([], 3)
    with pytest.raises(PacelineError, match="sees 3 tokens in a vocabulary of 4"):
        LlamaPeer(sys.executable, source, tmp_path / "peer", **{**settings, "vocab_size": 4})


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_llama_cpp_agrees_in_float32(kv_type: str, tmp_path: Path) -> None:
    python = os.environ.get("PACELINE_TEST_LLAMA")
    if not python:
        pytest.skip("PACELINE_TEST_LLAMA names no Python with llama.cpp")
    text = np.random.default_rng(3).integers(1, VOCAB, 90).tolist()
    pieces = windows(text, 64, 16)
    for config in (QWEN, LLAMA):
        source = checkpoint(config)
        path = tmp_path / f"{config.architecture}.gguf"
        write_gguf(source, path)
        engine = build_engine(source, EngineConfig(dtype="float32", max_num_seqs=1)).engine
        settings = {"vocab_size": VOCAB, "longest": 64, "threads": 1, "kv_type": kv_type}
        with LlamaPeer(python, path, tmp_path / config.architecture, **settings) as peer:
            assert kv_type in peer.facts["kv_type"]
            rows = measure(pieces, VOCAB, partial(engine_arm, engine), {"peer": peer.logits})
            prompt = text[:5]
            greedy = peer.greedy(prompt, 4)
        assert rows["peer"].kl.max() < (1e-8 if kv_type == "f32" else 1e-4)
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        assert list(run_jobs(engine, [Job(prompt, params)])[0][0].token_ids) == greedy
