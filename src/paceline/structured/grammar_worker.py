"""Tries grammars out for another process, by ``core/worker_program.py``.

A grammar is untrusted, and the library that compiles it cannot be interrupted. What compiles here
and gives its first masks quickly enough is fit for the parent. Imports nothing of Paceline.

The greeting is ``{"tokens", "special", "eos", "limits"}``, where the bytes of the tokens are
hexadecimal, with spaces between them. A question is ``{"grammar", "seconds", "mask_seconds"}``,
answered with ``{"ok"}`` or ``{"error"}``, the latter with ``"retry": true`` where that is not the
compiler's word and another try may end otherwise.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY_LIMIT = 2 << 30
STEPS = 12
"""Tokens of a random output whose masks are tried."""


class TooSlowError(Exception):
    """A mask takes longer than a step of the engine may wait."""


class TrialVocabulary:
    """What ``LLTokenizer`` asks of a vocabulary, and the ``tables`` that it makes of it. Its
    spellings are good enough for a trial.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: list[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos[0]
        self.tables = LLTokenizer(self, len(tokens), eos)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        tokens: list[int] = self.tables.greedy_tokenize(text)
        return tokens


def try_out(tokenizer: LLTokenizer, limits: LLParserLimits, request: dict[str, Any]) -> str:
    """What is wrong with a grammar; empty when nothing is."""
    matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    chance = random.Random(0)
    for _ in range(STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        began = time.process_time()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.process_time() - began > request["mask_seconds"]:
            raise TooSlowError("computing what it allows takes too long")
        if not bits:
            break
        matcher.consume_token(_any_bit(bits, chance))
    return matcher.get_error() if matcher.is_error() else ""


def _any_bit(bits: int, chance: random.Random) -> int:
    for _ in range(chance.randrange(min(8, bits.bit_count()))):
        bits &= bits - 1
    return (bits & -bits).bit_length() - 1


def answer(tokenizer: LLTokenizer, limits: LLParserLimits, request: dict[str, Any]) -> Any:
    """What to reply; whatever a grammar does wrong becomes a message."""
    try:
        problem = try_out(tokenizer, limits, request)
    except (TooSlowError, MemoryError) as error:
        return {"error": str(error) or "it needs too much memory", "retry": True}
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return {"error": problem[:1000]} if problem else {"ok": True}


def begin(greeting: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Make the tables of a vocabulary; return what tries a grammar with them."""
    tokens = [bytes.fromhex(spelling) for spelling in greeting["tokens"].split(" ")]
    tokenizer = TrialVocabulary(tokens, greeting["special"], greeting["eos"]).tables
    return functools.partial(answer, tokenizer, LLParserLimits(**greeting["limits"]))
