"""A scripted server for the tests of the page: the real page, invented answers and counters.

Owns what each prompt provokes. One that begins with busy, refused, fail, lost, endless, differ or
markup gets that; everything else is answered by :data:`STORY`, with tokens drafted by turns.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from paceline.server.admin.speedup import router as speedup_router
from paceline.server.page import page_router
from tests.server.page.browser import Page

STORY = (
    "A paceline is a line of riders who take turns in the wind. The one in front does the work, "
    "and those behind draft: they spend less, and keep what they saved for their own turn.\n\n"
    "The line goes no faster than its strongest rider could alone, yet it goes that fast for much "
    "longer. Nobody in it has to be believed: each wheel is checked by the next."
)
PROPOSERS = ["prompt_lookup", "suffix", "draft_model"]
CARD = {
    "id": "example/rider-1b",
    "root": "rider-1b-q4_k_m",
    "architecture": "llama",
    "max_model_len": 8192,
    "dtype": "file",
    "backend": "native avx2",
    "promise": "identical",
    "sampling": {"temperature": 0.2, "top_p": 0.9, "top_k": 0, "source": "its model card"},
    "meta": {"n_vocab": 32000, "n_embd": 2048, "n_params": 1_100_048_384, "size": 667_815_168},
}
PHASES = {"schedule": 0.1, "propose": 0.9, "plan": 0.15, "pack": 0.2, "forward": 6.2, "verify": 0.5}


@dataclass
class Script:
    """What the server does, and what it saw.

    Attributes:
        step_seconds: pause before each step of an answer.
        plain_step_seconds: likewise where nothing is drafted; 0: as long.
        has_template: whether chat is answered.
        key: what clients must send, if anything.
        ready: whether ``/health`` says so; ``/stats`` fails while it does not.
        text: what is answered in place of :data:`STORY`.
    """

    step_seconds: float = 0.01
    plain_step_seconds: float = 0.0
    has_template: bool = True
    key: str = ""
    ready: bool = True
    text: str = STORY
    ended: int = 0
    completed: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)


@dataclass
class Visit:
    """A page that is open, and the server behind it."""

    page: Page
    script: Script
    url: str


OpenPage = Callable[..., Visit]


def error(status: int, message: str, code: str | None = None, **more: Any) -> JSONResponse:
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    headers = {"Retry-After": "3"} if status == 429 else {}
    return JSONResponse({"error": body | more}, status, headers)


def steps_of(text: str, speculates: bool) -> Iterator[list[dict[str, Any]]]:
    """The text in words, one list of tokens per step; each step ends with the target's own."""
    words = [word + " " for word in text.split(" ")]
    words[-1] = words[-1][:-1]
    place = number = 0
    while place < len(words):
        size = 1 + (number * 7 % 4 if speculates else 0)
        origin = PROPOSERS[number % len(PROPOSERS)]
        taken = words[place : place + size]
        yield [
            {"id": 100 + place + at, "text": word, "origin": origin if at < size - 1 else "target"}
            for at, word in enumerate(taken)
        ]
        place, number = place + size, number + 1


def answer_to(script: Script, prompt: str, body: dict[str, Any], speculates: bool) -> str:
    if "response_format" in body or "structured_outputs" in body:
        whole = '{"name": "Ishmael", "age": 31, "occupation": "captain", "is_hero": true}'
        return whole[:30] if limit_of(body) < 10 else whole
    if prompt.startswith("differ") and not speculates:
        return STORY.replace("wind", "rain")
    if prompt.startswith("markup"):
        return "<img src=x onerror=\"document.title='broken'\"> & <b>bold</b>"
    return script.text * 200 if prompt.startswith("endless") else script.text


def limit_of(body: dict[str, Any]) -> float:
    """Tokens that the answer may have."""
    return float(body.get("max_tokens", math.inf))


def said_before(body: dict[str, Any]) -> str:
    """The part of an answer that a chat asks to continue."""
    return str(body["messages"][-1]["content"]) if body.get("continue_final_message") else ""


def chunk(is_chat: bool, tokens: list[dict[str, Any]], finish: str | None = None) -> dict[str, Any]:
    text = "".join(token["text"] for token in tokens)
    part = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"choices": [{"index": 0, "tokens": tokens, "finish_reason": finish} | part]}


def event(document: Any) -> str:
    return f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n"


async def stream(script: Script, body: dict[str, Any], prompt: str) -> AsyncIterator[str]:
    is_chat, count, steps = "messages" in body, 0, 0
    speculates = body["speculative"]["enabled"]
    text = answer_to(script, prompt, body, speculates)
    plain = script.plain_step_seconds or script.step_seconds
    for tokens in steps_of(text.removeprefix(said_before(body)), speculates):
        await asyncio.sleep(script.step_seconds if speculates else plain)
        yield event(chunk(is_chat, tokens))
        count, steps = count + len(tokens), steps + 1
        if steps == 5 and prompt.startswith("fail"):
            text = "the engine died while it answered"
            yield event({"error": {"message": text, "type": "server_error"}})
            return
        if steps == 5 and prompt.startswith("lost"):
            raise ConnectionResetError
        if count >= limit_of(body):
            break
    yield event(chunk(is_chat, [], "length" if count >= limit_of(body) else "stop"))
    told = {"mean_acceptance_length": count / steps, "num_steps": steps}
    told |= {"num_draft_tokens": 2 * steps if speculates else 0}
    metrics = {"speculative_decoding": told}
    yield event({"choices": [], "usage": {"completion_tokens": count, "metrics": metrics}})
    yield event("[DONE]")
    script.completed += 1


