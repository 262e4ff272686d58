"""One decoder for the Llama family tree. Families differ only in :class:`ModelConfig`'s flags.

The decoder maps rows to logits. It does not know requests, spans, sampling, or the device: all
arithmetic is the backend's (:mod:`paceline.models.ops`), all bookkeeping is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import ModelLoadError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.ops.base import Ops, Tensor
from paceline.models.rope import rope_tables


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

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig, ops: Ops) -> None:
        self._tensors = tensors
        self._config = config
        self._ops = ops

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {tuple(tensor.shape)}; the configuration needs {shape}"
            )
        return tensor

    def norm(self, name: str, size: int) -> Tensor:
        weight = self.take(name, size).float()
        return self._ops.pack_vector(weight + 1.0 if self._config.norm_plus_one else weight)

    def linear(self, names: list[str], fused: str, outs: list[int], width: int, bias: bool) -> Any:
        """One packed linear out of several stacked ones, or out of their fused form."""
        if fused + ".weight" in self._tensors:
            names, outs = [fused], [sum(outs)]
        pairs = list(zip(names, outs, strict=True))
        weight = torch.cat([self.take(f"{n}.weight", out, width) for n, out in pairs])
        vector = torch.cat([self.take(f"{n}.bias", out) for n, out in pairs]) if bias else None
        return self._ops.pack_linear(weight, vector)

    def layer(self, index: int) -> Layer:
        c = self._config
        p = f"model.layers.{index}."
        q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attn, mlp = p + "self_attn.", p + "mlp."
        mlp_norm = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
        qk_norm = None
        if c.qk_norm:
            q_norm = self.norm(attn + "q_norm.weight", c.head_dim).expand(c.num_heads, -1)
            k_norm = self.norm(attn + "k_norm.weight", c.head_dim).expand(c.num_kv_heads, -1)
            qk_norm = torch.cat((q_norm, k_norm))
        return Layer(
            input_norm=self.norm(p + "input_layernorm.weight", c.hidden_size),
            qkv=self.linear(
                [attn + "q_proj", attn + "k_proj", attn + "v_proj"],
                attn + "qkv_proj",
                [q_out, kv_out, kv_out],
                c.hidden_size,
                c.qkv_bias,
            ),
            qk_norm=qk_norm,
            o=self.linear([attn + "o_proj"], attn + "o_proj", [c.hidden_size], q_out, c.o_bias),
            post_attention_norm=self.norm(p + "post_attention_layernorm.weight", c.hidden_size)
            if c.post_norms
            else None,
            mlp_norm=self.norm(f"{p}{mlp_norm}.weight", c.hidden_size),
            gate_up=self.linear(
                [mlp + "gate_proj", mlp + "up_proj"],
                mlp + "gate_up_proj",
                [c.intermediate_size] * 2,
                c.hidden_size,
                c.mlp_bias,
            ),
            down=self.linear(
                [mlp + "down_proj"],
                mlp + "down_proj",
                [c.hidden_size],
                c.intermediate_size,
                c.mlp_bias,
            ),
            post_mlp_norm=self.norm(p + "post_feedforward_layernorm.weight", c.hidden_size)
            if c.post_norms
            else None,
        )


class Decoder:
    """Rows in, hidden rows out, and the head that turns hidden rows into logits.

    Args:
        config: the family's flags and sizes.
        tensors: weights under their Hugging Face names.
        ops: the device backend, which also decides the arithmetic's precision.
        max_len: positions for which rotary tables are built; fixes length-dependent scaling.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the configuration says.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Ops, max_len: int
    ) -> None:
        self.config = config
        self.ops = ops
        self.max_len = max_len
        reader = WeightReader(tensors, config, ops)
        table = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding = ops.pack_embedding(table)
        self.layers = [reader.layer(i) for i in range(config.num_layers)]
        self.norm = reader.norm("model.norm.weight", config.hidden_size)
        head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
        self.head = reader.linear([head], head, [config.vocab_size], config.hidden_size, False)
        self._rope = self._tables(config.rope)
        self._local_rope = self._tables(config.local_rope) if config.local_rope else self._rope

    def _tables(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(rope, self.config.head_dim, self.max_len)
        wide = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return wide[0].to(self.ops.device), wide[1].to(self.ops.device)

    def hidden(self, input_ids: Tensor, positions: Tensor, batch: Any) -> Tensor:
        """Run the layers.

        Args:
            input_ids, positions: ``[rows]`` int64, padded to a multiple of ``ops.row_multiple``.
            batch: the backend's own attention metadata for these rows.

        Returns:
            ``[rows, hidden_size]`` float32, after the final norm.
        """
        c, ops = self.config, self.ops
        x = ops.embedding(input_ids, self.embedding)
        if c.embedding_multiplier != 1.0:
            x = x * c.embedding_multiplier
        tables = [
            (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
            for cos, sin in (self._rope, self._local_rope)[: 2 if c.local_rope else 1]
        ]
        for index, layer in enumerate(self.layers):
            cos, sin = tables[-1] if c.local_rope and c.is_sliding(index) else tables[0]
            x = self._block(index, layer, x, cos, sin, batch)
        return ops.rms_norm(x, self.norm, c.norm_eps)

    def _block(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, batch: Any
    ) -> Tensor:
        c, ops = self.config, self.ops
        rows = x.shape[0]
        qkv = ops.linear(ops.rms_norm(x, layer.input_norm, c.norm_eps), layer.qkv)
        heads = qkv.view(rows, -1, c.head_dim)  # queries, then keys, then values
        turned = c.num_heads + c.num_kv_heads
        qk, v = heads[:, :turned], heads[:, turned:]
        if layer.qk_norm is not None:
            qk = ops.rms_norm(qk, layer.qk_norm, c.norm_eps)
        qk = ops.rotary(qk, cos, sin)
        q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
        attended = ops.linear(ops.attention(index, q, k, v, c, batch), layer.o)
        if layer.post_attention_norm is not None:
            attended = ops.rms_norm(attended, layer.post_attention_norm, c.norm_eps)
        x = x + self._scaled(attended)
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, c.norm_eps), layer.gate_up)
        mlp = ops.linear(ops.gated_activation(gate_up, c.activation), layer.down)
        if layer.post_mlp_norm is not None:
            mlp = ops.rms_norm(mlp, layer.post_mlp_norm, c.norm_eps)
        return x + self._scaled(mlp)

    def _scaled(self, branch: Tensor) -> Tensor:
        m = self.config.residual_multiplier
        return branch if m == 1.0 else branch * m

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden_size]`` (rows padded like the batch) to ``[rows, vocab]`` float32."""
        c = self.config
        logits = self.ops.linear(hidden, self.head)
        if c.logits_divisor != 1.0:
            logits = logits / c.logits_divisor
        return self.ops.softcap(logits, c.logits_softcap) if c.logits_softcap else logits
