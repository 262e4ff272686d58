"""Trees that grow in one native call, the levels of :mod:`paceline.proposers.base.drafter`.

Where the native kernels forward the draft, no Python runs between two levels: of a small draft's
level it takes longer than the arithmetic. Owns what the call is told; the C++ is
``csrc/drafts/grow.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import ForwardingConfig
from paceline.planner.drafts import Prices
from paceline.proposers.base.estimates import blur_of, likeness, num_ranked
from paceline.proposers.base.growth import Growth
from paceline.request.span import Span
from paceline.sampling import sampler
from paceline.tensors.arrays import Floats


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
    like, head = likeness(config), runner.decoder.pruned_head
    columns = runner.decoder.config.num_logits
    tables = runner.kv.block_tables([growth.request.request_id for growth in growths])
    found = runner.grow(
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
        pays=None if not prices.nodes else _asked(prices, growths),
        reserve=lambda index, drafted: reserve(growths[index], drafted),
    )
    for growth, (tokens, parents, probs, path_probs, *span, levels) in zip(
        growths, found, strict=True
    ):
        tree, draft = growth.tree, growth.draft
        tree.token_ids, tree.parents, tree.accept_probs = tokens, parents, probs
        growth.path_probs, growth.num_levels = path_probs, levels
        draft.kv_tokens, draft.kv_parents = span


def _asked(
    prices: Prices, growths: Sequence[Growth]
) -> Callable[[Sequence[tuple[int, Sequence[float]]]], list[bool]]:
    """Whether another level pays, of places among these growths."""
    return lambda promises: prices.are_met(
        [(growths[place].index, path) for place, path in promises]
    )
