"""Sizes of what layers are made of: rotary embeddings, heads, experts, recurrences, and more.

Each is a part of a model's shape (:mod:`paceline.models.config`). Knows no weights, no files and no
model family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

QUERY_GROWTH, GROWTH_START = "llama_4_scaling_beta", "growth_start"
"""What queries grow by with the logarithm of the position, and the position that the first token
counts as, among a rotary rule's own numbers."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer.

    Attributes:
        theta: base of the frequencies.
        scaling: ``default``, ``linear``, ``llama3``, ``yarn``, ``dynamic``, ``longrope`` or
            ``proportional``.
        factor: context extension factor of the scaling.
        dim: rotated dimensions of each head (partial rotary when below the head size).
        params: what else the scaling rule needs, by its Hugging Face names, numbers or tuples.
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    dim: int = 0
    params: tuple[tuple[str, float | tuple[float, ...]], ...] = ()


class HeadSizes(NamedTuple):
    """The heads of one layer's attention.

    Attributes:
        dim: dimensions of a head.
        kv_heads: heads of keys and values.
        has_values: whether there is a linear for values; if not, they are the keys as the linear
            for keys gives them, before norms and rotation.
    """

    dim: int
    kv_heads: int
    has_values: bool = True

    @property
    def kv_width(self) -> int:
        """Outputs of the linears of keys and values."""
        return self.dim * self.kv_heads * (2 if self.has_values else 1)


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention whose keys and values are one latent per token, which all heads share (MLA).

    Attributes:
        rank: numbers of a latent.
        q_rank: numbers that queries are compressed to; 0: they are not.
        nope_dim, rope_dim: dimensions of a head's query that have no position, and rotated ones.
        value_dim: of a head's result.
        interleaved: whether rotary pairs are neighbours in the checkpoint.
    """

    rank: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True

    NORM_EPS = 1e-6  # of both norms between matrices, in every model

    @property
    def key_dim(self) -> int:
        """Of the one key per token: its rotated dimensions, then its latent."""
        return self.rope_dim + self.rank

    def first_widths(self, heads: int) -> tuple[int, int, int]:
        """Of queries, latents and rotated dimensions that come out of a layer's first linear."""
        return self.q_rank or heads * (self.nope_dim + self.rope_dim), self.rank, self.rope_dim

    def num_weights(self, hidden_size: int, heads: int) -> int:
        """Of a layer's attention, norms left out."""
        queries = heads * (self.nope_dim + self.rope_dim)
        down = self.q_rank * (hidden_size + queries) if self.q_rank else hidden_size * queries
        results = heads * self.value_dim
        expanded = self.rank * (heads * self.nope_dim + results)
        return down + hidden_size * (self.key_dim + results) + expanded


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixtures of experts: feed-forward layers in which each row chooses a few of many.

    Attributes:
        number: experts of a layer.
        per_token: experts that a row chooses.
        width: of an expert.
        renormalise: whether the weights of a row's experts add up to 1, and not those of all.
        scale: what these weights are multiplied with.
        sigmoid: whether an expert's score is the sigmoid of its logit; if not, the softmax of all.
        choice_bias: whether a bias is added to the scores, for the choice alone.
        groups: a row chooses among the experts of a few groups, which are as large as each other.
        groups_per_token: groups that a row chooses among.
        group_best: a group counts as much as this number of its best experts together.
        least_sum: what weights that add up to less are divided by.
        jitter: weights are SparseMixer's (arXiv 2409.12136): each of a row's experts, in the order
            of their choice, is weighed against those that are left and whose logits are within
            twice this share of its own; 0: they are not.
        weighs_inputs: whether the weights are those of what experts read, not of their results.
        shared_width: of an expert that every row has besides those it chooses; 0: there is none.
        shared_gate: whether a sigmoid of the row weighs the shared expert.
        biases: whether the router and the chosen experts' linears have biases.
        sparse_layers: per layer, whether it is a mixture; empty: all are.
        own_norms: the router, the chosen experts and the shared one have norms of their own, before
            them and, but for the router, after them.
        own_scales: each expert has a number that its weights are multiplied with.
    """

    number: int
    per_token: int
    width: int
    renormalise: bool = True
    scale: float = 1.0
    shared_width: int = 0
    shared_gate: bool = False
    biases: bool = False
    sparse_layers: tuple[bool, ...] = ()
    sigmoid: bool = False
    choice_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    group_best: int = 1
    least_sum: float = 1e-20
    own_norms: bool = False
    own_scales: bool = False
    jitter: float = 0.0
    weighs_inputs: bool = False

    @property
    def by_score(self) -> bool:
        """Whether experts are chosen by their scores, and not by their logits."""
        return self.sigmoid or self.choice_bias

    def of_layer(self, layer: int) -> Experts | None:
        """These, where the layer is a mixture."""
        return self if not self.sparse_layers or self.sparse_layers[layer] else None

    def part(self, start: int, stop: int) -> Experts | None:
        """Those of some of a model's layers by themselves."""
        kept = self.sparse_layers[start:stop]
        return replace(self, sparse_layers=kept) if any(kept) or not kept else None


