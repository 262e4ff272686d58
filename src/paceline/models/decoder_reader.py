"""From a checkpoint's tensors to a decoder's packed weights: its ends, its entry, its layers.

Owns which tensors a part of a decoder is made of, by their Hugging Face names. Knows no file and no
arithmetic, and leaves to :mod:`paceline.models.tensor_reader` how a tensor is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, ModelLoadError
from paceline.models.config import RESIDUAL, XIELU
from paceline.models.layer_sizes import DELTA, MAMBA2, SHORT_CONV, Experts, LocalConv, Recurrent
from paceline.models.tensor_reader import TensorReader
from paceline.models.weights import (
    HEAD_TOKENS,
    AltUpEnds,
    AltUpLayer,
    Ends,
    EntryWeights,
    FeedForward,
    LatentWeights,
    Layer,
    LayerGate,
    LayerInputWeights,
    LocalConvWeights,
    Mixture,
    MixtureNorms,
    PrunedHead,
    RecurrentWeights,
)
from paceline.tensors.arrays import floats as as_floats

EMBEDDING, HEAD, POSITIONS = "model.embed_tokens", "lm_head", "model.embed_positions"
LAYER_EMBEDDING = "model.embed_tokens_per_layer"
TOKEN_NORM, INPUT_NORM, JOIN = "model.enorm.weight", "model.hnorm.weight", "model.eh_proj"
"""Of the kind ``mtp``, as DeepSeek's checkpoints name them."""
EAGLE3_TOKEN_NORM = "model.layers.0.input_layernorm.weight"
EAGLE3_INPUT_NORM = "model.layers.0.hidden_norm.weight"
_DELTA_PARTS: tuple[str, ...] = ("qkv", "z", "b", "a")


