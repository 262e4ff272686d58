"""Training of parallel drafts: what their packed rows see, what is dropped, and that they learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import ConfigError, TrainingError
from paceline.loading.checkpoint import load_checkpoint
from paceline_lab.train import draft as draft_module
from paceline_lab.train.configs import DraftTrainingConfig
from paceline_lab.train.draft import train_draft
from paceline_lab.train.lm import LMTrainingResult
from paceline_lab.train.model_files import TrainableModel, load_model, load_tokenizer, new_model
from paceline_lab.train.ops import TrainingOps, dense_hidden, differentiable_decoder
from paceline_lab.train.parallel import (
    chain_hidden,
    chain_rows,
    keep_share,
    make_parallel,
    measure_chains,
    parallel_loss,
)
from paceline_lab.train.trainer import divergence
from tests.lab.train.toy_text import SHAPE, draft_config

MASK, TOKENS = 279, 4
MODEL = new_model(SHAPE, 280, 0, seed=3)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def decoder(model: TrainableModel = MODEL, **traits: Any) -> Any:
    config = model.config.with_traits(traits)
    with torch.no_grad():
        return differentiable_decoder(config, model.params, TrainingOps(), 64)


def test_shares_are_those_of_the_paper() -> None:
    assert [round(keep_share(depth), 4) for depth in range(7)] == [
        *(1.0, 0.7, 0.49, 0.343),
        *(0.2401, 0.2, 0.2),
    ]


def test_so_many_chains_are_kept_and_each_is_whole() -> None:
    rows = chain_rows(103, TOKENS, generator())
    kept = [rows.bases[rows.depths == depth].tolist() for depth in range(TOKENS)]
    assert kept[0] == list(range(103))
    for depth in range(1, TOKENS):
        assert len(kept[depth]) == round(100 * keep_share(depth))
        assert set(kept[depth]) <= set(kept[depth - 1])
        assert max(kept[depth]) + depth < 103
    assert kept != [
        chain_rows(103, TOKENS, None).bases[chain_rows(103, TOKENS, None).depths == d].tolist()
        for d in range(TOKENS)
    ]


@pytest.mark.parametrize(
    "traits", [{}, {"attention.sliding_window": 3}, {"attention.softcap": 2.0}]
)
def test_a_packed_row_computes_what_a_forward_of_its_own_does(traits: dict[str, Any]) -> None:
    model = decoder(**traits)
    inputs = torch.randint(0, MASK, (2, 13), generator=generator())
    rows = chain_rows(13, TOKENS, generator())
    with torch.no_grad():
        packed = chain_hidden(model, inputs, rows, MASK).unflatten(0, (2, -1))
        for at, (base, depth) in enumerate(zip(rows.bases, rows.depths, strict=True)):
            masks = torch.full((2, int(depth)), MASK)
            alone = dense_hidden(model, torch.cat((inputs[:, : base + 1], masks), dim=1))
            expected = alone.unflatten(0, (2, -1))[:, -1]
            torch.testing.assert_close(packed[:, at], expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_over_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = decoder(new_model(SHAPE, 280, 0, seed=9)), decoder()
    windows = torch.randint(0, MASK, (2, 12), generator=generator())
    loss = parallel_loss(target, MASK, TOKENS)
    everything = chain_rows(11, TOKENS, None)
    monkeypatch.setattr("paceline_lab.train.parallel.chain_rows", lambda *_: everything)
    with torch.no_grad():
        whole = loss(draft, windows)
        expected = []
        for base, depth in zip(everything.bases, everything.depths, strict=True):
            masks = torch.full((2, int(depth)), MASK)
            read = torch.cat((windows[:, : base + 1], masks), dim=1)
            own, wanted = (
                model.logits(dense_hidden(model, tokens)).unflatten(0, (2, -1))[:, -1]
                for model, tokens in ((draft, read), (target, windows[:, : base + depth + 1]))
            )
            expected.append(divergence(own, wanted) / 2)
        assert whole.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)
        monkeypatch.setattr("paceline_lab.train.trainer.SLICE_ELEMENTS", 280 * 20)
        assert loss(draft, windows).item() == pytest.approx(whole.item(), rel=1e-4)


def test_what_is_dropped_depends_on_the_windows_alone() -> None:
    loss, windows = parallel_loss(decoder(new_model(SHAPE, 280, 0, 9)), MASK, TOKENS), None
    windows = torch.randint(0, MASK, (2, 40), generator=generator())
    with torch.no_grad():
        first = loss(decoder(), windows)
        torch.rand(3)
        assert torch.equal(loss(decoder(), windows), first)


def test_chains_are_counted_to_their_first_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    text = torch.randint(0, MASK, (1, 12), generator=generator())
    rows = chain_rows(11, 3, None)
    # Right in every row but those of depth 1, and of depth 2 behind every other base.
    right = (rows.depths != 1) & ~((rows.depths == 2) & (rows.bases % 2 == 0))
    best = torch.where(right, text[0][rows.positions + 1], MASK)
    logits = torch.nn.functional.one_hot(best, 280).float()
    monkeypatch.setattr("paceline_lab.train.parallel.chain_hidden", lambda *_: logits)
    monkeypatch.setattr(type(model), "logits", lambda self, hidden: hidden)
    figures = measure_chains(model, text, 4, MASK, 3)
    assert figures.positions == 6  # behind tokens 3 to 8
    assert figures.by_depth == (1.0, 0.0, 0.5)
    assert figures.tokens == 1.0


# --- the mask token -------------------------------------------------------------------------------


class Tokenizer:
    """As many ids as it is told, every other one of them without a token."""

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {f"t{index}": index for index in range((self._size + 1) % 2, self._size, 2)}


@pytest.mark.parametrize(
    ("raw", "size", "wanted", "chosen"),
    [
        ({}, 270, None, 270),  # the embedding has rows that no token uses
        ({"pad_token_id": 3}, 280, None, 3),
        ({"pad_token_id": 3, "pard_token": 9}, 270, None, 9),
        ({"pad_token_id": 3}, 270, 8, 8),
    ],
)
def test_the_mask_token_is_one_that_no_text_contains(
    raw: dict[str, Any], size: int, wanted: int | None, chosen: int
) -> None:
    model = make_parallel(TrainableModel({**MODEL.raw, **raw}, {}), Tokenizer(size), wanted)
    assert model.raw["pard_token"] == model.config.mask_token_id == chosen


@pytest.mark.parametrize(("wanted", "message"), [(None, "mask_token_id"), (280, "0 to 279")])
def test_a_vocabulary_without_such_a_token_is_refused(wanted: int | None, message: str) -> None:
    ends = TrainableModel({**MODEL.raw, "pad_token_id": 0}, {})  # text ends by it
    with pytest.raises(TrainingError, match=message):
        make_parallel(ends, Tokenizer(280), wanted)


# --- the whole training ---------------------------------------------------------------------------


def config(corpus: Path, target: Path, output: Path, **options: Any) -> DraftTrainingConfig:
    masks = {"parallel": True, "num_speculative_tokens": 3, "mask_token_id": 1}
    return draft_config(corpus, target, output, **{**masks, **options})


def test_training_teaches_the_masks(
    corpus: Path, trained: LMTrainingResult, tmp_path: Path
) -> None:
    options = {"init": str(trained.folder), "learning_rate": 1e-2}
    short, longer = (
        train_draft(
            config(corpus, trained.folder, tmp_path / str(steps), steps=steps, **options)
        ).chains
        for steps in (1, 25)
    )
    assert short is not None
    assert longer is not None
    assert longer.tokens > short.tokens + 0.1
    assert longer.by_depth[1] > short.by_depth[1] + 0.1
    folder = tmp_path / "25"
    assert load_checkpoint(folder).config.mask_token_id == 1
    assert json.loads((folder / "config.json").read_text())["pard_token"] == 1
    assert str(longer) in (folder / "README.md").read_text()


def test_a_resumed_training_equals_an_uninterrupted_one(
    corpus: Path, trained: LMTrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"steps": 4, "save_minutes": 0.0, "eval_prompts": 0, "held_out_tokens": 0}
    train_draft(config(corpus, trained.folder, tmp_path / "whole", **options))
    broken = config(corpus, trained.folder, tmp_path / "broken", **options)

    def failing(*arguments: Any) -> Callable[..., Any]:
        inner, left = parallel_loss(*arguments), [3]

        def loss(*given: Any) -> torch.Tensor:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return inner(*given)

        return loss

    with monkeypatch.context() as patch:
        patch.setattr(draft_module, "parallel_loss", failing)
        with pytest.raises(KeyboardInterrupt):
            train_draft(broken)
    train_draft(broken)
    whole, resumed = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_draft_of_no_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        config(tmp_path, tmp_path, tmp_path, num_speculative_tokens=0)


def test_a_model_that_was_trained_on_masks_keeps_its_mask(trained: LMTrainingResult) -> None:
    model, tokenizer = load_model(trained.folder), load_tokenizer(trained.folder)
    once = make_parallel(model, tokenizer, 7)
    assert make_parallel(once, tokenizer, None).raw["pard_token"] == 7