DELTA, MAMBA2, SHORT_CONV = "delta", "mamba2", "short_conv"
"""The gated delta rule (arXiv 2412.06464), Mamba-2 (arXiv 2405.21060), and convolutions alone."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent layers of a model, which are alike.

    Each reads its rows through one linear, then a short causal convolution over a few rows before
    each, then (but for ``short_conv``) a recurrence whose state is a matrix per head, and writes
    through another linear.

    Attributes:
        kind: :data:`DELTA`, :data:`MAMBA2` or :data:`SHORT_CONV`.
        layers: per layer, whether it is recurrent.
        kernel: rows that a convolution sees, the row itself among them.
        heads: of the recurrence; of a short convolution 1.
        groups: of heads that share a key (Mamba-2's B and C).
        key_dim: of a key (Mamba-2's B and C); 0: there is no state but the convolution's.
        value_dim: of a head's values; of a short convolution the width of the stream.
        beta_scale: what the delta rule's learning rates, between 0 and 1, are multiplied with.
        least_step: what Mamba-2's time steps are at least.
        conv_bias, in_bias, out_bias: whether the convolution and the linears have biases.
        norm: of what comes out of the recurrence: ``before_gate`` or ``after_gate``, or ``none``
            where the gate alone acts on it.
        norm_groups: parts of a row that are normed by themselves.
        norm_eps: of that norm.
        beside: whether these layers have attention too, which reads the same rows.
        in_scales: of Mamba-2, factors of what comes out of the first linear: gates, values, B, C
            and time steps; empty: none.
        out_scale: of what comes out of the last linear.
    """

    kind: str
    layers: tuple[bool, ...]
    kernel: int
    value_dim: int
    heads: int = 1
    groups: int = 1
    key_dim: int = 0
    beta_scale: float = 1.0
    least_step: float = 0.0
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    norm: str = "none"
    norm_groups: int = 1
    norm_eps: float = 1e-6
    beside: bool = False
    in_scales: tuple[float, ...] = ()
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Width of the values of a row, and of what the last linear reads."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Width of the keys of a row."""
        return self.groups * self.key_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.keys

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Of the parts of what comes out of the first linear.

        Delta rule: queries, keys and values; gate; learning rates; decays. Mamba-2: gate; values,
        keys (B) and queries (C); time steps. Short convolution: two gates, and what is convolved.
        """
        if self.kind == DELTA:
            return self.channels, self.inner, self.heads, self.heads
        if self.kind == MAMBA2:
            return self.inner, self.channels, self.heads
        return self.inner, self.inner, self.inner

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of a layer's state: the delta rule's ``[heads, key_dim, value_dim]``, and Mamba-2's
        ``[heads, value_dim, key_dim]``."""
        if self.kind == MAMBA2:
            return self.heads, self.value_dim, self.key_dim
        return self.heads, self.key_dim, self.value_dim

    def num_weights(self, hidden_size: int) -> int:
        """Of a layer's matrices."""
        return (sum(self.in_widths) + self.inner) * hidden_size + self.channels * self.kernel

    def part(self, start: int, stop: int) -> Recurrent | None:
        """Those of some of a model's layers by themselves."""
        kept = self.layers[start:stop]
        return replace(self, layers=kept) if any(kept) else None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """An input that each layer has for each token, beside the residual stream.

    It is made of an embedding of the token and of a linear that reads the residual stream that
    enters the first layer; at a layer's end it is gated by the residual stream and added to it.

    Attributes:
        width: of the input of one layer.
        vocab_size: tokens that the embedding has; others are read as token 0.
        layers: whose inputs the embedding and the linear hold; at least as many as the model has.
        multiplier: of the embedding.
    """

    width: int
    vocab_size: int
    layers: int
    multiplier: float

    @property
    def total(self) -> int:
        """Numbers of a token's inputs of all layers."""
        return self.layers * self.width

    def num_weights(self, hidden_size: int, layers: int) -> int:
        """Of the embedding and all matrices, the gates and projections of so many layers."""
        return (self.vocab_size + hidden_size) * self.total + 2 * layers * hidden_size * self.width


@dataclass(frozen=True, slots=True)
class LocalConv:
    """Convolutions within a block, around the attention and the feed-forward of a DFlash 2 layer.

    Row i becomes the sum over taps t of ``(base[t] + delta[i, t]) * row[i - t]``, where rows before
    the block are 0. One convolution is of what the part reads behind its norm, another of what it
    adds to the residual stream. A linear makes the deltas of both of what the first one reads.

    Attributes:
        kernel: taps.
        group: channels that share a delta.
    """

    kernel: int
    group: int

    def num_deltas(self, hidden_size: int) -> int:
        """Of a row, for both convolutions around one part."""
        return 2 * self.kernel * (hidden_size // self.group)

    def num_weights(self, hidden_size: int) -> int:
        """Of a layer's matrices, around both parts."""
        return 2 * hidden_size * self.num_deltas(hidden_size)


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several residual streams, of which layers read and write one (AltUp, arXiv 2301.13310).

    Before a layer all streams are predicted from all, after it all are corrected by what the layer
    made of the active one. Beside its attention a layer has a linear of low rank (LAuReL, arXiv
    2411.07501).

    Attributes:
        streams: their number.
        active: the one that layers read.
        scaled: whether a vector scales the active stream, for the gate of a layer's input alone.
        rank: of the linear beside attention.
    """

    streams: int
    active: int
    scaled: bool
    rank: int

    def num_weights(self, hidden_size: int, layers: int) -> int:
        """Of the matrices between streams, before and after so many layers and in them."""
        between = self.streams * (hidden_size + self.streams + self.streams**2)
        ends = 2 * (self.streams - 1) * hidden_size**2
        return ends + layers * (between + 2 * hidden_size * self.rank)
