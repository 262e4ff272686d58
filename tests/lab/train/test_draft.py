"""Cutting, distilling and measuring drafts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import ConfigError, TraceError, TrainingError
from paceline.request.traces import Trace, TraceWriter
from paceline_lab.train import draft as draft_module
from paceline_lab.train.acceptance import (
    continue_prompts,
    generate_documents,
    measure_acceptance,
    write_own_text,
)
from paceline_lab.train.data import TokenDocuments, read_answers
from paceline_lab.train.draft import train_draft
from paceline_lab.train.lm import LMTrainingResult
from paceline_lab.train.model_files import TrainableModel, load_model, new_model
from paceline_lab.train.ops import TrainingOps, dense_hidden, differentiable_decoder
from paceline_lab.train.surgery import cut_model, kept_layers
from paceline_lab.train.trainer import cross_entropy, distillation_loss
from tests.lab.train.toy_text import SHAPE, draft_config

PROMPTS = torch.randint(1, 280, (6, 5), generator=torch.Generator().manual_seed(1))


def _decoder(model: TrainableModel, dtype: str = "float32") -> Any:
    with torch.no_grad():
        return differentiable_decoder(model.config, model.params, TrainingOps(dtype), 64)


@pytest.fixture(scope="session")
def target(trained: LMTrainingResult) -> TrainableModel:
    return load_model(trained.folder)


def test_growing_rows_see_what_packed_rows_see(target: TrainableModel) -> None:
    decoder = _decoder(target)
    rows = continue_prompts(decoder, PROMPTS, 12, 0.0, seed=0)
    with torch.no_grad():
        logits = decoder.logits(dense_hidden(decoder, rows)).view(*rows.shape, -1)
    assert torch.equal(rows[:, : PROMPTS.shape[1]], PROMPTS)
    assert torch.equal(logits.argmax(-1)[:, PROMPTS.shape[1] - 1 : -1], rows[:, PROMPTS.shape[1] :])


def test_sampling_is_reproducible_and_leaves_the_global_state(target: TrainableModel) -> None:
    decoder, before = _decoder(target), torch.get_rng_state()
    first, second, other = (continue_prompts(decoder, PROMPTS, 12, 1.0, s) for s in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_reach_every_tensor(target: TrainableModel, dtype: str) -> None:
    params = {n: p.clone().requires_grad_() for n, p in target.params.items()}
    windows = torch.randint(0, 280, (2, 17))
    decoder = differentiable_decoder(target.config, params, TrainingOps(dtype), 17)
    cross_entropy(decoder, windows).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in params.values())


def test_loss_in_slices_is_the_loss(
    target: TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients() -> tuple[float, torch.Tensor]:
        params = {n: p.clone().requires_grad_() for n, p in target.params.items()}
        decoder = differentiable_decoder(target.config, params, TrainingOps(), 33)
        windows = torch.randint(0, 280, (3, 33), generator=torch.Generator().manual_seed(0))
        loss = cross_entropy(decoder, windows)
        loss.backward()
        grad = params["model.embed_tokens.weight"].grad
        assert grad is not None
        return loss.item(), grad

    whole = gradients()
    monkeypatch.setattr("paceline_lab.train.trainer.SLICE_ELEMENTS", 280 * 20)
    sliced = gradients()
    assert sliced[0] == pytest.approx(whole[0], abs=1e-5)
    torch.testing.assert_close(sliced[1], whole[1], rtol=1e-4, atol=1e-6)


def test_kept_layers_are_spread() -> None:
    assert kept_layers(8, 8) == list(range(8))
    assert kept_layers(8, 2) == [0, 7]
    assert kept_layers(8, 3) == [0, 4, 7]
    assert kept_layers(8, 1) == [0]


def test_cutting_keeps_shapes_and_beats_random(target: TrainableModel) -> None:
    cut = cut_model(target, drop_layers=1, mlp_width=40)
    assert cut.config.num_layers == 1
    assert cut.config.intermediate_size == 40
    assert cut.raw["num_hidden_layers"] == 1
    assert cut.params["model.layers.0.mlp.down_proj.weight"].shape == (32, 40)
    random = new_model(dataclasses.replace(SHAPE, num_layers=1), 280, 0, seed=0)
    windows = write_own_text(_decoder(target), PROMPTS, 20, seed=0).sampled
    narrow = cut_model(target, mlp_width=40)
    with torch.no_grad():
        losses = [cross_entropy(_decoder(m), windows).item() for m in (narrow, cut, random)]
    assert losses[0] < losses[1] < losses[2]


def test_cutting_nothing_changes_nothing(target: TrainableModel) -> None:
    same = cut_model(target, 0, SHAPE.intermediate_size)
    assert all(torch.equal(same.params[n], p) for n, p in target.params.items())
    assert same.config == target.config


@pytest.mark.parametrize("cut", [{"drop_layers": 2}, {"drop_layers": -1}, {"mlp_width": 49}])
def test_impossible_cuts_are_refused(target: TrainableModel, cut: dict[str, int]) -> None:
    with pytest.raises(TrainingError, match="allowed:"):
        cut_model(target, **cut)


def test_the_target_accepts_itself(target: TrainableModel) -> None:
    decoder = _decoder(target)
    text = write_own_text(decoder, PROMPTS, 12, seed=0)
    figures = measure_acceptance(decoder, decoder, text, seed=0)
    assert figures.positions == 6 * 12
    ones = (figures.greedy_top1, figures.greedy_top4, figures.shared_top1, figures.shared_top4)
    assert ones == (1.0, 1.0, 1.0, 1.0)
    assert figures.one_minus_tv == pytest.approx(1.0, abs=1e-5)


def test_the_loss_against_the_target(target: TrainableModel) -> None:
    decoder, windows = _decoder(target), torch.randint(0, 280, (2, 17))
    random = _decoder(new_model(SHAPE, 280, 0, seed=0))
    with torch.no_grad():
        loss = distillation_loss(decoder)
        assert loss(decoder, windows).item() == pytest.approx(0.0, abs=1e-5)
        assert loss(random, windows).item() > 0.1


def test_distillation_raises_acceptance(
    corpus: Path, trained: LMTrainingResult, tmp_path: Path
) -> None:
    options = {"generate_tokens": 1000, "generate_prompt_tokens": 4, "generate_new_tokens": 28}
    result = train_draft(draft_config(corpus, trained.folder, tmp_path, **options))
    assert result.before is not None
    assert result.after is not None
    assert result.after.greedy_top1 > result.before.greedy_top1 + 0.2
    assert result.after.shared_top1 > result.before.shared_top1
    assert result.after.one_minus_tv > result.before.one_minus_tv
    assert not list(tmp_path.glob("*.npz"))
    names = {p.name for p in trained.folder.iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert "held-out acceptance after" in (tmp_path / "README.md").read_text()


def test_cut_draft_from_the_target_itself(
    corpus: Path, trained: LMTrainingResult, tmp_path: Path
) -> None:
    config = draft_config(
        corpus,
        trained.folder,
        tmp_path,
        init=str(trained.folder),
        drop_layers=1,
        mlp_width=24,
        learning_rate=5e-3,
        steps=25,
    )
    result = train_draft(config)
    assert load_model(tmp_path).config.num_layers == 1
    assert result.before is not None
    assert result.after is not None
    assert result.after.one_minus_tv > result.before.one_minus_tv


def test_resumed_distillation_equals_uninterrupted_one(
    corpus: Path, trained: LMTrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "steps": 8,
        "generate_tokens": 500,
        "generate_prompt_tokens": 4,
        "generate_new_tokens": 28,
        "save_minutes": 0.0,
    }
    train_draft(draft_config(corpus, trained.folder, tmp_path / "whole", **options))
    broken = draft_config(corpus, trained.folder, tmp_path / "broken", **options)

    def failing(teacher: Any) -> Any:
        left = [9]
        inner = distillation_loss(teacher)

        def loss(*arguments: Any) -> torch.Tensor:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return inner(*arguments)

        return loss

    with monkeypatch.context() as patch:
        patch.setattr(draft_module, "distillation_loss", failing)
        with pytest.raises(KeyboardInterrupt):
            train_draft(broken)
    train_draft(broken)
    whole, resumed = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def _write_traces(folder: Path, sequences: list[list[int]]) -> None:
    """Answers after one token of prompt."""
    writer = TraceWriter(folder, {})
    writer.write_shard([_trace(i, tokens) for i, tokens in enumerate(sequences)])


def _trace(index: int, tokens: list[int]) -> Trace:
    outputs = np.array(tokens[1:], np.int32)
    zeros = np.zeros(len(outputs), np.float32)
    return Trace(index, 1, np.array(tokens, np.int32), zeros, outputs[:, None], zeros[:, None])


def test_drafts_learn_from_traces(
    target: TrainableModel, trained: LMTrainingResult, tmp_path: Path
) -> None:
    rows = continue_prompts(_decoder(target), PROMPTS.repeat(20, 1), 20, 1.0, seed=0)
    _write_traces(tmp_path / "traces", rows.tolist())
    config = draft_config(tmp_path, trained.folder, tmp_path / "out", text=(), steps=25)
    result = train_draft(dataclasses.replace(config, traces=(str(tmp_path / "traces"),)))
    assert result.before is not None
    assert result.after is not None
    assert result.after.one_minus_tv > result.before.one_minus_tv


def test_traces_are_read_and_checked(tmp_path: Path) -> None:
    _write_traces(tmp_path / "good", [[1, 2, 3], [4], [5, 6]])
    assert [list(d) for d in read_answers(tmp_path / "good", 280)] == [[1, 2, 3], [4], [5, 6]]
    with pytest.raises(TraceError, match="another model"):
        read_answers(tmp_path / "good", 5)
    with pytest.raises(TraceError, match=r"meta\.json"):
        read_answers(tmp_path, 280)


def test_generated_text_starts_with_pieces_of_the_texts(target: TrainableModel) -> None:
    texts = TokenDocuments.of(
        [np.arange(1, 30, dtype=np.int32), np.arange(100, 104, dtype=np.int32)]
    )
    made = generate_documents(
        _decoder(target),
        texts,
        tokens=50,
        prompt_tokens=5,
        new_tokens=10,
        temperatures=(0.0, 1.0),
        batch_size=3,
        seed=0,
    )
    assert len(made) == 6
    for row in made:
        assert len(row) == 15
        assert list(row[:5]) == list(range(row[0], row[0] + 5))


def test_another_vocabulary_is_refused(
    corpus: Path, trained: LMTrainingResult, tmp_path: Path
) -> None:
    from paceline_lab.train.lm import train_lm
    from tests.lab.train.toy_text import lm_config

    other = tmp_path / "other"
    train_lm(lm_config(corpus, other, vocab_size=270, steps=1, held_out_tokens=0))
    with pytest.raises(TrainingError, match="vocabulary of 270"):
        train_draft(draft_config(corpus, trained.folder, tmp_path / "out", init=str(other)))


@pytest.mark.parametrize(
    "options",
    [
        {"drop_layers": 1},
        {"generate_temperatures": ()},
        {"generate_temperatures": (-1.0,)},
        {"eval_new_tokens": 0},
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        draft_config(tmp_path, tmp_path, tmp_path, **options)
