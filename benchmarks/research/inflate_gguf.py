"""Makes GGUF files that show what blocks of 256 do: a real model widened, and one with outliers.

Many small models have rows that K-quants cannot cut into blocks of 256, so that a quantised file of
theirs holds other types than it is named after. Widening (``inflate.py``) repeats the hidden vector
and the heads: the model says the same words with the same outliers, and every row is a multiple of
256. The other model has random weights, and inputs of which a few are far larger than the rest.

Both keep the source file's tokenizer and are written in float32, for ``llama-quantize``, or the
widened one in a type that the gguf package can make.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from inflate import Shape, Tensors, inflate

from paceline.loading.gguf.names import place_of

REPETITIONS = 4
OUTLIER_SHARE, OUTLIER_FACTOR = 0.01, 50.0
LOGIT_WIDTH = 2.0
"""Standard deviation of the random model's logits, about."""
RANDOM_SIZES = {"hidden": 512, "intermediate": 1024, "heads": 8, "kv_heads": 4, "layers": 4}
SIZES = {
    "hidden": "embedding_length",
    "intermediate": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "layers": "block_count",
}
_ABOUT_TYPES = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the architecture ``llama``, whose tensors have Hugging Face names here.

    The rows of its ``q`` and ``k`` matrices stay interleaved, as the format has them: heads are
    repeated whole.
    """

    reader: Any
    stored: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Source:
        """Raises ValueError for other architectures."""
        reader = gguf.GGUFReader(path)
        kind = reader.fields["general.architecture"].contents()
        if kind != "llama":
            raise ValueError(f"{path} is a {kind}; only files of the architecture llama are read")
        return cls(reader, {place_of(kind, t.name).name: t.name for t in reader.tensors})

    def size(self, name: str) -> int:
        return int(self.reader.fields[f"llama.{SIZES[name]}"].contents())

    def tensors(self) -> Tensors:
        by_name = {tensor.name: tensor for tensor in self.reader.tensors}
        return {
            name: torch.tensor(
                gguf.quants.dequantize(by_name[stored].data, by_name[stored].tensor_type)
            ).float()
            for name, stored in self.stored.items()
        }

    def write(
        self,
        out: Path,
        tensors: Mapping[str, torch.Tensor],
        sizes: Mapping[str, int],
        as_stored: bool = False,
        matrices: str = "F32",
    ) -> None:
        """Write tensors with this file's metadata, of which only the sizes change: matrices in a
        type and vectors in float32, or each in the type that it has here."""
        writer = gguf.GGUFWriter(out, "llama")
        changed = {f"llama.{SIZES[name]}": size for name, size in sizes.items()}
        for name, field in self.reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", *_ABOUT_TYPES):
                continue
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, kind, sub_type=inner)
        writer.add_file_type(0)
        layers = sizes.get("layers", self.size("layers"))
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
        types = {t.name: t.tensor_type for t in self.reader.tensors} if as_stored else {}
        for name, tensor in tensors.items():
            stored = names.get_name(name, (".weight", ".bias"))
            assert stored is not None, name
            other = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else matrices]
            kind = types.get(stored, other)
            data = gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), kind)
            writer.add_tensor(str(stored), data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def write_widened(
    path: Path,
    out: Path,
    repetitions: int = REPETITIONS,
    units: int = 1,
    as_stored: bool = False,
    matrices: str = "F32",
) -> dict[str, int]:
    """The model of ``path`` with its hidden vector and its heads repeated; returns its sizes.

    Args:
        units: repetitions of the intermediate units.
        as_stored: write each tensor in the type that it has in ``path``.
        matrices: otherwise, the type of matrices.

    Raises:
        ValueError: the file is of another architecture, or its embeddings are not tied.
    """
    source = Source.read(path)
    heads, kv_heads, layers = (source.size(name) for name in ("heads", "kv_heads", "layers"))
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "tie_word_embeddings": "lm_head.weight" not in source.stored,
    }
    n = repetitions
    sizes = {"hidden": source.size("hidden") * n, "heads": heads * n, "kv_heads": kv_heads * n}
    sizes["intermediate"] = source.size("intermediate") * units
    large = inflate(source.tensors(), config, Shape(n, n, n, units, layers))
    source.write(out, large, sizes, as_stored, matrices)
    return sizes


def write_outliers(path: Path, out: Path, seed: int = 0) -> dict[str, int]:
    """A random model with the tokenizer of ``path``; returns its sizes.

    The weights of its norms are log-normal, and one channel in a hundred is far larger: the linears
    after them read such inputs, in the same channels in every layer, as those of real models do.
    """
    source, rng = Source.read(path), np.random.default_rng(seed)
    sizes = {name: int(size) for name, size in RANDOM_SIZES.items()}
    head = source.reader.fields["llama.rope.dimension_count"].contents()
    hidden, wide = sizes["hidden"], sizes["intermediate"]
    vocab = next(t.shape[1] for t in source.reader.tensors if t.name == "token_embd.weight")
    outliers = rng.choice(hidden, max(1, int(hidden * OUTLIER_SHARE)), replace=False)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = rng.standard_normal((rows, columns), np.float32) / np.sqrt(columns)
        return torch.from_numpy(values.astype(np.float32))

    def norm() -> torch.Tensor:
        values = rng.lognormal(0, 0.5, hidden)
        values[outliers] *= OUTLIER_FACTOR
        return torch.from_numpy(values.astype(np.float32))

    q, kv = sizes["heads"] * head, sizes["kv_heads"] * head
    found = {"model.embed_tokens.weight": matrix(int(vocab), hidden)}
    for layer in range(sizes["layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        for name, shape in {**shapes, "o_proj": (hidden, q)}.items():
            found[f"{prefix}self_attn.{name}.weight"] = matrix(*shape)
        for name, shape in (
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            found[f"{prefix}mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = norm()
    last = norm()
    # Logits as wide as a real model's, for all the outliers that the head reads.
    found["model.norm.weight"] = last * (LOGIT_WIDTH / last.square().mean().sqrt())
    source.write(out, found, sizes)
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="a GGUF file of the architecture llama")
    parser.add_argument("out", type=Path, help="the GGUF file to write")
    parser.add_argument("--outliers", action="store_true", help="the random model instead")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--matrices", default="F32", help="type of matrices, such as Q8_0")
    options = parser.parse_args(argv)
    if options.outliers:
        print(json.dumps(write_outliers(options.source, options.out)))
        return 0
    sizes = write_widened(
        options.source, options.out, options.repetitions, matrices=options.matrices
    )
    print(json.dumps(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
