"""Logits and greedy text of llama.cpp on the same weights, for comparison.

llama.cpp runs in another interpreter (:mod:`paceline_lab.quality.llama_peer_child`). A GGUF file is
read there as it is. Other checkpoints of plain Llama shapes are written to a float32 GGUF file
here, which llama.cpp quantises itself.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.installation import install_command
from paceline.loading.checkpoint import Checkpoint
from paceline.loading.gguf.names import layout_of, place_of
from paceline.models.config import ModelConfig
from paceline.models.families.layouts import row_order
from paceline.tensors.arrays import floats
from paceline_lab.quality import llama_peer_child
from paceline_lab.quality.quality import Logits, Window

FORMATS = ("F32", "Q8_0", "Q4_0")
"""Of a folder's weights. Float32 is the control: it tells an error of the conversion from one of
the arithmetic."""
KV_TYPES = ("f16", "f32")
"""What llama.cpp keeps keys and values in; the first is its default, the second is without flash
attention, which would round them to the first."""
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
            f"writing a GGUF file needs the package gguf: {install_command()}"
        ) from error
    config = checkpoint.config
    scaling = config.positions.rope.scaling
    if config.architecture not in ARCHITECTURES or scaling != "default":
        raise ConfigError(
            f"no conversion for {config.architecture} with {scaling} rotary scaling; there "
            f"is one for {', '.join(ARCHITECTURES)} without scaling"
        )
    if config.mlp.activation != "silu":  # the format has no word for it
        raise ConfigError(f"no conversion for the activation {config.mlp.activation}")
    kind = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, kind)
    _add_sizes(writer, config)
    layers = [f"blk.{i}.{part}" for i in range(config.num_layers) for part in _PARTS]
    top = ["token_embd", "output_norm", *([] if config.tie_embeddings else ["output"])]
    for stem in [*top, *layers]:
        for stored in (f"{stem}.weight", f"{stem}.bias"):
            place = place_of(kind, stored)
            if place.name in checkpoint.tensors:
                tensor = floats(checkpoint.tensors[place.name])
                order = row_order(layout_of(kind), config, place.name)
                if order is not None:
                    tensor = tensor[np.argsort(order)]
                writer.add_tensor(stored, np.ascontiguousarray(tensor))
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
    writer.add_layer_norm_rms_eps(config.norms.eps)
    writer.add_rope_freq_base(config.positions.rope.theta)
    writer.add_rope_dimension_count(config.positions.rope.dim or config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(0)


class LlamaPeer:
    """A model in llama.cpp, in a process of its own that answers one task after another.

    Args:
        python: an interpreter that has llama-cpp-python or xllamacpp.
        source: a GGUF file; a float32 one for any ``kind`` but None.
        folder: for what passes between the processes; one folder serves one peer.
        longest: the most tokens that are read at once, or read and written together.
        kind: one of :data:`FORMATS`, which the file is quantised to; None runs it as it is.
        kv_type: one of :data:`KV_TYPES`.

    Attributes:
        facts: the library, its version, the instruction sets that it uses, the types of keys and
            values, and whether attention is "flash"; in llama.cpp's own words.

    Raises:
        PacelineError: the interpreter cannot be run, or llama.cpp failed; with its last words.
    """

    def __init__(
        self,
        python: str,
        source: Path,
        folder: Path,
        *,
        vocab_size: int,
        longest: int,
        threads: int,
        kind: str | None = None,
        kv_type: str = KV_TYPES[0],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._vocab_size, self._logits = vocab_size, folder / "logits"
        self._log = folder / "log"
        command = [python, "-s", llama_peer_child.__file__]
        with self._log.open("w", encoding="utf-8") as log:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
            except OSError as error:
                raise PacelineError(f"{python} cannot be run: {error}") from error
        job = {"source": str(source), "kind": kind, "kv_type": kv_type, "threads": threads}
        try:
            self.facts = self._ask(**job, longest=longest, out=str(self._logits))
            if self.facts["vocab_size"] != vocab_size:
                raise PacelineError(
                    f"llama.cpp sees {self.facts['vocab_size']} tokens in a vocabulary of "
                    f"{vocab_size}"
                )
        except PacelineError:
            self.close()
            raise

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def logits(self, piece: Window, out: Logits) -> None:
        """Write the logits that predict a window's targets into ``out``: ``[n, vocab]``.

        The window is one batch, as a prompt is.
        """
        self._ask(tokens=list(piece.token_ids), first=piece.first)
        out[:] = np.memmap(self._logits, np.float32, "r", shape=out.shape)

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The likeliest continuation, token by token; it does not stop at an end token."""
        return list(self._ask(prompt=list(prompt), max_tokens=max_tokens)["token_ids"])

    def close(self) -> None:
        """End the process, which ends by itself when its pipe closes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, **task: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.close()  # it has said all once it has ended
            said = self._log.read_text(encoding="utf-8", errors="replace")
            raise PacelineError(f"llama.cpp failed: {said.strip()[-_TAIL:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
