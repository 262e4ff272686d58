"""Drafts by a smaller model of the same vocabulary, batched over requests. Knows no target model.

Per request the draft's KV holds a prefix of ``request.token_ids``. Before it drafts, the model
reads what it lacks, always at least the last token, whose logits are the first level of the tree.
Each further level is one forward over all requests, for the nodes that can still have a child among
the best: the tree is exactly the ``max_nodes`` nodes with the highest path probability. After
verification the KV of drafted nodes that were committed is kept and the rest is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError, RequestError
from paceline.proposers.base import DraftBudget
from paceline.proposers.draft_model.growth import (
    NAME,
    RANKED,
    DraftState,
    Growth,
    acceptance_estimates,
)
from paceline.request import Request, VerifyResult
from paceline.runtime.model_runner import ModelRunner
from paceline.runtime.sampler import SamplingRow, rank_candidates
from paceline.sampling_params import SamplingParams
from paceline.span import ROOT, DraftTree, Span

LAG_PER_TOKEN = 8
"""Tokens worth reading per token that may still be emitted. Beyond that, as with a long prompt that
the target finds in its prefix cache, reading takes longer than drafting can save."""


class DraftModelProposer:
    """See the module's docstring.

    Args:
        config: how to draft.
        runner: the draft model with a KV cache of its own, without prefix caching.
    """

    name = NAME
    costs_forwards = True

    def __init__(self, config: SpeculativeConfig, runner: ModelRunner) -> None:
        self.config = config
        self._runner = runner
        self._kv = runner.kv
        self._branching = config.max_branching if config.max_tree_nodes else 1
        overrides = {key: getattr(config, key) for key in ("temperature", "top_p", "top_k")}
        self._overrides = {key: value for key, value in overrides.items() if value is not None}
        try:
            replace(SamplingParams(), **self._overrides)
        except RequestError as error:
            raise ConfigError(f"speculative configuration of the draft model: {error}") from error
        self._drafts: dict[int, DraftState] = {}

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft model so far."""
        return self._runner.num_forwards

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        growths = [
            self._start(request, nodes, depth)
            for request, nodes, depth in zip(
                requests, budget.max_nodes, budget.max_depth, strict=True
            )
        ]
        wanted = [growth for growth in growths if growth is not None]
        try:
            self._grow(*self._read(wanted))
        except BaseException:
            for growth in wanted:  # what was written is unknown: begin anew
                self.finish(growth.request)
            raise
        return [DraftTree() if growth is None else growth.finished() for growth in growths]

    def observe(self, request: Request, result: VerifyResult) -> None:
        draft = self._drafts.get(request.request_id)
        if draft is not None:
            self._settle(request, draft)

    def finish(self, request: Request) -> None:
        if self._drafts.pop(request.request_id, None) is not None:
            self._kv.free(request.request_id)

    def context_length(self, request: Request) -> int:
        """The request's length, unless the draft holds KV of a token that the request does not."""
        draft = self._drafts.get(request.request_id)
        for at, token in enumerate(draft.tokens if draft else ()):
            if at >= len(request.token_ids) or request.token_ids[at] != token:
                return at
        return len(request.token_ids)

    def _start(self, request: Request, nodes: int, depth: int) -> Growth | None:
        """A tree to grow, or None where there is no budget or no room in the draft's context."""
        room = self._runner.decoder.max_len + 1 - len(request.token_ids)
        nodes = min(nodes, self.config.tree_nodes)
        depth = min(depth, self.config.num_speculative_tokens, room)
        if nodes < 1 or depth < 1:
            return None
        draft = self._drafts.get(request.request_id)
        if draft is None:
            params = replace(request.params, **self._overrides)
            draft = self._drafts[request.request_id] = DraftState(params)
            self._kv.open(request.request_id)
        self._settle(request, draft)
        if len(request.token_ids) - len(draft.tokens) > LAG_PER_TOKEN * request.remaining:
            return None
        return Growth(request, draft, nodes, depth)

    def _settle(self, request: Request, draft: DraftState) -> None:
        """Keep the KV of drafted tokens that were committed; roll the rest back.

        KV of the request's last token is never kept: its logits begin the next tree.
        """
        tokens, held = request.token_ids, len(draft.tokens)
        if draft.kv_tokens:
            path = draft.walk(tokens[held:-1])
            if path:
                self._kv.commit(request.request_id, path)
                draft.tokens += tokens[held : held + len(path)]
            else:
                self._kv.rollback(request.request_id)
            draft.kv_tokens, draft.kv_parents = [], []
        if len(draft.tokens) >= len(tokens):
            del draft.tokens[len(tokens) - 1 :]
            self._kv.truncate(request.request_id, len(draft.tokens))

    def _read(self, growths: Sequence[Growth]) -> tuple[list[Growth], torch.Tensor | None]:
        """Forward the tokens that the draft lacks, first come first served.

        What one step of the request leaves behind is always read; more than that shares the
        step's ``catch_up_tokens``.

        Returns:
            The requests that lack nothing any more, and the logits after their last tokens.
        """
        room = self.config.catch_up_tokens
        spans, readers, ready = [], [], []
        for growth in growths:
            request_id, tokens = growth.request.request_id, growth.request.token_ids
            held = len(growth.draft.tokens)
            count = lag = len(tokens) - held
            if lag > self.config.num_speculative_tokens + 1:
                count = min(lag, room)
                room -= count
            # Room for all of it, lest many requests each hold a part and none can go on.
            fits = self._kv.blocks_missing(request_id, lag) <= self._kv.pool.num_available
            if not count or not fits or not self._kv.reserve(request_id, count):
                continue
            chunk = tokens[held : held + count]
            spans.append(Span.chunk(request_id, held, chunk, sample=count == lag))
            readers.append((growth, chunk))
            if count == lag:
                ready.append(growth)
        if not spans:
            return [], None
        logits = self._forward(spans)
        for growth, chunk in readers:
            self._kv.commit(growth.request.request_id, range(len(chunk)))
            growth.draft.tokens += chunk
        return ready, logits

    def _grow(self, growths: list[Growth], logits: torch.Tensor | None) -> None:
        """Level by level, until no request has a node left whose children could count."""
        nodes = [(growth, ROOT) for growth in growths]
        for growth in growths:
            growth.draft.kv_tokens, growth.draft.kv_parents = [growth.request.token_ids[-1]], [ROOT]
        while nodes:
            assert logits is not None
            self._rank(nodes, logits)
            growths = [growth for growth in growths if growth.choose() and self._reserve(growth)]
            nodes = [(growth, node) for growth in growths for node in growth.frontier]
            if nodes:
                logits = self._forward([growth.span() for growth in growths])

    def _reserve(self, growth: Growth) -> bool:
        drafted = len(growth.draft.kv_tokens) - 1 + len(growth.frontier)
        return self._kv.reserve(growth.request.request_id, drafted)

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        return self._runner.forward(self._runner.pack(spans)).logits

    def _rank(self, nodes: Sequence[tuple[Growth, int]], logits: torch.Tensor) -> None:
        """Hang the likeliest children below the nodes, whose rows of logits are in order."""
        rows = [
            SamplingRow(
                growth.request, growth.paths[node] if node >= 0 else (), growth.draft.params
            )
            for growth, node in nodes
        ]
        tokens, scores = rank_candidates(logits, rows, max(self._branching, RANKED))
        estimates = acceptance_estimates(rows, scores)[:, : self._branching].tolist()
        ranked = tokens[:, : self._branching].tolist()
        for (growth, node), children, chances in zip(nodes, ranked, estimates, strict=True):
            growth.add(node, children, chances, self.config.min_accept_prob)
