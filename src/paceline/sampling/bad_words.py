"""Words that an output must not hold, as token ids. Owns the ways in which a word is spelled.

The sampler forbids the last token of each where the others stand before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.request.sampling_params import SamplingParams

Spelling = tuple[int, ...]


def in_token_ids(
    params: SamplingParams, spell: Callable[[str], Sequence[Sequence[int]]]
) -> SamplingParams:
    """The parameters with ``bad_words`` as token ids; words of one token are banned everywhere.

    As in vLLM each word counts as it is and behind a space, whatever space it comes with; so does
    one of nothing but white space, which keeps it. The same letters in other tokens are not found.

    Args:
        spell: the ways in which encoding writes a text, without special tokens around it: at a
            text's beginning, and within one where that differs.
    """
    if not params.bad_words:
        return params
    found = [tuple(ids) for ids in params.bad_words_ids]
    for word in params.bad_words:
        found += _spellings(word.lstrip() or word, spell)
    single = [ids[0] for ids in found if len(ids) == 1]
    return replace(
        params,
        bad_words=(),
        bad_words_ids=tuple(dict.fromkeys(ids for ids in found if len(ids) > 1)),
        banned_token_ids=(*params.banned_token_ids, *dict.fromkeys(single)),
    )


def _spellings(word: str, spell: Callable[[str], Sequence[Sequence[int]]]) -> list[Spelling]:
    """Of a word, and of it behind a space, but those that forbidding a shorter one forbids too."""
    spelled = dict.fromkeys(tuple(ids) for text in (word, f" {word}") for ids in spell(text) if ids)
    return [ids for ids in spelled if not any(_ends_in(ids, other) for other in spelled)]


def _ends_in(ids: Spelling, end: Spelling) -> bool:
    return len(ids) > len(end) and ids[-len(end) :] == end