class Answer(StreamingResponse):
    """A stream that tells its script when it is over, however it ended."""

    def __init__(self, script: Script, body: dict[str, Any], prompt: str) -> None:
        super().__init__(stream(script, body, prompt), media_type="text/event-stream")
        self._script = script

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._script.ended += 1


def load_until(seconds: float) -> float:
    """How much has been done by then, under a wavy load."""
    return seconds + 3 * math.sin(seconds / 4)


def uptime(script: Script) -> float:
    """Seconds that the server says it has run, which is longer than the script has."""
    return 400 + time.monotonic() - script.began


def stats(script: Script) -> dict[str, Any]:
    """Counters that grow with the time."""
    now = uptime(script)
    load = load_until(now)
    drafts = [int(12 * load * 0.8**depth) for depth in range(6)]
    accepted = [int(12 * load * 0.8**depth * 0.74 ** (depth + 1)) for depth in range(6)]
    shares = zip(PROPOSERS, (0.31, 0.22, 0.47), (0.81, 0.55, 0.62), strict=True)
    return {
        "model": "example/rider-1b",
        "uptime_s": now,
        "state": "ready",
        "restarts": 0,
        "promise": "Logits are bitwise equal for every width.",
        "proposers": PROPOSERS,
        "load": {"average": 0.2, "cores": 4},
        "running": 3 + int(2 * math.sin(now / 5)),
        "waiting": int(1 + math.sin(now / 3)),
        "kv": {"used": 610 + int(90 * math.sin(now / 6)), "total": 2048},
        "tokens": {"prompt": int(96 * load), "output": int(41 * load), "cached": int(37 * load)},
        "speculation": {
            "steps": int(16 * load),
            "emitted": int(41 * load),
            "drafts": drafts[0],
            "draft_tokens": sum(drafts),
            "accepted": sum(accepted),
            "drafts_per_pos": drafts,
            "accepted_per_pos": accepted,
            "by_proposer": {
                name: {
                    "drafts": int(12 * load * share),
                    "draft_tokens": int(40 * load * share),
                    "accepted": int(40 * load * share * rate),
                }
                for name, share, rate in shares
            },
        },
        "phases": {name: 0.016 * load * ms for name, ms in PHASES.items()},
        "cost_curve": [
            [rows, 5.4 + 0.11 * rows + 1.5 * (rows > 8)] for rows in (1, 2, 4, 8, 16, 32)
        ],
        "widths": {str(rows): int(load * 16 * share) for rows, share in WIDTHS.items()},
        "max_num_seqs": 64,
    }


WIDTHS = {1: 0.12, 3: 0.18, 4: 0.1, 6: 0.16, 8: 0.32, 12: 0.08, 16: 0.04}


def make_app(script: Script) -> FastAPI:
    app = FastAPI()
    app.include_router(page_router())
    app.include_router(speedup_router)

    @app.middleware("http")
    async def guard(request: Request, handle: Any) -> Any:
        bearer = request.headers.get("Authorization") == f"Bearer {script.key}"
        is_page = request.url.path == "/" or request.url.path.startswith("/page/")
        if script.key and not bearer and not is_page and request.url.path != "/health":
            return error(401, "this server asks for an API key", type="authentication_error")
        return await handle(request)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [CARD]}

    @app.get("/stats")
    async def counters(history: bool = False) -> Any:
        if not script.ready:
            return error(503, "the engine is restarting")
        now = uptime(script)
        told = [(ago, int(41 * load_until(now - ago))) for ago in range(200, 0, -1)]
        return stats(script) | ({"output_history": told} if history else {})

    @app.get("/health")
    async def health() -> Any:
        return {} if script.ready else error(503, "the engine is restarting")

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def generate(request: Request) -> Any:
        body = await request.json()
        script.bodies.append(body)
        is_chat = "messages" in body
        if is_chat and not script.has_template:
            return error(400, "the model has no chat template", "no_chat_template")
        said = [one["content"] for one in body.get("messages", []) if one["role"] == "user"]
        prompt = said[-1] if is_chat else body["prompt"]
        if prompt.startswith("busy"):
            return error(429, "32 requests are waiting", type="rate_limit_error")
        if prompt.startswith("refused"):
            return error(400, "temperature 9 is not within 0 to 2", param="temperature")
        if "unsupported" in json.dumps(body.get("response_format", "")):
            return error(400, "unknown keyword 'unsupported'", param="response_format")
        return Answer(script, body, prompt)

    return app


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Run an app in a thread; yields its address."""
    config = uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(5)
