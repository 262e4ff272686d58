"""The state that the verbs of one step share: each request's part in it, their shape, its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.planner.choice import DraftLimits
from paceline.planner.cost_table import NO_STEP, StepShape
from paceline.request.request import NO_DRAFT, Request
from paceline.request.span import ROOT, DraftTree, Span

NO_LIMITS = DraftLimits(0, 0)
"""Of a request that drafts nothing."""


class Scheduled:
    """One request's part in a step: the next ``num_tokens`` of its tokens, then its draft."""

    def __init__(self, request: Request, num_tokens: int, draft: DraftTree = NO_DRAFT) -> None:
        self.request = request
        self.num_tokens = num_tokens
        self.draft = draft
        # Fixed here: the request's own counts move when it commits.
        uncomputed = len(request.token_ids) - request.num_computed
        self.samples = num_tokens == uncomputed  # the span reaches the request's last token
        self.may_draft = uncomputed == 1  # it is that token alone: a draft may hang below it
        self.limits = NO_LIMITS  # within which the draft is chosen
        self.num_drafted = 0  # nodes from which the draft is chosen
        self.features: Any = None  # hidden states of the span's nodes, where a proposer reads them
        self.path: Sequence[int] = ()  # the span's nodes whose KV was committed

    @property
    def certain(self) -> int:
        """Tokens that go into the states of recurrent layers at once; the others are logged.

        These are all after which nothing is sampled, or those up to where a later request may go
        on, because that state is kept.
        """
        request = self.request
        begin = request.resume_at - request.num_computed
        if self.samples and begin >= 0 and request.resume_at and not request.num_output_tokens:
            return begin
        return self.num_tokens - self.samples

    def span(self) -> Span:
        request = self.request
        start = request.num_computed
        if self.may_draft:
            root = request.token_ids[-1]
            if not self.draft.token_ids:
                return Span(request.request_id, start, (root,), (ROOT,), (0,))
            return Span.tree(request.request_id, start, root, self.draft)
        tokens = request.token_ids[start : start + self.num_tokens]
        span = Span.chunk(request.request_id, start, tokens, self.samples)
        if request.params.prompt_logprobs is None or start >= request.prompt_len:
            return span
        return Span(span.request_id, start, tokens, span.parents, range(len(tokens)))


def step_shape(items: Sequence[Scheduled]) -> StepShape:
    """The facts on which the cost of a step with these spans and drafts depends."""
    rows, attended, context, samples = 0, 0, 0, 0
    for item in items:
        nodes = len(item.draft.token_ids)
        start = item.request.num_computed
        count = item.num_tokens + nodes
        rows += count
        attended += count * start
        context += start
        if item.samples:
            samples += 1 + nodes
    return StepShape(rows, attended, context, samples, len(items))


class Step:
    """One step on its way through the engine's verbs; it is timed from the moment it is made.

    Args:
        seconds: of all steps so far, by verb; what this one takes is added.
        clock: seconds.
    """

    def __init__(self, seconds: dict[str, float], clock: Callable[[], float]) -> None:
        self.items: Sequence[Scheduled] = ()
        """One span per request, after planning with the draft that is verified below it."""
        self.shape = NO_STEP  # of the forward that the items make
        self.room = 0  # rows that are left for draft nodes
        self.taps: Sequence[int] = ()  # hidden states that the forward returns
        self.forward_ms = 0.0  # 0 where the forward failed, so that nothing is learnt from it
        self._seconds, self._clock = seconds, clock
        self._began = self._latest = clock()

    def share(self, features: Any) -> None:
        """Give each item the hidden states of its own nodes."""
        first = 0
        for item in self.items:
            last = first + item.num_tokens + len(item.draft)
            item.features = features[first:last]
            first = last

    def drop_drafts(self) -> None:
        """Continue without drafts; commit gives back the slots that were reserved."""
        for item in self.items:
            item.draft = NO_DRAFT
        self.shape = step_shape(self.items)

    def done(self, verb: str) -> None:
        """A verb is over: charge it the time since the one before it was."""
        now, seconds = self._clock(), self._seconds
        seconds[verb] = seconds.get(verb, 0.0) + now - self._latest
        self._latest = now

    @property
    def total_ms(self) -> float:
        """From the beginning to the end of the latest verb."""
        return (self._latest - self._began) * 1e3
