"""Checkpoints of models that were saved without their heads, as ``AutoModel`` saves them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline.backends.native.native import native_module
from paceline.backends.native.packing import Packer
from paceline.core.errors import ModelLoadError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from tests.arrays import same
from tests.models.reference import FAMILIES, HYBRIDS, MIXTURES, edit, save_model, saved_model
from tests.quick import only

QUICK = ("qwen3", "gpt-neox", "gpt2", "gemma4-moe", "nemotron-h")
UNLIKE = (
    "phi",
    "phimoe-long",
    *(family for family in (*FAMILIES, *MIXTURES) if "llama4" in family),
)
"""Their heads have biases, or their base is no model of its own in transformers."""


def save_base(family: str, folder: Path, **changes: bool) -> Path:
    """A folder with all but the head; beside it, one with the whole model."""
    model = saved_model(family, folder / "whole", **changes)
    model.base_model.save_pretrained(folder / "base", save_original_format=True)
    return folder / "base"


@pytest.mark.parametrize(
    "family", only(QUICK, [f for f in (*FAMILIES, *MIXTURES, *HYBRIDS) if f not in UNLIKE])
)
def test_the_tensors_are_those_of_the_whole_model(tmp_path: Path, family: str) -> None:
    """transformers 5.24.0 writes names without ``model.``, ``gpt_neox.`` or ``backbone.``."""
    base = load_checkpoint(save_base(family, tmp_path))
    whole = load_checkpoint(tmp_path / "whole")
    names = set(whole.tensors) - {"lm_head.weight"}
    assert set(base.tensors) == names
    assert all(same(base.tensors[name], whole.tensors[name]) for name in names)


def test_the_embedding_stands_in_for_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_base("qwen3", tmp_path, tie_word_embeddings=False)
    base = load_checkpoint(folder)
    assert base.config.tie_embeddings
    assert base.hf_config["tie_word_embeddings"] is True
    assert "base was saved without its head: it gives embeddings, but no sensible text" in (
        caplog.text
    )


def test_a_head_that_was_saved_is_used(tmp_path: Path) -> None:
    folder = save_base("qwen3", tmp_path, tie_word_embeddings=False)
    head = load_file(tmp_path / "whole" / "model.safetensors")["lm_head.weight"]
    stored = {**load_file(folder / "model.safetensors"), "lm_head.weight": head}
    save_file(stored, folder / "model.safetensors")
    found = load_checkpoint(folder)
    assert not found.config.tie_embeddings
    assert same(found.tensors["lm_head.weight"], head)


def test_a_whole_model_needs_its_head(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path, tie_word_embeddings=False)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    found = load_checkpoint(tmp_path)
    assert not found.config.tie_embeddings
    with pytest.raises(ModelLoadError, match=r"no tensor lm_head\.weight"):
        _ = found.tensors["lm_head.weight"]


@pytest.mark.skipif(native_module() is None, reason="packing needs the native kernels")
def test_a_packed_folder_of_it_loads(tmp_path: Path) -> None:
    base = load_checkpoint(save_base("qwen3", tmp_path, tie_word_embeddings=False))
    write_packed(base, tmp_path / "packed", Packer("int8"))
    assert load_checkpoint(tmp_path / "packed").config == base.config


def test_a_multimodal_configuration_says_it_of_its_text(tmp_path: Path) -> None:
    folder = save_base("qwen3", tmp_path, tie_word_embeddings=False)
    raw = load_checkpoint(tmp_path / "whole").hf_config
    (folder / "config.json").unlink()
    edit(folder / "config.json", model_type="some", text_config=dict(raw))
    assert load_checkpoint(folder).config.tie_embeddings
