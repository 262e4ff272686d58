"""Draft trees that grow by a model's logits: which candidates, how likely, and which nodes stay.

A tree keeps the nodes with the highest path probability. Where the native kernels forward the
draft, a tree grows in one native call (``csrc/drafts/grow.cpp``) and no Python runs between two
levels: of a small draft's level it takes longer than the arithmetic. Knows no model and no cache;
when a level is forwarded is the affair of :mod:`paceline.proposers.base.drafter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import ForwardingConfig, SelfDraftConfig
from paceline.models.weights import PrunedHead
from paceline.planner.drafts import Prices
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree, Span
from paceline.sampling import sampler
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import Logits, rank_candidates
from paceline.tensors.arrays import Floats


@dataclass(slots=True)
class DraftState:
    """What the draft model holds of one request.

    Attributes:
        params: how candidates are ranked.
        tokens: the tokens whose KV is committed in the draft's cache.
        kv_tokens, kv_parents: the span of the draft that awaits verification: the last committed
            token, then the drafted nodes that were forwarded. Empty when there is none.
        holds_last: whether ``tokens`` ends with that last token; not where the draft has states,
            which do not go back: there it is drafted like the nodes below it.
    """

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    kv_tokens: list[int] = field(default_factory=list)
    kv_parents: list[int] = field(default_factory=list)
    holds_last: bool = True

    def walk(self, committed: Sequence[int]) -> list[int]:
        """Slots, after the committed ones, of the forwarded nodes that carry ``committed``."""
        path: list[int] = []
        node = 0
        for token in committed:
            for child in range(node + 1, len(self.kv_tokens)):
                if self.kv_tokens[child] == token and self.kv_parents[child] == node:
                    break
            else:
                break
            path.append(child - 1)
            node = child
        return path


@dataclass(slots=True, eq=False)
class Growth:
    """One request's tree while it grows; arrays are parallel over nodes, parents first.

    ``index`` is the request's place among those that are drafted for. ``kv_nodes`` is each node's
    index in the draft's span, -1 while it has not been forwarded. ``num_levels`` counts the levels
    that were ranked, hopeless ones included; 0 while the draft model has not read all of the
    request.
    """

    index: int
    request: Request
    draft: DraftState
    max_nodes: int
    max_depth: int
    tree: DraftTree = field(default_factory=DraftTree)
    path_probs: list[float] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    kv_nodes: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)
    last_level: int = 0
    num_levels: int = 0

    @property
    def num_drafted(self) -> int:
        """Nodes that were forwarded."""
        return len(self.draft.kv_tokens) - 1

    def add(self, parent: int, tokens: list[int], probs: list[float], min_prob: float) -> None:
        """Hang a node's candidates below it, best first; those that are hopeless are left out."""
        above, path = (1.0, []) if parent < 0 else (self.path_probs[parent], self.paths[parent])
        for token, prob in zip(tokens, probs, strict=True):
            path_prob = above * prob
            if not path_prob >= min_prob or path_prob <= 0.0:  # also true for NaN
                continue
            self.tree.token_ids.append(token)
            self.tree.parents.append(parent)
            self.tree.accept_probs.append(prob)
            self.path_probs.append(path_prob)
            self.paths.append([*path, token])
            self.kv_nodes.append(-1)

    def best(self, count: int) -> list[int]:
        """The ``count`` nodes likeliest to be reached and accepted; parents precede children."""
        probs = self.path_probs
        return sorted(range(len(probs)), key=lambda node: -probs[node])[:count]

    def choose(self) -> bool:
        """Pick the last level's nodes that may have a child among the best; False without any."""
        level = range(self.last_level, len(self.path_probs))
        self.last_level = len(self.path_probs)
        self.num_levels += 1
        self.frontier = []
        if level and self.num_levels < self.max_depth:
            # The last of the best is not worth a forward: its children rank behind it.
            self.frontier = [n for n in self.best(self.max_nodes - 1) if n in level]
        return bool(self.frontier)

    def promise(self) -> tuple[int, list[float]]:
        """The index, and the estimates on the way down to the frontier's likeliest node."""
        node = max(self.frontier, key=self.path_probs.__getitem__)
        path: list[float] = []
        while node >= 0:
            path.append(self.tree.accept_probs[node])
            node = self.tree.parents[node]
        return self.index, path[::-1]

    def span(self, again: bool = False) -> Span:
        """The chosen nodes below everything that was forwarded before them.

        Args:
            again: forward that again, too. States have none of the nodes, as a KV cache has.
        """
        tokens, parents = self.draft.kv_tokens, self.draft.kv_parents
        cached = len(tokens)
        for node in self.frontier:
            parent = self.tree.parents[node]
            self.kv_nodes[node] = len(tokens)
            tokens.append(self.tree.token_ids[node])
            parents.append(0 if parent < 0 else self.kv_nodes[parent])
        rows = range(cached, len(tokens))
        start = len(self.draft.tokens) - self.draft.holds_last  # node 0 is the last token
        return Span(self.request.request_id, start, tokens, parents, rows, 0 if again else cached)

    def finished(self, origin: str) -> DraftTree:
        """The best nodes of all levels so far, drafted by the proposer of this name."""
        self.tree.origins = [origin] * len(self.tree)
        order = self.best(self.max_nodes)
        return self.tree if order == list(range(len(self.tree))) else self.tree.select(order)


