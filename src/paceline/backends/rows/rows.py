"""A decoder's steps over a backend of row ops (:mod:`paceline.backends.rows.row_ops`).

A row's bits must not depend on what shares its forward. So sums over residual streams are added one
after another, and all others run over one row's last dimension. A row's choice of experts is a
function of its own router logits: the largest first, equal ones by the lowest id, a NaN before all
others, and of groups of experts likewise; the experts' results are added in the order of that
choice, each times its weight, the shared expert's last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from paceline.backends.rows.row_ops import AddedLayers, RowOps, Tensor
from paceline.backends.rows.row_recurrent import recurrent
from paceline.models.config import RESIDUAL
from paceline.models.decoder import Decoder
from paceline.models.layer_sizes import Experts
from paceline.models.rope import RotaryTable
from paceline.models.weights import (
    AltUpLayer,
    FeedForward,
    LatentWeights,
    Layer,
    LayerGate,
    LocalConvWeights,
    Mixture,
)


class Heads(NamedTuple):
    """What attention reads of rows.

    Attributes:
        q, k, v: queries, keys and values ``[rows, heads, head_dim]``; ``k`` and ``v`` are None
            where the layer reads those of another.
        gate: what weighs the result through a sigmoid, ``[rows, heads * head_dim]``; None: nothing.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    gate: Tensor | None = None


class Angles(NamedTuple):
    """How heads are rotated at some positions.

    Attributes:
        cos, sin: ``[rows, 1, rotary_dim]``.
        q_scale: of queries, ``[rows, 1, 1]``; None: 1.
    """

    cos: Tensor
    sin: Tensor
    q_scale: Tensor | None

    @staticmethod
    def of(table: RotaryTable, positions: Tensor) -> Angles:
        scale = None if table.q_scale is None else table.q_scale[positions].view(-1, 1, 1)
        return Angles(table.cos[positions].unsqueeze(1), table.sin[positions].unsqueeze(1), scale)


def _nothing(layer: int, x: Tensor) -> None:
    """Ignore a residual stream."""


def _by_head(ops: RowOps, x: Tensor, linears: Sequence[Any]) -> Tensor:
    """Rows ``[rows, heads, in]`` through a linear of each head, ``[rows, heads, out]``."""
    heads = x.unbind(1)
    found = [ops.row_linear(h.contiguous(), w) for h, w in zip(heads, linears, strict=True)]
    return torch.stack(found, dim=1)


