"""From a checkpoint's tensors to a decoder's packed weights. Knows no file and no arithmetic.

Linears come in three forms: floats, which the backend packs; bytes of the format in which the file
has them, which a backend that computes in the file's own formats takes as they are; and packed ones
(:mod:`paceline.models.packed_folder`), ready to use. One linear is in memory as floats at a time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import ConfigError, ModelLoadError
from paceline.models.arrays import floats as as_floats
from paceline.models.blocks import row_bytes
from paceline.models.config import XIELU, Experts, ModelConfig
from paceline.models.latent import LatentWeights
from paceline.models.mixture import FeedForward, Mixture
from paceline.models.ops.base import (
    PackedLinear,
    PackedOps,
    WeightOps,
    WeightPart,
)
from paceline.models.packed_format import ORDER, packed_formats, packed_name, packed_parts
from paceline.models.pruned_head import HEAD_TOKENS, PrunedHead
from paceline.models.stored import StoredTensors
from paceline.models.tensor_checks import check_floats, check_leftovers, check_tied

Join = Callable[[Sequence[Any]], Any]
log = logging.getLogger(__name__)
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


class Ends(NamedTuple):
    """Packed embedding and head of a decoder, and its shape."""

    embedding: Any
    head: Any
    config: ModelConfig


class WeightReader:
    """Takes tensors out of a checkpoint under their Hugging Face names, checking their shapes."""

    def __init__(self, tensors: Mapping[str, Any], config: ModelConfig, ops: WeightOps) -> None:
        self._tensors = tensors
        self._config = config
        self._ops = ops
        self._rounded: Counter[str] = Counter()  # tensors per stored type
        self._used: set[str] = set()

    def take(self, name: str, *shape: int) -> Any:
        tensor = self._tensors[name]
        self._check_shape(name, tuple(tensor.shape), shape)
        self._used.add(name)
        return tensor

    def floats(self, name: str, *shape: int) -> Any:
        """A tensor of weights, which can be of a type with floats of 16 bits or more alone."""
        tensor = self.take(name, *shape)
        self._check_floats(name, tensor)
        return tensor

    def _check_floats(self, name: str, tensor: Any) -> None:
        check_floats(name, tensor, self._type_of(name, str(tensor.dtype)))

    @staticmethod
    def _check_shape(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {found}; the configuration needs {shape}"
            )

    def norm(self, name: str, size: int) -> Any:
        """A norm of rows: ``[size]``, or of a layer norm ``[2, size]``, weights and biases."""
        if not self._config.layer_norm:
            return self._packed_norm(self._vector(name, size))
        weight = self._vector(name, size)
        bias = weight * 0
        if self._config.norm_bias:
            bias = self._vector(name.removesuffix("weight") + "bias", size)
        if self._config.norm_plus_one:
            weight = weight + 1
        rows = [weight.reshape(1, size), bias.reshape(1, size)]
        return self._ops.pack_vector(self._ops.join(rows))

    def host_norm(self, name: str, size: int) -> Any:
        """As :meth:`norm`, for a norm that no backend computes."""
        weight = as_floats(self.floats(name, size))
        return weight + np.float32(1.0) if self._config.norm_plus_one else weight

    def _vector(self, name: str, *shape: int) -> Any:
        """Floats that no linear is made of."""
        return self.floats(name, *shape)

    def _packed_norm(self, weight: Any) -> Any:
        packed = self._ops.pack_vector(weight)
        return packed + 1.0 if self._config.norm_plus_one else packed

    def linear(self, names: list[str], fused: str, outs: list[int], width: int, bias: bool) -> Any:
        """One packed linear out of several stacked ones, or out of their fused form."""
        if packed_formats(self._tensors, fused):
            return self._adopted(fused, outs, width, bias)
        if fused + ".weight" in self._tensors:
            names, outs = [fused], [sum(outs)]
        vector = self._joined_bias(names, outs, bias)
        with _naming(fused):
            parts = [
                self._part(f"{name}.weight", out, width)
                for name, out in zip(names, outs, strict=True)
            ]
            parts = _stacked(parts, self._ops.join)
            packed = self._ops.pack_linear(parts, width, vector)
        self._release([f"{name}.weight" for name in names])
        return packed

    def float_linear(
        self, names: list[str], fused: str, outs: list[int], width: int, bias: bool
    ) -> Any:
        """A linear of several stacked ones that is float32 on every backend.

        One with a single output may be stored as a vector.
        """
        if packed_formats(self._tensors, fused):
            return self._adopted(fused, [sum(outs)], width, bias)
        weights = []
        for name, out in zip((f"{n}.weight" for n in names), outs, strict=True):
            is_vector = out == 1 and self._tensors[name].ndim == 1
            weight = self.floats(name, *([width] if is_vector else [out, width]))
            wide = as_floats(weight) if isinstance(weight, np.ndarray) else weight
            weights.append(wide.reshape(out, width))
        whole = self._ops.join(weights)
        rows = whole.view(np.uint8) if isinstance(whole, np.ndarray) else whole
        part = WeightPart(sum(outs), lambda first, last: rows[first:last], "F32")
        return self._ops.pack_linear([part], width, self._joined_bias(names, outs, bias))

    def _joined_bias(self, names: list[str], outs: list[int], bias: bool) -> Any:
        """That of stacked linears; None where they have none."""
        if not bias:
            return None
        pairs = zip(names, outs, strict=True)
        return self._ops.join([self.floats(f"{name}.bias", out) for name, out in pairs])

    def _mixture(self, index: int) -> Mixture | None:
        """A layer's mixture of experts; None where the layer is dense."""
        e, mlp = self._config.experts_of(index), f"model.layers.{index}.mlp."
        if e is None:
            return None
        gates = [mlp + "gate", mlp + "shared_expert_gate"][: 2 if e.shared_gate else 1]
        outs, shared = [e.number, 1][: len(gates)], None
        if e.shared_width:
            shared = self._feed_forward(mlp + "shared_expert.", e.shared_width, bias=False)
        return Mixture(
            self.float_linear(gates, mlp + "gate", outs, self._config.hidden_size, e.biases),
            [self._feed_forward(f"{mlp}experts.{i}.", e.width, e.biases) for i in range(e.number)],
            shared,
            self._choice_bias(mlp + "gate.e_score_correction.bias", e) if e.choice_bias else None,
        )

    def _choice_bias(self, name: str, experts: Experts) -> Any:
        """What is added to the scores of experts, stored as a vector or as its only row."""
        is_row = self._tensors[name].ndim == 2
        bias = self._vector(name, *([1] if is_row else []), experts.number)
        if not np.isfinite(as_floats(bias)).all():
            raise ModelLoadError(f"tensor {name} has values that are no finite numbers")
        return self._ops.pack_vector(bias.reshape(-1))

    def _feed_forward(self, prefix: str, width: int, bias: bool) -> FeedForward:
        """The two linears of a dense layer, or of an expert."""
        hidden, down = self._config.hidden_size, prefix + "down_proj"
        names, fused = [prefix + "gate_proj", prefix + "up_proj"], prefix + "gate_up_proj"
        if not self._config.gated_mlp:
            names, fused = names[1:], names[1]
        gate_up = self.linear(names, fused, [width] * len(names), hidden, bias)
        return FeedForward(gate_up, self.linear([down], down, [hidden], width, bias))

    def _part(self, weight: str, n: int, width: int) -> WeightPart:
        """Rows of a matrix: as they are stored where the backend takes them so."""
        stored = self._as_stored(weight, n, width)
        if stored is not None:
            return stored
        part = WeightPart.of(self.floats(weight, n, width))
        self._rounded[self._type_of(weight, "floats")] += 1
        return part

    def _as_stored(self, weight: str, n: int, width: int) -> WeightPart | None:
        tensors = self._tensors
        if self._ops.dtype != "file" or not isinstance(tensors, StoredTensors):
            return None
        found = tensors.as_stored(weight)
        if found is None:
            return None
        form, rows, order = found
        self._check_shape(weight, tensors.shape_of(weight), (n, width))
        if tuple(rows.shape) != (n, row_bytes(form, width)):
            raise ModelLoadError(f"tensor {weight} has {tuple(rows.shape)} bytes of {form}")
        self._used.add(weight)
        return WeightPart(n, lambda first, last: rows[first:last], form, order)

    def ends(self) -> tuple[Any, Any]:
        """The embedding and the head; they may be one object where they are tied."""
        c = self._config
        if c.tie_embeddings and HEAD + ".weight" in self._tensors:
            self._check_tied()
        if packed_formats(self._tensors, EMBEDDING):
            embedding = self._adopted(EMBEDDING, [c.vocab_size], c.hidden_size, bias=False)
            if c.tie_embeddings:
                return embedding, embedding
            return embedding, self._adopted(HEAD, [c.num_logits], c.hidden_size, bias=c.head_bias)
        embedding = self._end(EMBEDDING, c.vocab_size, self._ops.pack_embedding)
        tied = EMBEDDING if c.tie_embeddings else HEAD
        known = embedding if c.tie_embeddings else None
        bias = self.floats(HEAD + ".bias", c.num_logits) if c.head_bias else None
        return embedding, self._end(
            tied, c.num_logits, lambda part, k: self._ops.pack_head(part, k, known, bias)
        )

    def places(self, max_len: int) -> Any:
        """The embedding of positions, at least ``max_len`` of them; None where there is none."""
        c = self._config
        if not c.learned_positions:
            return None
        if max_len > c.max_position:
            raise ConfigError(
                f"the model has an embedding for each of {c.max_position} positions, and "
                f"{max_len} are asked for; give --max-model-len {c.max_position} or less"
            )
        table = self._vector(POSITIONS + ".weight", c.max_position, c.hidden_size)
        return self._ops.pack_vector(table)

    def ends_or_lent(self, lent: Ends) -> tuple[Any, Any]:
        """As :meth:`ends`, with another decoder's for those that the checkpoint has not."""
        c, pack = self._config, self._ops.pack_head
        embedding, head = lent.embedding, lent.head
        if EMBEDDING + ".weight" in self._tensors:
            embedding = self._end(EMBEDDING, c.vocab_size, self._ops.pack_embedding)
        else:
            self._check_lent(EMBEDDING, lent, (lent.config.vocab_size, c.vocab_size))
        if HEAD + ".weight" in self._tensors:
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

    def _end(self, name: str, n: int, pack: Callable[[WeightPart, int], Any]) -> Any:
        """Embedding or head, which are large, without unpacking them as a whole."""
        weight, width, tensors = name + ".weight", self._config.hidden_size, self._tensors
        with _naming(name):
            part = self._as_stored(weight, n, width)
            if part is None and isinstance(tensors, StoredTensors):
                self._check_shape(weight, tensors.shape_of(weight), (n, width))
                self._check_floats(weight, tensors.rows(weight, 0, 1))
                self._used.add(weight)
                part = WeightPart(n, partial(tensors.rows, weight))
            packed = pack(part or WeightPart.of(self.floats(weight, n, width)), width)
        self._release([weight])
        return packed

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

    def _adopted(self, name: str, outs: list[int], k: int, bias: bool) -> Any:
        """A linear of a packed folder: one part, or one for each of the stacked linears."""
        assert isinstance(self._ops, PackedOps), "packed weights need a backend that takes them"
        parts = packed_parts(self._tensors, name, outs)
        for index, part in enumerate(parts):
            kinds = (part.format,) if part.order is None else (part.format, ORDER)
            self._used.update(packed_name(name, index, kind) for kind in kinds)
        if (f"{name}.bias" in self._tensors) != bias:
            raise ModelLoadError(
                f"{name} is not packed as the configuration says: it has "
                f"{'no' if bias else 'a'} bias"
            )
        vector = None
        if bias:
            self._used.add(f"{name}.bias")
            vector = self._tensors[f"{name}.bias"]
        with _naming(name):
            return self._ops.adopt(PackedLinear(parts, vector, k))

    def layer(self, index: int) -> Layer:
        c, p = self._config, f"model.layers.{index}."
        attn, width, read = p + "self_attn.", c.hidden_size, c.attention_inputs(index)
        q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        latent = self._latent(attn) if c.latent else None
        o_in = c.num_heads * c.latent.value_dim if c.latent else q_out
        mixture = self._mixture(index)
        gate_up, down = None, None
        if mixture is None:
            gate_up, down = self._feed_forward(p + "mlp.", c.intermediate_size, c.mlp_bias)
        input_norm = self._input_norm(index)
        return Layer(
            input_norm=input_norm,
            qkv=self._first(attn, [q_out, kv_out, kv_out], read),
            qk_norm=self._qk_norm(attn) if c.qk_norm else None,
            o=self.linear([attn + "o_proj"], attn + "o_proj", [width], o_in, c.o_bias),
            post_attention_norm=self._post_norm(p + "post_attention_layernorm.weight"),
            mlp_norm=input_norm if c.shared_norm else self._mlp_norm(p),
            gate_up=gate_up,
            down=down,
            mixture=mixture,
            post_mlp_norm=self._post_norm(p + "post_feedforward_layernorm.weight"),
            learnt=self._learnt(index) if c.activation == XIELU else None,
            sinks=self._sinks(attn),
            latent=latent,
        )

    def _first(self, attn: str, outs: list[int], read: int) -> Any:
        """The linear of queries, keys and values, or of what they are compressed to."""
        c, latent = self._config, self._config.latent
        if latent is None:
            names = [attn + f"{x}_proj" for x in "qkv"]
            return self.linear(names, attn + "qkv_proj", outs, read, c.qkv_bias)
        names = [attn + ("q_a_proj" if latent.q_rank else "q_proj"), attn + "kv_a_proj_with_mqa"]
        outs = [latent.first_widths(c.num_heads)[0], latent.key_dim]
        return self.linear(names, attn + "qkv_a_proj", outs, read, bias=False)

    def _latent(self, attn: str) -> LatentWeights:
        """What lies between a latent attention's first and last linear."""
        c, latent, q_norm, q_b = self._config, self._config.latent, None, None
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

    def _mlp_norm(self, prefix: str) -> Any:
        c = self._config
        if not c.pre_norms:
            return None
        name = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
        return self.norm(f"{prefix}{name}.weight", c.hidden_size)

    def _learnt(self, index: int) -> Any:
        """Alpha above and below zero, and beta, of xIELU."""
        prefix = f"model.layers.{index}.mlp.act_fn."
        names = [prefix + name for name in ("alpha_p", "alpha_n", "beta")]
        above, below, beta = (
            self._config.learnt[index]
            if self._config.learnt
            else [as_floats(self._vector(n, *self._tensors[n].shape)).reshape(()) for n in names]
        )
        found = [np.logaddexp(above, 0.0), beta + np.logaddexp(below, 0.0), beta]
        return self._ops.pack_vector(np.array(found, np.float32))

    def _input_norm(self, index: int) -> Any:
        if not self._config.has_input_norm(index):
            return None
        return self.norm(f"model.layers.{index}.input_layernorm.weight", self._config.hidden_size)

    def _qk_norm(self, attn: str) -> Any:
        c = self._config
        norms = []
        for name, heads in (("q_norm", c.num_heads), ("k_norm", c.num_kv_heads)):
            size = c.head_dim * (heads if c.qk_norm_whole else 1)
            norm = self._vector(f"{attn}{name}.weight", size)
            norms += [norm.reshape(-1, c.head_dim)] * (1 if c.qk_norm_whole else heads)
        return self._packed_norm(self._ops.join(norms))

    def _sinks(self, attn: str) -> Any:
        if not self._config.attention_sinks:
            return None
        return self._ops.pack_vector(self._vector(attn + "sinks", self._config.num_heads))

    def _post_norm(self, name: str) -> Any:
        return self.norm(name, self._config.hidden_size) if self._config.post_norms else None

    def check_all_used(self) -> None:
        """Raise :class:`UnsupportedModelError` where the checkpoint has more than what was read."""
        check_leftovers(self._tensors, self._used)

    def log_rounding(self) -> None:
        """Say what was rounded to another format while loading, and how much that changed it."""
        for rounding in self._ops.roundings():
            log.info(
                "rounded to %s: %s; relative RMS error %.2f%%",
                rounding.format,
                ", ".join(f"{n} tensors of {kind}" for kind, n in sorted(self._rounded.items())),
                100 * rounding.relative,
            )

    def _type_of(self, name: str, default: str) -> str:
        tensors = self._tensors
        return tensors.type_of(name) if isinstance(tensors, StoredTensors) else default

    def _release(self, names: list[str]) -> None:
        if isinstance(self._tensors, StoredTensors):
            for name in names:
                self._tensors.release(name)


def stacked_rows(join: Join, parts: list[Any], first: int, last: int) -> Any:
    """Rows ``first:last`` of matrices on top of each other, without stacking the others."""
    found = []
    for part in parts:
        rows = part[max(first, 0) : max(last, 0)]
        if len(rows):
            found.append(rows)
        first, last = first - len(part), last - len(part)
    return found[0] if len(found) == 1 else join(found)


def _stacked(parts: list[WeightPart], join: Join) -> list[WeightPart]:
    """One part where all are of the same format and have their inputs in the same order."""
    first = parts[0]
    if not all(_are_alike(first, part) for part in parts[1:]):
        return parts
    whole = [part.read(0, part.num_outputs) for part in parts]
    count = sum(part.num_outputs for part in parts)
    return [WeightPart(count, partial(stacked_rows, join, whole), first.format, first.order)]


def _are_alike(first: WeightPart, other: WeightPart) -> bool:
    if first.order is None or other.order is None:
        return first.format == other.format and first.order is other.order
    return first.format == other.format and np.array_equal(first.order, other.order)


@contextmanager
def _naming(linear: str) -> Iterator[None]:
    """Refusals of a backend, such as that of a NaN among the weights, name their linear."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"the weights of {linear} cannot be used: {error}") from error
