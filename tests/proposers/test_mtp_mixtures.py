"""MTP layers of mixtures and of hybrid models, against decoder layers of transformers."""

from __future__ import annotations

import copy
import json
import re
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
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from paceline.api.llm import LLM
from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer
from paceline.backends.rows.reference import ReferenceOps
from paceline.build.default_drafts import bundled_drafts
from paceline.config import parse_speculative_config
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers.heads import build
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import Span
from tests.arrays import assert_close
from tests.loading.gguf_writing import CASES, write_gguf
from tests.models.reference import VOCAB, Driver, save_model, saved_model
from tests.proposers.heads import target_info
from tests.proposers.mtp import mtp_options
from tests.quick import in_turns

# Classes of decoder layers, and the number of a layer that is like the MTP layer.
LAYERS: dict[str, tuple[Any, int]] = {
    "glm4-moe": (Glm4MoeDecoderLayer, 2),
    "glm4-moe-lite": (Glm4MoeLiteDecoderLayer, 1),
    "deepseek-v3": (DeepseekV3DecoderLayer, 2),
    "qwen3-next": (Qwen3NextDecoderLayer, 2),
    "qwen3-5": (Qwen3_5DecoderLayer, 2),
    "qwen3-5-moe": (Qwen3_5MoeDecoderLayer, 2),
}
TOKENS = torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"mlp_only_layers": []}
}  # as GGUF files have it


class Nextn(nn.Module):
    """A decoder layer of transformers' between what makes an MTP layer of it."""

    def __init__(self, family: str, model: Any) -> None:
        super().__init__()
        config, self.model = model.config, [model]  # in a list: not a part of this one
        width, norm = config.hidden_size, type(model.model.norm)
        self.enorm, self.hnorm = (norm(width, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = LAYERS[family][0](config, LAYERS[family][1])
        self.shared_head = nn.ModuleDict({"norm": norm(width, config.rms_norm_eps)})
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

    def qwen_tensors(self) -> dict[str, torch.Tensor]:
        """As checkpoints of Qwen have them."""
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
        names |= {"eh_proj": "fc", "shared_head.norm": "norm"}
        found = {}
        for name, tensor in self.tensors("").items():
            stem, _, kind = name.rpartition(".")
            plain = f"{names[stem]}.{kind}" if stem in names else f"layers.0.{name}"
            found[f"mtp.{plain}"] = tensor
        return found


def saved(family: str, folder: Path) -> Nextn:
    """A folder with the layer, whose experts lie in stacks."""
    layer = Nextn(family, saved_model(family, folder, stacked=True))
    behind = f"model.layers.{layer.model[0].config.num_hidden_layers}."
    tensors = layer.qwen_tensors() if family.startswith("qwen") else layer.tensors(behind)
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})
    return layer


def converted(family: str, path: Path, alone: bool = False) -> Nextn:
    """A GGUF file with the layer, or of it alone between a model's ends."""
    model = saved_model(family, path.with_suffix(""), **CHANGES.get(family, {}))
    layer, config = Nextn(family, model), copy.deepcopy(model.config)
    count = config.num_hidden_layers
    tensors = layer.tensors(f"model.layers.{count}.")
    apart = {n: t for n, t in tensors.items() if n.split(".")[3] in NEXTN}
    config.num_hidden_layers += 1
    for kinds in ("mlp_layer_types", "layer_types"):
        if getattr(config, kinds, None):
            known = getattr(config, kinds)
            setattr(config, kinds, [*known, known[LAYERS[family][1]]])
    one = float(family.startswith("qwen"))  # whose norms' weights have it added
    nextn = {
        f"blk.{count}.nextn.{NEXTN[n.split('.')[3]]}.weight": t.numpy() + one * ("norm" in n)
        for n, t in apart.items()
    }
    kept = {n: t for n, t in tensors.items() if n not in apart}
    metadata = {**CASES.get(family, {}), "ARCH.nextn_predict_layers": 1}
    trunk = model.state_dict()
    if alone:
        trunk = {name: tensor for name, tensor in trunk.items() if ".layers." not in name}
    all_tensors = {**trunk, **kept}
    write_gguf(path, config, all_tensors, metadata=metadata, extra_tensors=nextn)
    return layer


NEXTN = {name: name for name in ("enorm", "hnorm", "eh_proj")}
NEXTN["shared_head"] = "shared_head_norm"
FORMS = {"folder": saved, "m.gguf": converted}
assert "nextn" in gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.NEXTN_EH_PROJ]


def check_logits(
    layer: Nextn, path: Path, ops: type[ReferenceOps] | type[CpuOps], model: str | None = None
) -> None:
    """That the MTP layer of a folder or file, or of another ``model``, says what transformers'
    decoder layer says."""
    checkpoint = load_checkpoint(path, with_tokenizer=False)
    target = Driver(checkpoint, max_len=64, ops=ops("float32"))
    info = replace(target_info(target.runner), vocab_size=VOCAB, checkpoint=checkpoint)
    runner = build(mtp_options(model=model), info)._runner
    assert (runner.decoder.config.mlp.experts is None) == (checkpoint.config.mlp.experts is None)
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


