"""A server's state as one JSON object, for its page.

Counters are cumulative, and zero while the engine is down and when it starts again; while it does
not answer they stand still. Rates are the reader's to derive. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from paceline.core.errors import EngineClosedError
from paceline.core.load import current_load
from paceline.models.threads import cores
from paceline.request.metrics import EngineStats
from paceline.server.engine_process.client import EngineClient
from paceline.text.tokenizer import Tokenizer

IDENTICAL = "output identical to plain decoding, bit for bit"
UP_TO_ROUNDING = "output as plain decoding up to rounding: near-ties may fall differently"
PATIENCE = 1.0
"""Seconds for an engine to answer, which it does between two steps."""
_STARTED = time.monotonic()


async def engine_stats(client: EngineClient) -> EngineStats | None:
    """The engine's counters: the last known while it does not answer, None while it is down."""
    if client.state == "hung":
        return client.last_stats
    try:
        return await asyncio.wait_for(client.stats(), PATIENCE)
    except TimeoutError:
        return client.last_stats
    except EngineClosedError:
        return None


def _has_own_template(tokenizer: Tokenizer | None) -> bool:
    """Whether the model knows chats, as far as its files or who started the server say so."""
    if tokenizer is None or tokenizer.has_fallback_template:
        return False
    return tokenizer.has_chat_template


async def snapshot(client: EngineClient) -> dict[str, Any]:
    """What ``GET /stats`` answers."""
    stats = await engine_stats(client) or EngineStats()
    info = client.info
    return {
        "model": info.model,
        "uptime_s": time.monotonic() - _STARTED,
        "state": client.state,
        "restarts": client.num_restarts,
        "promise": IDENTICAL if info.promises_identity else UP_TO_ROUNDING,
        "has_chat_template": _has_own_template(client.tokenizer),
        "proposers": list(info.proposers),
        "load": None if (load := current_load(cores())) is None else asdict(load),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "max_num_seqs": info.max_num_seqs,
        "kv": {
            "used": stats.kv_blocks_used,
            "total": info.kv_blocks_total,
            "block_size": info.block_size,
        },
        "tokens": {
            "prompt": stats.num_prompt_tokens,
            "output": stats.num_output_tokens,
            "cached": stats.num_cached_tokens,
        },
        "speculation": _speculation(stats),
        "phases": stats.seconds,
        "cost_curve": [[rows, ms] for rows, ms in info.cost_curve],
        "has_profile": info.has_profile,
        "widths": {str(rows): n for rows, n in sorted(stats.decode_steps_by_rows.items())},
        "preemptions": stats.num_preemptions,
    }


def _speculation(stats: EngineStats) -> dict[str, Any]:
    counters = stats.speculation
    return {
        "steps": counters.num_steps,
        "emitted": counters.num_emitted_tokens,
        "expected": counters.num_steps + stats.expected_accepted_tokens,
        "drafts": counters.num_drafts,
        "draft_tokens": counters.num_draft_tokens,
        "accepted": counters.num_accepted_tokens,
        "pruned": counters.num_pruned_tokens,
        "accepted_per_pos": counters.num_accepted_tokens_per_pos,
        "drafts_per_pos": counters.num_drafts_per_pos,
        "by_proposer": {
            name: {
                "drafts": own.num_drafts,
                "draft_tokens": own.num_draft_tokens,
                "accepted": own.num_accepted_tokens,
                "accepted_per_pos": own.num_accepted_tokens_per_pos,
            }
            for name, own in counters.by_proposer.items()
        },
    }
