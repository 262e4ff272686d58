"""What a draft with recurrent layers keeps of a request: a state, which does not go back.

So the request's last token is never part of it before the next one is known. Like the drafted nodes
below it, it is logged as those of a target are (:mod:`paceline.cache.states`), and every level of
a tree forwards the nodes above it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.cache.kv_cache import KVCache
from paceline.proposers.base.growth import DraftState
from paceline.request.request import Request
from paceline.request.span import Span


def certain_rows(kv: KVCache, count: int, is_last: bool) -> int:
    """Of tokens to be read, how many go into the state at once.

    None where the log has room for all of them, which takes no further slot. The last token never
    does.
    """
    assert kv.states is not None
    return 0 if count <= kv.states.memory.num_nodes else count - is_last


def commit_read(kv: KVCache, drafts: Mapping[int, DraftState], spans: Sequence[Span]) -> None:
    """Make tokens that a forward has read part of the states; those that are sampled wait."""
    for span in spans:
        count = len(span.token_ids) - len(span.sample_rows)
        if count:
            kv.commit(span.request_id, range(count))
            drafts[span.request_id].tokens += span.token_ids[:count]


def settle(kv: KVCache, request: Request, draft: DraftState) -> None:
    """Keep drafted nodes that were committed, where a level was forwarded; roll the rest back."""
    committed = request.token_ids[len(draft.tokens) : -1]
    if len(draft.kv_tokens) > 1 and committed:
        path = [0, *(slot + 1 for slot in draft.walk(committed[1:]))]
        kv.commit(request.request_id, path)
        draft.tokens += committed[: len(path)]
    elif draft.kv_tokens:
        kv.rollback(request.request_id)
    draft.kv_tokens, draft.kv_parents = [], []
