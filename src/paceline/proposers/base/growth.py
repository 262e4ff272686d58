"""One request's draft tree while it grows, and what the draft's KV cache holds of the request.

Owns the choice of nodes: those with the highest path probability. Knows no model and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.config.speculative import ForwardingConfig
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree, Span


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
