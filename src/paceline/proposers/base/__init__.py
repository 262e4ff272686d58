"""What a proposer is. Knows no particular one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.backends.native.native import native_module, why_not_native
from paceline.config import SpeculativeConfig
from paceline.planner.drafts import FREE, Prices, TextDrafter
from paceline.request.request import NO_DRAFT, Request, VerifyResult
from paceline.request.span import DraftTree
from paceline.tensors.arrays import Floats

if TYPE_CHECKING:
    from paceline.cache.model_runner import ModelRunner
    from paceline.loading.checkpoint import Checkpoint
    from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What proposers have to fit to.

    Attributes:
        vocab_size: width of the target's logits.
        fingerprint: hash of the target's vocabulary, None where it has no tokenizer.
        device: torch device string.
        backend: of the ops, ``auto`` or what was forced.
        max_model_len: longest context, in tokens.
        max_num_seqs: most requests that run at once.
        kv_bytes: bytes for the KV cache of a draft model.
        runner: the target itself, None where nothing runs.
        tokenizer: the target's, None where it has none.
        checkpoint: the target's weights, None where they are not at hand.
        dtype: in which the target runs.
    """

    vocab_size: int
    fingerprint: str | None
    device: str
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    backend: str = "auto"
    runner: ModelRunner | None = None
    tokenizer: Tokenizer | None = None
    checkpoint: Checkpoint | None = None
    dtype: str = "auto"


class DraftBudget(NamedTuple):  # made in every step: a frozen dataclass takes thrice as long
    """What the planner allows each request of a step to draft; lists parallel to the requests.

    Attributes:
        max_nodes: most nodes of the request's tree.
        max_depth: most tokens along one path (never more than the request may still emit, less the
            bonus token).
        prices: what further drafting must promise; a proposer whose drafting takes time stops
            where it does not.
    """

    max_nodes: Sequence[int]
    max_depth: Sequence[int]
    prices: Prices = FREE


class Proposer(Protocol):
    """Drafts continuations from token ids. Wrong drafts cost time, never correctness.

    A request is first seen in :meth:`propose` or :meth:`observe`, whichever comes first; a proposer
    keeps what it needs by ``request.request_id`` until :meth:`finish`.

    What has a default here is that of a proposer without a model and without a memory, as its
    subclasses inherit it.
    """

    name: str
    """Origin of the nodes that it drafts."""
    config: SpeculativeConfig
    """Limits of its drafts; the engine reads them too."""
    costs_forwards: bool = False
    """True when drafting takes forwards of a model, so that it is worth asking whether to."""
    costs_levels: bool = True
    """Where drafting takes forwards: each further level of its trees takes one more."""
    sees_matches: bool = False
    """True where :meth:`matched` says what a draft may be worth before it is made."""
    drafts_from_text: bool = False
    """True for a :class:`TextProposer`, which offers :meth:`drafters`."""
    taps: Sequence[int] = ()
    """Hidden states of the target that it is given by :meth:`read`, as
    :class:`~paceline.models.backend.Taps` counts them."""

    @property
    def num_forwards(self) -> int:
        """Forwards of its model so far."""
        return 0

    def lag(self, request: Request) -> int | None:
        """Tokens of a request that it has to read before it can draft; None where it will not."""
        return 0

    def matched(self, request: Request) -> int:
        """Tokens at the end of a request's text that occurred before: long matches promise much.

        Where :attr:`sees_matches` is true it is asked in nearly every step, before it is decided
        who drafts, so it takes next to no time.
        """
        return 0

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        """One tree per request (possibly empty) below its last token."""
        ...

    def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
        """What drafts for each request, where :attr:`drafts_from_text` is true."""
        return ()

    def follows(self, request: Request) -> bool:
        """Whether it will take in the hidden states of what the next step computes of a request.

        Asked before every forward where :attr:`taps` is not empty; a forward in which nobody
        follows any request returns none.
        """
        return True

    def read(self, request: Request, start: int, features: Floats) -> None:
        """Take in what :attr:`taps` asked for of positions whose KV the target has committed.

        Called after every step in which :meth:`follows` said so of any request, whether anybody
        drafted in it or not. Positions that the target did not compute, because it found them in
        its prefix cache, are not among them.

        Args:
            start: the first of the positions; the others follow it.
            features: float32 ``[positions, taps, hidden_size]``.
        """
        return

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Learn what a step committed. ``request.token_ids`` holds it already."""
        return

    def finish(self, request: Request) -> None:
        """Forget a request that ended or was preempted. Unknown requests are ignored."""
        return

    def context_length(self, request: Request) -> int:
        """How many of the request's tokens this proposer has taken in or will before it drafts."""
        return len(request.token_ids)


class TextProposer(Proposer):
    """A proposer that drafts for each request by itself, from texts alone and without forwards.

    All of them are asked together: what one request's text takes is microseconds.

    Args:
        is_native: draft in C++; None is where that was built.
    """

    drafts_from_text = True

    def __init__(self, config: SpeculativeConfig, is_native: bool | None = None) -> None:
        self.config = config
        if is_native is None:
            is_native = why_not_native() is None
        self._native: Any = native_module() if is_native else None
        self._branching = config.tree_branching
        self._texts: dict[int, TextDrafter] = {}

    def _open(self, request: Request) -> TextDrafter:
        """What drafts for a request that was not seen before."""
        raise NotImplementedError

    def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
        drafters = []
        for request in requests:
            text = self._texts.get(request.request_id)
            if text is None:
                text = self._texts[request.request_id] = self._open(request)
            drafters.append(text)
        return drafters

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        most_nodes, most_depth = self.config.tree_nodes, self.config.num_speculative_tokens
        trees = []
        asked = zip(
            requests, self.drafters(requests), budget.max_nodes, budget.max_depth, strict=True
        )
        for request, drafter, nodes, depth in asked:
            tree = NO_DRAFT
            if nodes and depth:
                drafted = drafter.draft(
                    request.token_ids, min(nodes, most_nodes), min(depth, most_depth)
                )
                tree = DraftTree(*drafted, [self.name] * len(drafted[0]))
            trees.append(tree)
        return trees

    def finish(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)
