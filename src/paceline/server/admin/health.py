"""What a server says of itself: version, health, ``/metrics``, ``/stats``.

And the prefix cache emptied. In ``/stats``, for the server's page, counters are cumulative, and
zero while the engine is down and when it starts again; while it does not answer they stand still.
Rates are the reader's to derive.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.core.errors import RequestError
from paceline.core.machine import current_load
from paceline.models.threads import cores
from paceline.request.engine_stats import EngineStats
from paceline.server.engine_process.client import EngineClient, engine_stats
from paceline.server.hosting.models import Models
from paceline.server.http.errors import SERVER, ApiError
from paceline.server.http.openapi import errors
from paceline.server.http.security import refuse_foreign_page
from paceline.server.http.sse import encode_json
from paceline.server.metrics.server_metrics import CONTENT_TYPE
from paceline.server.protocol.generation import ErrorBody
from paceline.text.tokenizer import Tokenizer

router = APIRouter()


class Version(BaseModel):
    version: str


class Health(BaseModel):
    status: str


_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorBody, "description": "The server is not ready, or ending."}
}


@router.get("/health", responses=_NOT_READY)
@router.get("/readyz", responses=_NOT_READY)
async def health(request: Request) -> Health:
    state = Models.of(request).state
    if state != "ready":
        raise ApiError(503, f"the server is {state}", SERVER, code=state)
    return Health(status=state)


@router.get("/livez", responses=_NOT_READY)
async def livez(request: Request) -> Health:
    """Whether starting the server anew is not called for: it drains, or helps its engine itself."""
    models = Models.of(request)
    if models.failure:
        raise ApiError(503, f"the server ends: {models.failure}", SERVER, code=models.state)
    return Health(status=models.state)


@router.get("/metrics", responses=errors(), response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    models = Models.of(request)
    known = (each for each in models.all if each.is_known)
    await asyncio.gather(*(each.note_counters() for each in known))
    return Response(models.metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/stats", responses=errors(400, 404), response_model=dict[str, Any])
async def stats(request: Request, model: str | None = None, history: str = "false") -> Response:
    if history not in ("true", "false"):
        raise RequestError.of("history", f"is {history[:40]!r}; allowed: 'true' and 'false'")
    serving = Models.of(request).find(model)
    document: dict[str, Any] = {"model": serving.name}
    if serving.is_known:
        document = await snapshot(serving.client)
        if history == "true":
            document["output_history"] = serving.client.output_history.told()
    document["state"] = serving.state
    return Response(encode_json(document), media_type="application/json")


@router.post("/flush_prefix_cache", responses=errors(403, 500, 503))
@router.post("/reset_prefix_cache", responses=errors(403, 500, 503))
async def flush_prefix_cache(request: Request) -> Health:
    models = Models.of(request)
    refuse_foreign_page(request.headers, models.config.allowed_origins)
    for serving in models.loaded:
        serving.check_takes_requests()
        await serving.client.flush_prefix_cache()
    return Health(status="flushed")


@router.get("/version", responses=errors())
async def version() -> Version:
    return Version(version=__version__)


IDENTICAL = "output identical to plain decoding, bit for bit"
UP_TO_ROUNDING = "output as plain decoding up to rounding: near-ties may fall differently"
_STARTED = time.monotonic()


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
