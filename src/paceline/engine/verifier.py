"""The MATCH rule: sample the target's token at a node, and descend if a child carries it.

The emitted tokens are therefore those of plain decoding, whatever was drafted. The verifier never
reads a probability that a proposer estimated, and never looks at which proposer drafted a node.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cache.model_runner import ForwardResult
from paceline.core.errors import RequestFailedError, UnservableRequestError
from paceline.engine.step import Scheduled
from paceline.request.request import TARGET_ORIGIN, TokenLogprobs, VerifyResult
from paceline.request.span import ROOT
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import (
    Logits,
    argmax_rows,
    named_logprobs,
    sample_tokens,
    token_logprobs,
)

Verdict = VerifyResult | RequestFailedError


def verify(result: ForwardResult, items: Sequence[Scheduled]) -> list[Verdict | None]:
    """Walk every request's tree.

    Args:
        result: of the spans' rows: raw logits, or their arg-max where no request needs more.

    Returns:
        For each span its accepted and emitted tokens, or the error that ends that request alone
        (logits that are not numbers, or a mask that leaves no token); None for a prefill chunk
        that does not reach the last token.
    """
    verdicts: list[Verdict | None] = [None] * len(items)
    argmax, offsets = result.argmax, result.offsets
    walks: list[_Walk] = []
    for index, item in enumerate(items):
        if not item.samples:
            continue
        first = offsets[index + 1] - 1 - len(item.draft.token_ids)
        if not item.request.is_plain_greedy:
            walks.append(_Walk(item, index, first))
            continue
        if argmax is None:
            argmax = _argmax(result.logits)
        verdicts[index] = _greedy(item, first, argmax, result.logits)
    if walks:
        _sample(walks, result.logits)
    for walk in walks:
        verdicts[walk.index] = walk.error or walk.result(result.logits)
    return verdicts


def _argmax(logits: Logits) -> list[int]:
    """Each row's best token, -1 where a logit is not finite."""
    tokens, valid = argmax_rows(logits)
    return [token if fine else -1 for token, fine in zip(tokens, valid, strict=True)]


def _greedy(item: Scheduled, first_row: int, argmax: Sequence[int], logits: Logits) -> Verdict:
    """The tokens of a greedy request, which takes the best token of each row."""
    draft, token = item.draft, argmax[first_row]
    if token < 0:
        return _not_finite(item, len(item.request.token_ids))
    path, tokens, last = [0], [token], ROOT
    origins: list[str] = []
    for node, parent in enumerate(draft.parents):  # a child comes after its parent
        if parent == last and draft.token_ids[node] == token:
            token, last = argmax[first_row + 1 + node], node
            if token < 0:  # the step ends before it, and the next one's root meets it
                break
            path.append(node + 1)
            tokens.append(token)
            origins.append(draft.origins[node])
    origins.append(TARGET_ORIGIN)
    if not item.request.reports_logprobs:
        return VerifyResult(path, tokens, origins, draft)
    logprobs = _logprobs(item, first_row, path, tokens, logits)
    return VerifyResult(path, tokens, origins, draft, logprobs)


def _not_finite(item: Scheduled, position: int) -> RequestFailedError:
    return RequestFailedError(
        f"request {item.request.request_id}: the logits at position {position} are not finite; "
        "check the weights"
    )


def _logprobs(
    item: Scheduled,
    first_row: int,
    path: Sequence[int],
    tokens: Sequence[int],
    logits: Logits,
) -> Sequence[TokenLogprobs]:
    params = item.request.params
    picked = logits[[first_row + node for node in path]]
    if params.logprob_token_ids is None:
        return token_logprobs(picked, tokens, [params.logprobs or 0] * len(path))
    entries = token_logprobs(picked, tokens, [0] * len(path))
    named = named_logprobs(picked, params.logprob_token_ids)
    return [entry._replace(top=top) for entry, top in zip(entries, named, strict=True)]


# --- requests whose tokens are sampled, or whose logits are edited --------------------------------


class _Walk:
    """A walk down one request's tree: accepted span nodes and the tokens emitted so far."""

    __slots__ = ("done", "error", "first_row", "index", "item", "path", "tokens")

    def __init__(self, item: Scheduled, index: int, first_row: int) -> None:
        self.item = item
        self.index = index
        self.first_row = first_row
        self.path = [0]
        self.tokens: list[int] = []
        self.done = False
        self.error: RequestFailedError | None = None

    def step(self, token: int) -> None:
        """Emit a token, and descend if a child carries it."""
        self.tokens.append(token)
        node = self.item.draft.child(self.path[-1] - 1, token)  # span nodes are one past these
        if node is None:
            self.done = True
        else:
            self.path.append(node + 1)

    def fail(self, error: RequestFailedError) -> None:
        """End the walk where there is no token; at the root this fails the request.

        Below the root the step ends with the token before, and the request fails at its next root,
        as it would without a draft.
        """
        self.done = True
        if self.tokens:
            self.path.pop()
        else:
            self.error = error

    @property
    def row(self) -> int:
        return self.first_row + self.path[-1]

    def result(self, logits: Logits) -> VerifyResult:
        draft, path = self.item.draft, self.path
        origins = [draft.origins[node - 1] for node in path[1:]]
        logprobs: Sequence[TokenLogprobs] = ()
        if self.item.request.reports_logprobs:
            logprobs = _logprobs(self.item, self.first_row, path, self.tokens, logits)
        return VerifyResult(path, self.tokens, [*origins, TARGET_ORIGIN], draft, logprobs)


def _sample(walks: Sequence[_Walk], logits: Logits) -> None:
    """Take all walks to their ends, one level of all trees per turn."""
    live = list(walks)
    while live:
        rows = [SamplingRow(w.item.request, w.tokens, mask=_mask(w)) for w in live]
        tokens, valid = sample_tokens(logits, rows, [w.row for w in live])
        for walk, token, fine in zip(live, tokens, valid, strict=True):
            if walk.done:  # its grammar failed
                continue
            if fine:
                walk.step(token)
            else:
                walk.fail(_no_token(walk, logits))
        live = [w for w in live if not w.done]


def _mask(walk: _Walk) -> bytes | None:
    """The tokens that the grammar allows at the current node; a failing grammar ends the walk."""
    request = walk.item.request
    if request.constraint is None:
        return None
    try:
        return request.constraint.mask(walk.tokens)
    except UnservableRequestError as error:
        walk.fail(UnservableRequestError(f"request {request.request_id}: {error}"))
    except Exception as error:
        why = f"request {request.request_id}: its grammar failed: {error!r}"
        walk.fail(RequestFailedError(why))
    return None


def _no_token(walk: _Walk, logits: Logits) -> RequestFailedError:
    """Why no token was found at the current node; ``logits`` are the raw ones."""
    position = len(walk.item.request.token_ids) + len(walk.tokens)
    if not all(argmax_rows(logits[walk.row : walk.row + 1])[1]):
        return _not_finite(walk.item, position)
    return UnservableRequestError(
        f"request {walk.item.request.request_id}: no token is left at position {position}: "
        "grammar, allowed_token_ids, logit_bias and the other fields exclude every one of them; "
        "ask for less at once"
    )
