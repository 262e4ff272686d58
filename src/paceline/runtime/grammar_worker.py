"""Program that tries grammars out for another process. Imports nothing of Paceline.

A grammar is untrusted, and the library that compiles it cannot be interrupted. Here its memory is
limited, an alarm ends it, and its parent kills it at the deadline; what compiles and gives its
first masks quickly enough is fit for the parent.

Protocol: one JSON object a line on standard input, one on standard output. The first line is
``{"tokenizer", "vocab_size", "eos", "limits"}``, answered with ``{"ready"}``; each further one is
``{"grammar", "seconds", "mask_seconds"}``, answered with ``{"ok"}`` or ``{"error"}``.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY_LIMIT = 2 << 30
STEPS = 12
"""Tokens of a random output whose masks are tried."""


def try_out(tokenizer: LLTokenizer, limits: LLParserLimits, request: dict[str, Any]) -> str:
    """What is wrong with a grammar; empty when nothing is."""
    matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    chance = random.Random(0)
    for _ in range(STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        began = time.perf_counter()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.perf_counter() - began > request["mask_seconds"]:
            return "what it allows takes too long to tell"
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
    except MemoryError:
        problem = "it needs too much memory"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return {"error": problem[:1000]} if problem else {"ok": True}


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on this platform; the deadline still holds
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_LIMIT:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, hard))


def main() -> None:
    # The parent handles an interrupt and closes the pipe; this process need not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    alarm: Callable[[int], object] = getattr(signal, "alarm", lambda seconds: None)
    first = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(first["tokenizer"], first["vocab_size"], first["eos"])
    limits = LLParserLimits(**first["limits"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        alarm(math.ceil(request["seconds"]) + 1)  # ends an orphan whose parent cannot
        reply = json.dumps(answer(tokenizer, limits, request))
        alarm(0)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
