"""Which models are loaded: who comes, who goes, and who waits. Models here are names and sizes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paceline.core.checks import seconds_of
from paceline.core.errors import (
    ConfigError,
    EngineClosedError,
    ModelLoadError,
    ModelTooLargeError,
    ModelUnavailableError,
)
from paceline.server.hosting.loaded_models import RETRY_SECONDS, Limits, Resident, Room

GIB = 1 << 30


class Model:
    """Opens when its gate does; tells the journal what happens to it."""

    def __init__(self, journal: list[str], name: str, size: int = GIB) -> None:
        self.name, self.size, self.has_failed = name, size, False
        self.grows_to = size
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._journal = journal

    async def open(self) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.size, self.has_failed = self.grows_to, False
        self._journal.append(f"+{self.name}")

    async def close(self) -> None:
        if f"+{self.name}" in self._journal:
            self._journal.append(f"-{self.name}")


class Street:
    """A room with models a, b, c, of which the first is loaded."""

    def __init__(self, **limits: Any) -> None:
        self.now = 100.0
        self.journal: list[str] = []
        self.room = Room(Limits(**limits), lambda: self.now)
        self.models = {name: Model(self.journal, name) for name in "abc"}
        self.residents = {name: self.room.resident(model) for name, model in self.models.items()}

    async def use(self, name: str, keep_alive: float | None = None) -> None:
        self.now += 1
        async with self.residents[name].using(keep_alive):
            assert self.is_open(name)

    async def hold(self, name: str) -> tuple[asyncio.Event, asyncio.Task[None]]:
        """A request that runs until the event is set."""
        ends, runs = asyncio.Event(), asyncio.Event()

        async def request() -> None:
            async with self.residents[name].using():
                runs.set()
                await ends.wait()

        task = asyncio.create_task(request())
        await runs.wait()
        return ends, task

    async def ask(self, name: str) -> asyncio.Task[None]:
        """A request that does nothing once its model is there; begun, and waiting where it must."""
        task = asyncio.create_task(self.use(name))
        await settled()
        return task

    def is_open(self, name: str) -> bool:
        """Whether its model can answer."""
        return self.journal.count(f"+{name}") > self.journal.count(f"-{name}")

    def places(self) -> str:
        return "".join(name for name, each in self.residents.items() if each.place == "loaded")


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def story(**limits: Any) -> Callable[[Callable[[Street], Coroutine[Any, Any, None]]], Any]:
    """Make a test of what happens in a street."""

    def made(tell: Callable[[Street], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def run() -> None:
            await asyncio.wait_for(tell(Street(**limits)), 60)

        def test() -> None:
            asyncio.run(run())

        test.__name__, test.__doc__ = tell.__name__, tell.__doc__
        return test

    return made


@story()
async def test_a_model_comes_once_for_all_who_wait_for_it(street: Street) -> None:
    street.models["a"].gate.clear()
    waiting = [await street.ask("a") for _ in range(3)]
    assert street.residents["a"].place == "loading"
    street.models["a"].gate.set()
    await asyncio.gather(*waiting)
    assert street.journal == ["+a"]


@story(models=2)
async def test_the_model_whose_last_use_is_oldest_makes_room(street: Street) -> None:
    for name in "abac":
        await street.use(name)
    assert street.journal == ["+a", "+b", "-b", "+c"]
    await street.use("b")
    assert street.journal[4:] == ["-a", "+b"]


@story(memory=3 * GIB)
async def test_as_many_go_as_the_memory_asks_for(street: Street) -> None:
    street.models["c"].size = street.models["c"].grows_to = int(2.5 * GIB)
    for name in "abc":
        await street.use(name)
    assert street.journal == ["+a", "+b", "-a", "-b", "+c"]


@story(models=2)
async def test_an_idle_model_goes_before_a_busy_one(street: Street) -> None:
    ends, request = await street.hold("a")
    await street.use("b")
    await street.use("c")
    assert street.places() == "ac"
    ends.set()
    await request


@story(models=1)
async def test_running_requests_end_before_their_model_goes(street: Street) -> None:
    ends, request = await street.hold("a")
    newcomer, again = await street.ask("b"), await street.ask("a")
    assert (street.places(), street.residents["a"].place) == ("", "leaving")
    assert street.journal == ["+a"]
    ends.set()
    await asyncio.gather(request, newcomer, again)
    assert street.journal == ["+a", "-a", "+b", "-b", "+a"]  # no model keeps another out


@story(models=1)
async def test_a_model_that_came_serves_who_waited_before_it_goes(street: Street) -> None:
    await asyncio.gather(*(street.use(name) for name in "abcabc"))
    assert street.journal == ["+a", "-a", "+b", "-b", "+c"]


@story(models=1)
async def test_nobody_makes_room_for_who_has_left(street: Street) -> None:
    ends, request = await street.hold("a")
    newcomer = await street.ask("b")
    newcomer.cancel()
    await settled()
    assert street.places() == "a"
    await street.use("a")
    ends.set()
    await request
    assert street.journal == ["+a"]


@story()
async def test_a_load_that_has_begun_ends_though_nobody_waits(street: Street) -> None:
    street.models["a"].gate.clear()
    (await street.ask("a")).cancel()
    await settled()
    street.models["a"].gate.set()
    await settled()
    assert street.places() == "a"


@story(memory=2 * GIB)
async def test_a_model_too_large_for_the_budget_is_refused_with_the_figures(street: Street) -> None:
    await street.use("a")
    street.models["b"].size = 3 * GIB
    with pytest.raises(ModelTooLargeError, match=r"b needs 3.00 GiB .* may have 2.00 GiB: raise"):
        await street.use("b")
    assert street.journal == ["+a"]


@story(memory=2 * GIB)
async def test_a_model_that_turns_out_larger_makes_others_go(street: Street) -> None:
    street.models["b"].grows_to = 2 * GIB
    await street.use("a")
    await street.use("b")
    assert street.journal == ["+a", "+b", "-a"]
    street.models["c"].grows_to = 3 * GIB
    with pytest.raises(ModelTooLargeError, match=r"c needs 3.00 GiB"):
        await street.use("c")
    assert street.journal[3:] == ["-b", "+c", "-c"]
    await street.use("b")


def test_a_first_model_too_large_is_an_error_at_the_start() -> None:
    with pytest.raises(ModelTooLargeError, match="all loaded models"):
        Room(Limits(memory=GIB - 1)).resident(Model([], "a"), is_loaded=True)


@story(models=2)
async def test_a_failing_load_harms_no_other_and_is_tried_again_later(street: Street) -> None:
    ends, request = await street.hold("a")
    street.models["b"].error = ModelLoadError("its config.json is broken")
    waiting = [await street.ask("b"), asyncio.create_task(street.use("b"))]
    for each in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(each, ModelUnavailableError)
        assert str(each) == "model b cannot be loaded: its config.json is broken"
    await street.use("c")
    ends.set()
    await request
    assert street.journal == ["+a", "+c"]
    street.models["b"].error = None
    with pytest.raises(ModelUnavailableError, match="is broken"):
        await street.use("b")
    street.now += RETRY_SECONDS
    await street.use("b")
    assert street.places() == "bc"


@story()
async def test_an_idle_model_stays_as_long_as_its_last_request_said(street: Street) -> None:
    resident = street.residents["a"]
    await street.use("a", keep_alive=60)
    assert resident.seconds_left == 60
    street.now += 20
    assert resident.seconds_left == 40
    await street.use("a")
    assert (resident.seconds_left, street.places()) == (math.inf, "a")
    await street.use("a", keep_alive=1e-3)
    while street.journal != ["+a", "-a"]:
        await asyncio.sleep(0.001)
    await street.use("a")
    assert street.places() == "a"


@story(keep_alive=0.0)
async def test_a_keep_alive_of_zero_unloads_when_the_last_request_ends(street: Street) -> None:
    ends, request = await street.hold("a")
    await street.use("a")
    assert street.places() == "a"
    ends.set()
    await request
    assert street.places() == ""
    await street.use("a", keep_alive=math.inf)
    assert street.journal == ["+a", "-a", "+a"]


@story()
async def test_a_request_that_comes_in_time_keeps_the_model(street: Street) -> None:
    await street.use("a", keep_alive=1e-3)
    ends, request = await street.hold("a")
    await asyncio.sleep(0.01)
    assert street.residents["a"].seconds_left == math.inf
    ends.set()
    await request
    assert street.journal == ["+a"]


@story()
async def test_a_model_that_failed_is_loaded_again(street: Street) -> None:
    await street.use("a")
    street.models["a"].has_failed = True
    await street.use("a")
    assert street.journal == ["+a", "+a"]


def test_the_only_model_of_a_server_is_not() -> None:
    room = Room()
    model = Model([], "a")
    resident = room.resident(model, is_loaded=True)
    model.has_failed = True
    assert resident.is_here


@story(models=1)
async def test_who_waits_while_the_server_ends_is_told(street: Street) -> None:
    ends, request = await street.hold("a")
    waiting = await street.ask("b")
    await street.room.close()
    with pytest.raises(EngineClosedError, match="the server ends"):
        await waiting
    with pytest.raises(EngineClosedError):
        await street.use("c")
    ends.set()
    await request
    assert street.journal == ["+a", "-a"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *((300, 300), ("300", 300), (0, 0), ("0", 0), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5)),
        *(("100ms", 0.1), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), (2.5, 2.5)),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5 minutes", "m", "nan", True, None, [], "5x"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        seconds_of(text)


def test_residents_need_nothing_of_their_loop_before_they_are_used() -> None:
    """A server is assembled where no loop runs."""
    assert isinstance(Room().resident(Model([], "a")), Resident)
