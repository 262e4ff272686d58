"""Training a language model: it learns, resumes exactly, and writes what it trained."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from paceline.backends.rows.rows import Rows
from paceline.core.errors import ConfigError, TrainingError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.layer_sizes import Experts
from paceline_lab.train import lm, trainer
from paceline_lab.train.checkpoint import FILE_NAME
from paceline_lab.train.configs import learning_rate
from paceline_lab.train.lm import LMTrainingResult, train_lm
from paceline_lab.train.model_files import load_model, load_tokenizer
from paceline_lab.train.ops import TrainingOps, dense_hidden, differentiable_decoder
from paceline_lab.train.surgery import cut_model, upcycle
from paceline_lab.train.trainer import cross_entropy, imbalance
from tests.disks import full_disk
from tests.lab.train.reference import reference_logits
from tests.lab.train.toy_text import SHAPE, lm_config, write_corpus

TOKENS = torch.randint(0, 280, (1, 32), generator=torch.Generator().manual_seed(0))


def _training_logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    with torch.no_grad():
        decoder = differentiable_decoder(model.config, model.params, TrainingOps(), 32)
        return decoder.logits(dense_hidden(decoder, TOKENS))


def test_loss_falls(trained: LMTrainingResult) -> None:
    assert trained.held_out_before == pytest.approx(5.6, abs=0.4)  # log 280
    assert trained.held_out_after < 0.6 * trained.held_out_before
    assert trained.steps == 60
    assert trained.train_tokens == 60 * 8 * 32


def test_written_model_is_what_transformers_reads(trained: LMTrainingResult) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(trained.folder, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    torch.testing.assert_close(_training_logits(trained.folder), expected, rtol=0, atol=1e-4)


def test_written_model_is_what_the_engine_reads(trained: LMTrainingResult) -> None:
    checkpoint = load_checkpoint(trained.folder)
    logits = reference_logits(checkpoint.config, checkpoint.tensors, TOKENS[0])
    torch.testing.assert_close(logits, _training_logits(trained.folder), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained mixture of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    shape = dataclasses.replace(SHAPE, num_experts=4, experts_per_token=2)
    config = lm_config(write_corpus(folder), folder / "model", shape=shape, steps=60)
    result = train_lm(config)
    assert result.held_out_after < 0.6 * result.held_out_before
    return result.folder


def test_a_mixture_is_what_transformers_reads(mixture: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    torch.testing.assert_close(_training_logits(mixture), expected, rtol=0, atol=1e-4)


def test_a_mixture_uses_all_its_experts(mixture: Path) -> None:
    """The loss that balances them is 1 where they are used alike, and 2 where half of them are."""
    model = load_model(mixture)
    text = (mixture.parent / "corpus.jsonl").read_text(encoding="utf-8")
    windows = torch.tensor(load_tokenizer(mixture).encode(text).ids[: 50 * 32]).view(50, 32)
    with torch.no_grad():
        decoder = differentiable_decoder(model.config, model.params, TrainingOps(), 32)
        dense_hidden(decoder, windows)
    assert len(decoder.routed) == SHAPE.num_layers
    assert 1.0 <= imbalance(decoder).item() < 1.2
    for ids, _ in decoder.routed:
        assert torch.bincount(ids.flatten(), minlength=4).min() > 0.1 * ids.shape[0]


def test_a_mixture_grows_out_of_a_dense_model(trained: LMTrainingResult, tmp_path: Path) -> None:
    """It says the same at first, and its experts are trained from there."""
    dense, shape = load_model(trained.folder), dataclasses.replace(SHAPE, num_experts=4)
    grown = upcycle(dense, shape, seed=0)
    assert grown.config.mlp.experts == Experts(4, 2, SHAPE.intermediate_size)
    with torch.no_grad():
        told, expected = (
            dense_hidden(differentiable_decoder(m.config, m.params, TrainingOps(), 32), TOKENS)
            for m in (grown, dense)
        )
    torch.testing.assert_close(told, expected)
    text = str(tmp_path / "corpus.jsonl")
    write_corpus(tmp_path)
    config = lm_config(Path(text), tmp_path / "m", init=str(trained.folder), shape=shape, steps=3)
    result = train_lm(config)
    experts = [p for n, p in load_model(result.folder).params.items() if "0.mlp.experts" in n]
    assert len(experts) == 4 * 3
    assert not torch.equal(experts[0], experts[3])
    with pytest.raises(TrainingError, match="type qwen3_moe cannot be turned into a mixture"):
        upcycle(grown, shape, seed=0)


def test_a_mixture_can_be_continued_and_not_cut(mixture: Path, tmp_path: Path) -> None:
    before = load_model(mixture)
    text = mixture.parent / "corpus.jsonl"
    config = lm_config(text, tmp_path, init=str(mixture), steps=2, dtype="bfloat16")
    after = load_model(train_lm(config).folder)
    assert after.config == before.config
    changed = [n for n, p in after.params.items() if not torch.equal(p, before.params[n])]
    assert {n for n in before.params if ".mlp." in n} <= set(changed)  # routers too
    with pytest.raises(TrainingError, match="cannot be cut"):
        cut_model(before, drop_layers=1)


def test_folder_is_complete(trained: LMTrainingResult) -> None:
    names = {p.name for p in trained.folder.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (trained.folder / "README.md").read_text()
    assert "paceline train lm ..." in card
    assert f"{trained.held_out_after:.3f}" in card
    tokenizer = load_tokenizer(trained.folder)
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.decode(tokenizer.encode("Zürich → 東京\n").ids) == "Zürich → 東京\n"


def _stop_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Make the training's loss fail, as a killed process would stop it, after some calls."""
    left = [calls]

    def failing(*arguments: Any) -> torch.Tensor:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return cross_entropy(*arguments)

    monkeypatch.setattr(lm, "cross_entropy", failing)


