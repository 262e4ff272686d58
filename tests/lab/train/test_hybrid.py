"""Training hybrids of gated delta nets and attention, from scratch or grown out of dense models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError, TrainingError
from paceline_lab.train.lm import LMTrainingResult, train_lm
from paceline_lab.train.model_files import TrainableModel, load_model
from paceline_lab.train.ops import TrainingOps, dense_hidden, differentiable_decoder
from paceline_lab.train.surgery import HybridRows, hybridise
from tests.lab.train.toy_text import SHAPE, draft_config, lm_config

transformers = pytest.importorskip("transformers", minversion="5.0")
Driver = pytest.importorskip("tests.models.reference").Driver

TOKENS = torch.randint(0, 280, (1, 32), generator=torch.Generator().manual_seed(0))
HYBRID = dataclasses.replace(SHAPE, layers="da")


def _logits(model: TrainableModel) -> torch.Tensor:
    with torch.no_grad():
        rows = HybridRows(model, "float32")
        return rows.logits(dense_hidden(rows, TOKENS))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def hybrid(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    result = train_lm(lm_config(corpus, folder, shape=HYBRID, steps=60))
    assert result.held_out_before == pytest.approx(5.6, abs=0.4)  # log 280
    assert result.held_out_after < 0.6 * result.held_out_before
    return folder


def test_a_written_hybrid_is_what_transformers_and_the_engine_read(hybrid: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    torch.testing.assert_close(_logits(load_model(hybrid, hybrid=True)), expected)
    told = Driver.of(hybrid, max_len=64).chunk(TOKENS[0].tolist())
    torch.testing.assert_close(told, expected, rtol=0, atol=1e-4)


def test_attention_that_stays_says_what_it_said(trained: LMTrainingResult) -> None:
    dense = load_model(trained.folder)
    with torch.no_grad():
        rows = differentiable_decoder(dense.config, dense.params, TrainingOps(), 32)
        expected = rows.logits(dense_hidden(rows, TOKENS))
    torch.testing.assert_close(_logits(hybridise(dense, "a", seed=0)), expected)


def test_a_hybrid_grows_out_of_a_dense_model_and_is_continued(
    trained: LMTrainingResult, corpus: Path, tmp_path: Path
) -> None:
    config = lm_config(corpus, tmp_path / "grown", init=str(trained.folder), shape=HYBRID, steps=20)
    grown = train_lm(config)
    assert grown.held_out_after < grown.held_out_before < 5.6
    config = lm_config(corpus, tmp_path / "more", init=str(grown.folder), steps=2, dtype="bfloat16")
    before, after = (load_model(f, hybrid=True) for f in (grown.folder, train_lm(config).folder))
    assert after.config == before.config
    changed = {n for n, p in after.params.items() if not torch.equal(p, before.params[n])}
    assert {n for n in before.params if ".linear_attn." in n} <= changed
    with pytest.raises(TrainingError, match="type qwen3_5_text cannot be turned into a hybrid"):
        hybridise(after, "da", seed=0)


@pytest.mark.parametrize("changes", [{"layers": "dd"}, {"layers": "dx"}, {"num_experts": 4}])
def test_layers_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(TrainingError, match="layers"):
        dataclasses.replace(HYBRID, **changes)


def test_a_hybrid_is_not_trained_as_a_draft(hybrid: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not trained as drafts"):
        draft_config(corpus, hybrid, tmp_path, shape=HYBRID)
    with pytest.raises(TrainingError, match="cannot be trained here"):
        load_model(hybrid)
