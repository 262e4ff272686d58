"""Packed weights of a decoder, as records: its ends, its layers, and what these are made of.

Packed is what a backend made of tensors (:mod:`paceline.models.backend`). Knows no file and no
arithmetic; :mod:`paceline.models.decoder_reader` takes these out of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import ModelConfig
from paceline.tensors.arrays import Array, Floats


class Ends(NamedTuple):
    """Packed embedding and head of a decoder, and its shape."""

    embedding: Any
    head: Any
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class EntryWeights:
    """Packed weights; where ``join`` is None, layer 0 reads the joined row. Norms may be None."""

    token_norm: Any
    input_norm: Any
    join: Any


HEAD_TOKENS = "d2t"


@dataclass(frozen=True, slots=True)
class PrunedHead:
    """Which tokens a head has that has not every one.

    ``config.json`` says ``draft_vocab_size``, the rows of ``lm_head.weight``, and the tensor
    ``d2t`` how far beyond its row each row's token is: the form in which EAGLE-3 checkpoints have
    it.

    Attributes:
        token_ids: int64, ascending: the token of each row of the head, and column of the logits.
        vocab_size: of the tokens that could be there.
    """

    token_ids: npt.NDArray[np.int64]
    vocab_size: int

    @staticmethod
    def of(offsets: Array, vocab_size: int) -> PrunedHead:
        """Read a stored ``d2t``.

        Raises:
            ModelLoadError: it has no integers, or tokens that do not ascend within the vocabulary.
        """
        if offsets.dtype not in (np.int64, np.int32):
            raise ModelLoadError(f"{HEAD_TOKENS} is of type {offsets.dtype}; it must be int64")
        ids = offsets.astype(np.int64) + np.arange(len(offsets))
        if ids[0] < 0 or ids[-1] >= vocab_size or (ids[1:] <= ids[:-1]).any():
            raise ModelLoadError(
                f"{HEAD_TOKENS} is damaged: the tokens of the head must ascend within 0 to "
                f"{vocab_size - 1}"
            )
        return PrunedHead(ids, vocab_size)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """What is stored as ``d2t``."""
        return self.token_ids - np.arange(len(self.token_ids))

    def by_token(self, logits: Floats) -> Floats:
        """``[rows, columns]`` as ``[rows, vocab_size]``: -inf for tokens that are not there."""
        whole = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        whole[:, self.token_ids] = logits
        return whole


def check_whole_head(name: str, config: ModelConfig) -> None:
    """Raise :class:`UnsupportedModelError` unless the model can emit every token."""
    if config.draft_vocab_size:
        raise UnsupportedModelError(
            f"{name} has {config.draft_vocab_size} of {config.vocab_size} tokens in its head: it "
            "can only draft for another model; name it in the speculative configuration"
        )


class FeedForward(NamedTuple):
    """Packed linears of one feed-forward layer or expert: to twice its width, and back."""

    gate_up: Any
    down: Any


class MixtureNorms(NamedTuple):
    """Norms of a mixture whose parts have their own; its shared expert reads the layer's.

    Attributes:
        router, experts: before them, ``[hidden]``.
        routed, shared: of the sum of the chosen experts' results, and of the shared expert's.
    """

    router: Any
    experts: Any
    routed: Any
    shared: Any


@dataclass(frozen=True, slots=True)
class Mixture:
    """Packed weights of a layer's mixture.

    Attributes:
        router: a linear in float32 on every backend, one output for each expert and, where a
            sigmoid weighs the shared expert, one more.
        experts: by their ids.
        shared: None where there is no shared expert.
        choice_bias: float32 ``[experts]``, added to the scores for the choice; None: there is none.
        scales: float32 ``[experts]``, what the weight of each is multiplied with; None: 1.
        norms: None where all parts read the layer's norm, and their results have none.
    """

    router: Any
    experts: Sequence[FeedForward]
    shared: FeedForward | None
    choice_bias: Any = None
    scales: Any = None
    norms: MixtureNorms | None = None


class LatentWeights(NamedTuple):
    """Packed weights of a layer's attention, besides those that all layers have.

    Keys and values are never expanded: queries and results go through each head's half of the
    matrix that would expand them, ``k_b_proj.H`` and ``v_b_proj.H``, so that a token's one key is
    its rotated dimensions and, behind them, its latent, and its one value is the same.

    Attributes:
        q_norm, q_b: norm and linear of compressed queries; None where queries are not compressed.
        kv_norm: norm of the latents.
        k_b: of each head, a linear from its queries without positions to latents.
        v_b: of each head, a linear from latents to its results.
    """

    q_norm: Any
    q_b: Any
    kv_norm: Any
    k_b: Sequence[Any]
    v_b: Sequence[Any]


class RecurrentWeights(NamedTuple):
    """Packed weights of a recurrent layer; those are None that its kind does not have.

    Attributes:
        first, last: the linears.
        conv: ``[kernel, channels]``, the oldest row's factors first.
        conv_bias: ``[channels]``.
        decay: ``[heads]``, below 0: the rate at which a head forgets.
        step_bias: ``[heads]``.
        skip: ``[heads]``, Mamba-2's D.
        in_scale: ``[sum of in_widths]``, factors of what comes out of the first linear.
        norm: ``[value_dim]`` of the delta rule, ``[inner]`` of Mamba-2.
    """

    first: Any
    last: Any
    conv: Any
    conv_bias: Any = None
    decay: Any = None
    step_bias: Any = None
    skip: Any = None
    norm: Any = None
    in_scale: Any = None


class LayerInputWeights(NamedTuple):
    """What a token's inputs of all layers are made of.

    The inputs are the mean of the token's row of the embedding and of the projection of its row of
    the residual stream, which enters the first layer, times the square root of 2.

    Attributes:
        embedding: of tokens, ``[vocab_size, layers * width]``.
        projection: linear from the residual stream; its results are divided by the square root of
            the stream's width, and normed.
        norm: of each layer's part of them, ``[width]``.
    """

    embedding: Any
    projection: Any
    norm: Any


class LayerGate(NamedTuple):
    """How a layer takes its input: ``x + norm(projection(activation(gate(x)) * input))``.

    Attributes:
        gate: linear from the residual stream to the input's width.
        projection: linear back.
        norm: of its results.
    """

    gate: Any
    projection: Any
    norm: Any


class AltUpEnds(NamedTuple):
    """Linears between the one stream outside the layers and the others, without the first."""

    spread: Sequence[Any]
    gather: Sequence[Any]


class AltUpLayer(NamedTuple):
    """How a layer takes its stream and gives it back, float32 vectors but for two linears.

    Attributes:
        router_norm: of the active stream ``[hidden]``, divided by the stream's width.
        router: ``[streams * hidden]``, whose results' tanh decide.
        predict: ``[streams * streams * streams]``: the weight of stream j in the prediction of
            stream k is what the router's results make of row ``k * streams + j``.
        correct: ``[streams * streams]``: how much of the difference each stream takes, less 1.
        scale: of the active stream before the gate of the layer's input, ``[hidden]``; None: 1.
        left, right: linears to the low rank and back.
        norm: of their results.
    """

    router_norm: Any
    router: Any
    predict: Any
    correct: Any
    scale: Any
    left: Any
    right: Any
    norm: Any


class LocalConvWeights(NamedTuple):
    """The convolutions around a layer's attention or feed-forward.

    Attributes:
        base: ``[2 * kernel * hidden]``, of what goes in, then of what comes out; by taps.
        deltas: linear from the rows that go in to what is added to the base, groups last.
    """

    base: Any
    deltas: Any


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
    attention_conv: LocalConvWeights | None = None
    mlp_conv: LocalConvWeights | None = None
    recurrent: RecurrentWeights | None = None  # where there is no attention, `qkv` and `o` are None