class DecoderReader:
    """Takes a decoder out of a checkpoint, one after another of its parts.

    Args:
        tensors: reads and packs the checkpoint's tensors.
    """

    def __init__(self, tensors: TensorReader) -> None:
        self._tensors, self._config, self._ops = tensors, tensors.config, tensors.ops

    def _norm(self, name: str, there_is: bool = True) -> Any:
        """A norm of the residual stream; None where there is none."""
        return self._tensors.norm(f"{name}.weight", self._config.hidden_size) if there_is else None

    def _mixture(self, index: int) -> Mixture | None:
        """A layer's mixture of experts; None where the layer is dense."""
        e, mlp = self._config.mlp.experts_of(index), f"model.layers.{index}.mlp."
        if e is None:
            return None
        gates = [mlp + "gate", mlp + "shared_expert_gate"][: 2 if e.shared_gate else 1]
        outs, shared, gate = [e.number, 1][: len(gates)], None, mlp + "gate"
        if e.shared_width:
            # An expert with norms of its own is what a dense layer has as its feed-forward.
            prefix = mlp if e.own_norms else mlp + "shared_expert."
            shared = self._feed_forward(prefix, e.shared_width, bias=False)
        return Mixture(
            self._tensors.float_linear(gates, gate, outs, self._config.hidden_size, e.biases),
            [self._feed_forward(f"{mlp}experts.{i}.", e.width, e.biases) for i in range(e.number)],
            shared,
            self._choice_bias(gate + ".e_score_correction.bias", e) if e.choice_bias else None,
            self._tensors.packed_vector(gate + ".per_expert_scale", e.number)
            if e.own_scales
            else None,
            self._mixture_norms(index) if e.own_norms else None,
        )

    def _mixture_norms(self, index: int) -> MixtureNorms:
        p, width = f"model.layers.{index}.", self._config.hidden_size
        router = as_floats(self._tensors.vector(f"{p}mlp.gate.scale", width))
        return MixtureNorms(
            self._ops.pack_vector(router * np.float32(width**-0.5)),
            self._norm(p + "pre_feedforward_layernorm_2"),
            self._norm(p + "post_feedforward_layernorm_2"),
            self._norm(p + "post_feedforward_layernorm_1"),
        )

    def _choice_bias(self, name: str, experts: Experts) -> Any:
        """What is added to the scores of experts, stored as a vector or as its only row."""
        is_row = len(self._tensors.shape_of(name)) == 2
        bias = self._tensors.vector(name, *([1] if is_row else []), experts.number)
        if not np.isfinite(as_floats(bias)).all():
            raise ModelLoadError(f"tensor {name} has values that are not finite numbers")
        return self._ops.pack_vector(bias.reshape(-1))

    def _feed_forward(self, prefix: str, width: int, bias: bool) -> FeedForward:
        """The two linears of a dense layer, or of an expert."""
        hidden = self._config.hidden_size
        names, fused = [prefix + "gate_proj", prefix + "up_proj"], prefix + "gate_up_proj"
        if not self._config.mlp.gated:
            names, fused = names[1:], names[1]
        gate_up = self._tensors.linear(names, fused, [width] * len(names), hidden, bias)
        return FeedForward(gate_up, self._tensors.single(prefix + "down_proj", hidden, width, bias))

    def ends(self) -> tuple[Any, Any]:
        """The embedding and the head; they may be one object where they are tied."""
        c = self._config
        embedding = self._tensors.end(EMBEDDING, c.vocab_size, self._ops.pack_embedding)
        if c.tie_embeddings and self._tensors.is_packed(EMBEDDING):
            return embedding, embedding
        tied = EMBEDDING if c.tie_embeddings else HEAD
        known = embedding if c.tie_embeddings else None
        bias = self._tensors.floats(HEAD + ".bias", c.num_logits) if c.head_bias else None
        return embedding, self._tensors.end(
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
        return self._tensors.packed_vector(POSITIONS + ".weight", c.max_position, c.hidden_size)

    def ends_or_lent(self, lent: Ends) -> tuple[Any, Any]:
        """As :meth:`ends`, with another decoder's for those that the checkpoint has not."""
        c, pack = self._config, self._ops.pack_head
        embedding, head = lent.embedding, lent.head
        if self._tensors.has_linear(EMBEDDING):
            embedding = self._tensors.end(EMBEDDING, c.vocab_size, self._ops.pack_embedding)
        else:
            self._check_lent(EMBEDDING, lent, (lent.config.vocab_size, c.vocab_size))
        if self._tensors.has_linear(HEAD):
            head = self._tensors.end(HEAD, c.num_logits, lambda part, k: pack(part, k, None))
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

    def entry(self) -> EntryWeights | None:
        """The weights of the decoder's entry; None where its rows are tokens alone.

        In most kinds each row is a token and a vector of ``hidden_size`` floats (its *input*).
        Token embedding and input, each through its own norm where the kind has one, are joined to
        a row of twice the width:

        * ``eagle3`` (EAGLE-3): layer 0's queries, keys and values read the joined row, and the
          residual stream is the input, or with ``norm_before_residual`` the input after its norm;
        * ``mtp`` (multi-token prediction of DeepSeek, GLM, Qwen): a linear makes the joined row
          the residual stream, and all layers are ordinary;
        * ``eagle`` (EAGLE-1 and 2): the same, but neither the joined row nor layer 0 nor the head
          has a norm.

        In the kind ``residual`` the input is the residual stream itself: layers before these,
        elsewhere, have read the token.

        In the kind ``dflash`` (DFlash) rows are tokens alone, and an input stands for a position
        by itself: every layer's keys and values read it unchanged, and rows of tokens come after
        it. Spans of tokens are *blocks*, all of which every row sees.
        """
        kind, width, tensors = self._config.entry.kind, self._config.hidden_size, self._tensors
        if kind in ("", "dflash"):
            return None
        if kind == RESIDUAL:
            return EntryWeights(None, None, None)
        if kind == "eagle3":
            token_norm = tensors.norm(EAGLE3_TOKEN_NORM, width)
            return EntryWeights(token_norm, tensors.norm(EAGLE3_INPUT_NORM, width), None)
        join = tensors.single(JOIN, width, 2 * width, self._config.entry.bias)
        if kind == "eagle":
            return EntryWeights(None, None, join)
        return EntryWeights(tensors.norm(TOKEN_NORM, width), tensors.norm(INPUT_NORM, width), join)

    def pruned_head(self) -> PrunedHead | None:
        """Which tokens the head has; None where it has all."""
        c = self._config
        if not c.draft_vocab_size:
            return None
        return PrunedHead.of(self._tensors.take(HEAD_TOKENS, c.draft_vocab_size), c.vocab_size)

    def layer(self, index: int) -> Layer:
        c, p = self._config, f"model.layers.{index}."
        attn, width, heads = p + "self_attn.", c.hidden_size, c.heads_of(index)
        attends, recurrent = c.has_attention(index), c.recurrent_of(index)
        latent = self._latent(attn) if c.attention.latent and attends else None
        o_in = c.num_heads * (c.attention.latent.value_dim if c.attention.latent else heads.dim)
        mixture, has_post_norms = self._mixture(index), c.has_post_norms(index)
        gate_up, down = None, None
        if mixture is None and c.has_mlp(index):
            gate_up, down = self._feed_forward(p + "mlp.", c.mlp_width(index), c.mlp.bias)
        input_norm = mlp_norm = self._norm(p + "input_layernorm", c.has_input_norm(index))
        if not c.norms.shared and not c.only_part:
            name = "pre_feedforward_layernorm" if has_post_norms else "post_attention_layernorm"
            mlp_norm = self._norm(p + name, c.has_pre_norms(index))
        return Layer(
            input_norm=input_norm,
            qkv=self._first(index, attn) if attends else None,
            qk_norm=self._qk_norm(index, attn) if c.attention.qk_norm and attends else None,
            o=self._tensors.single(attn + "o_proj", width, o_in, c.attention.o_bias)
            if attends
            else None,
            post_attention_norm=self._norm(p + "post_attention_layernorm", has_post_norms),
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=down,
            mixture=mixture,
            post_mlp_norm=self._norm(p + "post_feedforward_layernorm", has_post_norms),
            learnt=self._learnt(index) if c.mlp.activation == XIELU else None,
            sinks=self._tensors.packed_vector(attn + "sinks", c.num_heads)
            if c.attention.sinks and attends
            else None,
            latent=latent,
            v_norm=self._v_norm(index),
            gate=self._gate(p) if c.layer_inputs else None,
            scale=self._layer_scale(p) if c.layer_scales else 1.0,
            altup=self._altup(p) if c.altup else None,
            attention_conv=self._local_conv(p + "attention_conv.", c.local_conv),
            mlp_conv=self._local_conv(p + "mlp_conv.", c.local_conv),
            recurrent=read_recurrent(self._tensors, recurrent, width, index) if recurrent else None,
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
                self._tensors.leave_out(f"{attn}{x}.weight" for x in ("k_proj", "v_proj", "k_norm"))
            names = [attn + f"{x}_proj" for x in kinds]
            outs = [(c.num_heads if x == "q" else heads.kv_heads) * heads.dim for x in kinds]
            if c.attention.gate:
                names, outs = [*names, attn + "gate_proj"], [*outs, outs[0]]
            return self._tensors.linear(names, attn + "qkv_proj", outs, read, c.attention.qkv_bias)
        names = [attn + ("q_a_proj" if latent.q_rank else "q_proj"), attn + "kv_a_proj_with_mqa"]
        outs = [latent.first_widths(c.num_heads)[0], latent.key_dim]
        return self._tensors.linear(names, attn + "qkv_a_proj", outs, read, bias=False)

    def _latent(self, attn: str) -> LatentWeights:
        """What lies between a latent attention's first and last linear."""
        c, latent, q_norm, q_b = self._config, self._config.attention.latent, None, None
        assert latent is not None
        linear, norm = self._tensors.single, self._tensors.norm
        if latent.q_rank:
            queries = c.num_heads * (latent.nope_dim + latent.rope_dim)
            q_norm = norm(f"{attn}q_a_layernorm.weight", latent.q_rank)
            q_b = linear(attn + "q_b_proj", queries, latent.q_rank)
        heads = range(c.num_heads)
        return LatentWeights(
            q_norm,
            q_b,
            norm(f"{attn}kv_a_layernorm.weight", latent.rank),
            [linear(f"{attn}k_b_proj.{h}", latent.rank, latent.nope_dim) for h in heads],
            [linear(f"{attn}v_b_proj.{h}", latent.value_dim, latent.rank) for h in heads],
        )

    def _learnt(self, index: int) -> Any:
        """Alpha above and below zero, and beta, of xIELU."""
        numbers: Sequence[Any] = ()
        if self._config.mlp.learnt:
            numbers = self._config.mlp.learnt[index]
        else:
            names = (f"model.layers.{index}.mlp.act_fn.{x}" for x in ("alpha_p", "alpha_n", "beta"))
            stored = [self._tensors.vector(n, *self._tensors.shape_of(n)) for n in names]
            numbers = [as_floats(number).reshape(()) for number in stored]
        above, below, beta = numbers
        learnt = [np.logaddexp(above, 0.0), beta + np.logaddexp(below, 0.0), beta]
        return self._ops.pack_vector(np.array(learnt, np.float32))

    def _qk_norm(self, index: int, attn: str) -> Any:
        c = self._config
        if c.attention.qk_norm_bare:
            ones = np.ones((c.num_heads + c.num_kv_heads, c.head_dim), np.float32)
            return self._ops.pack_vector(ones) if c.positions.is_rotated(index) else None
        dim, kv_heads, _ = c.heads_of(index)
        kinds, norms = [("q_norm", c.num_heads), ("k_norm", kv_heads)], []
        for name, heads in kinds[: 2 if c.owns_kv(index) else 1]:
            size = dim * (heads if c.attention.qk_norm_whole else 1)
            norm = self._tensors.vector(f"{attn}{name}.weight", size)
            norms += [norm.reshape(-1, dim)] * (1 if c.attention.qk_norm_whole else heads)
        return self._tensors.packed_norm(self._ops.join(norms))

    def _v_norm(self, index: int) -> Any:
        """A norm that has no weights, as one whose weights are 1."""
        if not self._config.attention.value_norm or not self._config.owns_kv(index):
            return None
        return self._ops.pack_vector(np.ones(self._config.heads_of(index).dim, np.float32))

    def layer_inputs(self) -> LayerInputWeights | None:
        """What the inputs of all layers are made of; None where layers have none."""
        c, inputs = self._config, self._config.layer_inputs
        if inputs is None:
            return None
        name, tensors = LAYER_EMBEDDING, self._tensors
        return LayerInputWeights(
            tensors.end(name, inputs.vocab_size, self._ops.pack_embedding, inputs.total),
            tensors.single("model.per_layer_model_projection", inputs.total, c.hidden_size),
            tensors.norm("model.per_layer_projection_norm.weight", inputs.width),
        )

    def altup(self) -> AltUpEnds | None:
        """What lies between the streams and the ends; None where there is one stream."""
        if self._config.altup is None:
            return None
        width, count = self._config.hidden_size, self._config.altup.streams - 1
        spread, gather = (
            [self._tensors.single(f"model.{end}.{index}", width, width) for index in range(count)]
            for end in ("altup_projections", "altup_unembed_projections")
        )
        return AltUpEnds(spread, gather)

    def _altup(self, prefix: str) -> AltUpLayer:
        """Scores, coefficients and the linear of low rank of a layer."""
        c, altup = self._config, self._config.altup
        assert altup is not None
        width, streams, rank, p = c.hidden_size, altup.streams, altup.rank, prefix + "altup."

        def flat(name: str, *shape: int) -> Any:
            return self._ops.pack_vector(
                self._tensors.vector(f"{p}{name}.weight", *shape).reshape(-1)
            )

        norm = as_floats(self._tensors.vector(p + "router_norm.weight", width)) / np.float32(width)
        name = p + "correct_output_scale"
        if not altup.scaled:  # checkpoints have it all the same
            self._tensors.leave_out([name])
        return AltUpLayer(
            self._ops.pack_vector(norm),
            flat("modality_router", streams, width),
            flat("prediction_coefs", streams**2, streams),
            flat("correction_coefs", streams, streams),
            scale=self._tensors.packed_vector(name, width) if altup.scaled else None,
            left=self._tensors.single(prefix + "laurel.linear_left", rank, width),
            right=self._tensors.single(prefix + "laurel.linear_right", width, rank),
            norm=self._norm(prefix + "laurel.post_laurel_norm"),
        )

    def _local_conv(self, prefix: str, shape: LocalConv | None) -> LocalConvWeights | None:
        if shape is None:
            return None
        width, name = self._config.hidden_size, prefix + "kernel_projection"
        base = self._tensors.vector(prefix + "base_kernel", 2, shape.kernel, width)
        return LocalConvWeights(
            self._ops.pack_vector(base.reshape(-1)),
            self._tensors.single(name, shape.num_deltas(width), width),
        )

    def _layer_scale(self, prefix: str) -> float:
        return float(as_floats(self._tensors.vector(prefix + "layer_scalar", 1))[0])

    def _gate(self, prefix: str) -> LayerGate:
        c, inputs = self._config, self._config.layer_inputs
        assert inputs is not None
        return LayerGate(
            self._tensors.single(prefix + "per_layer_input_gate", inputs.width, c.hidden_size),
            self._tensors.single(prefix + "per_layer_projection", c.hidden_size, inputs.width),
            self._norm(prefix + "post_per_layer_input_norm"),
        )


def read_recurrent(
    reader: TensorReader, shape: Recurrent, hidden_size: int, layer: int
) -> RecurrentWeights:
    """The weights of a recurrent layer; ``ModelLoadError`` also for a head that would grow.

    Under ``model.layers.I.linear_attn.`` there are ``in_proj`` (or, of the delta rule, its parts
    ``in_proj_{qkv,z,b,a}``), ``conv1d``, ``A_log`` (or ``A``, which is ``-exp(A_log)``),
    ``dt_bias``, ``D``, ``norm`` and ``out_proj``. Instead of ``in_proj_qkv`` and ``conv1d`` there
    may be three tensors each.
    """
    p = f"model.layers.{layer}.linear_attn."
    names, widths = [p + "in_proj"], [sum(shape.in_widths)]
    if shape.kind == DELTA:
        parts, widths = _DELTA_PARTS, list(shape.in_widths)
        if reader.has(p + "in_proj_q.weight"):
            parts, widths = (
                ("q", "k", "v", *parts[1:]),
                [shape.keys, shape.keys, shape.inner, *widths[1:]],
            )
        names = [f"{p}in_proj_{part}" for part in parts]
    has_heads = shape.kind != SHORT_CONV
    normed = {DELTA: shape.value_dim, MAMBA2: shape.inner}.get(shape.kind, 0)
    bias = p + "conv1d.bias"
    return RecurrentWeights(
        first=reader.linear(names, p + "in_proj", widths, hidden_size, shape.in_bias),
        last=reader.single(p + "out_proj", hidden_size, shape.inner, shape.out_bias),
        conv=_conv(reader, p, shape),
        conv_bias=reader.packed_vector(bias, shape.channels) if shape.conv_bias else None,
        decay=_decay(reader, p, shape.heads) if has_heads else None,
        step_bias=reader.packed_vector(p + "dt_bias", shape.heads) if has_heads else None,
        skip=reader.packed_vector(p + "D", shape.heads) if shape.kind == MAMBA2 else None,
        in_scale=_in_scale(reader, shape) if shape.in_scales else None,
        norm=reader.packed_vector(p + "norm.weight", normed) if shape.norm != "none" else None,
    )


def _conv(reader: TensorReader, prefix: str, shape: Recurrent) -> Any:
    """Stored as ``[channels, 1, kernel]`` or ``[channels, kernel]``, in one tensor or three."""
    names = [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
    names = names if reader.has(names[0]) else [prefix + "conv1d.weight"]
    shapes = [reader.shape_of(name) for name in names]
    channels = sum(sum(stored[:1]) for stored in shapes)
    if channels != shape.channels:
        raise ModelLoadError(
            f"tensor {names[0]} and those like it are of {channels} channels; the configuration "
            f"needs {shape.channels}"
        )
    parts = []
    for name, stored in zip(names, shapes, strict=True):
        middle = [1] if len(stored) == 3 else []
        part = as_floats(reader.vector(name, *stored[:1], *middle, shape.kernel))
        parts.append(part.reshape(-1, shape.kernel))
    return reader.ops.pack_vector(np.ascontiguousarray(np.concatenate(parts).T))


def _in_scale(reader: TensorReader, shape: Recurrent) -> Any:
    widths = shape.inner, shape.inner, shape.keys, shape.keys, shape.heads
    return reader.ops.pack_vector(np.repeat(np.array(shape.in_scales, np.float32), widths))


def _decay(reader: TensorReader, prefix: str, heads: int) -> Any:
    if reader.has(prefix + "A_log"):
        decay = -np.exp(as_floats(reader.vector(prefix + "A_log", heads)))
    else:
        decay = as_floats(reader.vector(prefix + "A", heads))
    if not (decay <= 0).all():
        raise ModelLoadError(
            f"tensor {prefix}A has values that are above 0 or not numbers; what decays a state "
            "must be below 0"
        )
    return reader.ops.pack_vector(decay)
