"""The shape of a decoder: its sizes, and one part for each thing in which model families differ.

Knows no weights and no files. :func:`paceline.models.families.config_json.config_from_hf` builds it
from a parsed ``config.json``, and the metadata of a GGUF file go the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.models.layer_sizes import (
    AltUp,
    Experts,
    HeadSizes,
    Latent,
    LayerInputs,
    LocalConv,
    Recurrent,
    RopeConfig,
)

MASK_TOKEN_KEYS = ("pard_token", "ptd_token_id")
"""Where a parallel draft's ``config.json`` says what it reads for tokens that it does not know."""

RESIDUAL = "residual"
"""The entry of layers that other layers come before."""
XIELU = "xielu"
"""An activation that learns three numbers in each layer (arXiv 2411.13010)."""
LEARNT_KEYS = ("xielu_alpha_p", "xielu_alpha_n", "xielu_beta")
"""Where a configuration says them, layer by layer; otherwise the checkpoint has them as tensors."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How rows attend to those before them, but for the number and size of heads.

    Attributes:
        qkv_bias, o_bias: whether these linears have biases.
        qk_norm: RMS norm of each query and key head before rotary.
        qk_norm_whole: of all queries and of all keys of a row instead (OLMoE).
        qk_norm_last: after rotary instead (Hunyuan).
        qk_norm_bare: without weights, and in layers with rotary alone (Llama 4).
        value_norm: RMS norm without weights of each value head.
        scale: what scores are multiplied with; 0: 1 / sqrt(head_dim).
        softcap: of scores; 0: none.
        sinks: a score per head that takes part in every softmax (gpt-oss).
        gate: a sigmoid of the row weighs each number that attention gives.
        sliding_window: a key at this distance or beyond is not seen; 0: all are.
        sliding_layers: per layer, whether the window holds; empty: in all, if there is one.
        window_chunks: a row sees its own of the text's chunks of that size instead (Llama 4).
        latent: with it there is one KV head, whose values are its keys.
        layer_heads: per layer; empty: all as the model's ``head_dim`` and ``num_kv_heads`` say.
        kv_layers: per layer, whose keys and values it reads; empty: its own.
        reads_target: every layer reads keys and values of another model's layer, of those alone.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_last: bool = False
    qk_norm_bare: bool = False
    value_norm: bool = False
    scale: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    gate: bool = False
    sliding_window: int = 0
    sliding_layers: tuple[bool, ...] = ()
    window_chunks: bool = False
    latent: Latent | None = None
    layer_heads: tuple[HeadSizes, ...] = ()
    kv_layers: tuple[int, ...] = ()
    reads_target: bool = False

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer's attention reads: itself or an earlier one."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def is_sliding(self, layer: int) -> bool:
        if not self.sliding_window:
            return False
        return self.sliding_layers[layer] if self.sliding_layers else True

    def first_in_window(self, position: int) -> int:
        """The first position that a row sees in layers that have a window."""
        if self.window_chunks:
            return position // self.sliding_window * self.sliding_window
        return max(0, position + 1 - self.sliding_window)

    def part(self, start: int, stop: int) -> AttentionConfig:
        """That of some of a model's layers by themselves."""
        return replace(
            self,
            sliding_layers=self.sliding_layers[start:stop],
            layer_heads=self.layer_heads[start:stop],
            kv_layers=tuple(layer - start for layer in self.kv_layers[start:stop]),
        )


