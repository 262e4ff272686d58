"""Writes heads as llama.cpp's converter does: its names, its layouts, its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

from tests.loading.gguf_writing import interleaved
from tests.proposers.heads import EPS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TAPS, Tensors
from tests.toy import TOY, VOCAB

_NAMES = {
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}


_BASES = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}


def stored_name(name: str) -> str:
    """llama.cpp's name of a tensor of the speculators layout."""
    if not name.startswith("layers."):
        return _NAMES.get(name, name)
    _, layer, part = name.removesuffix(".weight").split(".", 2)
    if part in _BASES:
        return f"blk.{layer}.{_BASES[part]}"
    return f"blk.{layer}.{_PARTS[part]}.weight"


def write_gguf_head(
    path: Path, tensors: Tensors, kind: str = "eagle3", qtype: str = "F32", **keys: Any
) -> Tensors:
    """Write a head for the toy target.

    Args:
        tensors: under the names of the speculators layout.
        qtype: of its matrices whose rows are as long as its blocks want.
        keys: of the metadata, without the architecture; None leaves one out.

    Returns:
        The tensors with the values that the file has.
    """
    writer = gguf.GGUFWriter(path, kind)
    keys = {"vocab_size": VOCAB, "target_layers": list(TAPS)} | keys
    for key, value in keys.items():
        name = key if key.startswith("tokenizer.") else f"{kind}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_block_count(1 + max(int(n.split(".")[1]) for n in tensors if n[:7] == "layers."))
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(TOY.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(EPS)
    stored = {}
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            writer.add_tensor(name, (tensor + torch.arange(len(tensor))).numpy())
            stored[name] = tensor
            continue
        packing = gguf.GGMLQuantizationType[qtype if tensor.ndim == 2 else "F32"]
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[packing][0]:
            packing = gguf.GGMLQuantizationType.F16
        data = tensor.numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if kind == "eagle3" and part in name:
                data = interleaved(data, heads)
        packed = gguf.quants.quantize(data, packing)
        writer.add_tensor(stored_name(name), packed, raw_dtype=packing)
        plain = gguf.quants.quantize(tensor.numpy(), packing)
        stored[name] = torch.from_numpy(gguf.quants.dequantize(plain, packing))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
