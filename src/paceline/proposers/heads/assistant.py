"""Drafts by a Gemma 4 assistant: a small decoder that has no keys and values of its own.

Each of its layers reads those that the target keeps of the request, of the target's last layer of
the same kind, full or sliding, that has some. A row takes in two vectors as wide as the target's
residual stream, which a linear (``pre_projection``) makes one of the decoder's width: the target's
embedding of a token, and a hidden state. At the request's last token that is what the target puts
out, after its last norm, at the position before it; at a drafted one what the assistant itself put
out at the node's parent (``post_projection``). Nothing is written, so all rows of a tree are at the
position of the request's last token and see the same keys, those before it. A node depends on its
parent through the hidden state alone, and a tree of any form is right.

In layers with a sliding window a row sees one key more than a row of the target at the same
position: transformers counts the window from the last key on, which it includes.

Small assistants have their tokens in clusters (``masked_embedding``): a linear scores the clusters,
and only the tokens of the best ones get logits.

Sources: transformers 5.24 (``models/gemma4_assistant`` and
``SinglePositionMultiTokenCandidateGenerator``), llama.cpp's ``gemma4-assistant``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.backends.resolve import fewer_bits
from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import HeadConfig
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.rope import rope_tables
from paceline.models.tensor_reader import TensorReader
from paceline.planner.drafts import Prices
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.growth import Candidates, DraftState, Growth, ranked, ranking_params
from paceline.proposers.heads.checkpoint import (
    CENTROIDS,
    POST,
    PRE,
    TOKEN_ORDER,
    Assistant,
    HeadCheckpoint,
)
from paceline.proposers.heads.proposer import Followed, HeadDrafter
from paceline.request.request import Request
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Floats

FIRST_LAG = 2
"""Tokens before the first draft of a request that rested: one more has to be computed."""


def build_assistant(
    head: HeadCheckpoint,
    assistant: Assistant,
    config: HeadConfig,
    target: TargetInfo,
    runner: ModelRunner,
) -> AssistantProposer:
    """A proposer by an assistant that is opened already.

    Args:
        runner: the target.

    Raises:
        ConfigError: the assistant does not fit to the target.
        ModelLoadError: it is incomplete or corrupt.
    """
    shape, whole = head.decoder.config, runner.decoder.config
    layers = layers_to_read(head, assistant, target, whole)
    memory = runner.kv.memory.lent(layers)
    ops = fewer_bits(config.dtype, runner.decoder.ops)
    decoder = Decoder(shape, head.decoder.tensors, ops, target.max_model_len)
    own = ModelRunner(decoder, runner.kv, memory)
    own.taps = (shape.num_layers + 1,)
    assert head.further is not None
    reader = TensorReader(head.further, shape, ops)
    hidden, width = shape.hidden_size, whole.hidden_size
    ends = Projections(
        ops, reader.single(PRE, hidden, 2 * width), reader.single(POST, width, hidden)
    )
    clusters = None
    if assistant.num_clusters:
        clusters = Clusters(reader, assistant, decoder)
    reader.check_all_used()
    return AssistantProposer(config, own, runner.decoder, ends, clusters)


def layers_to_read(
    head: HeadCheckpoint, assistant: Assistant, target: TargetInfo, whole: ModelConfig
) -> list[int]:
    """Of each layer of an assistant, the target's layer whose keys and values it reads.

    Raises:
        ConfigError: the assistant was made for another target.
    """
    shape = head.decoder.config
    _check(head, "hidden states of the target", assistant.target_width, whole.hidden_size)
    _check(head, "tokens", shape.vocab_size, target.vocab_size)
    layers = range(whole.num_layers)
    attending = [layer for layer in layers if whole.has_attention(layer)]
    read = []
    for index in range(shape.num_layers):
        slides = shape.attention.is_sliding(index)
        kind = "sliding" if slides else "full"
        alike = [layer for layer in attending if whole.attention.is_sliding(layer) == slides]
        if not alike:
            _check(head, f"{kind} layers", "some", "none")
        layer = whole.attention.kv_layer(alike[-1])
        heads, others = shape.heads_of(index), whole.heads_of(layer)
        _check(head, f"dimensions of a head of {kind} layers", heads.dim, others.dim)
        _check(head, f"KV heads of {kind} layers", heads.kv_heads, others.kv_heads)
        _check(
            head,
            f"rotary embedding of {kind} layers",
            *(_turns(each, slides) for each in (shape, whole)),
        )
        if slides:
            window = shape.attention.sliding_window - 1
            _check(head, "sliding window", window, whole.attention.sliding_window)
        read.append(layer)
    return read


def _check(head: HeadCheckpoint, what: str, own: object, wanted: object) -> None:
    if own != wanted:
        raise ConfigError(
            f"{head.name} was made for another target: {what}: {own} there, {wanted} in this target"
        )


def _turns(shape: ModelConfig, slides: bool) -> str:
    """By which angles a kind of layers turns the pairs of a head, in short."""
    positions = shape.positions
    rope = positions.local_rope if slides and positions.local_rope else positions.rope
    cos, sin = rope_tables(rope, shape.head_dim, 2, range(1, 2))
    angles = np.arctan2(sin, cos)[0]
    turned = angles[np.abs(angles) > 1e-12]
    return f"{len(turned)} pairs by {angles[:1].round(5)} to {turned[-1:].round(7)}"


@dataclass(frozen=True, slots=True)
class Projections:
    """What lies between the target's width and the assistant's.

    Attributes:
        ops: computes the linears.
        pre: packed, twice the target's width to the assistant's.
        post: packed, the assistant's to the target's.
    """

    ops: Ops
    pre: Any
    post: Any

    def enter(self, embedded: Floats, states: Floats) -> Floats:
        """Token embeddings and hidden states ``[rows, width]`` to ``[rows, hidden_size]``."""
        return self.ops.linear(np.concatenate((embedded, states), axis=1), self.pre)

    def leave(self, outputs: Floats) -> Floats:
        """What the decoder puts out, as a hidden state of the target: ``[rows, width]``."""
        return self.ops.linear(outputs, self.post)


class Clusters:
    """Logits of the tokens that are in the best clusters of each row.

    Args:
        reader: of the centroids, and of the tokens in the order of their clusters.
        assistant: how many clusters there are and are looked into.
        decoder: the assistant, whose embedding is its head.

    Raises:
        ModelLoadError: a tensor is missing, or the order does not name every token once.
    """

    def __init__(self, reader: TensorReader, assistant: Assistant, decoder: Decoder) -> None:
        shape, number = decoder.config, assistant.num_clusters
        for name in (f"{CENTROIDS}.weight", TOKEN_ORDER):
            if not reader.has(name):
                raise ModelLoadError(f"the assistant has no {name}: it is incomplete")
        self._scores = reader.float_linear(
            [CENTROIDS], CENTROIDS, [number], shape.hidden_size, bias=False
        )
        order = np.asarray(reader.take(TOKEN_ORDER, shape.vocab_size))
        if order.dtype.kind != "i" or not np.array_equal(
            np.sort(order), np.arange(shape.vocab_size)
        ):
            raise ModelLoadError(f"{TOKEN_ORDER} is damaged: it must name every token once")
        self._tokens: npt.NDArray[np.int64] = order.astype(np.int64).reshape(number, -1)
        self._top, self._decoder = assistant.top_clusters, decoder

    def logits(self, outputs: Floats) -> Floats:
        """``[rows, hidden_size]`` to ``[rows, vocab_size]``, -inf outside of the clusters."""
        ops, embedding = self._decoder.ops, self._decoder.embedding
        scores = ops.linear(outputs, self._scores)
        best = np.argpartition(-scores, self._top - 1, axis=1)[:, : self._top]
        logits = np.full((len(outputs), self._tokens.size), -np.inf, np.float32)
        for row, clusters, output in zip(logits, best, outputs, strict=True):
            tokens = self._tokens[clusters].ravel()
            row[tokens] = ops.embedded(tokens, embedding, 1.0) @ output
        return logits


class AssistantProposer(HeadDrafter):
    """See the module's docstring.

    Args:
        config: how to draft.
        runner: the assistant's layers over the target's KV; its tap is what they put out.
        target: whose embedding it reads.
        ends: around its layers.
        clusters: None where every token gets a logit.
    """

    def __init__(
        self,
        config: HeadConfig,
        runner: ModelRunner,
        target: Decoder,
        ends: Projections,
        clusters: Clusters | None,
    ) -> None:
        super().__init__(config, runner, (target.config.num_layers + 1,))
        self._target, self._ends, self._clusters = target, ends, clusters
        self._latest: dict[int, tuple[int, Floats]] = {}
        """By request: the last position that was read, and the target's hidden state there."""
        self._outputs: dict[tuple[int, tuple[int, ...]], Floats] = {}
        """By request and path, of the drafts that are being made: what a node's children read."""

    def read(self, request: Request, start: int, features: Floats) -> None:
        self._latest[request.request_id] = start + len(features) - 1, features[-1, 0].copy()

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._latest.pop(request.request_id, None)

    def num_held(self, request: Request) -> int:
        """All tokens but the last: the target holds them."""
        return len(request.token_ids) - 1

    def _rest_lag(self, request: Request) -> int | None:
        return FIRST_LAG

    def _is_ready(self, request: Request, followed: Followed) -> bool:
        known, request_id = len(request.token_ids) - 1, request.request_id
        position, _ = self._latest.get(request_id, (-1, None))
        return (
            0 <= position == known - 1
            and request_id in self._kv
            and self._kv[request_id].length >= known
        )

    def _open(self, request: Request) -> DraftState:
        return DraftState(ranking_params(self.config, request.params))  # nothing is held

    def _read(self, growths: Sequence[Growth]) -> tuple[list[Growth], list[Span]]:
        return list(growths), [
            _span(growth.request, growth.request.token_ids[-1]) for growth in growths
        ]

    def _draft(self, growths: list[Growth], spans: Sequence[Span], prices: Prices) -> None:
        self._outputs.clear()
        super()._draft(growths, spans, prices)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        requests = [row.request for row in rows]
        paths = [tuple(row.path) for row in rows]
        tokens = [
            (path or request.token_ids)[-1] for request, path in zip(requests, paths, strict=True)
        ]
        states = np.stack([self._above(*node) for node in zip(requests, paths, strict=True)])
        multiplier = self._target.config.multipliers.embedding
        embedded = self._target.ops.embedded(tokens, self._target.embedding, multiplier)
        inputs = self._ends.enter(embedded, states)
        samples = self._clusters is None
        nodes = [_span(*node, samples) for node in zip(requests, tokens, strict=True)]
        result = self._runner.forward(self._runner.pack(nodes), inputs=inputs)
        assert result.features is not None
        outputs = result.features[:, 0]
        put_out = self._ends.leave(outputs)
        for request, path, output in zip(requests, paths, put_out, strict=True):
            self._outputs[request.request_id, path] = output
        logits = result.logits if self._clusters is None else self._clusters.logits(outputs)
        return ranked(logits, rows, self.config, None)

    def _above(self, request: Request, path: tuple[int, ...]) -> Floats:
        """The hidden state that a node takes in, whose token ends a path."""
        if not path:
            return self._latest[request.request_id][1]
        return self._outputs[request.request_id, path[:-1]]

    def _reserve(self, growth: Growth, drafted: int) -> bool:
        return True  # nodes have no KV


def _span(request: Request, token: int, samples: bool = True) -> Span:
    """A node by itself, which sees what comes before the request's last token."""
    last_seen = len(request.token_ids) - 2
    return Span(request.request_id, last_seen, [token], [-1], [0] if samples else [])