def test_resumed_run_equals_uninterrupted_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"steps": 12, "grad_accumulation": 2, "batch_size": 4}
    train_lm(lm_config(corpus, tmp_path / "whole", **options))
    broken = lm_config(corpus, tmp_path / "broken", save_minutes=0.0, **options)
    with monkeypatch.context() as patch:
        _stop_after(patch, 20)  # in the middle of a step, in whichever epoch
        with pytest.raises(KeyboardInterrupt):
            train_lm(broken)
    assert (tmp_path / "broken" / FILE_NAME).is_file()
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    result = train_lm(broken)
    assert result.steps == 12
    assert not (tmp_path / "broken" / FILE_NAME).exists()
    whole, resumed = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_full_disk_ends_the_training_with_an_error_and_leaves_nothing_half(
    corpus: Path, tmp_path: Path, trained: LMTrainingResult
) -> None:
    options: dict[str, Any] = {"steps": 2, "held_out_tokens": 0, "tokenizer": str(trained.folder)}
    for name, save_minutes in (("state", 0.0), ("model", 60.0)):
        config = lm_config(corpus, tmp_path / name, save_minutes=save_minutes, **options)
        with full_disk(room=4096), pytest.raises(TrainingError, match="cannot write"):
            train_lm(config)
        assert not list((tmp_path / name).glob("*.safetensors"))
        assert not list((tmp_path / name).glob(".*"))


def test_state_of_another_run_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            train_lm(lm_config(corpus, tmp_path, save_minutes=0.0, held_out_tokens=0))
    with pytest.raises(TrainingError, match="other options"):
        train_lm(lm_config(corpus, tmp_path, learning_rate=1e-4, held_out_tokens=0))
    state = tmp_path / FILE_NAME
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(TrainingError, match="cannot be read"):
        train_lm(lm_config(corpus, tmp_path, held_out_tokens=0))


