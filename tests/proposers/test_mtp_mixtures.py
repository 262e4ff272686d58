"""MTP layers that are mixtures, with latent attention or without, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from paceline.config import parse_speculative_config
from paceline.engine.bundled_drafts import bundled_drafts
from paceline.llm import LLM
from paceline.models.checkpoint import load_checkpoint
from paceline.models.ops.cpu import CpuOps
from paceline.models.ops.native import why_not_native
from paceline.models.ops.reference import ReferenceOps
from paceline.proposers.heads import build
from paceline.sampling_params import SamplingParams
from paceline.span import Span
from tests.arrays import assert_close
from tests.models.gguf_writing import CASES, write_gguf
from tests.models.reference import VOCAB, Driver, save_model
from tests.proposers.heads import target_info
from tests.proposers.mtp import mtp_options

LAYERS = {"glm4-moe": Glm4MoeDecoderLayer, "deepseek-v3": DeepseekV3DecoderLayer}
TOKENS = torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}


class Nextn(nn.Module):
    """A decoder layer of transformers' between what makes an MTP layer of it."""

    def __init__(self, family: str, model: Any) -> None:
        super().__init__()
        config, self.model = model.config, [model]  # in a list: not a part of this one
        width = config.hidden_size
        self.enorm, self.hnorm = (nn.RMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = LAYERS[family](config, config.num_hidden_layers - 1)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(width, config.rms_norm_eps)})
        torch.manual_seed(7)
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                scale = 0.3 if "norm" in name else 0.1 if name.endswith("_bias") else 0.2
                tensor.copy_(torch.randn_like(tensor) * scale + ("norm" in name))
        self.eval()

    def forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        model, count = self.model[0], len(tokens)
        token = self.enorm(model.model.embed_tokens(torch.tensor([tokens])))
        x = self.eh_proj(torch.cat((token, self.hnorm(hidden[None])), dim=2))
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = model.model.rotary_emb(x, torch.arange(count)[None])
        x = self.layer(x, attention_mask=mask, position_embeddings=angles)
        return model.lm_head(self.shared_head["norm"](x))[0]

    def tensors(self, behind: str) -> dict[str, torch.Tensor]:
        found = self.state_dict()
        return {behind + n.removeprefix("layer."): t.clone() for n, t in found.items()}


def saved(family: str, folder: Path) -> Nextn:
    """A folder with the layer, whose experts lie in stacks."""
    layer = Nextn(family, save_model(family, folder, stacked=True))
    behind = f"model.layers.{layer.model[0].config.num_hidden_layers}."
    path = folder / "model.safetensors"
    save_file(load_file(path) | layer.tensors(behind), path, {"format": "pt"})
    return layer


def converted(family: str, path: Path) -> Nextn:
    """A GGUF file with the layer."""
    layer = Nextn(family, save_model(family, path.with_suffix("")))
    model = layer.model[0]
    count = model.config.num_hidden_layers
    tensors = layer.tensors(f"model.layers.{count}.")
    apart = {n: t for n, t in tensors.items() if n.split(".")[3] in NEXTN}
    model.config.num_hidden_layers += 1
    if hasattr(model.config, "mlp_layer_types"):
        model.config.mlp_layer_types = [*model.config.mlp_layer_types, "sparse"]
    nextn = {
        f"blk.{count}.nextn.{NEXTN[n.split('.')[3]]}.weight": t.numpy() for n, t in apart.items()
    }
    kept = {n: t for n, t in tensors.items() if n not in apart}
    metadata = {**CASES.get(family, {}), "ARCH.nextn_predict_layers": 1}
    all_tensors = {**model.state_dict(), **kept}
    write_gguf(path, model.config, all_tensors, metadata=metadata, extra_tensors=nextn)
    model.config.num_hidden_layers -= 1
    return layer


NEXTN = {name: name for name in ("enorm", "hnorm", "eh_proj")}
NEXTN["shared_head"] = "shared_head_norm"
FORMS = {"folder": saved, "m.gguf": converted}
assert "nextn" in gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.NEXTN_EH_PROJ]


@pytest.mark.parametrize("backend", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", LAYERS)
def test_logits_are_those_of_the_decoder_layer(
    tmp_path: Path, family: str, form: str, backend: str
) -> None:
    layer = FORMS[form](family, tmp_path / form)
    checkpoint = load_checkpoint(tmp_path / form, with_tokenizer=False)
    target = Driver(checkpoint, max_len=64, ops=KINDS[backend]("float32"))
    info = replace(target_info(target.runner), vocab_size=VOCAB, checkpoint=checkpoint)
    runner = build(mtp_options(), info)._runner
    assert runner.decoder.config.experts is not None
    hidden = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(1))
    rows = range(len(TOKENS))
    runner.kv.open(0)
    assert runner.kv.reserve(0, len(TOKENS))
    batch = runner.pack([Span(0, 0, TOKENS, range(-1, len(TOKENS) - 1), rows)])
    found = runner.forward(batch, inputs=hidden.numpy()).logits
    with torch.no_grad():
        wanted = layer(TOKENS, hidden)
    assert wanted.std() > 0.05
    assert_close(torch.as_tensor(found), wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_it_drafts_by_itself_and_changes_no_token(tmp_path: Path, form: str) -> None:
    FORMS[form]("glm4-moe", tmp_path / form)
    source = str(tmp_path / form)
    assert bundled_drafts(source) == parse_speculative_config({"method": "mtp"})
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(source, dtype="float32", max_model_len=64) as llm:
        assert "mtp" in llm.proposers
        (drafted,) = llm.generate([TOKENS], params)
    with LLM(source, dtype="float32", max_model_len=64, speculative_config=[]) as llm:
        (plain,) = llm.generate([TOKENS], params)
    assert drafted.token_ids == plain.token_ids
