"""Logits of llama.cpp on a checkpoint's own weights, for comparison.

The weights are written to a float32 GGUF file here, and quantised and run by llama.cpp itself in
another interpreter (:mod:`paceline.workbench.llama_peer_child`). Only plain Llama shapes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import ConfigError, PacelineError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.gguf_names import place_of
from paceline.workbench import llama_peer_child
from paceline.workbench.quality import Logits, Window

FORMATS = ("F32", "Q8_0", "Q4_0")
"""Float32 is the control: it tells an error of the conversion from one of the arithmetic."""
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_PARTS = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)
_TAIL = 600


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Write the weights as float32, without a tokenizer.

    Raises:
        ConfigError: the model has a feature that this conversion leaves out, or the ``gguf``
            package is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "writing a GGUF file needs the extra: pip install 'paceline[gguf]'"
        ) from error
    config = checkpoint.config
    if config.architecture not in ARCHITECTURES or config.rope.scaling != "default":
        raise ConfigError(
            f"no conversion for {config.architecture} with {config.rope.scaling} rotary scaling; "
            f"there is one for {', '.join(ARCHITECTURES)} without scaling"
        )
    if config.activation != "silu":  # the format has no word for it
        raise ConfigError(f"no conversion for the activation {config.activation}")
    kind = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, kind)
    _add_sizes(writer, config)
    layers = [f"blk.{i}.{part}" for i in range(config.num_layers) for part in _PARTS]
    top = ["token_embd", "output_norm", *([] if config.tie_embeddings else ["output"])]
    for stem in [*top, *layers]:
        for stored in (f"{stem}.weight", f"{stem}.bias"):
            place = place_of(kind, stored)
            if place.name in checkpoint.tensors:
                tensor = checkpoint.tensors[place.name].float()
                if place.unpermute:
                    heads = config.num_heads if place.unpermute == "q" else config.num_kv_heads
                    tensor = _interleaved(tensor, heads)
                writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.dim or config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(0)


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (half, pair) of each head to (pair, half), as converters store them."""
    rows = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)


def peer_logits(
    python: str,
    source: Path,
    kind: str,
    pieces: Sequence[Window],
    vocab_size: int,
    folder: Path,
    threads: int,
) -> Logits:
    """Logits of all scored tokens by llama.cpp: ``[n, vocab]``, mapped from a file in ``folder``.

    Args:
        python: an interpreter that has llama-cpp-python or xllamacpp.
        source: a float32 GGUF file.
        kind: one of :data:`FORMATS`.

    Raises:
        PacelineError: the interpreter cannot be run, or llama.cpp failed; with its last words.
    """
    task, out = folder / "task.json", folder / f"{kind}.logits"
    job = {
        "source": str(source),
        "kind": kind,
        "windows": [[list(piece.token_ids), piece.first] for piece in pieces],
        "out": str(out),
        "threads": threads,
    }
    task.write_text(json.dumps(job), encoding="utf-8")
    command = [python, "-s", llama_peer_child.__file__, str(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise PacelineError(f"{python} cannot be run: {error}") from error
    if done.returncode:
        raise PacelineError(f"llama.cpp failed: {done.stderr.strip()[-_TAIL:]}")
    count = sum(len(piece.targets) for piece in pieces)
    return np.memmap(out, np.float32, "r", shape=(count, vocab_size))
