"""Logits of a text that is known already, through the engine's own forward in slices of one shape.

Every forward has :data:`SLICE_ROWS` rows, whatever the text's length, so that a row's logits never
depend on how much is scored at once. A model with recurrent layers gets no rows but those of the
text: no row would be read back out of a state. Knows no sampling and no figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.cache.model_runner import ForwardResult
from paceline.core.errors import ConfigError
from paceline.engine.engine import Engine
from paceline.request.span import Span
from paceline.sampling.sampler import Logits

SLICE_ROWS = 64
SEQUENCE = -1
"""Id of the sequence whose KV is written; those of requests count from 0."""


def forced_logits(
    engine: Engine, token_ids: Sequence[int], first: int
) -> Iterator[tuple[int, Logits]]:
    """Score ``token_ids[first:]``, each token given those before it.

    Call it, and use it up, where the engine is stepped and between two steps.

    Args:
        first: at least 1; nothing predicts the first token of a text.

    Yields:
        The index of the first token that is predicted, and the logits ``[n, vocab]`` that predict
        it and the ``n - 1`` after it. The memory may be reused after the next is asked for.

    Raises:
        ConfigError: the KV cache has no room for the text.
    """
    assert 1 <= first <= len(token_ids)
    context = engine.config.max_model_len
    assert context is not None
    assert len(token_ids) <= context, "the text is longer than the context"
    engine.kv.open(SEQUENCE)
    try:
        # The last token predicts nothing that is asked for.
        for start in range(0, len(token_ids) - 1, SLICE_ROWS):
            end = min(start + SLICE_ROWS, context)
            # No logits where no row's are wanted.
            wanted = range(end - start) if min(end, len(token_ids)) >= first else ()
            logits = forced_slice(engine, token_ids, start, end, wanted).logits
            begin, end = max(first, start + 1), min(start + SLICE_ROWS, len(token_ids) - 1) + 1
            if begin < end:
                yield begin, logits[begin - start - 1 : end - start - 1]
    finally:
        engine.kv.free(SEQUENCE)


def forced_slice(
    engine: Engine, token_ids: Sequence[int], start: int, end: int, sampled: Sequence[int]
) -> ForwardResult:
    """Rows ``start`` to ``end`` as one forward, with the logits of those that are ``sampled``.

    Args:
        end: may lie beyond the text, whose last token is repeated then, but for recurrent layers.

    Raises:
        ConfigError: the KV cache has no room for the text.
    """
    tokens = list(token_ids[start:end])
    count = len(tokens)
    if engine.kv.states is None:
        tokens += [tokens[-1]] * (end - start - count)  # seen by no row before them
    if not engine.kv.reserve(SEQUENCE, len(tokens), certain=count):
        raise ConfigError(
            f"the KV cache has no room for a text of {len(token_ids)} tokens; raise "
            "--kv-cache-memory"
        )
    sampled = [row for row in sampled if row < len(tokens)]
    span = Span(SEQUENCE, start, tokens, range(-1, len(tokens) - 1), sampled)
    result = engine.runner.forward(engine.runner.pack([span]))
    engine.kv.commit(SEQUENCE, range(count))
    return result
