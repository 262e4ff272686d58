"""Lives of the engine's process: deaths, restarts, refusals, and what the reader of answers meets.

The engine is a paper one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import (
    EngineClosedError,
    EngineDeadError,
    ModelLoadError,
    RequestError,
    RequestFailedError,
)
from paceline.request.sampling_params import SamplingParams
from paceline.server.engine_process import client as client_module
from paceline.server.engine_process.client import Answers, EngineClient
from paceline.server.engine_process.life import Pulse
from paceline.server.engine_process.messages import Piece
from tests.server import factories
from tests.server.live import Eager, Watch, until, unwatched

LONG = SamplingParams(max_tokens=10**6)
SHORT = SamplingParams(max_tokens=3)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 110))


@asynccontextmanager
async def opened(
    factory: Callable[[], Any] = factories.paper,
    log_to: Path | None = None,
    budget: int = 5,
    pulse: Pulse | None = None,
) -> AsyncIterator[EngineClient]:
    logging = None if log_to is None else partial(factories.log_to, str(log_to))
    client = EngineClient(
        factory, configure_logging=logging, restarts=Eager(budget), pulse=pulse or unwatched()
    )
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def tokens(client: EngineClient, params: SamplingParams = SHORT) -> list[int]:
    async with client.generate([[7]], [params]) as generation:
        return [token async for piece in generation for token in piece.token_ids]


def pid_of(client: EngineClient) -> int:
    assert client.pid is not None
    return client.pid


async def kill(client: EngineClient) -> None:
    """Kill the engine's process under a running prompt, which must hear of it at once."""
    async with client.generate([[7]], [LONG]) as generation:
        pieces = aiter(generation)
        await anext(pieces)
        os.kill(pid_of(client), signal.SIGKILL)
        async with asyncio.timeout(30):
            with pytest.raises(EngineDeadError, match="died"):
                [piece async for piece in pieces]


def test_a_killed_engine_fails_its_prompts_and_is_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(partial(factories.again, str(tmp_path))) as client:
            first = pid_of(client)
            assert await tokens(client) == [7, 7, 7]
            waiting = asyncio.create_task(tokens(client, LONG))
            await kill(client)
            with pytest.raises(EngineDeadError):
                await waiting
            assert client.num_generating == 0
            assert client.state == "starting"
            with pytest.raises(EngineDeadError, match="starting"):
                await tokens(client)
            with pytest.raises(EngineDeadError):
                await client.stats()
            (tmp_path / "go").touch()
            await until(lambda: client.state != "starting")
            assert (client.state, client.num_restarts) == ("ready", 1)
            assert pid_of(client) != first
            assert await tokens(client) == [7, 7, 7]

    run(story())


def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    async def story() -> None:
        async with opened(budget=2) as client:
            for _ in range(2):
                await kill(client)
                await until(lambda: client.state == "ready")
                assert await tokens(client) == [7, 7, 7], "that it answers buys it no further life"
            await kill(client)
            assert client.state == "failed"
            assert "after 2 restarts in a row" in client.failure
            with pytest.raises(EngineDeadError, match="failed"):
                await tokens(client)
            assert client.num_restarts == 2

    run(story())


def test_a_model_that_is_gone_cannot_be_started_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(partial(factories.once, str(tmp_path / "built")), budget=3) as client:
            await kill(client)
            await until(lambda: client.state == "failed")
            assert client.num_restarts == 3
            assert "cannot be started: the model's folder is gone; after 3" in client.failure

    run(story())


def test_a_model_that_is_back_is_started_again(tmp_path: Path) -> None:
    async def story() -> None:
        built = tmp_path / "built"
        async with opened(partial(factories.once, str(built)), budget=10**6) as client:
            await kill(client)
            await until(lambda: client.num_restarts > 1)
            assert client.output_history.told() == []
            built.unlink()
            await until(lambda: client.state == "ready")
            assert await tokens(client) == [7, 7, 7]

    run(story())


def test_a_stopped_engine_is_not_ready_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ENDING_SECONDS", 0.05)  # it is closed while it is stopped

    async def story() -> None:
        watch = Watch(hang_timeout=1e5, interval=0.02)
        async with opened(pulse=watch) as client:
            await until(lambda: client.last_stats is not None)
            os.kill(pid_of(client), signal.SIGSTOP)
            watch.is_on = True
            await until(lambda: client.state == "hung")
            os.kill(pid_of(client), signal.SIGCONT)
            await until(lambda: client.state == "ready")
            watch.is_on = False
            assert await tokens(client) == [7, 7, 7]
            assert client.output_history.told() != []
            assert client.num_restarts == 0
            os.kill(pid_of(client), signal.SIGSTOP)
            watch.is_on = True
            await until(lambda: client.state == "hung")
            client.drain()
            assert client.state == "draining"

    run(story())


