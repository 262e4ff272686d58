"""Configurations that tie the head, and the one or two matrices that files hold, against
transformers.

What a folder's model says is that of transformers 5.23 and 5.24, whose classes decide what is tied.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline.loading.checkpoint import load_checkpoint
from tests.models.reference import RETOLD, Driver, save_model, saved_model
from tests.models.test_families import EVERY, TOKENS, close, want
from tests.quick import once, only

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {"gpt-neox": ("gpt_neox.embed_in.weight", "embed_out.weight")}
NAMES |= {"gpt2": ("transformer.wte.weight", "lm_head.weight")}
NAMES |= {"mamba2": ("backbone.embeddings.weight", "lm_head.weight")}
NAMES |= {"llama": ("model.embed_tokens.weight", "lm_head.weight")}
NAMES |= {"lfm2": ("model.embed_tokens.weight", "lm_head.weight")}
"""Families whose checkpoints call both ends otherwise, or what ties them: embedding and head."""


def rewrite(family: str, folder: Path, embedding: float | None, head: float | None) -> None:
    """Store a tied matrix times a number under each name, or not at all."""
    tensors = load_file(folder / "model.safetensors")
    told = [tensors.pop(name) for name in NAMES[family] if name in tensors]
    for name, factor in zip(NAMES[family], (embedding, head), strict=True):
        if factor is not None:
            tensors[name] = told[0] * factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


OWN = 1.0, 0.5
STORED = [OWN, (None, 1.0), (1.0, 1.0), (1.0, None)]


@pytest.mark.parametrize(("family", "stored"), once(NAMES, STORED))
def test_what_is_stored_decides(
    family: str, stored: tuple[float | None, float | None], tmp_path: Path
) -> None:
    model = saved_model(family, tmp_path, tie_word_embeddings=True)
    rewrite(family, tmp_path, *stored)
    driver = Driver.of(tmp_path)
    assert driver.checkpoint.config.tie_embeddings == (stored != OWN)
    close(driver.chunk(TOKENS), want(model, TOKENS) * (stored[1] or 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("stored", STORED)
def test_transformers_reads_the_same(
    family: str, stored: tuple[float | None, float | None], tmp_path: Path
) -> None:
    model = saved_model(family, tmp_path, tie_word_embeddings=True)
    rewrite(family, tmp_path, *stored)
    kind = type(model)
    there = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    close(want(there, TOKENS), want(model, TOKENS) * (stored[1] or 1.0))


@pytest.mark.parametrize("family", only(["nemotron-h"], [f for f in EVERY if f not in RETOLD]))
def test_a_folder_that_was_saved_as_tied(family: str, tmp_path: Path) -> None:
    """NemotronH's class writes two matrices, ``backbone.embeddings`` and a head of its own."""
    model = saved_model(family, tmp_path, tie_word_embeddings=True)
    driver = Driver.of(tmp_path, max_len=64)
    assert driver.checkpoint.config.tie_embeddings == (not family.startswith("nemotron-h"))
    close(driver.chunk(TOKENS), want(model, TOKENS))


def test_a_head_of_its_own_is_told_to_whoever_converts(tmp_path: Path) -> None:
    save_model("nemotron-h", tmp_path, tie_word_embeddings=True)
    assert load_checkpoint(tmp_path).hf_config["tie_word_embeddings"] is False