@pytest.mark.parametrize(("family", "form", "backend"), in_turns(LAYERS, FORMS, KINDS))
def test_logits_are_those_of_the_decoder_layer(
    tmp_path: Path, family: str, form: str, backend: str
) -> None:
    layer = FORMS[form](family, tmp_path / form)
    check_logits(layer, tmp_path / form, KINDS[backend])


@pytest.mark.parametrize("family", LAYERS)
def test_a_file_of_the_layer_alone(tmp_path: Path, family: str) -> None:
    (tmp_path / "m.speculators").mkdir()
    layer = converted(family, tmp_path / "head.gguf", alone=True)
    head = (tmp_path / "head.gguf").rename(tmp_path / "m.speculators" / "head.gguf")
    save_model(family, tmp_path / "m", stacked=True, **CHANGES.get(family, {}))
    check_logits(layer, tmp_path / "m", ReferenceOps, str(head))
    wanted = parse_speculative_config({"method": "mtp", "model": str(head)})
    assert bundled_drafts(str(tmp_path / "m")) == wanted


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3-5"])
def test_a_file_of_the_layer_alone_is_found_beside_its_model(tmp_path: Path, family: str) -> None:
    """Under the name that llama.cpp's converter gives it."""
    converted(family, tmp_path / "mtp-tiny-F16.gguf", alone=True)
    model = saved_model(family, tmp_path / "folder", **CHANGES.get(family, {}))
    path, metadata = tmp_path / "tiny-1B-F32.gguf", CASES.get(family, {})
    write_gguf(path, model.config, model.state_dict(), metadata=metadata)
    wanted = {"method": "mtp", "model": str(tmp_path / "mtp-tiny-F16.gguf")}
    assert bundled_drafts(str(path)) == parse_speculative_config(wanted)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(str(path), dtype="float32") as llm:
        assert llm.proposers == ("suffix", "mtp")
        (drafted,) = llm.generate([TOKENS], params)
    with LLM(str(path), dtype="float32", speculative_config=[]) as llm:
        (plain,) = llm.generate([TOKENS], params)
    assert drafted.token_ids == plain.token_ids
    converted(family, tmp_path / "tiny-1B-Q8_0.gguf")  # which has the layer itself
    own = bundled_drafts(str(tmp_path / "tiny-1B-Q8_0.gguf"))
    assert own == parse_speculative_config({"method": "mtp"})


def test_of_a_quantised_model_inside_a_multimodal_one(tmp_path: Path) -> None:
    """As Qwen publishes them: a matrix that is two linears, head by head, is quantised."""
    layer = saved("qwen3-5", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        re.sub(r"^model\.", "model.language_model.", name): tensor
        for name, tensor in load_file(path).items()
    }
    linears = {
        "mtp.fc": layer.eh_proj,
        "mtp.layers.0.self_attn.q_proj": layer.layer.self_attn.q_proj,
    }
    for name, linear in linears.items():
        scale = linear.weight.detach().abs().max() / 448
        stored = (linear.weight.detach() / scale).to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight": stored, f"{name}.weight_scale": scale}
        linear.weight.data = stored.float() * scale
    save_file(tensors, path, {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": raw, "architectures": raw.pop("architectures")}
    outer["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    check_logits(layer, tmp_path, ReferenceOps)
    assert bundled_drafts(str(tmp_path)) == parse_speculative_config({"method": "mtp"})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["glm4-moe", "qwen3-next", "qwen3-5"])
def test_it_drafts_by_itself_and_changes_no_token(tmp_path: Path, family: str, form: str) -> None:
    FORMS[form](family, tmp_path / form)
    source = str(tmp_path / form)
    assert bundled_drafts(source) == parse_speculative_config({"method": "mtp"})
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(source, dtype="float32", max_model_len=64) as llm:
        assert "mtp" in llm.proposers
        (drafted,) = llm.generate([TOKENS], params)
    with LLM(source, dtype="float32", max_model_len=64, speculative_config=[]) as llm:
        (plain,) = llm.generate([TOKENS], params)
    assert drafted.token_ids == plain.token_ids


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", LAYERS)
def test_a_converted_folder_drafts_with_it(tmp_path: Path, family: str, form: str) -> None:
    layer, out = FORMS[form](family, tmp_path / form), tmp_path / "packed"
    write_packed(load_checkpoint(tmp_path / form, with_tokenizer=False), out, Packer("float32"))
    check_logits(layer, out, CpuOps)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(str(out), max_model_len=64) as llm:
        assert llm.proposers == ("suffix", "mtp")
        (drafted,) = llm.generate([TOKENS], params)
    with LLM(str(out), max_model_len=64, speculative_config=[]) as llm:
        (plain,) = llm.generate([TOKENS], params)
    assert drafted.token_ids == plain.token_ids
