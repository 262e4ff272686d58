"""From a checkpoint's tensors to a decoder's packed weights. Knows no file and no arithmetic.

Linears come in three forms: floats, which the backend packs; GGUF's Q4_0 blocks, which a 4-bit
backend takes as they are; and packed ones (:mod:`paceline.models.packed_folder`), ready to use.
One linear is in memory as floats at a time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.errors import ModelLoadError
from paceline.models.config import ModelConfig
from paceline.models.ops.base import PackedLinear, PackedOps, Tensor, WeightOps
from paceline.models.pruned_head import HEAD_TOKENS, PrunedHead
from paceline.models.stored import StoredTensors
from paceline.models.tensor_checks import check_floats, check_leftovers, check_tied

log = logging.getLogger(__name__)
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(slots=True)
class Layer:
    """Packed weights of one block; the optional ones are None where the family has none."""

    input_norm: Tensor
    qkv: Any
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    o: Any
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    post_mlp_norm: Tensor | None


class WeightReader:
    """Takes tensors out of a checkpoint under their Hugging Face names, checking their shapes."""

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig, ops: WeightOps) -> None:
        self._tensors = tensors
        self._config = config
        self._ops = ops
        self._rounded: Counter[str] = Counter()  # tensors per stored type
        self._used: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors[name]
        self._check_shape(name, tuple(tensor.shape), shape)
        self._used.add(name)
        return tensor

    def floats(self, name: str, *shape: int) -> Tensor:
        """A tensor of weights, which can be of a type with floats of 16 bits or more alone."""
        tensor = self.take(name, *shape)
        self._check_floats(name, tensor)
        return tensor

    def _check_floats(self, name: str, tensor: Tensor) -> None:
        check_floats(name, tensor, self._type_of(name, str(tensor.dtype)))

    @staticmethod
    def _check_shape(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {found}; the configuration needs {shape}"
            )

    def norm(self, name: str, size: int) -> Tensor:
        weight = self.floats(name, size).float()
        return self._ops.pack_vector(weight + 1.0 if self._config.norm_plus_one else weight)

    def linear(self, names: list[str], fused: str, outs: list[int], width: int, bias: bool) -> Any:
        """One packed linear out of several stacked ones, or out of their fused form."""
        if _is_packed(self._tensors, fused):
            return self._adopted(fused, sum(outs), width, bias)
        if fused + ".weight" in self._tensors:
            names, outs = [fused], [sum(outs)]
        pairs = list(zip(names, outs, strict=True))
        vector = torch.cat([self.floats(f"{n}.bias", out) for n, out in pairs]) if bias else None
        with _naming(fused):
            packed = self._from_blocks(names, sum(outs), width, vector)
            if packed is None:
                parts = [self.floats(f"{n}.weight", out, width) for n, out in pairs]
                packed = self._from_floats(parts, sum(outs), width, vector)
                self._rounded.update(self._type_of(f"{name}.weight", "floats") for name in names)
        self._release([f"{name}.weight" for name in names])
        return packed

    def _from_blocks(self, names: list[str], n: int, width: int, bias: Tensor | None) -> Any | None:
        """The linear without rounding anything again, where all of its parts are Q4_0."""
        ops, tensors = self._ops, self._tensors
        if not (isinstance(ops, PackedOps) and ops.dtype == "int4"):
            return None
        if not isinstance(tensors, StoredTensors):
            return None
        parts = [tensors.q4_blocks(f"{name}.weight") for name in names]
        blocks = [part for part in parts if part is not None]
        if len(blocks) < len(parts):
            return None
        rows, row_bytes = sum(len(part) for part in blocks), width // 32 * 18
        if rows != n or width % 32 or any(part.shape[1] != row_bytes for part in blocks):
            raise ModelLoadError(
                f"{', '.join(names)}: {rows} rows of Q4_0 blocks; the configuration needs "
                f"{n} of {width} weights"
            )
        self._used.update(f"{name}.weight" for name in names)
        return ops.pack_q4_0(partial(_stacked_rows, blocks), n, width, bias)

    def _from_floats(self, parts: list[Tensor], n: int, width: int, bias: Tensor | None) -> Any:
        ops = self._ops
        if isinstance(ops, PackedOps):
            return ops.pack_linear_rows(partial(_stacked_rows, parts), n, width, bias)
        return ops.pack_linear(torch.cat(parts), bias)

    def ends(self) -> tuple[Any, Any]:
        """The embedding and the head; they may be one object where they are tied."""
        c, ops = self._config, self._ops
        size, rows = (c.vocab_size, c.hidden_size), (c.num_logits, c.hidden_size)
        if c.tie_embeddings and HEAD + ".weight" in self._tensors:
            self._check_tied()
        if _is_packed(self._tensors, EMBEDDING):
            embedding = self._adopted(EMBEDDING, *size, bias=False)
            return embedding, embedding if c.tie_embeddings else self._adopted(HEAD, *rows, False)
        if isinstance(ops, PackedOps) and isinstance(self._tensors, StoredTensors):
            embedding = self._packed_by_rows(ops, EMBEDDING, *size)
            if c.tie_embeddings:
                return embedding, embedding
            return embedding, self._packed_by_rows(ops, HEAD, *rows)
        table = self.floats(EMBEDDING + ".weight", *size)
        embedding = ops.pack_embedding(table)
        if c.tie_embeddings:
            return embedding, ops.pack_head(table, embedding)
        return embedding, ops.pack_head(self.floats(HEAD + ".weight", *rows), None)

    def _check_tied(self) -> None:
        """What is stored of a tied head is read for that alone: the embedding is used for it."""
        names = [EMBEDDING + ".weight", HEAD + ".weight"]
        embedding, head = (self.floats(name, *self._tensors[name].shape) for name in names)
        check_tied(embedding, head)
        self._release(names)

    def pruned_head(self) -> PrunedHead | None:
        """Which tokens the head has; None where it has all."""
        c = self._config
        if not c.draft_vocab_size:
            return None
        return PrunedHead.of(self.take(HEAD_TOKENS, c.draft_vocab_size), c.vocab_size)

    def _packed_by_rows(self, ops: PackedOps, name: str, *size: int) -> Any:
        """Embedding or head, which are large, without unpacking them as a whole."""
        weight, tensors = name + ".weight", self._tensors
        assert isinstance(tensors, StoredTensors)
        self._check_shape(weight, tensors.shape_of(weight), size)
        self._check_floats(weight, tensors.rows(weight, 0, 1))
        self._used.add(weight)
        with _naming(name):
            packed = ops.pack_rows(partial(tensors.rows, weight), *size)
        self._release([weight])
        return packed

    def _adopted(self, name: str, n: int, k: int, bias: bool) -> Any:
        """A linear of a packed folder."""
        assert isinstance(self._ops, PackedOps), "packed weights need a backend that takes them"
        scaled = self._ops.dtype == "int8" or name in (EMBEDDING, HEAD)
        wanted = {"data": True, "scale": scaled, "bias": bias}
        if any((f"{name}.{key}" in self._tensors) != there for key, there in wanted.items()):
            keys = ", ".join(key for key, there in wanted.items() if there)
            raise ModelLoadError(f"{name} is not packed as the configuration says: not as {keys}")
        self._used.update(f"{name}.{key}" for key, there in wanted.items() if there)
        with _naming(name):
            data, scale, vector = (
                self._tensors[f"{name}.{key}"].numpy() if there else None
                for key, there in wanted.items()
            )
            assert data is not None
            return self._ops.adopt(PackedLinear(data, scale, vector, n, k))

    def layer(self, index: int) -> Layer:
        c, p = self._config, f"model.layers.{index}."
        attn, mlp = p + "self_attn.", p + "mlp."
        width, inner = c.hidden_size, c.intermediate_size
        q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv, gate_up = [attn + f"{x}_proj" for x in "qkv"], [mlp + "gate_proj", mlp + "up_proj"]
        mlp_norm = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
        return Layer(
            input_norm=self.norm(p + "input_layernorm.weight", width),
            qkv=self.linear(qkv, attn + "qkv_proj", [q_out, kv_out, kv_out], width, c.qkv_bias),
            qk_norm=self._qk_norm(attn) if c.qk_norm else None,
            o=self.linear([attn + "o_proj"], attn + "o_proj", [width], q_out, c.o_bias),
            post_attention_norm=self._post_norm(p + "post_attention_layernorm.weight"),
            mlp_norm=self.norm(f"{p}{mlp_norm}.weight", width),
            gate_up=self.linear(gate_up, mlp + "gate_up_proj", [inner] * 2, width, c.mlp_bias),
            down=self.linear([mlp + "down_proj"], mlp + "down_proj", [width], inner, c.mlp_bias),
            post_mlp_norm=self._post_norm(p + "post_feedforward_layernorm.weight"),
        )

    def _qk_norm(self, attn: str) -> Tensor:
        c = self._config
        q_norm = self.norm(attn + "q_norm.weight", c.head_dim).expand(c.num_heads, -1)
        k_norm = self.norm(attn + "k_norm.weight", c.head_dim).expand(c.num_kv_heads, -1)
        return torch.cat((q_norm, k_norm))

    def _post_norm(self, name: str) -> Tensor | None:
        return self.norm(name, self._config.hidden_size) if self._config.post_norms else None

    def check_all_used(self) -> None:
        """Raise :class:`UnsupportedModelError` where the checkpoint has more than what was read."""
        check_leftovers(self._tensors, self._used)

    def log_rounding(self) -> None:
        """Say what was rounded to 4 bits while loading, and how much that changed it."""
        ops = self._ops
        if isinstance(ops, PackedOps) and ops.rounding.squares:
            log.info(
                "rounded to 4 bits in groups of 32: %s; relative RMS error %.1f%%",
                ", ".join(f"{n} tensors of {kind}" for kind, n in sorted(self._rounded.items())),
                100 * ops.rounding.relative,
            )

    def _type_of(self, name: str, default: str) -> str:
        tensors = self._tensors
        return tensors.type_of(name) if isinstance(tensors, StoredTensors) else default

    def _release(self, names: list[str]) -> None:
        if isinstance(self._tensors, StoredTensors):
            for name in names:
                self._tensors.release(name)


def _stacked_rows(parts: list[Tensor], first: int, last: int) -> Tensor:
    """Rows ``first:last`` of matrices on top of each other, without stacking the others."""
    found = []
    for part in parts:
        rows = part[max(first, 0) : max(last, 0)]
        if len(rows):
            found.append(rows)
        first, last = first - len(part), last - len(part)
    return found[0] if len(found) == 1 else torch.cat(found)


def _is_packed(tensors: Mapping[str, Tensor], linear: str) -> bool:
    return f"{linear}.data" in tensors


@contextmanager
def _naming(linear: str) -> Iterator[None]:
    """Refusals of a backend, such as that of a NaN among the weights, name their linear."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"the weights of {linear} cannot be used: {error}") from error
