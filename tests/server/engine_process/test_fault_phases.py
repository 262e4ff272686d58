"""A phase of the engine's step that raises: who notices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.server import factories
from tests.server.asgi import RawCall, events
from tests.server.live import Server, last_error, opened, run, until

WORDS = list(range(300, 360))
DRAFTING = ("propose", "plan")
STEP = ("pack", "forward", "verify")


async def answers(server: Server, salts: Sequence[str]) -> list[RawCall]:
    """The same requests with these salts, all at once."""
    body = {"temperature": 0.7, "ignore_eos": True, "return_origins": True}
    calls = [
        server.ask(prompt=WORDS * 2, max_tokens=24, seed=seed, cache_salt=salt, **body)
        for seed, salt in enumerate(salts)
    ]
    await asyncio.gather(*(call.task for call in calls))
    return calls


def tokens(call: RawCall) -> list[int]:
    documents = events(call.text)
    parts = [part for document in documents for part in document["choices"]]
    return [token["id"] for part in parts for token in part["tokens"]]


def test_a_phase_that_fails_harms_nobody_but_its_culprit() -> None:
    """Drafting costs drafts alone; in the rest of a step the guilty request fails by itself."""

    async def story() -> None:
        async with opened(factories.fragile) as server:
            wanted = [tokens(call) for call in await answers(server, ["", "a", "b"])]
            assert all(len(each) == 24 for each in wanted)
            harmless = [f"break {phase}" for phase in (*DRAFTING, *STEP)]
            harmless += [f"poison {phase}" for phase in DRAFTING]
            for salt in harmless:
                found = [tokens(call) for call in await answers(server, ["", salt, "b"])]
                assert found == wanted, salt
            for phase in STEP:
                one, guilty, other = await answers(server, ["", f"poison {phase}", "b"])
                assert [tokens(one), tokens(other)] == [wanted[0], wanted[2]]
                error = last_error(guilty)
                assert error["code"] == "request_failed"
                assert f"broken in {phase}" in error["message"]
            assert server.client.num_restarts == 0
            counted = await server.client.stats()
            assert {f"broken {phase}" for phase in (*DRAFTING, *STEP)} <= counted.seconds.keys()
            assert counted.num_failed_requests == len(STEP)
            await server.works()
            assert (await server.client.stats()).kv_blocks_used == 0

    run(story())


@pytest.mark.slow
def test_a_phase_that_nothing_can_undo_costs_one_restart() -> None:
    async def story() -> None:
        async with opened(factories.fragile) as server:
            wanted = [tokens(call) for call in await answers(server, ["", "a"])]
            for restarts, phase in enumerate(factories.FATAL, start=1):
                for call in await answers(server, [f"break {phase}", "a"]):
                    error = last_error(call)
                    assert error["code"] == "engine_dead"
                    assert f"broken in {phase}" in error["message"]
                await until(lambda: server.client.state == "ready")
                assert server.client.num_restarts == restarts
                assert [tokens(call) for call in await answers(server, ["", "a"])] == wanted

    run(story())
