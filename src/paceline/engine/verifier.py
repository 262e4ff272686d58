"""The MATCH rule: sample the target's token at a node, and descend if a child carries it.

The emitted tokens are therefore those of plain decoding, whatever was drafted. The verifier never
reads a probability that a proposer estimated, and never looks at which proposer drafted a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import RequestFailedError, UnservableRequestError
from paceline.request import TARGET_ORIGIN, Request, TokenLogprobs, VerifyResult
from paceline.runtime.model_runner import ForwardResult
from paceline.runtime.sampler import (
    SamplingRow,
    argmax_rows,
    sample_tokens,
    to_numpy,
    token_logprobs,
)
from paceline.span import DraftTree


@dataclass(slots=True)
class Verification:
    """A request with the draft that the target has seen, and the first of its logit rows."""

    request: Request
    draft: DraftTree
    first_row: int


class _Walk:
    """A walk down one request's tree: accepted span nodes and the tokens emitted so far."""

    __slots__ = ("children", "done", "item", "path", "tokens")

    def __init__(self, item: Verification) -> None:
        self.item = item
        self.path = [0]
        self.tokens: list[int] = []
        self.done = False
        draft = item.draft
        self.children = {
            edge: node
            for node, edge in enumerate(zip(draft.parents, draft.token_ids, strict=True), start=1)
        }

    def step(self, token: int) -> None:
        """Emit a token, and descend if a child carries it."""
        self.tokens.append(token)
        node = self.children.get((self.path[-1] - 1, token))  # span nodes are one past draft nodes
        if node is None:
            self.done = True
        else:
            self.path.append(node)

    def fail(
        self,
        why: str,
        failed: dict[int, RequestFailedError],
        kind: type[RequestFailedError] = RequestFailedError,
    ) -> None:
        """End where no token can be found; at the root that fails the request.

        Further down the step ends with the token before. A request that does not end there meets
        the failure at its next root, as without a draft.
        """
        self.done = True
        if self.tokens:
            self.path.pop()
        else:
            request = self.item.request
            failed[request.request_id] = kind(f"request {request.request_id}: {why}")

    @property
    def row(self) -> int:
        return self.item.first_row + self.path[-1]


def verify(
    result: ForwardResult, items: Sequence[Verification]
) -> list[VerifyResult | RequestFailedError]:
    """Walk every request's tree.

    Args:
        result: raw logits of the target, or, where all requests are plainly greedy and want no
            log-probs, perhaps only their arg-max; a request's rows are its root and then its draft
            nodes, in span order.
        items: the requests of this step.

    Returns:
        For each request what was accepted and emitted, or the error that ends that request alone
        (logits that are not numbers, or a mask that leaves no token).
    """
    logits = result.logits
    table = to_numpy(logits)
    walks = [_Walk(item) for item in items]
    failed: dict[int, RequestFailedError] = {}
    greedy: list[_Walk] = []
    live: list[_Walk] = []
    for walk in walks:
        (greedy if walk.item.request.params.is_plain_greedy else live).append(walk)
    if greedy:
        argmax = result.argmax
        if argmax is None:
            _walk_greedy(greedy, *argmax_rows(table), failed)
        else:
            _walk_greedy(greedy, argmax, [token >= 0 for token in argmax], failed)
    while live:  # one level of all trees per turn
        rows = [SamplingRow(w.item.request, w.tokens, mask=_mask(w, failed)) for w in live]
        tokens, valid = sample_tokens(table, rows, [w.row for w in live])
        for walk, token, fine in zip(live, tokens, valid, strict=True):
            _take(walk, token, fine, failed, table)
        live = [w for w in live if not w.done]
    return [failed.get(w.item.request.request_id) or _result(w, logits) for w in walks]


def _walk_greedy(
    walks: Sequence[_Walk],
    tokens: Sequence[int],
    valid: Sequence[bool],
    failed: dict[int, RequestFailedError],
) -> None:
    for walk in walks:
        while not walk.done:
            _take(walk, tokens[walk.row], valid[walk.row], failed)


def _mask(walk: _Walk, failed: dict[int, RequestFailedError]) -> bytes | None:
    """What the request's grammar allows where the walk is; a grammar that fails ends the walk."""
    constraint = walk.item.request.constraint
    if constraint is None:
        return None
    try:
        return constraint.mask(walk.tokens)
    except UnservableRequestError as error:
        walk.fail(str(error), failed, UnservableRequestError)
    except Exception as error:
        walk.fail(f"its grammar failed: {error!r}", failed)
    return None


def _take(
    walk: _Walk,
    token: int,
    valid: bool,
    failed: dict[int, RequestFailedError],
    table: npt.NDArray[np.float32] | None = None,
) -> None:
    """Let the walk go on by a token, or fail; ``table`` has the raw logits where masks apply."""
    if walk.done:
        return
    if valid:
        walk.step(token)
        return
    position = len(walk.item.request.token_ids) + len(walk.tokens)
    if table is not None and all(argmax_rows(table[walk.row : walk.row + 1])[1]):
        why = (
            f"no token is left at position {position}: grammar, allowed_token_ids, logit_bias and "
            "the other fields exclude every one of them; ask for less at once"
        )
        walk.fail(why, failed, UnservableRequestError)
    else:
        why = f"the logits at position {position} are not finite; check the weights"
        walk.fail(why, failed)


def _result(walk: _Walk, logits: torch.Tensor) -> VerifyResult:
    draft = walk.item.draft
    origins = [draft.origins[node - 1] for node in walk.path[1:]]
    return VerifyResult(
        path=walk.path,
        token_ids=walk.tokens,
        origins=[*origins, TARGET_ORIGIN],
        draft=draft,
        logprobs=_logprobs(walk, logits),
    )


def _logprobs(walk: _Walk, logits: torch.Tensor) -> Sequence[TokenLogprobs]:
    wanted = walk.item.request.params.logprobs
    if wanted is None:
        return ()
    rows = [walk.item.first_row + node for node in walk.path]
    return token_logprobs(logits[rows], walk.tokens, [wanted] * len(rows))
