"""What goes when models are cut: layers are tested in test_draft, feed-forward and head here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError, TrainingError, UnsupportedModelError
from paceline.models.weights import HEAD_TOKENS
from paceline_lab.train.acceptance import measure_acceptance, write_own_text
from paceline_lab.train.configs import DraftTrainingConfig
from paceline_lab.train.draft import train_draft
from paceline_lab.train.lm import LMTrainingResult, train_lm
from paceline_lab.train.model_files import TrainableModel, load_model, new_model
from paceline_lab.train.ops import TrainingOps, dense_hidden, differentiable_decoder
from paceline_lab.train.surgery import cut_model, frequent_tokens, prune_head
from paceline_lab.train.trainer import distillation_loss
from tests.lab.train.test_draft import PROMPTS
from tests.lab.train.toy_text import SHAPE, draft_config, lm_config

GROUPED = dataclasses.replace(SHAPE, num_heads=6, num_kv_heads=2, head_dim=4, num_layers=2)


def decoder_of(model: TrainableModel) -> Any:
    with torch.no_grad():
        return differentiable_decoder(model.config, model.tensors, TrainingOps(), 64)


def logits(model: TrainableModel) -> torch.Tensor:
    decoder = decoder_of(model)
    with torch.no_grad():
        return decoder.logits(dense_hidden(decoder, PROMPTS))


@pytest.fixture
def model() -> TrainableModel:
    return new_model(GROUPED, 280, 0, seed=1)


def fused(model: TrainableModel) -> TrainableModel:
    """The same model as Phi-3 would store it, without the norms that it has not."""
    params = {n: p for n, p in model.params.items() if "q_norm" not in n and "k_norm" not in n}
    for layer in range(GROUPED.num_layers):
        for place, new, names in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            prefix = f"model.layers.{layer}.{place}."
            parts = [params.pop(f"{prefix}{name}.weight") for name in names]
            params[f"{prefix}{new}.weight"] = torch.cat(parts)
    raw = {**model.raw, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    return TrainableModel(raw, params)


@pytest.mark.parametrize("store", [lambda model: model, fused])
def test_channels_that_say_nothing_go_first(model: TrainableModel, store: Any) -> None:
    for name, p in model.params.items():
        if name.endswith("down_proj.weight"):
            p[:, ::2] = 0.0
    whole = store(model)
    cut = cut_model(whole, mlp_width=GROUPED.intermediate_size // 2)
    assert cut.num_params < whole.num_params
    torch.testing.assert_close(logits(cut), logits(whole), rtol=1e-4, atol=1e-5)


def test_all_cuts_at_once_leave_a_model(model: TrainableModel) -> None:
    cut = cut_model(model, drop_layers=1, mlp_width=16)
    assert torch.isfinite(logits(cut)).all()
    assert (cut.config.num_layers, cut.config.intermediate_size) == (1, 16)


# --- the head -------------------------------------------------------------------------------------


def test_the_most_frequent_tokens_and_the_special_ones() -> None:
    tokens = np.array([7, 7, 7, 4, 4, 9, 9, 1, 3], np.int32)
    assert frequent_tokens(tokens, 12, 4, [0, 11]).tolist() == [0, 4, 7, 11]
    assert frequent_tokens(tokens, 12, 5, []).tolist() == [1, 3, 4, 7, 9]
    assert frequent_tokens(tokens, 12, 12, [0]).tolist() == list(range(12))
    for count in (1, 13, -1):
        with pytest.raises(TrainingError, match="allowed: 2 to 12"):
            frequent_tokens(tokens, 12, count, [0, 11])


def test_a_pruned_head_keeps_its_rows(model: TrainableModel) -> None:
    ids = np.arange(0, 280, 3)
    pruned = prune_head(model, ids)
    torch.testing.assert_close(logits(pruned), logits(model)[:, ids])
    assert "lm_head.weight" not in model.params
    assert prune_head(model, np.arange(280)) is model
    with pytest.raises(TrainingError, match="already"):
        prune_head(pruned, ids)


def test_it_is_measured_and_taught_by_the_tokens_that_it_has(model: TrainableModel) -> None:
    """The target with a pruned head is perfect wherever it can be."""
    ids = np.arange(0, 280, 2)
    target, draft = decoder_of(model), decoder_of(prune_head(model, ids))
    text = write_own_text(target, PROMPTS, 12, seed=0)
    found = measure_acceptance(draft, target, text, seed=0)
    share = np.isin(text.greedy[:, 5:].numpy(), ids).mean()
    assert 0 < share < 1
    assert found.greedy_top1 == found.greedy_top4 == pytest.approx(share)
    assert 0 < found.shared_top1 == found.shared_top4 < 1
    windows = torch.randint(0, 280, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = distillation_loss(target)(draft, windows)
        assert loss.item() == pytest.approx(0.0, abs=1e-5)


def test_a_draft_with_a_pruned_head_is_trained_and_read_again(
    corpus: Path, trained: LMTrainingResult, tmp_path: Path
) -> None:
    config = draft_config(corpus, trained.folder, tmp_path / "a", draft_vocab_size=150, steps=25)
    result = train_draft(config)
    assert result.before is not None
    assert result.after is not None
    assert result.after.greedy_top1 > result.before.greedy_top1 + 0.2
    found = load_model(tmp_path / "a")
    assert found.config.num_logits == 150
    assert found.fixed[HEAD_TOKENS].dtype == torch.int64
    assert not found.config.tie_embeddings
    again = dataclasses.replace(
        config, init=str(tmp_path / "a"), output=str(tmp_path / "b"), draft_vocab_size=0, steps=1
    )
    train_draft(again)
    assert torch.equal(load_model(tmp_path / "b").fixed[HEAD_TOKENS], found.fixed[HEAD_TOKENS])
    pruned = str(tmp_path / "a")
    with pytest.raises(UnsupportedModelError, match="can only draft"):
        train_draft(dataclasses.replace(config, target=pruned, output=str(tmp_path / "c")))
    with pytest.raises(UnsupportedModelError, match="can only draft"):
        train_lm(lm_config(corpus, tmp_path / "d", init=pruned))


@pytest.mark.parametrize(
    "options",
    [
        {"drop_layers": 1},
        {"mlp_width": 8},
        {"mlp_width": -1},
        {"num_speculative_tokens": 4},
        {"mask_token_id": 0},
    ],
)
def test_options_that_would_change_nothing_are_refused(
    tmp_path: Path, options: dict[str, int]
) -> None:
    with pytest.raises(ConfigError):
        DraftTrainingConfig(target="t", output=str(tmp_path), steps=1, **options)
