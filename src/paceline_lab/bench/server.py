"""What is asked of a server besides generation: is it ready, its model, counters, a clean cache.

What its ``/metrics`` says of speculation is read before and after.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.core.errors import BenchmarkError
from paceline_lab.bench.client import Outcome, aiohttp, refusal, send

_LINE = re.compile(
    r"^(?:paceline|vllm):spec_decode_(num_\w+?)(?:_total)?(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE
)
_POSITION = re.compile(r'\bposition="(\d+)"')
_COUNTED = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
_DRAFT_STEPS = "num_draft_steps"
"""Steps that had a draft: where several proposers draft into one tree, there are more drafts."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CONNECT_S = 10.0
"""How long a server may refuse connections: one that is being started listens before it loads."""
FLUSH_PATHS = ("/flush_prefix_cache", "/reset_prefix_cache")
"""Paceline's name, and vLLM's."""
Counters = Mapping[str, float]
"""What a server counted of speculation, by the metrics' names without ``spec_decode_``; accepted
tokens of each position, from 0 on, by the position. Servers other than ours count no steps."""
_SHORT = aiohttp.ClientTimeout(total=30.0)


def parse_counters(text: str) -> Counters | None:
    """The counters in Prometheus text, series of one name summed; None where there are none."""
    totals: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        position = _POSITION.search(labels)
        with suppress(ValueError):
            key = position[1] if position else name
            totals[key] = totals.get(key, 0.0) + float(value)
    if totals.keys().isdisjoint(_COUNTED):
        return None
    return totals | {"num_drafts": totals.get(_DRAFT_STEPS, totals.get("num_drafts", 0.0))}


def growth(before: Counters, after: Counters, total: Counters) -> Counters:
    """``total`` and what was counted between two moments."""
    names = {*before, *after, *total}
    return {
        name: total.get(name, 0.0) + after.get(name, 0.0) - before.get(name, 0.0) for name in names
    }


def speculation_figures(counters: Counters) -> dict[str, Any]:
    """Under vLLM's keys; nothing unless something was drafted.

    The acceptance length counts the bonus token. It is over all steps where the server counts them,
    and otherwise, as in vLLM, over those that had a draft.
    """
    steps, drafts, tokens, accepted = (counters.get(name, 0.0) for name in _COUNTED)
    if drafts <= 0 or tokens <= 0:
        return {}
    last = max(
        (int(name) for name, count in counters.items() if name.isdecimal() and count), default=-1
    )
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / (steps or drafts),
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            counters.get(str(position), 0.0) / drafts for position in range(last + 1)
        ],
    }


async def wait_until_ready(session: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
    """Wait until the server answers ``/v1/models`` with anything but a server's error.

    A server that is loading answers 503, which is waited for.

    Raises:
        BenchmarkError: it still does so after ``timeout_s`` seconds, or refuses connections for
            longer than :data:`CONNECT_S`.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        problem, limit_s = f"{url} was not ready within {timeout_s:g} s", timeout_s
        try:
            async with session.get(f"{url}/v1/models", timeout=_SHORT) as response:
                if response.status < 500:
                    return
                reason = await refusal(response)
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError):
                problem = f"no server answers at {url}; start it, or name another by --base-url"
                limit_s = min(CONNECT_S, timeout_s)
        if time.monotonic() - began + pause > limit_s:
            raise BenchmarkError(f"{problem}: {reason}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def try_request(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    """Send one request that is not measured; ``BenchmarkError`` if it fails, as a run would."""
    outcome = Outcome()
    await send(session, url, body, outcome)
    if outcome.error:
        raise BenchmarkError(f"{url} fails the first request: {outcome.error}")


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first of the models that the server lists; ``BenchmarkError`` where it lists none."""
    try:
        async with session.get(f"{url}/v1/models", timeout=_SHORT) as response:
            if response.status != 200:
                raise BenchmarkError(f"{url}/v1/models: {await refusal(response)}; give --model")
            document = await response.json(content_type=None)
        return str(document["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise BenchmarkError(f"{url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"{url}/v1/models lists no model; give --model") from error


async def flush_prefix_cache(session: aiohttp.ClientSession, url: str) -> bool:
    """Have the server forget the prompts that it has read; whether it can."""
    for path in FLUSH_PATHS:
        try:
            async with session.post(f"{url}{path}", timeout=_SHORT) as response:
                if response.status < 300:
                    return True
        except (aiohttp.ClientError, OSError):
            return False
    return False


async def counters(session: aiohttp.ClientSession, url: str) -> Counters | None:
    """The server's counts of speculation; None where it has no metrics of that."""
    try:
        async with session.get(f"{url}/metrics", timeout=_SHORT) as response:
            if response.status != 200:
                return None
            return parse_counters(await response.text(errors="replace"))
    except (aiohttp.ClientError, OSError):
        return None
