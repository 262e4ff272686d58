"""The threads that submit prompts: none waits for another prompt's grammar, or for nobody."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import MagicMock

from paceline.request.sampling_params import SamplingParams
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.engine_process.process import NUM_GRAMMAR_SUBMITTERS, EngineServer
from tests.server import factories
from tests.server.test_engine_client import opened, run, tokens

SHAPED = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))


def test_grammars_that_take_for_ever_hold_up_no_others() -> None:
    async def story() -> None:
        async with opened(factories.paper_with_grammars) as client:
            shaped = [asyncio.create_task(tokens(client, SHAPED)) for _ in range(64)]
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                assert await tokens(client) == [7, 7, 7]
                await client.stats()
            assert not any(task.done() for task in shaped)
            for task in shaped:
                task.cancel()
            await asyncio.gather(*shaped, return_exceptions=True)

    run(story())


def test_a_prompt_that_was_aborted_while_it_waited_is_not_submitted() -> None:
    channel, engine = MagicMock(), MagicMock()
    channel.__iter__.return_value = [("generate", 0, [[7]], [SHAPED], "", ""), ("abort", 0)]
    server = EngineServer(channel, engine)
    is_free = threading.Event()
    for _ in range(NUM_GRAMMAR_SUBMITTERS):
        server._grammar_pool.submit(is_free.wait)
    server.serve()
    is_free.set()
    server._grammar_pool.shutdown()
    engine.submit.assert_not_called()
    channel.send.assert_not_called()