class Rows:
    """The steps of a decoder over a backend of row ops, which packed its weights.

    Attributes:
        head_tokens: which token each column of the logits is, int64 in host memory; None where
            column i is token i.
        routed: how the rows of the latest :meth:`hidden` were routed, for each layer that is a
            mixture.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.config = decoder, decoder.config
        self.ops = cast(RowOps, decoder.ops)
        self.routed: list[Routing] = []
        self._adapters: Sequence[tuple[Tensor, AddedLayers]] = ()
        head = decoder.pruned_head
        self.head_tokens = None if head is None else torch.from_numpy(head.token_ids)

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: Any,
        inputs: Tensor | None = None,
        take: Callable[[int, Tensor], None] = _nothing,
        adapters: Sequence[tuple[Tensor, AddedLayers]] = (),
    ) -> Tensor:
        """Run the layers.

        Args:
            input_ids, positions: ``[rows]`` int64, padded to a multiple of ``ops.row_multiple``.
            batch: the backend's own attention metadata for these rows.
            inputs: ``[rows, hidden_size]`` float32 of the rows of a decoder that has an entry.
            take: gets each residual stream, after its number as
                :class:`~paceline.models.backend.Taps` counts.
            adapters: of some rows what is added to the layers' linears; no row is in two of them.

        Returns:
            ``[rows, hidden_size]`` float32, after the final norm.
        """
        c = self.config
        self.routed.clear()
        self._adapters = adapters
        x, joined = self._enter(input_ids, inputs)
        if self._decoder.places is not None and c.entry.kind != RESIDUAL:
            x = x + self._decoder.places[positions]
        angles = self._angles(positions)
        inputs_of_layers = self._layer_inputs(input_ids, x)
        streams = self._spread(x)
        for index, layer in enumerate(self._decoder.layers):
            take(index, x)
            if streams is not None:
                streams, x = self._predicted(layer.altup, streams)
            read = self._normed(x, layer.input_norm) if index or joined is None else joined
            entered = x
            if c.has_mixer(index):
                read, deltas = self._convolved(layer.attention_conv, read, batch)
                branch = self._mixed(index, layer, read, angles[index], batch)
                branch = self._convolved_out(layer.attention_conv, branch, deltas, batch)
                x = x + self._scaled(self._normed(branch, layer.post_attention_norm))
            if streams is not None:
                x = (x + self._low_rank(layer.altup, read)) * 0.5**0.5
            if c.has_mlp(index):
                x = self._fed_forward(index, layer, x, entered if c.mlp.parallel else x, batch)
            own = None if inputs_of_layers is None else inputs_of_layers[:, index]
            if streams is not None:
                streams, x = self._corrected(layer, streams, x, own)
            else:
                x = self._left(layer, x, own)
        if streams is not None:
            x = self._gathered(streams)
        take(len(self._decoder.layers), x)
        x = self._normed(x, self._decoder.norm)
        take(len(self._decoder.layers) + 1, x)
        return x

    def write_kv(self, positions: Tensor, inputs: Tensor, batch: Any) -> None:
        """Write the KV of rows ``[rows, hidden_size]`` that every layer reads unchanged."""
        angles = self._angles(positions)
        for index, layer in enumerate(self._decoder.layers):
            heads = self._heads(index, layer, inputs, angles[index])
            assert heads.k is not None
            assert heads.v is not None
            self.ops.write_kv(index, heads.k, heads.v, batch)

    def _angles(self, positions: Tensor) -> list[Angles | None]:
        """How each layer rotates heads at the positions; None where it does not."""
        # All of them: asking a GPU for the last position would make it wait.
        self._decoder.reach(self._decoder.max_len)
        tables = [self._decoder.rotary(index) for index in range(len(self._decoder.layers))]
        found = {table: Angles.of(table, positions) for table in tables if table is not None}
        return [None if table is None else found[table] for table in tables]

    def _enter(self, input_ids: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The residual stream that enters layer 0, and what it reads instead of its norm."""
        c, ops, entry = self.config, self.ops, self._decoder.entry
        if c.entry.kind == RESIDUAL:
            assert inputs is not None
            return inputs, None
        x = ops.embedding(input_ids, self._decoder.embedding)
        if c.multipliers.embedding != 1.0:
            x = x * c.multipliers.embedding
        assert (entry is None) == (inputs is None), "inputs are for decoders that have an entry"
        if entry is None or inputs is None:
            return x, None
        normed = self._normed(inputs, entry.input_norm)
        joined = torch.cat((self._normed(x, entry.token_norm), normed), dim=1)
        if entry.join is not None:
            return ops.row_linear(joined, entry.join), None
        return normed if c.entry.norm_before_residual else inputs, joined

    def _layer_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor | None:
        """The inputs that layers have besides ``x``, ``[rows, layers, width]``; None: none."""
        c, ops, weights = self.config, self.ops, self._decoder.layer_inputs
        if c.layer_inputs is None or weights is None:
            return None
        known = torch.where(input_ids < c.layer_inputs.vocab_size, input_ids, 0)
        token = ops.embedding(known, weights.embedding) * c.layer_inputs.multiplier
        read = ops.row_linear(x, weights.projection) * c.hidden_size**-0.5
        shape = (len(x), -1, c.layer_inputs.width)
        normed = ops.rms_norm(read.view(shape), weights.norm, c.norms.eps)
        found: Tensor = (normed + token.view(shape)) * 0.5**0.5
        return found

    def _left(self, layer: Layer, x: Tensor, own_input: Tensor | None) -> Tensor:
        """The residual stream that leaves a layer, with the layer's input ``[rows, width]``."""
        if layer.gate is not None and own_input is not None:
            x = x + self._gated(layer.gate, x, own_input)
        return x if layer.scale == 1.0 else x * layer.scale

    def _gated(self, weights: LayerGate, x: Tensor, own_input: Tensor) -> Tensor:
        """What a layer's input adds to the residual stream ``x``."""
        ops = self.ops
        gate = ops.activation(ops.row_linear(x, weights.gate), self.config.mlp.activation, None)
        return self._normed(ops.row_linear(gate * own_input, weights.projection), weights.norm)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return x
        if self.config.norms.layer_norm:
            return self.ops.layer_norm(x, norm[0], norm[1], self.config.norms.eps)
        return self.ops.rms_norm(x, norm, self.config.norms.eps)

    def _linear(self, index: int, name: str, x: Tensor) -> Tensor:
        """A linear of a layer, with what the rows' adapters add."""
        ops = self.ops
        y = ops.row_linear(x, getattr(self._decoder.layers[index], name))
        for rows, layers in self._adapters:
            for outputs, down, up, scale in layers[index].get(name, ()):
                more = ops.row_linear(ops.row_linear(x[rows], down), up) * scale
                y[rows, outputs] += more
        return y

    def _heads(self, index: int, layer: Layer, read: Tensor, angles: Angles | None) -> Heads:
        """What a layer's attention reads of rows."""
        c, ops = self.config, self.ops
        if layer.latent is not None:
            return self._latent_heads(layer.latent, layer.qkv, read, angles)
        dim, kv_heads, has_values = c.heads_of(index)
        qkv = self._linear(index, "qkv", read)
        heads = qkv.view(len(read), -1, dim)  # queries, then keys, values and gates
        own = kv_heads if c.owns_kv(index) else 0
        turned = c.num_heads + own
        ends = turned + (own if has_values else 0)
        qk, v = heads[:, :turned], heads[:, turned if has_values else c.num_heads : ends]
        gate = heads[:, ends:].flatten(1) if c.attention.gate else None
        if layer.qk_norm is not None and not c.attention.qk_norm_last:
            qk = self._normed_heads(qk, layer.qk_norm)
        if angles is not None:
            qk = ops.rotary(qk, angles.cos, angles.sin)
        if layer.qk_norm is not None and c.attention.qk_norm_last:
            qk = self._normed_heads(qk, layer.qk_norm)
        q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
        if angles is not None and angles.q_scale is not None:
            q = q * angles.q_scale
        if not own:
            return Heads(q, None, None, gate)
        v = v if layer.v_norm is None else ops.rms_norm(v, layer.v_norm, c.norms.eps)
        return Heads(q, k, v, gate)

    def _latent_heads(
        self, weights: LatentWeights, first: Any, read: Tensor, angles: Angles | None
    ) -> Heads:
        """As :meth:`_heads`: queries of keys that are rotated dimensions and latents."""
        c, ops, latent = self.config, self.ops, self.config.attention.latent
        assert latent is not None
        assert angles is not None
        down = ops.row_linear(read, first)
        q, kv, k_rope = (x.contiguous() for x in down.split(latent.first_widths(c.num_heads), 1))
        if weights.q_b is not None:
            q = ops.row_linear(ops.rms_norm(q, weights.q_norm, latent.NORM_EPS), weights.q_b)
        q = q.view(len(q), c.num_heads, -1)
        q_nope, q_rope = q.split((latent.nope_dim, latent.rope_dim), dim=2)
        reads = _by_head(ops, q_nope, weights.k_b)
        kv = ops.rms_norm(kv, weights.kv_norm, latent.NORM_EPS)
        key = torch.cat((k_rope, kv), dim=1).unsqueeze(1)
        heads = torch.cat((torch.cat((q_rope, reads), dim=2), key), dim=1)
        heads = ops.rotary(heads, angles.cos, angles.sin)
        return Heads(heads[:, :-1], heads[:, -1:], heads[:, -1:])

    def _normed_heads(self, qk: Tensor, norm: Tensor) -> Tensor:
        """Queries and keys ``[rows, heads + kv_heads, head_dim]`` after their norms."""
        c, ops = self.config, self.ops
        if not c.attention.qk_norm_whole:
            return ops.rms_norm(qk, norm, c.norms.eps)
        sizes = (c.num_heads, c.num_kv_heads)
        normed = [
            ops.rms_norm(heads.flatten(1), weight.flatten(), c.norms.eps)
            for heads, weight in zip(qk.split(sizes, dim=1), norm.split(sizes), strict=True)
        ]
        return torch.cat(normed, dim=1).view(qk.shape)

    def _mixed(
        self, index: int, layer: Layer, read: Tensor, angles: Angles | None, batch: Any
    ) -> Tensor:
        """What a layer's recurrence or attention makes of rows behind its norm."""
        c, shape = self.config, self.config.recurrent_of(index)
        if shape is None or layer.recurrent is None:
            return self._attended(index, layer, self._heads(index, layer, read, angles), batch)
        before = sum(shape.layers[:index])
        found = recurrent(before, layer.recurrent, read, shape, batch.recurrent, self.ops)
        if not shape.beside:
            return found
        attended = self._attended(index, layer, self._heads(index, layer, read, angles), batch)
        return found + attended * c.multipliers.attention_out

    def _attended(self, index: int, layer: Layer, heads: Heads, batch: Any) -> Tensor:
        c, ops = self.config, self.ops
        attended = ops.attention(index, heads.q, heads.k, heads.v, c, batch, layer.sinks)
        if heads.gate is not None:
            attended = attended * ops.sigmoid(heads.gate)
        if layer.latent is not None and c.attention.latent is not None:
            latents = attended.view(len(attended), c.num_heads, -1)[
                ..., c.attention.latent.rope_dim :
            ]
            attended = _by_head(ops, latents, layer.latent.v_b).flatten(1)
        return self._linear(index, "o", attended)

    def _fed_forward(
        self, index: int, layer: Layer, x: Tensor, stream: Tensor, batch: Any
    ) -> Tensor:
        """The residual stream ``x`` after a layer's feed-forward, which reads ``stream``."""
        c = self.config
        read = self._normed(stream, layer.mlp_norm)
        read, deltas = self._convolved(layer.mlp_conv, read, batch)
        if layer.mixture is not None:
            mlp = self._mixture(layer.mixture, read, stream)
        else:
            mlp = sparse(self._linear(index, "gate_up", read), c.mlp.sparse_deviations(index))
            if c.multipliers.gate != 1.0:
                gate, up = mlp.chunk(2, dim=1)
                mlp = torch.cat((gate * c.multipliers.gate, up), dim=1)
            mlp = self._linear(index, "down", self._activated(mlp, layer.learnt))
            if c.multipliers.mlp_out != 1.0:
                mlp = mlp * c.multipliers.mlp_out
        mlp = self._convolved_out(layer.mlp_conv, mlp, deltas, batch)
        return x + self._scaled(self._normed(mlp, layer.post_mlp_norm))

    def _convolved(
        self, weights: LocalConvWeights | None, read: Tensor, batch: Any
    ) -> tuple[Tensor, Tensor]:
        """What a part of a layer reads of rows behind its norm, and deltas for what it adds."""
        shape = self.config.local_conv
        if weights is None or shape is None:
            return read, read
        deltas = self.ops.row_linear(read, weights.deltas).view(len(read), 2, shape.kernel, -1)
        base = weights.base.view(2, shape.kernel, -1)
        return convolved(read, base[0], deltas[:, 0], batch.block_rows), deltas[:, 1]

    def _convolved_out(
        self, weights: LocalConvWeights | None, branch: Tensor, deltas: Tensor, batch: Any
    ) -> Tensor:
        """What a part of a layer adds to the residual stream."""
        shape = self.config.local_conv
        if weights is None or shape is None:
            return branch
        base = weights.base.view(2, shape.kernel, -1)
        return convolved(branch, base[1], deltas, batch.block_rows)

    def _scaled(self, branch: Tensor) -> Tensor:
        m = self.config.multipliers.residual
        return branch if m == 1.0 else branch * m

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden_size]`` (padded like the batch) to ``[rows, num_logits]`` float32."""
        c = self.config
        logits = self.ops.row_linear(hidden, self._decoder.head)
        if c.multipliers.logits_divisor != 1.0:
            logits = logits / c.multipliers.logits_divisor
        softcap = c.multipliers.logits_softcap
        return self.ops.softcap(logits, softcap) if softcap else logits

    # --- mixtures of experts ----------------------------------------------------------------------

    def _mixture(self, mixture: Mixture, x: Tensor, stream: Tensor) -> Tensor:
        """The mixture of rows ``[rows, hidden]`` behind the layer's norm."""
        ops, experts, eps = self.ops, self.config.mlp.experts, self.config.norms.eps
        assert experts is not None

        def normed(rows: Tensor, norm: str, otherwise: Tensor) -> Tensor:
            weight = getattr(mixture.norms, norm, None)
            return otherwise if weight is None else ops.rms_norm(rows, weight, eps)

        logits = ops.row_linear(normed(stream, "router", x), mixture.router)
        scores, gates = logits[:, : experts.number], logits[:, experts.number :]
        ids, weights = choose(scores, experts, mixture.choice_bias, ops.sigmoid)
        self.routed.append(Routing(ids, scores))
        if mixture.scales is not None:
            weights = weights * mixture.scales[ids]
        read = normed(stream, "experts", x)
        results = x.new_zeros(len(x), experts.per_token, x.shape[1])
        for expert in ids.unique().tolist():
            rows, ranks = (ids == expert).nonzero(as_tuple=True)
            rows_read = read[rows]
            if experts.weighs_inputs:
                rows_read = rows_read * weights[rows, ranks, None]
            results[rows, ranks] = self._expert(mixture.experts[expert], rows_read).to(x.dtype)
        if experts.weighs_inputs:
            weights = torch.ones_like(weights)
        y = reduce(add, (weights[:, i, None] * results[:, i] for i in range(experts.per_token)))
        y = normed(y, "routed", y)
        if mixture.shared is None:
            return y
        shared = self._expert(mixture.shared, x)
        shared = normed(shared, "shared", shared)
        return y + (ops.sigmoid(gates) * shared if experts.shared_gate else shared)

    def _expert(self, expert: FeedForward, x: Tensor) -> Tensor:
        rows = F.pad(x, (0, 0, 0, -len(x) % self.ops.row_multiple))
        inner = self._activated(self.ops.row_linear(rows, expert.gate_up), None)
        return self.ops.row_linear(inner, expert.down)[: len(x)]

    def _activated(self, inner: Tensor, learnt: Tensor | None) -> Tensor:
        activation = self.config.mlp.activation
        if self.config.mlp.gated:
            return self.ops.gated_activation(inner, activation)
        return self.ops.activation(inner, activation, learnt)

    # --- several residual streams -----------------------------------------------------------------

    def _spread(self, x: Tensor) -> Tensor | None:
        """The streams ``[rows, streams, hidden]`` of embeddings; None where a model has one stream.

        Further ones have the embedding's root mean square.
        """
        if self._decoder.altup is None:
            return None
        others = (self.ops.row_linear(x, weights) for weights in self._decoder.altup.spread)
        return torch.stack([x, *(_as_large(other, x) for other in others)], dim=1)

    def _gathered(self, streams: Tensor) -> Tensor:
        """The mean of all streams, each with the first one's root mean square."""
        assert self._decoder.altup is not None
        first, *others = streams.unbind(1)
        pairs = zip(others, self._decoder.altup.gather, strict=True)
        projected = (self.ops.row_linear(x.contiguous(), weights) for x, weights in pairs)
        return reduce(add, [first, *(_as_large(x, first) for x in projected)]) / streams.shape[1]

    def _predicted(self, weights: AltUpLayer | None, streams: Tensor) -> tuple[Tensor, Tensor]:
        """All streams as a layer expects them, and the active one."""
        assert weights is not None
        count, active = streams.shape[1], self._active
        scores = self._scores(weights, streams[:, active], count)
        shares = _small(scores, weights.predict).view(-1, count, count)
        sums = [
            reduce(add, (shares[:, k, j, None] * streams[:, j] for j in range(count)))
            for k in range(count)
        ]
        streams = streams + torch.stack(sums, dim=1)
        return streams, streams[:, active].contiguous()

    def _corrected(
        self, layer: Layer, streams: Tensor, x: Tensor, own_input: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """All streams, and the active one, after a layer that made ``x`` of it.

        Its input is added to all streams but the first.
        """
        assert layer.altup is not None
        assert layer.gate is not None
        assert own_input is not None
        shares = _small(self._scores(layer.altup, x, streams.shape[1]), layer.altup.correct) + 1.0
        change = x - streams[:, self._active]
        streams = change.unsqueeze(1) * shares.unsqueeze(2) + streams
        first = streams[:, self._active]
        scaled = first if layer.altup.scale is None else first * layer.altup.scale
        more = self._gated(layer.gate, scaled, own_input)
        streams = torch.cat((streams[:, :1], streams[:, 1:] + more.unsqueeze(1)), dim=1)
        return streams, streams[:, self._active]

    def _low_rank(self, weights: AltUpLayer | None, read: Tensor) -> Tensor:
        """What is added to a layer's attention (LAuReL), of the rows that both read."""
        assert weights is not None
        ops = self.ops
        projected = ops.row_linear(ops.row_linear(read, weights.left), weights.right)
        return read + ops.rms_norm(projected, weights.norm, self.config.norms.eps)

    @property
    def _active(self) -> int:
        assert self.config.altup is not None
        return self.config.altup.active

    def _scores(self, weights: AltUpLayer, x: Tensor, count: int) -> Tensor:
        """What a row says of its streams, ``[rows, streams]``."""
        normed = self.ops.rms_norm(x, weights.router_norm, self.config.norms.eps)
        return self.ops.softcap(_small(normed, weights.router, count), 1.0)


LEAST_SQUARE = 1e-5
"""Of a stream's mean square, before it is divided by its root."""


def convolved(x: Tensor, base: Tensor, deltas: Tensor, block_rows: Tensor) -> Tensor:
    """A convolution within blocks; see :class:`~paceline.models.layer_sizes.LocalConv`.

    Args:
        x: rows, those of a block one after another, ``[rows, hidden]``.
        base: ``[kernel, hidden]``.
        deltas: ``[rows, kernel, groups]``.
        block_rows: how many rows of its block come before each row, ``[rows]``.
    """
    factors = base + deltas.repeat_interleave(x.shape[1] // deltas.shape[2], dim=2)
    terms = [factors[:, 0] * x]
    for tap in range(1, len(base)):
        before = F.pad(x, (0, 0, tap, 0))[: len(x)]
        terms.append(factors[:, tap] * before.where((block_rows >= tap).unsqueeze(1), 0.0))
    return reduce(add, terms)


def sparse(gate_up: Tensor, deviations: float) -> Tensor:
    """Gates and ups ``[rows, 2 * width]``, gates lowered by a bound of their row and cut at 0."""
    if deviations == -math.inf:
        return gate_up
    gate, up = gate_up.chunk(2, dim=1)
    mean = gate.mean(dim=1, keepdim=True)
    deviation = (gate - mean).square().mean(dim=1, keepdim=True).sqrt()
    return torch.cat((F.relu(gate - (mean + deviation * deviations)), up), dim=1)


def _small(x: Tensor, flat: Tensor, outputs: int = 0) -> Tensor:
    """A linear with so few outputs that each is a sum over a row by itself."""
    weights = flat.view(outputs or -1, x.shape[1])
    return torch.stack([(x * row).sum(dim=1) for row in weights], dim=1)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """Rows of ``x`` with the root mean square of those of ``other``."""
    size = x.square().mean(dim=1, keepdim=True).clamp_min(LEAST_SQUARE).sqrt()
    return x * other.square().mean(dim=1, keepdim=True).sqrt() / size


class Routing(NamedTuple):
    """The experts of each row ``[rows, per_token]``, and the logits that they were chosen by."""

    ids: Tensor
    logits: Tensor


def choose(
    logits: Tensor,
    experts: Experts,
    bias: Tensor | None = None,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, ``[rows, per_token]``, from logits ``[rows, number]``.

    Args:
        bias: of the scores, for the choice.
        sigmoid: the function of that name, which must not depend on how many rows there are.
    """
    if experts.by_score:
        scores = sigmoid(logits) if experts.sigmoid else torch.softmax(logits, dim=1)
        # Scores may be equal where logits are not.
        wanted = logits if bias is None and experts.groups == 1 else scores
        ids = _best(wanted if bias is None else wanted + bias, experts)
        weights = scores.gather(1, ids)
        if experts.renormalise:
            weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(experts.least_sum)
    elif experts.jitter:
        ids = _best(logits, experts)
        weights = _one_by_one(logits, ids, experts.jitter)
    else:
        ids = _best(logits, experts)
        # The softmax of the chosen logits is that of all, renormalised.
        read = logits.gather(1, ids) if experts.renormalise else logits
        weights = torch.softmax(read, dim=1)
        weights = weights if experts.renormalise else weights.gather(1, ids)
    return ids, weights if experts.scale == 1.0 else weights * experts.scale


def _one_by_one(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """The weights of each row's experts by SparseMixer, ``[rows, per_token]``."""
    left, weights = logits, []
    for chosen in ids.split(1, dim=1):
        best = logits.gather(1, chosen)
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        scores = torch.softmax(left.masked_fill(far, -torch.inf), dim=1)
        weights.append(scores.gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=1)


def _best(values: Tensor, experts: Experts) -> Tensor:
    """The ids of each row's largest values ``[rows, per_token]``, out of its best groups alone."""
    if experts.groups > 1:
        grouped = values.unflatten(1, (experts.groups, -1))
        best = torch.sort(grouped, dim=2, descending=True, stable=True)[0]
        worth = best[..., : experts.group_best].sum(dim=2)
        allowed = _ordered(worth)[:, : experts.groups_per_token]
        closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, allowed, value=False)
        values = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
        # Of values that are -inf themselves, those of closed groups come last.
        first = closed.repeat_interleave(grouped.shape[2], dim=1).sort(dim=1, stable=True)[1]
        return first.gather(1, _ordered(values.gather(1, first))[:, : experts.per_token])
    return _ordered(values)[:, : experts.per_token]


def _ordered(values: Tensor) -> Tensor:
    return torch.sort(values, dim=1, descending=True, stable=True)[1]