@dataclass(frozen=True, slots=True)
class PositionConfig:
    """How rows know where in the text they are.

    Attributes:
        rope: rotary embedding of heads.
        local_rope: of sliding-window layers, where it differs.
        still_rope: of layers without rotary: what their queries grow by.
        rotary_layers: per layer, whether heads are rotated; empty: in all.
        learned: an embedding of positions is added to that of tokens.
        ahead: how far beyond the last position that a row sees its heads are rotated.
    """

    rope: RopeConfig = RopeConfig()  # noqa: RUF009 (frozen)
    local_rope: RopeConfig | None = None
    still_rope: RopeConfig | None = None
    rotary_layers: tuple[bool, ...] = ()
    learned: bool = False
    ahead: int = 0

    def is_rotated(self, layer: int) -> bool:
        return self.rotary_layers[layer] if self.rotary_layers else True


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Norms of the residual stream.

    Attributes:
        eps: what keeps their divisors above 0; that of heads' norms too.
        before: norms before attention and feed-forward.
        after: norms after attention and feed-forward (Gemma 2 and 3: too).
        by_kind: before in recurrent layers, after in the others (OLMo Hybrid).
        shared: a layer's attention and feed-forward have one norm before them.
        plus_one: weights are stored minus one (Gemma).
        layer_norm: norms subtract the mean; those of heads never do.
        bias: of layer norms.
    """

    eps: float = 1e-6
    before: bool = True
    after: bool = False
    by_kind: bool = False
    shared: bool = False
    plus_one: bool = False
    layer_norm: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """Feed-forward layers, but for the width that is usual in the model.

    Attributes:
        activation: ``silu``, ``gelu_tanh``, ``gelu`` (by erf), ``relu2``, ``xielu`` or
            ``clamped_swiglu``.
        gated: a dense one has a gate beside its way up.
        bias: whether its linears have biases.
        parallel: it reads what its layer's attention reads.
        widths: per layer, of a dense one; empty: the model's ``intermediate_size``.
        sparsity: per layer, share of gates that are set to 0; empty: none.
        learnt: per layer, as :data:`LEARNT_KEYS`; empty: see the tensors.
        experts: None where every layer is dense.
    """

    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    parallel: bool = False
    widths: tuple[int, ...] = ()
    sparsity: tuple[float, ...] = ()
    learnt: tuple[tuple[float, ...], ...] = ()
    experts: Experts | None = None

    def experts_of(self, layer: int) -> Experts | None:
        """Those of a layer; None where it is dense."""
        return self.experts.of_layer(layer) if self.experts else None

    def sparse_deviations(self, layer: int) -> float:
        """Gates that are not so many standard deviations above their row's mean are set to 0, and
        the others lowered by as much. -inf: they stay."""
        share = self.sparsity[layer] if self.sparsity else 0.0
        if not share:
            return -math.inf
        from statistics import NormalDist  # which is slow to import

        return NormalDist().inv_cdf(share)

    def part(self, start: int, stop: int) -> FeedForwardConfig:
        """That of some of a model's layers by themselves."""
        return replace(
            self,
            widths=self.widths[start:stop],
            sparsity=self.sparsity[start:stop],
            learnt=self.learnt[start:stop],
            experts=self.experts.part(start, stop) if self.experts else None,
        )


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What numbers on their way through the decoder are multiplied with or bounded by.

    Attributes:
        embedding: of embedded tokens.
        residual: of what attention and feed-forward add to the residual stream.
        attention_out: of what attention adds beside a recurrence.
        gate: of what a dense feed-forward's activation reads.
        mlp_out: of what a dense feed-forward adds.
        logits_divisor: what logits are divided by.
        logits_softcap: of logits; 0: none.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    mlp_out: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class EntryConfig:
    """How hidden states come into a head that drafts from them, or into a stage.

    Attributes:
        kind: one of :mod:`paceline.models.decoder_reader`; empty: rows are tokens alone.
        bias: of the linear that joins hidden states with tokens.
        norm_before_residual: of ``eagle3``: the residual stream begins after the norm.
        sliding_sees_ahead: of ``dflash``: sliding layers see all of a block, as others do.
    """

    kind: str = ""
    bias: bool = False
    norm_before_residual: bool = False
    sliding_sees_ahead: bool = False

    @property
    def reads_blocks(self) -> bool:
        """Whether spans are blocks, whose rows may see the rows after them."""
        return self.kind == "dflash"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family tree: its sizes, and its parts, which families differ in.

    Attributes:
        dtype: the checkpoint's own.
        mask_token_id: what a parallel draft reads in place of unknown tokens.
        draft_vocab_size: rows of a draft's head that has not every token; 0: it has.
        recurrent: None where every layer is attention.
        layer_inputs: what layers read beside the residual stream; with ``altup`` they do.
        local_conv: what is around attention and feed-forward in a head that reads blocks.
        layer_scales: each layer's residual stream ends multiplied with a number.
        only_part: per layer, ``mixer`` or ``mlp`` alone; empty: all have both.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    tie_embeddings: bool = False
    head_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    mask_token_id: int | None = None
    draft_vocab_size: int = 0
    attention: AttentionConfig = AttentionConfig()
    positions: PositionConfig = PositionConfig()
    norms: NormConfig = NormConfig()
    mlp: FeedForwardConfig = FeedForwardConfig()
    multipliers: Multipliers = Multipliers()
    entry: EntryConfig = EntryConfig()
    recurrent: Recurrent | None = None
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    local_conv: LocalConv | None = None
    layer_scales: bool = False
    only_part: tuple[str, ...] = ()

    def with_traits(self, traits: Mapping[str, Any]) -> ModelConfig:
        """This decoder with other values of fields: of its own by their names, and of its parts'
        as ``part.field``."""
        by_part: dict[str, dict[str, Any]] = {"": {}}
        for name, value in traits.items():
            part, _, field = name.rpartition(".")
            by_part.setdefault(part, {})[field] = value
        own = by_part.pop("")
        parts = {p: replace(own.get(p, getattr(self, p)), **by_part[p]) for p in by_part}
        return replace(self, **own, **parts)

    @property
    def num_logits(self) -> int:
        """Rows of the head, and columns of the logits."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_weights(self) -> int:
        """Of the embeddings, the head and all layers' matrices: norms and biases are left out."""
        total = (self.vocab_size * (not self.tie_embeddings) + self.num_logits) * self.hidden_size
        total += self.positions.learned * self.max_position * self.hidden_size
        total += sum(map(self.layer_weights, range(self.num_layers)))
        if self.layer_inputs:
            total += self.layer_inputs.num_weights(self.hidden_size, self.num_layers)
        if self.altup:
            total += self.altup.num_weights(self.hidden_size, self.num_layers)
        return total

    def layer_weights(self, layer: int) -> int:
        """Of a layer's matrices."""
        total, width = 0, self.mlp_width(layer)
        mixture, recurrent = self.mlp.experts_of(layer), self.recurrent_of(layer)
        if mixture:
            total += (mixture.number + mixture.shared_gate) * self.hidden_size
            width = mixture.number * mixture.width + mixture.shared_width
        total += self._attention_weights(layer) if self.has_attention(layer) else 0
        total += recurrent.num_weights(self.hidden_size) if recurrent else 0
        total += self.local_conv.num_weights(self.hidden_size) if self.local_conv else 0
        return total + (self.mlp_weights(width) if self.has_mlp(layer) else 0)

    def mlp_weights(self, width: int) -> int:
        """Of a feed-forward of so many units, such as an expert."""
        return self.hidden_size * (3 if self.mlp.gated else 2) * width

    def _attention_weights(self, layer: int) -> int:
        if self.attention.latent:
            return self.attention.latent.num_weights(self.hidden_size, self.num_heads)
        heads = self.heads_of(layer)
        width = (2 + self.attention.gate) * self.num_heads * heads.dim
        return self.hidden_size * (width + (heads.kv_width if self.owns_kv(layer) else 0))

    @property
    def kv_arrays(self) -> int:
        """Keys and values, or keys alone."""
        return 1 if self.attention.latent else 2

    @property
    def is_like_llama(self) -> bool:
        """Whether layers have Llama's form but for biases, windows, multipliers and more norms."""
        norms, attention, mlp = self.norms, self.attention, self.mlp
        scored = mlp.experts is not None and mlp.experts.by_score
        apart = (
            *(norms.layer_norm, not norms.before),
            *(attention.qk_norm_last, attention.window_chunks, attention.sinks, attention.gate),
            *(attention.latent, attention.layer_heads, attention.kv_layers),
            *(mlp.parallel, mlp.widths, not mlp.gated, scored),
            *(self.positions.learned, self.positions.rotary_layers),
            *(self.head_bias, self.layer_scales, self.altup, self.recurrent, self.local_conv),
        )
        return not any(apart)

    @property
    def attention_scale(self) -> float:
        """What scores of attention are multiplied with."""
        return self.attention.scale or self.head_dim**-0.5

    @property
    def last_norm(self) -> bool:
        """Whether a norm comes before the head."""
        return self.entry.kind != "eagle"

    def has_input_norm(self, layer: int) -> bool:
        """Whether a layer begins with a norm of its own; the first one of some heads does not."""
        return self.has_pre_norms(layer) and (
            layer > 0 or self.entry.kind not in ("eagle", "eagle3")
        )

    def has_pre_norms(self, layer: int) -> bool:
        """Whether a norm comes before a layer's mixer and one before its feed-forward."""
        is_recurrent = self.recurrent_of(layer) is not None
        return is_recurrent if self.norms.by_kind else self.norms.before

    def has_post_norms(self, layer: int) -> bool:
        """Whether a norm comes after each of them."""
        is_recurrent = self.recurrent_of(layer) is not None
        return not is_recurrent if self.norms.by_kind else self.norms.after

    def attention_inputs(self, layer: int) -> int:
        """Width of what a layer's queries, keys and values read."""
        return self.hidden_size * (2 if self.entry.kind == "eagle3" and layer == 0 else 1)

    def sees_ahead(self, layer: int) -> bool:
        """Whether a row sees all of its block, and not only what comes before it."""
        slides = self.attention.is_sliding(layer)
        return self.entry.reads_blocks and (self.entry.sliding_sees_ahead or not slides)

    def first_layers(self, count: int) -> ModelConfig:
        """The shape of this model's first layers by themselves, between its embedding and head."""
        return self._layers(0, count)

    def stage(self, start: int, stop: int) -> ModelConfig:
        """The shape of some of this model's layers, which take in and hand on the residual stream;
        those from 0 on begin with the embedding."""
        entry = EntryConfig(RESIDUAL) if start else self.entry
        return replace(self._layers(start, stop), entry=entry)

    def _layers(self, start: int, stop: int) -> ModelConfig:
        positions = self.positions
        return replace(
            self,
            num_layers=stop - start,
            attention=self.attention.part(start, stop),
            positions=replace(positions, rotary_layers=positions.rotary_layers[start:stop]),
            mlp=self.mlp.part(start, stop),
            recurrent=self.recurrent.part(start, stop) if self.recurrent else None,
            only_part=self.only_part[start:stop],
        )

    def recurrent_of(self, layer: int) -> Recurrent | None:
        """What a layer's recurrence is; None where it has none."""
        return self.recurrent if self.recurrent and self.recurrent.layers[layer] else None

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has a recurrence or attention."""
        return not self.only_part or self.only_part[layer] == "mixer"

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has a feed-forward."""
        return not self.only_part or self.only_part[layer] == "mlp"

    def has_attention(self, layer: int) -> bool:
        recurrent = self.recurrent_of(layer)
        return self.has_mixer(layer) and (recurrent is None or recurrent.beside)

    def heads_of(self, layer: int) -> HeadSizes:
        heads = self.attention.layer_heads
        return heads[layer] if heads else HeadSizes(self.head_dim, self.num_kv_heads)

    def owns_kv(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        attention = self.attention
        is_own = not attention.reads_target and attention.kv_layer(layer) == layer
        return self.has_attention(layer) and is_own

    def mlp_width(self, layer: int) -> int:
        """Of a layer's dense feed-forward."""
        return self.mlp.widths[layer] if self.mlp.widths else self.intermediate_size