def ranking_params(config: ForwardingConfig, params: SamplingParams) -> SamplingParams:
    """How candidates for a request are ranked: as it is sampled, unless a draft ranks otherwise.

    Raises:
        RequestError: the configuration asks for values that no request may have.
    """
    overrides = {key: getattr(config, key) for key in ("temperature", "top_p", "top_k")}
    return replace(params, **{key: value for key, value in overrides.items() if value is not None})


RANKED = 8
"""Candidates that are ranked: how far the others lie behind is the evidence for the first."""
LOGIT_BLUR = 0.7

Doubles = npt.NDArray[np.float64]
Candidates = tuple[list[int], list[float]]
"""Tokens that may follow a node, best first, and how likely each is to be the target's."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike the logits of a draft and of its target are.

    Attributes:
        sureness: how likely the first candidate is where it leads by far.
        blur: spread of the difference between the models' scores, greedy.
    """

    sureness: float = 0.9
    blur: float = LOGIT_BLUR


ANOTHER_MODEL = Likeness()
FEWER_LAYERS = Likeness(0.9, 1.2)
FEWER_BITS = {
    "int4": Likeness(0.99, 0.3),
    "int3": Likeness(0.99, 0.5),
    "int2": Likeness(0.99, 1.0),
}
"""Copies of a target by their precision: fitted to a model of 135 million weights, greedy."""
MORE_BITS = Likeness(0.99, 0.1)


def ranked(
    logits: Logits,
    rows: Sequence[SamplingRow],
    config: ForwardingConfig,
    head: PrunedHead | None,
    confidences: Floats | None = None,
) -> Iterable[Candidates]:
    """What may follow each row by its logits, as the target would rank them.

    Args:
        confidences: how likely the first candidate of each row is to be the target's, where the
            draft says so itself, ``[n]``.
    """
    count = config.tree_branching
    tokens, scores = rank_candidates(logits, rows, num_ranked(config, logits.shape[1]), head)
    estimates = acceptance_estimates(rows, scores, likeness(config))
    if confidences is not None:
        estimates = with_confidence(estimates, confidences)
    return zip(tokens[:, :count].tolist(), estimates[:, :count].tolist(), strict=True)


def num_ranked(config: ForwardingConfig, columns: int) -> int:
    """Candidates that are ranked of so many columns."""
    return min(columns, max(config.tree_branching, RANKED))


def likeness(config: ForwardingConfig) -> Likeness:
    """How alike a draft and its target are, as far as the draft's configuration says."""
    if not isinstance(config, SelfDraftConfig):
        return ANOTHER_MODEL
    if config.draft_layers is not None:
        return FEWER_LAYERS
    return FEWER_BITS.get(config.dtype, MORE_BITS)