def test_continuing_a_model_keeps_shape_and_tokenizer(
    corpus: Path, tmp_path: Path, trained: LMTrainingResult
) -> None:
    config = lm_config(corpus, tmp_path, init=str(trained.folder), steps=10, learning_rate=3e-3)
    result = train_lm(config)
    assert result.held_out_before == pytest.approx(trained.held_out_after, abs=1e-3)
    assert result.held_out_after < result.held_out_before
    same = (trained.folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == same


def test_continuing_a_model_keeps_how_it_generates(
    corpus: Path, tmp_path: Path, trained: LMTrainingResult
) -> None:
    """Chat models often name one end of an answer in one file and both in the other."""
    known = {"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.8}
    shutil.copytree(trained.folder, tmp_path / "chat")
    (tmp_path / "chat" / "generation_config.json").write_text(json.dumps(known))
    train_lm(lm_config(corpus, tmp_path / "more", init=str(tmp_path / "chat"), steps=1))
    told = json.loads((tmp_path / "more" / "generation_config.json").read_text())
    assert told == {"bos_token_id": 0, **known}
    assert set(load_checkpoint(tmp_path / "more").config.eos_token_ids) == {0, 2}


def test_a_tokenizer_may_leave_ids_out(corpus: Path, tmp_path: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "the": 3, "[UNK]": 5, "rider": 9}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer": str(tmp_path), "steps": 1}
    train_lm(lm_config(corpus, tmp_path / "model", **options))
    assert load_model(tmp_path / "model").config.vocab_size == 10


def test_finished_model_is_not_overwritten(corpus: Path, trained: LMTrainingResult) -> None:
    with pytest.raises(TrainingError, match="already holds a model"):
        train_lm(lm_config(corpus, trained.folder))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "packed-00001.safetensors"]
)
def test_a_model_in_shards_is_not_overwritten(corpus: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"kept")
    with pytest.raises(TrainingError, match="already holds a model"):
        train_lm(lm_config(corpus, tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_what_is_overwritten_is_gone(corpus: Path, tmp_path: Path, trained: Any) -> None:
    """Its shards are not read in place of the weights, nor is its tokenizer taken."""
    shard, options = "model-00001-of-00001.safetensors", {"steps": 1, "overwrite": True}
    (tmp_path / shard).write_bytes((trained.folder / "model.safetensors").read_bytes())
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / shard), shard)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    train_lm(lm_config(corpus, tmp_path, **options))
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert load_tokenizer(tmp_path).get_vocab_size() == 280
    train_lm(lm_config(corpus, tmp_path, vocab_size=290, **options))
    assert load_tokenizer(tmp_path).get_vocab_size() == 290
    assert load_model(tmp_path).config.vocab_size == 290


def test_a_loss_that_is_not_finite_stops(corpus: Path, tmp_path: Path) -> None:
    config = lm_config(corpus, tmp_path, learning_rate=10.0, grad_clip=1e9, warmup_steps=0)
    original = trainer.differentiable_decoder

    def poisoned(*arguments: Any) -> Rows:
        rows = original(*arguments)
        rows._decoder.norm = rows._decoder.norm * float("nan")
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "differentiable_decoder", poisoned)
        with pytest.raises(TrainingError, match="loss is nan"):
            train_lm(config)


def test_something_has_to_end_a_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(--steps\), a time \(--max-minutes\)"):
        lm_config(tmp_path, tmp_path, steps=0)


def test_schedule_by_steps_and_by_time(tmp_path: Path) -> None:
    by_steps = lm_config(tmp_path, tmp_path, steps=100, warmup_steps=9, learning_rate=1.0)
    rates = [learning_rate(by_steps, s, 0.0) for s in (0, 4, 20, 50, 75, 100)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.515, 0.03])
    by_time = lm_config(tmp_path, tmp_path, steps=0, max_minutes=2.0, learning_rate=1.0)
    rates = [learning_rate(by_time, 50, seconds) for seconds in (0.0, 60.0, 90.0, 120.0, 500.0)]
    assert rates == pytest.approx([1.0, 1.0, 0.515, 0.03, 0.03])


def test_time_ends_the_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.01 * next(looks))  # so long between two looks
    monkeypatch.setattr(trainer, "time", clock)
    result = train_lm(lm_config(corpus, tmp_path, steps=0, max_minutes=0.01, held_out_tokens=0))
    assert result.steps > 0
    assert 0.6 <= result.seconds < 0.8


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"dtype": "int8"},
        {"seq_len": 1},
        {"batch_size": True},
        {"learning_rate": -1.0},
        {"vocab_size": 10},
        {"output": ""},
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        lm_config(tmp_path, options.pop("output", str(tmp_path)), **options)


TRAIN_AND_DIE = """
import os, signal, sys, torch
from tests.lab.train.toy_text import SHAPE, lm_config, write_corpus
from paceline_lab.train.lm import train_lm

torch.set_num_threads(1)
corpus, folder, saves, replace = *sys.argv[1:3], int(sys.argv[3]), os.replace

def dies(*paths):  # when a file is written but not yet in its place
    global saves
    saves -= 1
    if saves == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = dies
train_lm(lm_config(corpus, folder, save_minutes=0.0, steps=60))
"""


@pytest.mark.slow
def test_killed_process_continues(corpus: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}

    def train(folder: str, last_save: int = 0) -> int:
        options = [str(corpus), str(tmp_path / folder), str(last_save)]
        command = [sys.executable, "-c", TRAIN_AND_DIE, *options]
        return subprocess.run(command, env=environment, cwd=root, check=False).returncode

    assert train("whole") == 0
    assert train("killed", last_save=40) == -signal.SIGKILL
    assert (tmp_path / "killed" / FILE_NAME).exists()
    assert train("killed") == 0
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "killed")]
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "killed" / "config.json").read_text())["dtype"] == "float32"
