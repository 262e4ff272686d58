"""Words that an output must not hold, as token ids. Owns the ways in which a word is spelled.

The sampler forbids the last token of each where the others stand before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.sampling_params import SamplingParams


def in_token_ids(params: SamplingParams, encode: Callable[[str], list[int]]) -> SamplingParams:
    """The parameters with ``bad_words`` as token ids; words of one token are banned everywhere.

    As in vLLM each word counts as the beginning of a text and behind a space, in the spelling that
    encoding gives it. The same letters in other tokens are not found.

    Args:
        encode: the token ids of a text, without any around them.
    """
    if not params.bad_words:
        return params
    found = [tuple(ids) for ids in params.bad_words_ids]
    for word in params.bad_words:
        plain, spaced = (
            tuple(encode(text)) for text in (word.lstrip() or word, f" {word.lstrip()}")
        )
        found.append(plain)
        if spaced[-len(plain) :] != plain:  # which forbids the spaced one too
            found.append(spaced)
    single = [ids[0] for ids in found if len(ids) == 1]
    return replace(
        params,
        bad_words=(),
        bad_words_ids=tuple(dict.fromkeys(ids for ids in found if len(ids) > 1)),
        banned_token_ids=(*params.banned_token_ids, *single),
    )
