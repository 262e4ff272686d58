"""``POST /speedup``: what the page may claim of answers that it timed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.applications import Starlette

from paceline.server.admin.speedup import router

APP = Starlette(routes=router.routes)


def ask(body: Any) -> Any:
    async def send() -> Any:
        async with AsyncClient(transport=ASGITransport(APP), base_url="http://test") as client:
            return await client.post("/speedup", json=body)

    return asyncio.run(send()).json()


def rounds(*seconds: tuple[float, float], steps: int = 60, drafted: int = 40) -> list[Any]:
    return [
        {
            "plain": {"seconds": plain, "steps": 68},
            "speculative": {"seconds": speculative, "steps": steps, "drafted": drafted},
        }
        for plain, speculative in seconds
    ]


def test_a_single_pair_is_no_proof() -> None:
    # The page said "1.66x the speed" of such a pair, at 1.13 tokens per step.
    said = ask({"rounds": rounds((2.49, 1.5))})
    assert (said["speedup"], said["is_certain"]) == (None, False)
    assert said["sentence"].startswith("the speed-up could not be measured: ")


def test_rounds_that_agree_are_certain() -> None:
    said = ask({"rounds": rounds((1.0, 0.93), (1.0, 0.94), (1.0, 0.93))})
    assert said["is_certain"]
    assert said["high"] <= 68 / 60
    assert said["sentence"] == "1.07x faster (1.06x to 1.09x)"


def test_the_load_is_said() -> None:
    measured = rounds((1.0, 0.93), steps=68, drafted=0)
    said = ask({"rounds": measured, "load": {"average": 4.2, "cores": 2}})
    assert said["sentence"] == (
        "about as fast as plain decoding: nothing was drafted; the machine was already busy "
        "(load 4.2 on 2 cores): measure again when it is idle"
    )


@pytest.mark.parametrize("seconds", [[], [(0.0, 0.0)]])
def test_nothing_measured_tells_nothing(seconds: list[tuple[float, float]]) -> None:
    said = ask({"rounds": rounds(*seconds)})
    assert (said["speedup"], said["low"], said["high"]) == (None, None, None)
    because = "nothing was measured; measure again"
    assert said["sentence"] == f"the speed-up could not be measured: {because}"