def test_an_engine_that_stays_stopped_is_replaced() -> None:
    async def story() -> None:
        watch = Watch(hang_timeout=0.1, interval=0.02)
        async with opened(pulse=watch) as client:
            before = pid_of(client)
            running = asyncio.create_task(tokens(client, LONG))
            await until(lambda: client.num_generating > 0)
            os.kill(before, signal.SIGSTOP)
            watch.is_on = True
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await running
            await until(lambda: client.state == "ready" and pid_of(client) != before)

    run(story())


def test_an_engine_whose_step_does_not_end_is_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        factory = partial(factories.stuck_once, str(tmp_path / "built"))
        watch = Watch(step_timeout=0.1, interval=0.02)
        async with opened(factory, pulse=watch) as client:
            watch.is_on = True
            await until(lambda: client.num_restarts == 1 and client.state == "ready")
            assert await tokens(client) == [7, 7, 7]

    run(story())


def test_what_building_the_engine_raises_is_raised() -> None:
    client = EngineClient(factories.unreadable)
    with pytest.raises(ModelLoadError, match="no such model"):
        run(client.start())
    assert client.state == "failed"


def test_an_engine_that_dies_before_it_says_hello_has_not_started() -> None:
    client = EngineClient(factories.stillborn)
    with pytest.raises(EngineDeadError, match="died"):
        run(client.start())
    assert client.state == "failed"


def test_closing_ends_what_runs_and_the_process() -> None:
    async def story() -> int:
        async with opened() as client:
            pid = pid_of(client)
            running = asyncio.create_task(tokens(client, LONG))
            await until(lambda: client.num_generating > 0)
            await client.close()
            with pytest.raises(EngineClosedError, match="closed") as caught:
                await running
            assert type(caught.value) is EngineClosedError
            with pytest.raises(EngineClosedError):
                await tokens(client)
            return pid

    with pytest.raises(ProcessLookupError):
        os.kill(run(story()), 0)


def test_draining_lets_what_was_admitted_end_and_outlasts_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(partial(factories.again, str(tmp_path))) as client:
            client.drain()
            assert await tokens(client) == [7, 7, 7]
            await kill(client)
            assert client.state == "starting"
            (tmp_path / "go").touch()
            await until(lambda: client.state == "draining")
            assert await tokens(client) == [7, 7, 7]

    run(story())


def test_signals_for_the_whole_group_do_not_reach_the_engine() -> None:
    async def story() -> None:
        async with opened() as client:
            for ignored in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(client), ignored)
            assert await tokens(client) == [7, 7, 7]
            assert Path(f"/proc/{pid_of(client)}/comm").read_text().strip() == "paceline-engine"

    run(story())


def test_log_lines_of_a_request_carry_its_trace_id(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def story() -> None:
        async with opened(log_to=log) as client:
            async with client.generate([[7]], [SHORT], trace_id="abc") as generation:
                assert len([piece async for piece in generation]) == 3
            with pytest.raises(RequestError):
                async with client.generate([[]], [SHORT], trace_id="def"):
                    raise AssertionError("it was accepted")
            await client.stats()

    run(story())
    taken, refused = log.read_text().splitlines()
    assert taken.startswith("INFO abc request 0: 1 prompt tokens")
    assert refused.startswith("INFO def request 1 is refused: the prompt is empty")


PARENT = """
import asyncio
from tests.server import factories
from paceline.server.engine_process.client import EngineClient

async def main():
    client = EngineClient(factories.paper)
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=root) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    with suppress(FileNotFoundError, ProcessLookupError):  # it is gone
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)


def test_the_http_process_knows_no_torch() -> None:
    imports = "from paceline.server.engine_process import client, messages, process"
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_tables_of_grammars_are_made_before_a_request_is_taken() -> None:
    async def story() -> None:
        async with opened(factories.prepared) as client:
            assert await tokens(client) == [7, 7, 7]

    run(story())


def test_the_end_of_one_sample_does_not_hide_that_another_failed() -> None:
    async def read() -> None:
        generation = Answers([SamplingParams(n=2)])
        generation.take(Piece(1, [7], ["target"], "x"))
        failed = Piece(0, [], [], finish_reason="abort", error=RequestFailedError("no memory"))
        assert not generation.take(failed)
        assert generation.take(Piece(1, [7], ["target"], "x", finish_reason="stop"))
        pieces = aiter(generation)
        assert (await anext(pieces)).sample == 1
        with pytest.raises(RequestFailedError, match="no memory"):
            await anext(pieces)

    asyncio.run(read())
