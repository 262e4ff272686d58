"""What is asked of a server besides generation: is it ready, its model, counters, a clean cache.

What its ``/metrics`` says of speculation is read before and after.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import BenchmarkError
from paceline.workbench.serving.client import Outcome, refusal, send
from paceline.workbench.serving.extra import aiohttp

PREFIXES = ("paceline:", "vllm:")
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_POSITION = re.compile(r'\bposition="(\d+)"')
_NAMES = {
    "spec_decode_num_steps": "num_steps",
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_DRAFT_STEPS = "spec_decode_num_draft_steps"
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
FLUSH_PATHS = ("/flush_prefix_cache", "/reset_prefix_cache")
"""Paceline's name, and vLLM's."""
_SHORT = aiohttp.ClientTimeout(total=30.0)


@dataclass(slots=True)
class SpecDecodeCounters:
    """Counts since the server started, or between two moments; positions count from 0.

    Attributes:
        num_steps: verify steps, those without a draft included; 0 where the server does not count
            them.
        num_drafts: verified drafts. Where several proposers draft into one tree, this is exact only
            if the server counts the steps that had a draft.
    """

    num_steps: float = 0.0
    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    accepted_per_position: dict[int, float] = field(default_factory=dict)

    def combined(self, other: SpecDecodeCounters, sign: int = 1) -> SpecDecodeCounters:
        """Both added, or with ``sign`` -1 the difference."""
        mine, theirs = self.accepted_per_position, other.accepted_per_position
        return SpecDecodeCounters(
            self.num_steps + sign * other.num_steps,
            self.num_drafts + sign * other.num_drafts,
            self.num_draft_tokens + sign * other.num_draft_tokens,
            self.num_accepted_tokens + sign * other.num_accepted_tokens,
            {
                position: mine.get(position, 0.0) + sign * theirs.get(position, 0.0)
                for position in sorted({*mine, *theirs})
            },
        )

    def figures(self) -> dict[str, Any]:
        """Under vLLM's keys; nothing unless something was drafted.

        The acceptance length counts the bonus token. It is over all steps where the server counts
        them, and otherwise, as in vLLM, over those that had a draft.
        """
        if self.num_drafts <= 0 or self.num_draft_tokens <= 0:
            return {}
        positions = self.accepted_per_position
        last = max((position for position, count in positions.items() if count), default=-1)
        rates = [positions.get(i, 0.0) / self.num_drafts for i in range(last + 1)]
        return {
            "spec_decode_acceptance_rate": 100 * self.num_accepted_tokens / self.num_draft_tokens,
            "spec_decode_acceptance_length": 1
            + self.num_accepted_tokens / (self.num_steps or self.num_drafts),
            "spec_decode_num_drafts": int(self.num_drafts),
            "spec_decode_draft_tokens": int(self.num_draft_tokens),
            "spec_decode_accepted_tokens": int(self.num_accepted_tokens),
            "spec_decode_per_position_acceptance_rates": rates,
        }


def parse_counters(text: str) -> SpecDecodeCounters | None:
    """The counters in Prometheus text, series of one name summed; None where there are none."""
    found = SpecDecodeCounters()
    is_there = False
    draft_steps: float | None = None
    for line in text.splitlines():
        match = _LINE.match(line)
        stem = _stem(match[1]) if match else None
        if match is None or stem is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if stem in _NAMES:
            is_there = True
            setattr(found, _NAMES[stem], getattr(found, _NAMES[stem]) + value)
        elif stem == _DRAFT_STEPS:
            draft_steps = (draft_steps or 0.0) + value
        elif stem == _PER_POSITION and (position := _POSITION.search(match[2] or "")):
            counts, place = found.accepted_per_position, int(position[1])
            counts[place] = counts.get(place, 0.0) + value
    if draft_steps is not None:
        found.num_drafts = draft_steps
    return found if is_there else None


def _stem(name: str) -> str | None:
    prefix = next((each for each in PREFIXES if name.startswith(each)), None)
    return None if prefix is None else name.removeprefix(prefix).removesuffix("_total")


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
