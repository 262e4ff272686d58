"""What is asked of a server besides generation: is it ready, its model, counters, a clean cache."""

from __future__ import annotations

import asyncio
import time

from paceline.errors import BenchmarkError
from paceline.workbench.serving.client import Outcome, refusal, send
from paceline.workbench.serving.extra import aiohttp
from paceline.workbench.serving.spec_decode import SpecDecodeCounters, parse_counters

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
FLUSH_PATHS = ("/flush_prefix_cache", "/reset_prefix_cache")
"""Paceline's name, and vLLM's."""
_SHORT = aiohttp.ClientTimeout(total=30.0)


async def wait_until_ready(session: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
    """Wait until the server answers ``/v1/models``, whatever it says, but for a server's error.

    Raises:
        BenchmarkError: it does not within the time.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            async with session.get(f"{url}/v1/models", timeout=_SHORT) as response:
                if response.status < 500:
                    return
                reason = await refusal(response)
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() - began + pause > timeout_s:
            raise BenchmarkError(f"{url} was not ready within {timeout_s:g} s: {reason}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def try_request(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    """Send one request that is not measured.

    Raises:
        BenchmarkError: it fails, so that a run would be a list of failures.
    """
    outcome = Outcome()
    await send(session, url, body, outcome)
    if outcome.error:
        raise BenchmarkError(f"{url} fails the first request: {outcome.error}")


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first of the models that the server lists.

    Raises:
        BenchmarkError: it lists none.
    """
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


async def counters(session: aiohttp.ClientSession, url: str) -> SpecDecodeCounters | None:
    """The server's counts of speculation; None where it has no metrics of that."""
    try:
        async with session.get(f"{url}/metrics", timeout=_SHORT) as response:
            if response.status != 200:
                return None
            return parse_counters(await response.text(errors="replace"))
    except (aiohttp.ClientError, OSError):
        return None
