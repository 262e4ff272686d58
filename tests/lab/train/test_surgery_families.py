"""Models of other families that were cut are still such models, to transformers too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline_lab.train.model_files import load_model, save_model
from paceline_lab.train.surgery import cut_model, prune_head
from tests.models import reference

pytestmark = pytest.mark.slow
TOKENS = torch.randint(3, reference.VOCAB, (12,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["llama-biased", "qwen2", "qwen3", "phi3", "granite", "gemma2"])
def test_a_cut_model_is_one_of_its_family(tmp_path: Path, family: str) -> None:
    import transformers

    reference.save_model(family, tmp_path / "whole")
    whole = load_model(tmp_path / "whole")
    cut = cut_model(whole, drop_layers=1, mlp_width=64)
    (tmp_path / "cut").mkdir()
    save_model(tmp_path / "cut", cut, tmp_path / "whole", "float32", "")
    ours = reference.Driver.of(tmp_path / "cut").chunk(TOKENS.tolist())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "cut", attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = theirs(TOKENS[None]).logits[0]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    ids = np.arange(0, reference.VOCAB, 5)
    (tmp_path / "head").mkdir()
    save_model(tmp_path / "head", prune_head(cut, ids), tmp_path / "whole", "float32", "")
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 60
    pruned = reference.Driver.of(tmp_path / "head").chunk(TOKENS.tolist())
    torch.testing.assert_close(pruned, ours[:, ids], rtol=1e-5, atol=1e-5)