def acceptance_estimates(
    rows: Sequence[SamplingRow], scores: Doubles, like: Likeness = ANOTHER_MODEL
) -> Doubles:
    """How likely each ranked candidate is to be the target's token.

    A prior: a softmax over the scores of the best candidates, whose sharpness and weight were
    fitted to a pair of trained models on code and prose, greedy and at temperatures 0.6, 0.8 and 1;
    for the first layers of a target, to the larger of these two, greedy and at 0.8.

    Args:
        rows: whose candidates these are.
        scores: ``[n, RANKED]``, descending, as the sampler ranks them; -inf where there is none.
        like: how alike the models are.

    Returns:
        ``[n, RANKED]``; NaN in rows whose scores are not numbers.
    """
    blur = np.asarray([blur_of(row.sampling, like.blur) for row in rows])[:, None]
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        weights = np.exp((scores - scores[:, :1]) / blur)
        estimates: Doubles = like.sureness * weights / weights.sum(axis=1, keepdims=True)
    return estimates


def with_confidence(estimates: Doubles, confidences: Floats) -> Doubles:
    """Estimates of which the first is what the draft says of its own choice.

    The others keep their ratio to it, as far as the probability that it leaves is enough for them.

    Args:
        estimates: ``[n, RANKED]``, descending.
        confidences: ``[n]``, from 0 to 1.
    """
    first = confidences.astype(np.float64)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        others = first * (estimates[:, 1:] / estimates[:, :1])
        total = others.sum(axis=1, keepdims=True)
        others *= np.minimum(1.0, (1.0 - first) / np.where(total > 0, total, 1.0))
    return np.concatenate([first, others], axis=1)


def blur_of(params: SamplingParams, greedy: float) -> float:
    """Spread of the difference between the models' scores, in units of the score."""
    return greedy if params.is_greedy else greedy / min(LOGIT_BLUR, params.temperature)


def can_grow(runner: ModelRunner, growths: Sequence[Growth]) -> bool:
    """Whether a call does for these what Python would, which asks grammars and looks for bad words
    at every node.
    """
    return (
        runner.grows_trees
        and len(growths) > 0
        and all(growth.request.constraint is None for growth in growths)
        and not any(growth.request.params.bad_words_ids for growth in growths)
    )


def grow(
    config: ForwardingConfig,
    runner: ModelRunner,
    growths: Sequence[Growth],
    spans: Sequence[Span],
    inputs: Floats | None,
    prices: Prices,
    reserve: Callable[[Growth, int], bool],
) -> None:
    """Read spans, whose samples are the growths' last tokens, in order, and fill the trees."""

    def pays(promises: Sequence[tuple[int, Sequence[float]]]) -> list[bool]:
        return prices.are_met([(growths[place].index, path) for place, path in promises])

    like, head = likeness(config), runner.decoder.pruned_head
    columns = runner.decoder.config.num_logits
    tables = runner.kv.block_tables([growth.request.request_id for growth in growths])
    grown = runner.grow(
        runner.pack(spans),
        inputs,
        [
            (
                sampler.rules(growth.request, growth.draft.params),
                growth.request.token_ids,
                growth.max_nodes,
                growth.max_depth,
                blur_of(growth.draft.params, like.blur),
                len(growth.draft.tokens) - 1,
                table,
            )
            for growth, table in zip(growths, tables, strict=True)
        ],
        ranked=num_ranked(config, columns),
        branching=min(config.tree_branching, columns),
        min_path_prob=config.min_accept_prob,
        sureness=like.sureness,
        column_ids=None if head is None else head.token_ids,
        vocab_size=columns if head is None else head.vocab_size,
        pays=pays if prices.nodes else None,
        reserve=lambda index, drafted: reserve(growths[index], drafted),
    )
    for growth, (tokens, parents, probs, path_probs, *span, levels) in zip(
        growths, grown, strict=True
    ):
        tree, draft = growth.tree, growth.draft
        tree.token_ids, tree.parents, tree.accept_probs = tokens, parents, probs
        growth.path_probs, growth.num_levels = path_probs, levels
        draft.kv_tokens, draft.kv_parents = span
