"""From a checkpoint's tensors to a decoder's packed weights: its layers and ends.

Knows no file and no arithmetic. How a tensor is packed, :mod:`paceline.models.tensor_reader` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import ConfigError, ModelLoadError
from paceline.models.altup import AltUpLayer
from paceline.models.config import XIELU, Experts, ModelConfig
from paceline.models.latent import LatentWeights
from paceline.models.layer_inputs import LayerGate
from paceline.models.layered_weights import LayeredReader
from paceline.models.mixture import FeedForward, Mixture, MixtureNorms
from paceline.models.packed_format import packed_formats
from paceline.models.pruned_head import HEAD_TOKENS, PrunedHead
from paceline.models.recurrent import RecurrentWeights
from paceline.models.recurrent_weights import read_recurrent
from paceline.tensors.arrays import floats as as_floats

EMBEDDING, HEAD, POSITIONS = "model.embed_tokens", "lm_head", "model.embed_positions"


@dataclass(slots=True)
class Layer:
    """Packed weights of one block; the optional ones are None where the family has none."""

    input_norm: Any
    qkv: Any
    qk_norm: Any  # [heads + kv_heads, head_dim]
    o: Any
    post_attention_norm: Any
    mlp_norm: Any
    gate_up: Any  # this and `down` are None where the layer is a mixture
    down: Any
    mixture: Mixture | None
    post_mlp_norm: Any
    learnt: Any  # what the activation has beyond its input
    sinks: Any  # [heads]
    latent: LatentWeights | None = None
    v_norm: Any = None  # [head_dim], ones
    gate: LayerGate | None = None
    scale: float = 1.0  # of the residual stream that leaves it
    altup: AltUpLayer | None = None
    recurrent: RecurrentWeights | None = None  # where there is no attention, `qkv` and `o` are None


class Ends(NamedTuple):
    """Packed embedding and head of a decoder, and its shape."""

    embedding: Any
    head: Any
    config: ModelConfig


class WeightReader(LayeredReader):
    """Takes a decoder out of a checkpoint."""

    def _mixture(self, index: int) -> Mixture | None:
        """A layer's mixture of experts; None where the layer is dense."""
        e, mlp = self._config.mlp.experts_of(index), f"model.layers.{index}.mlp."
        if e is None:
            return None
        gates = [mlp + "gate", mlp + "shared_expert_gate"][: 2 if e.shared_gate else 1]
        outs, shared = [e.number, 1][: len(gates)], None
        if e.shared_width:
            # An expert with norms of its own is what a dense layer has as its feed-forward.
            prefix = mlp if e.own_norms else mlp + "shared_expert."
            shared = self._feed_forward(prefix, e.shared_width, bias=False)
        return Mixture(
            self.float_linear(gates, mlp + "gate", outs, self._config.hidden_size, e.biases),
            [self._feed_forward(f"{mlp}experts.{i}.", e.width, e.biases) for i in range(e.number)],
            shared,
            self._choice_bias(mlp + "gate.e_score_correction.bias", e) if e.choice_bias else None,
            self._scales(mlp + "gate.per_expert_scale", e) if e.own_scales else None,
            self._mixture_norms(index) if e.own_norms else None,
        )

    def _scales(self, name: str, experts: Experts) -> Any:
        return self._ops.pack_vector(self.vector(name, experts.number))

    def _mixture_norms(self, index: int) -> MixtureNorms:
        p, width = f"model.layers.{index}.", self._config.hidden_size
        router = as_floats(self.vector(f"{p}mlp.gate.scale", width)) * np.float32(width**-0.5)
        return MixtureNorms(
            self._ops.pack_vector(router),
            self.norm(f"{p}pre_feedforward_layernorm_2.weight", width),
            self.norm(f"{p}post_feedforward_layernorm_2.weight", width),
            self.norm(f"{p}post_feedforward_layernorm_1.weight", width),
        )

    def _choice_bias(self, name: str, experts: Experts) -> Any:
        """What is added to the scores of experts, stored as a vector or as its only row."""
        is_row = self._tensors[name].ndim == 2
        bias = self.vector(name, *([1] if is_row else []), experts.number)
        if not np.isfinite(as_floats(bias)).all():
            raise ModelLoadError(f"tensor {name} has values that are not finite numbers")
        return self._ops.pack_vector(bias.reshape(-1))

    def _feed_forward(self, prefix: str, width: int, bias: bool) -> FeedForward:
        """The two linears of a dense layer, or of an expert."""
        hidden, down = self._config.hidden_size, prefix + "down_proj"
        names, fused = [prefix + "gate_proj", prefix + "up_proj"], prefix + "gate_up_proj"
        if not self._config.mlp.gated:
            names, fused = names[1:], names[1]
        gate_up = self.linear(names, fused, [width] * len(names), hidden, bias)
        return FeedForward(gate_up, self.linear([down], down, [hidden], width, bias))

    def ends(self) -> tuple[Any, Any]:
        """The embedding and the head; they may be one object where they are tied."""
        c = self._config
        embedding = self._end(EMBEDDING, c.vocab_size, self._ops.pack_embedding)
        if c.tie_embeddings and packed_formats(self._tensors, EMBEDDING):
            return embedding, embedding
        tied = EMBEDDING if c.tie_embeddings else HEAD
        known = embedding if c.tie_embeddings else None
        bias = self.floats(HEAD + ".bias", c.num_logits) if c.head_bias else None
        return embedding, self._end(
            tied,
            c.num_logits,
            lambda part, k: self._ops.pack_head(part, k, known, bias),
            bias=c.head_bias,
        )

    def places(self, max_len: int) -> Any:
        """The embedding of positions, at least ``max_len`` of them; None where there is none."""
        c = self._config
        if not c.positions.learned:
            return None
        if max_len > c.max_position:
            raise ConfigError(
                f"the model has an embedding for each of {c.max_position} positions, and "
                f"{max_len} are asked for; give --max-model-len {c.max_position} or less"
            )
        table = self.vector(POSITIONS + ".weight", c.max_position, c.hidden_size)
        return self._ops.pack_vector(table)

    def ends_or_lent(self, lent: Ends) -> tuple[Any, Any]:
        """As :meth:`ends`, with another decoder's for those that the checkpoint has not."""
        c, pack = self._config, self._ops.pack_head
        embedding, head = lent.embedding, lent.head
        if self.has_linear(EMBEDDING):
            embedding = self._end(EMBEDDING, c.vocab_size, self._ops.pack_embedding)
        else:
            self._check_lent(EMBEDDING, lent, (lent.config.vocab_size, c.vocab_size))
        if self.has_linear(HEAD):
            head = self._end(HEAD, c.num_logits, lambda part, k: pack(part, k, None))
        else:
            self._check_lent(HEAD, lent, (lent.config.num_logits, c.num_logits))
        return embedding, head

    def _check_lent(self, name: str, lent: Ends, rows: tuple[int, int]) -> None:
        widths = lent.config.hidden_size, self._config.hidden_size
        if widths[0] != widths[1] or rows[0] != rows[1]:
            raise ModelLoadError(
                f"the checkpoint has no {name}.weight, and the target's, of shape "
                f"{rows[0], widths[0]}, cannot stand in for one of shape {rows[1], widths[1]}"
            )

    def pruned_head(self) -> PrunedHead | None:
        """Which tokens the head has; None where it has all."""
        c = self._config
        if not c.draft_vocab_size:
            return None
        return PrunedHead.of(self.take(HEAD_TOKENS, c.draft_vocab_size), c.vocab_size)

    def layer(self, index: int) -> Layer:
        c, p = self._config, f"model.layers.{index}."
        attn, width, heads = p + "self_attn.", c.hidden_size, c.heads_of(index)
        attends, recurrent = c.has_attention(index), c.recurrent_of(index)
        latent = self._latent(attn) if c.attention.latent and attends else None
        o_in = c.num_heads * (c.attention.latent.value_dim if c.attention.latent else heads.dim)
        mixture = self._mixture(index)
        gate_up, down = None, None
        if mixture is None and c.has_mlp(index):
            gate_up, down = self._feed_forward(p + "mlp.", c.mlp_width(index), c.mlp.bias)
        input_norm = self._input_norm(index)
        mlp_norm = input_norm if c.norms.shared or c.only_part else self._mlp_norm(index, p)
        return Layer(
            input_norm=input_norm,
            qkv=self._first(index, attn) if attends else None,
            qk_norm=self._qk_norm(index, attn) if c.attention.qk_norm and attends else None,
            o=self._out(attn, width, o_in) if attends else None,
            post_attention_norm=self._post_norm(index, p + "post_attention_layernorm.weight"),
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=down,
            mixture=mixture,
            post_mlp_norm=self._post_norm(index, p + "post_feedforward_layernorm.weight"),
            learnt=self._learnt(index) if c.mlp.activation == XIELU else None,
            sinks=self._sinks(attn) if attends else None,
            latent=latent,
            v_norm=self._v_norm(index),
            gate=self._gate(p) if c.layer_inputs else None,
            scale=self._layer_scale(p) if c.layer_scales else 1.0,
            altup=self._altup(p) if c.altup else None,
            recurrent=read_recurrent(self, recurrent, width, index) if recurrent else None,
        )

    def _first(self, index: int, attn: str) -> Any:
        """The linear of queries, keys and values, or of what they are compressed to."""
        c, latent, read = (
            self._config,
            self._config.attention.latent,
            self._config.attention_inputs(index),
        )
        if latent is None:
            heads, kinds = c.heads_of(index), "q"
            if c.owns_kv(index):
                kinds = "qkv" if heads.has_values else "qk"
            else:  # some checkpoints have them all the same
                self._used.update(f"{attn}{x}.weight" for x in ("k_proj", "v_proj", "k_norm"))
            names = [attn + f"{x}_proj" for x in kinds]
            outs = [(c.num_heads if x == "q" else heads.kv_heads) * heads.dim for x in kinds]
            if c.attention.gate:
                names, outs = [*names, attn + "gate_proj"], [*outs, outs[0]]
            return self.linear(names, attn + "qkv_proj", outs, read, c.attention.qkv_bias)
        names = [attn + ("q_a_proj" if latent.q_rank else "q_proj"), attn + "kv_a_proj_with_mqa"]
        outs = [latent.first_widths(c.num_heads)[0], latent.key_dim]
        return self.linear(names, attn + "qkv_a_proj", outs, read, bias=False)

    def _out(self, attn: str, width: int, o_in: int) -> Any:
        return self.linear(
            [attn + "o_proj"], attn + "o_proj", [width], o_in, self._config.attention.o_bias
        )

    def _latent(self, attn: str) -> LatentWeights:
        """What lies between a latent attention's first and last linear."""
        c, latent, q_norm, q_b = self._config, self._config.attention.latent, None, None
        assert latent is not None

        def linear(name: str, out: int, width: int) -> Any:
            return self.linear([attn + name], attn + name, [out], width, bias=False)

        if latent.q_rank:
            queries = c.num_heads * (latent.nope_dim + latent.rope_dim)
            q_norm = self.norm(f"{attn}q_a_layernorm.weight", latent.q_rank)
            q_b = linear("q_b_proj", queries, latent.q_rank)
        heads = range(c.num_heads)
        return LatentWeights(
            q_norm,
            q_b,
            self.norm(f"{attn}kv_a_layernorm.weight", latent.rank),
            [linear(f"k_b_proj.{h}", latent.rank, latent.nope_dim) for h in heads],
            [linear(f"v_b_proj.{h}", latent.value_dim, latent.rank) for h in heads],
        )

    def _mlp_norm(self, index: int, prefix: str) -> Any:
        c = self._config
        if not c.has_pre_norms(index):
            return None
        is_between = c.has_post_norms(index)
        name = "pre_feedforward_layernorm" if is_between else "post_attention_layernorm"
        return self.norm(f"{prefix}{name}.weight", c.hidden_size)

    def _learnt(self, index: int) -> Any:
        """Alpha above and below zero, and beta, of xIELU."""
        prefix = f"model.layers.{index}.mlp.act_fn."
        names = [prefix + name for name in ("alpha_p", "alpha_n", "beta")]
        above, below, beta = (
            self._config.mlp.learnt[index]
            if self._config.mlp.learnt
            else [as_floats(self.vector(n, *self._tensors[n].shape)).reshape(()) for n in names]
        )
        found = [np.logaddexp(above, 0.0), beta + np.logaddexp(below, 0.0), beta]
        return self._ops.pack_vector(np.array(found, np.float32))

    def _input_norm(self, index: int) -> Any:
        if not self._config.has_input_norm(index):
            return None
        return self.norm(f"model.layers.{index}.input_layernorm.weight", self._config.hidden_size)

    def _qk_norm(self, index: int, attn: str) -> Any:
        c = self._config
        if c.attention.qk_norm_bare:
            ones = np.ones((c.num_heads + c.num_kv_heads, c.head_dim), np.float32)
            return self._ops.pack_vector(ones) if c.positions.is_rotated(index) else None
        dim, kv_heads, _ = c.heads_of(index)
        kinds, norms = [("q_norm", c.num_heads), ("k_norm", kv_heads)], []
        for name, heads in kinds[: 2 if c.owns_kv(index) else 1]:
            size = dim * (heads if c.attention.qk_norm_whole else 1)
            norm = self.vector(f"{attn}{name}.weight", size)
            norms += [norm.reshape(-1, dim)] * (1 if c.attention.qk_norm_whole else heads)
        return self._packed_norm(self._ops.join(norms))

    def _v_norm(self, index: int) -> Any:
        """A norm that has no weights, as one whose weights are 1."""
        if not self._config.attention.value_norm or not self._config.owns_kv(index):
            return None
        return self._ops.pack_vector(np.ones(self._config.heads_of(index).dim, np.float32))

    def _sinks(self, attn: str) -> Any:
        if not self._config.attention.sinks:
            return None
        return self._ops.pack_vector(self.vector(attn + "sinks", self._config.num_heads))

    def _post_norm(self, index: int, name: str) -> Any:
        c = self._config
        return self.norm(name, c.hidden_size) if c.has_post_norms(index) else None
