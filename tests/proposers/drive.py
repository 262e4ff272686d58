"""Drives one proposer against a toy target under the MATCH rule, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.cache.model_runner import ModelRunner
from paceline.engine.step import Scheduled
from paceline.engine.verifier import verify
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.request import TARGET_ORIGIN, Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree, Span

NODES, DEPTH = 64, 8


def make_request(
    request_id: int, prompt: Sequence[int], max_len: int = 200, **params: Any
) -> Request:
    params.setdefault("temperature", 0.0)
    return Request(
        request_id, list(prompt), len(prompt), SamplingParams(**params), 7 * request_id + 3, max_len
    )


def propose(
    proposer: Proposer, *requests: Request, nodes: int = NODES, depth: int = DEPTH
) -> list[DraftTree]:
    count = len(requests)
    return proposer.propose(requests, DraftBudget([nodes] * count, [depth] * count))


def commit(proposer: Proposer, request: Request, token_ids: Sequence[int]) -> None:
    """Commit tokens as a step would that accepted none of anybody's draft."""
    request.token_ids.extend(token_ids)
    origins = [TARGET_ORIGIN] * len(token_ids)
    proposer.observe(request, VerifyResult([0], list(token_ids), origins))


class Target:
    """The target model: verifies drafts and commits what it emits."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def verify(self, request: Request, draft: DraftTree) -> VerifyResult:
        """Forward what is not computed yet with the draft, and append what is emitted."""
        kv, request_id = self.runner.kv, request.request_id
        if request_id not in kv:
            kv.open(request_id)
        held, last = kv[request_id].length, len(request.token_ids) - 1
        if held < last:
            assert kv.reserve(request_id, last - held, last - held)
            chunk = request.token_ids[held:last]
            self.runner.forward(self.runner.pack([Span.chunk(request_id, held, chunk, False)]))
            kv.commit(request_id, range(last - held))
        span = Span.tree(request_id, last, request.token_ids[-1], draft)
        assert kv.reserve(request_id, len(draft) + 1)
        rows = self.runner.forward(self.runner.pack([span]))
        (result,) = verify(rows, [Scheduled(request, request.num_uncomputed, draft)])
        assert isinstance(result, VerifyResult)
        kv.commit(request_id, result.path)
        request.token_ids.extend(result.token_ids)
        return result

    def step(
        self, proposer: Proposer, request: Request, **budget: int
    ) -> tuple[DraftTree, VerifyResult]:
        """Propose, verify, commit, observe."""
        (draft,) = propose(proposer, request, **budget)
        result = self.verify(request, draft)
        proposer.observe(request, result)
        return draft, result
